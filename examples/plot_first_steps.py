"""
First steps
===========

Attention moves every token by a function of all tokens. In the limit of many tokens it is a flow on probability
measures, and for several kinds of attention that flow keeps Gaussian measures Gaussian. This example runs softmax,
L2 and Sinkhorn attention with the same parameters, on a cloud and on its Gaussian.
"""

import matplotlib.pyplot as plt
import numpy as np

import ot_transformers as otf
from ot_transformers.plotting import STYLE, plot_ellipses, plot_particles

plt.rcParams.update(STYLE)

# %%
# A centred cloud of tokens, and parameters with V = I and A = K^T Q negative definite: each token moves towards those
# that it resembles least, and the cloud contracts. A scale of the score, if wanted, is always an explicit argument.
rng = np.random.default_rng(0)
x = rng.standard_normal((150, 2)) @ np.array([[1.4, 0.5], [0.0, 0.6]])
tokens = otf.Particles(x - x.mean(0))
Q = np.array([[1.0, 0.3], [0.0, 0.8]])
V = np.eye(2)
kinds = {
    "softmax": otf.SoftmaxAttention.from_qkv(Q, -Q, V),
    "L2": otf.L2Attention(Q, -Q, V),
    "Sinkhorn": otf.SinkhornAttention.from_qkv(Q, -Q, V, eps=1.0),
}

# %%
# The velocity of each token, and the affine field by which each attention acts on the Gaussian of equal moments.
gaussian = tokens.to_gaussian()
for name, attention in kinds.items():
    field = attention.affine(gaussian)
    gap = np.abs(attention.velocity(tokens) - field.at(tokens.x, gaussian)).max()
    print(f"{name:9s} M = {field.M.round(3).tolist()}, largest difference to the tokens' velocity {gap:.3f}")

# %%
# `solve` takes either measure and returns a trajectory: its times, states and how it ended.
flows = {
    name: (otf.solve(attention, tokens, 2.0), otf.solve(attention, gaussian, 2.0))
    for name, attention in kinds.items()
}
for name, (particles, closure) in flows.items():
    end = closure.states[-1]
    apart = otf.BuresWasserstein().distance(particles.states[-1].to_gaussian(), end)
    print(f"{name:9s} {closure.status}: eigenvalues {np.linalg.eigvalsh(end.cov).round(4)}, gap {apart:.4f}")

# %%
# Tokens with their trails, and ellipses of two standard deviations of the closure from start (dark) to end.
figure, axes = plt.subplots(1, 3, figsize=(13, 4.4), layout="constrained")
for ax, (name, (particles, closure)) in zip(axes, flows.items(), strict=True):
    plot_particles(particles, ax=ax)
    plot_ellipses(closure, ax=ax, n_ellipses=5, colourbar=ax is axes[-1])
    ax.set_title(f"{name} attention")
plt.show()
