r"""
Clustering and blow-up
======================

Where the covariance goes depends on the attention. With V = I and A = diag(-1, 1), softmax blows up at
:math:`t^* = 1 / \lambda_{\max}(S_0^{1/2} (A + A^T) S_0^{1/2})`, L2 and Sinkhorn grow exponentially; with
A = diag(-1, 0) all of them end on a line.
"""

# %%
# The blow-up time comes with an error bar, which holds against the closed form.
import matplotlib.pyplot as plt
import numpy as np
from matplotlib import rc_context

from ot_transformers import Gaussian, L2Attention, SinkhornAttention, SoftmaxAttention, classify, solve
from ot_transformers.plotting import STYLE

S0 = np.array([[1.0, 0.3], [0.3, 0.5]])
start, V = Gaussian(np.zeros(2), S0), np.eye(2)


def kinds(low: float, high: float) -> dict:
    Q, K = (
        np.sqrt(np.abs(np.diag([low, high]))),
        np.sign(np.diag([low, high])) * np.sqrt(np.abs(np.diag([low, high]))),
    )
    A = K.T @ Q
    return {
        "softmax": SoftmaxAttention(A, V),
        "L2": L2Attention(Q, K, V),
        "Sinkhorn": SinkhornAttention(A, V),
    }


w, U = np.linalg.eigh(S0)
root = (U * np.sqrt(w)) @ U.T
exact = 1 / np.linalg.eigvalsh(root @ np.diag([-2.0, 2.0]) @ root)[-1]
run = solve(SoftmaxAttention(np.diag([-1.0, 1.0]), V), start, 8.0)
print(f"{run.status}: t* = {run.blow_up_time:.9f} +- {run.blow_up_error:.0e}, exact {exact:.9f}")

# %%
# The class and the exact rank of each limit, from the decay exponents of the eigenvalues.
with rc_context(STYLE):
    figure, axes = plt.subplots(1, 2, figsize=(8.4, 3.6), layout="constrained")
    for ax, high, t_end in zip(axes, (1.0, 0.0), (3.0, 1e4), strict=True):
        for name, attention in kinds(-1.0, high).items():
            first = solve(attention, start, t_end)
            end = first.last_times * (1 - 1e-9)
            # Dense at both ends: near 0, and near a blow-up.
            grid = np.concatenate([np.geomspace(1e-3, 0.5, 60), 1 - np.geomspace(0.5, 1e-9, 60)[1:]])
            flow = solve(attention, start, end, save_at=np.concatenate([[0.0], end * grid]))
            found = classify(attention, first)
            print(f"A = diag(-1, {high:g}), {name}: {found.label}, rank {int(found.rank)}")
            followed = [np.linalg.eigvalsh(s.cov)[0 if high == 0 else -1] for s in flow.states]
            ax.plot(flow.times, followed, label=name, ls="--" if name == "Sinkhorn" else "-")
        ax.set(xlabel="time t", title=f"A = diag(-1, {high:g})")
    axes[0].axvline(exact, color="0.6", ls=":", lw=1)
    axes[0].set(ylabel="largest eigenvalue of S(t)", yscale="log", ylim=(0.5, 1e6))
    axes[1].set(ylabel="smallest eigenvalue of S(t)", xscale="log", yscale="log", xlim=(10, 1e4))
    axes[0].legend(frameon=False)
plt.show()
