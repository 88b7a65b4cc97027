r"""
The mean-field limit
====================

n tokens drawn from a Gaussian follow the attention of their own empirical measure; the limit follows the exact
Gaussian closure. The distance of their moments falls like :math:`n^{-1/2}`.
"""

# %%
# Softmax and Sinkhorn attention with V = I and A = -I, for clouds of 32 to 512 tokens.
import matplotlib.pyplot as plt
import numpy as np
from matplotlib import rc_context

from ot_transformers import Gaussian, SinkhornAttention, SoftmaxAttention, mean_field_experiment
from ot_transformers.plotting import COLOURS, STYLE, plot_rate

start = Gaussian([0.5, 0.0], [[1.0, 0.3], [0.3, 0.5]])
kinds = {
    "softmax": SoftmaxAttention(-np.eye(2), np.eye(2)),
    "Sinkhorn": SinkhornAttention(-np.eye(2), np.eye(2)),
}
sizes = (32, 64, 128, 256, 512)

# %%
# The interval of the rate is by bootstrap over the repeats.
with rc_context(STYLE):
    figure, ax = plt.subplots(figsize=(5.4, 3.8), layout="constrained")
    for colour, (name, attention) in zip(COLOURS, kinds.items(), strict=False):
        report = mean_field_experiment(
            attention, start, 1.0, ns=sizes, n_repeats=24, seed=1, rtol=1e-5, atol=1e-7
        )
        print(f"{name}: rate {report.rate:.3f}, 95% interval [{report.rate_low:.3f}, {report.rate_high:.3f}]")
        slope = -0.5 if name == "Sinkhorn" else None
        plot_rate(report.ns, report.rms, ax=ax, slope=slope, label=name, colour=colour)
    ax.set(xlabel="tokens n", ylabel="Bures-Wasserstein distance to the closure", title="flows to t = 1")
plt.show()
