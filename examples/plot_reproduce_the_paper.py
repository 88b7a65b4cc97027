r"""
Reproducing the paper
=====================

Three pictures of the numerical section of arXiv 2501.18322: covariances that end on a line, covariances that blow up,
and the ranks of random limits. ``ot-transformers reproduce`` makes all of them, for four attentions.
"""

# %%
# Covariances [a c; c b] of the plane live in the cone with coordinates (a - b, 2c, a + b). With V = I and
# A = -e e^T every softmax flow ends on the line of rank-1 matrices orthogonal to e. Where A has a positive eigenvalue
# the flow blows up; divided by the trace it lives on the disc, whose circle is rank 1.
import matplotlib.pyplot as plt
import numpy as np
from matplotlib import rc_context

from ot_transformers import Gaussian, SoftmaxAttention, classify, numerical_rank, solve
from ot_transformers.plotting import STYLE, plot_cone, plot_disc, plot_rank_histogram

rng = np.random.default_rng(0)
X = rng.normal(size=(8, 2, 3))
starts = Gaussian(np.zeros((8, 2)), X @ X.transpose(0, 2, 1) / 3)
line = SoftmaxAttention(np.diag([-1.0, 0.0]), np.eye(2))
blown = SoftmaxAttention(np.diag([-1.0, 1.0]), np.eye(2))
to_line = solve(line, starts, 300.0, save_at=np.concatenate([[0.0], np.geomspace(0.01, 300.0, 60)]))
to_infinity = solve(blown, starts, 20.0, save_at=np.concatenate([[0.0], np.geomspace(0.01, 20.0, 200)]))
w, U = np.linalg.eigh(starts.cov)
root = (U * np.sqrt(w)[:, None, :]) @ U.transpose(0, 2, 1)
exact = 1 / np.linalg.eigvalsh(root @ np.diag([-2.0, 2.0]) @ root)[:, -1]
print(f"blow-up times: relative error {np.abs(to_infinity.blow_up_time / exact - 1).max():.0e}")

# %%
# Random limits in d = 5: Q is 2 x 5, K = -Q, A = K^T Q / sqrt(d), V = I. The theory gives rank d - d//2 = 3. The decay
# exponents of the eigenvalues find it; an absolute threshold, which a plain script takes, does not.
d, draws = 5, 100
Q, Y = rng.normal(size=(draws, d // 2, d)), rng.normal(size=(draws, d, d))
attention = SoftmaxAttention(
    -Q.transpose(0, 2, 1) @ Q / np.sqrt(d), np.broadcast_to(np.eye(d), (draws, d, d))
)
gaussians = Gaussian(np.zeros((draws, d)), Y @ Y.transpose(0, 2, 1))
flow = solve(attention, gaussians, 1e8, save_at=np.concatenate([[0.0], np.geomspace(1.0, 1e8, 12)]))
ranks = classify(attention, flow).rank
plain = numerical_rank(flow.states[-1], absolute=0.1)
print(f"rank 3: {np.sum(ranks == 3)} of {draws} by exponents, {np.sum(plain == 3)} at threshold 0.1")

# %%
with rc_context(STYLE):
    figure = plt.figure(figsize=(13.5, 4.2), layout="constrained")
    left, right = figure.subfigures(1, 2, width_ratios=[1.0, 2.0])
    cone = left.add_subplot(projection="3d")
    disc, histogram = right.subplots(1, 2)
    plot_cone(np.stack([s.cov for s in to_line.states]), ax=cone)
    cone.set_box_aspect(None, zoom=0.85)
    plot_disc(np.stack([s.cov for s in to_infinity.states]), ax=disc)
    plot_rank_histogram([ranks, plain], ["by exponents", "> 0.1"], ax=histogram, dim=d, expected=d - d // 2)
    cone.set_title("V = I, A = diag(-1, 0)")
    disc.set_title("V = I, A = diag(-1, 1), over the trace")
    histogram.set_title("ranks of 100 limits, d = 5")
plt.show()
