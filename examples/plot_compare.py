"""
Sinkhorn attention on real tokens is a Bures-Wasserstein gradient flow
======================================================================

The bundled cloud holds the tokens that enter a trained transformer, for the opening of *Moby-Dick*. With a symmetric
score A and V = -A, Sinkhorn attention on their Gaussian is the gradient flow of an energy that `gradient_structure`
finds. ``ot-transformers compare`` is this example with all its checks and a report.
"""

import matplotlib.pyplot as plt
import numpy as np

import ot_transformers as otf
from ot_transformers.plotting import STYLE, plot_eigenvalues, plot_energy, plot_rate

plt.rcParams.update(STYLE)

# %%
# Four principal components of the cloud, and the symmetrised head 4 of the layer it enters. The model divides its
# scores by sqrt(32); `Head.A` has that scale as an argument.
tokens = otf.load_tokens()
basis = np.linalg.eigh(tokens.cov.astype(float)).eigenvectors[:, -4:]
cloud = otf.Particles(tokens.x.astype(float) @ basis)
score = basis.T @ otf.load_head(4).double().A(scale=32**-0.5) @ basis
A = 0.5 * (score + score.T)
attention = otf.SinkhornAttention(A, -A, eps=0.1)

# %%
# Which energy and metric is it the gradient flow of? Here sigma = -1 and D = I: it descends -OT(mu, mu) / 2 in W2.
structure = otf.gradient_structure(attention)
print(f"sign {structure.sign}, residual {structure.residual:.1e}")
metric = otf.BuresWasserstein(structure.D)

# %%
# The attention on the tokens, its Gaussian closure, and the gradient flow of the energy on Gaussians.
times = np.linspace(0.0, 8.0, 41)
particles = otf.solve(attention, cloud, 8.0, rtol=1e-7, save_at=times)
closure = otf.solve(attention, cloud.to_gaussian(), 8.0, rtol=1e-10, atol=1e-12, save_at=times)
flow = otf.gradient_flow(
    structure.energy, cloud.to_gaussian(), 8.0, metric=metric, rtol=1e-10, atol=1e-12, save_at=times
)
apart = max(metric.distance(a, b) for a, b in zip(closure.states, flow.states, strict=True))
gap = metric.distance(particles.states[-1].to_gaussian(), closure.states[-1])
print(f"closure and gradient flow: {apart:.1e} apart; tokens and closure: {gap:.3f} apart at the end")

# %%
# JKO steps of the same energy approach it at order 1 in the step size.
counts = np.array([4, 8, 16])
steps = [otf.jko(structure.energy, cloud.to_gaussian(), 8.0 / k, int(k), metric=metric) for k in counts]
errors = [metric.distance(s.states[-1], flow.states[-1]) for s in steps]

# %%
# Energy along all of them, the order of the JKO steps, and the eigenvalues of the covariance.
figure, axes = plt.subplots(1, 3, figsize=(14, 4.2), layout="constrained")
value = structure.energy.value
plot_energy(
    {
        "tokens": (times, np.array([value(s) for s in particles.states])),
        "closure": (times, np.array([value(s) for s in closure.states])),
        "gradient flow": (times, np.array([value(s) for s in flow.states])),
        "JKO, step 1": (steps[1].times, np.array([value(s) for s in steps[1].states])),
    },
    ax=axes[0],
    steps=("JKO, step 1",),
)
axes[0].set_title("Energy")
plot_rate(8.0 / counts, errors, ax=axes[1], slope=1.0, xlabel=r"step $\tau$", ylabel="distance to the flow")
axes[1].set_title("JKO steps")
plot_eigenvalues(closure, ax=axes[2], label="closure")
plot_eigenvalues(particles, ax=axes[2], label="tokens", style=":")
axes[2].set_title("Eigenvalues of the covariance")
plt.show()
