"""
The twisted geometry of two Gaussians against W2
================================================

Softmax attention is a gradient flow only in a twisted distance, in which moving mass costs more where the
interaction :math:`G_\\mu(x) = E_y e^{x^\\top A y}` is large. Here we compare its geodesics with those of W2.
"""

# %%
# Two Gaussians in the plane, and the metric for A = I / 2, D = I: far from the origin scores are large, moving there
# is dear, and geodesics sag towards the origin.
import matplotlib.pyplot as plt
import numpy as np

from ot_transformers import BuresWasserstein, Gaussian, Particles, TwistedWasserstein

A = 0.5 * np.eye(2)
twisted = TwistedWasserstein(A, D=np.eye(2))
mu = Gaussian([-1.3, 0.9], np.diag([0.16, 0.03]))
nu = Gaussian([1.3, 0.9], np.diag([0.03, 0.16]))

# %%
# Among affine velocities both have geodesics in closed or nearly closed form. The restricted twisted length is an
# upper bound on the distance; the error estimate comes with it.
straight = BuresWasserstein().geodesic(mu, nu)
bent = twisted.geodesic(mu, nu)
print(f"W2 {float(straight.length):.6f},  twisted {bent.length:.6f} +- {bent.error:.1e}")

# %%
# On the line the full distance is at hand through Gauss-Hermite particles: it lies strictly below the restricted
# one, for Gaussians are not totally geodesic.
line = TwistedWasserstein(-1.0, D=1.0)
narrow, wide = Gaussian(0.0, 0.3**2), Gaussian(0.0, 0.8**2)
full = line.quadrature_geodesic(narrow, wide)
print(f"restricted {float(line.distance(narrow, wide)):.7f},  full {full.length:.7f} +- {full.error:.1e}")

# %%
# For a < 0 the geometry is the opposite: Dirac masses on the line have a finite way to infinity.
x = np.linspace(0, 6, 61)[1:]
reach = [float(line.distance(Particles([[0.0]]), Particles([[s]]))) for s in x]

# %%
# Left: covariance ellipses along both geodesics. Right: the distance from the origin against the Euclidean one.
fig, (left, right) = plt.subplots(
    1, 2, figsize=(10, 4), gridspec_kw={"width_ratios": [1.6, 1]}, layout="constrained"
)
for geodesic, colour, name in ((straight, "0.55", "W2"), (bent, "tab:red", "twisted")):
    for t in np.linspace(0, 1, 7):
        left.plot(*geodesic.at(t).ellipse(1.0).T, color=colour, lw=1.2, label=name if t == 0 else None)
    means = np.array([geodesic.at(t).mean for t in np.linspace(0, 1, 33)])
    left.plot(*means.T, color=colour, lw=1, ls=":")
left.set(aspect="equal", xlabel="$x_1$", ylabel="$x_2$", title="geodesics of Gaussians (1 s.d. ellipses)")
left.legend(loc="lower left", frameon=False)
right.plot(x, reach, color="tab:red", label="$d(\\delta_0, \\delta_x)$, $a = -1$")
right.axhline(
    float(line.line_diameter[0]) / 2, color="0.5", ls="--", lw=1, label="$\\sqrt{\\pi/2}$: infinity"
)
right.plot(x[x < 1.6], x[x < 1.6], color="0.55", lw=1, label="W2")
right.set(xlabel="$x$", ylabel="distance from $\\delta_0$", title="Dirac masses on the line")
right.legend(frameon=False)
plt.show()
