r"""
Masked attention
================

A decoder's token sees the tokens before it. With a position s in [0, 1] for each token, masked attention is attention
to the measure restricted to positions :math:`s' \leq s`; with distinct positions it is the causal softmax layer.
"""

# %%
# The same numbers as torch's causal layer.
import matplotlib.pyplot as plt
import numpy as np
import torch
from matplotlib import rc_context

from ot_transformers import (
    ConditionalWasserstein,
    MaskedAttention,
    PositionedParticles,
    SoftmaxAttention,
    solve,
)
from ot_transformers.plotting import STYLE

rng = np.random.default_rng(0)
n = 40
x, s = rng.normal(size=(n, 2)), np.linspace(0, 1, n)
A, V = np.array([[1.0, 0.5], [0.0, 0.5]]), np.eye(2)
tokens = PositionedParticles(x, s)
ours = MaskedAttention(SoftmaxAttention(A, V)).velocity(tokens)
q, k = torch.from_numpy(x @ A.T)[None], torch.from_numpy(x)[None]
layer = torch.nn.functional.scaled_dot_product_attention(q, k, k, is_causal=True, scale=1.0)[0].numpy() @ V.T
print(f"largest difference to the causal layer: {np.abs(ours - layer).max():.1e}")

# %%
# The first token attends to itself alone and leads; the others follow. The distance between two sequences compares
# tokens of equal position.
masked = solve(MaskedAttention(SoftmaxAttention(A, -V)), tokens, 2.0)
free = solve(SoftmaxAttention(A, -V), tokens, 2.0)
distance = ConditionalWasserstein().distance(masked.states[-1], PositionedParticles(free.states[-1].x, s))
print(f"conditional Wasserstein distance of the ends: {float(distance):.4f}")

# %%
with rc_context(STYLE):
    figure, axes = plt.subplots(1, 2, figsize=(8.4, 3.8), layout="constrained", sharex=True, sharey=True)
    for ax, flow, title in zip(axes, (masked, free), ("masked", "not masked"), strict=True):
        path = np.stack([state.x for state in flow.states])
        ax.plot(path[..., 0], path[..., 1], color="0.8", lw=0.8)
        dots = ax.scatter(path[-1, :, 0], path[-1, :, 1], c=s, cmap="viridis", s=18, zorder=3)
        ax.set(title=title, xlabel="$x_1$", aspect="equal")
    axes[0].set_ylabel("$x_2$")
    figure.colorbar(dots, ax=axes, label="position s")
plt.show()
