"""
Bures-Wasserstein geometry
==========================

Gaussians form a curved space: W2 between them is a distance on means and covariances, with maps, geodesics,
parallel transport and barycentres in closed form or by a short fixed point. None of it needs an inverse, so
that singular covariances, a line or a point, are members like all others.
"""

# %%
# Two needles, nearly at right angles: the second eigenvalue of each is 0.01.
import matplotlib.pyplot as plt
import numpy as np
from matplotlib import rc_context

from ot_transformers import BuresWasserstein, Gaussian, bures_barycenter, bures_distance, bures_geodesic
from ot_transformers.plotting import COLOURS, STYLE


def needle(angle: float, long: float = 1.0, short: float = 0.01) -> np.ndarray:
    c, s = np.cos(angle), np.sin(angle)
    U = np.array([[c, -s], [s, c]])
    return U @ np.diag([long, short]) @ U.T


S0, S1 = needle(np.radians(80)), needle(np.radians(10))
times = np.linspace(0, 1, 8)

# %%
# The geodesic turns one needle into the other; the linear mixture :math:`(1-t) S_0 + t S_1` swells to a disc on the
# way. The geodesic has constant speed: the distances from its start are :math:`t \, BW(S_0, S_1)`.
geodesic = bures_geodesic(S0, S1, times)
mixture = np.array([(1 - t) * S0 + t * S1 for t in times])
print("BW(S0, S_t) / BW(S0, S1):", np.round(bures_distance(S0, geodesic) / bures_distance(S0, S1), 12))

# %%
# Nothing is lost near equality or at singular matrices: S against S (1 + 1e-9), and a needle without width.
print(f"BW(S, (1 + 1e-9) S) = {bures_distance(S0, S0 * (1 + 1e-9)):.5e}, exact {5e-10 * np.sqrt(1.01):.5e}")
flat = needle(0.3, short=0.0)
print(f"BW to itself {bures_distance(flat, flat):.1f}, to a point {bures_distance(flat, 0 * flat):.6f}")

# %%
# The metric object takes means along, and a mobility D: distances are those of the coordinates D^{-1/2} x.
mu, nu = Gaussian([0.0, 0.0], S0), Gaussian([2.0, 1.0], S1)
for D in (None, np.diag([4.0, 1.0])):
    metric = BuresWasserstein(D)
    v = metric.log(mu, nu)
    print(f"W2 = {metric.distance(mu, nu):.6f} = |log| = {metric.inner(mu, v, v) ** 0.5:.6f}")

# %%
# Barycentres with all weights of a square between four covariances.
corners = np.stack([needle(0.4), 0.5 * np.eye(2), needle(2.2), needle(1.2, 0.3, 0.3 * 1e-4)])
grid = np.linspace(0, 1, 5)
weights = np.array([[((1 - a) * (1 - b), a * (1 - b), (1 - a) * b, a * b) for a in grid] for b in grid])
centres = bures_barycenter(corners, weights)


# %%
# Above left: the geodesic and the mixture. Below left: area of the ellipse along both. Right: the barycentres.
def draw(
    ax: plt.Axes, centre: tuple[float, float], S: np.ndarray, colour: object, filled: bool = False
) -> None:
    curve = Gaussian(np.array(centre), S).ellipse(1.0)
    ax.plot(*curve.T, color=colour, lw=1.6)
    if filled:
        ax.fill(*curve.T, color=colour, alpha=0.25, lw=0)


with rc_context(STYLE):
    fig = plt.figure(figsize=(10.5, 4.8), layout="constrained")
    panels = fig.subplot_mosaic([["curves", "square"], ["area", "square"]], width_ratios=[1.45, 1])
    for t, colour, S, M in zip(times, plt.cm.viridis(0.88 * times), geodesic, mixture, strict=True):
        draw(panels["curves"], (14 * t, 2.6), S, colour, filled=True)
        draw(panels["curves"], (14 * t, 0.0), M, colour)
    panels["curves"].set(aspect="equal", xticks=14 * times[::7], yticks=[0, 2.6], ylim=(-1.3, 3.9))
    panels["curves"].set_xticklabels(["$S_0$", "$S_1$"])
    panels["curves"].set_yticklabels(["mixture", "geodesic"])
    panels["curves"].set_title("from one needle to the other")
    panels["curves"].grid(False)

    fine = np.linspace(0, 1, 101)
    area = np.pi * np.sqrt(np.linalg.det(bures_geodesic(S0, S1, fine)))
    swollen = np.pi * np.sqrt([np.linalg.det((1 - t) * S0 + t * S1) for t in fine])
    panels["area"].plot(fine, swollen, color=COLOURS[1], label="mixture")
    panels["area"].plot(fine, area, color=COLOURS[0], label="geodesic")
    panels["area"].set(xlabel="$t$", ylabel="area of the 1 s.d. ellipse", ylim=(0, None), xlim=(0, 1))
    panels["area"].legend()

    square = panels["square"]
    for b, row in enumerate(centres):
        for a, S in enumerate(row):
            corner = a in (0, 4) and b in (0, 4)
            draw(square, (2.2 * a, -2.2 * b), S, COLOURS[0] if corner else "0.45", filled=corner)
    square.set(aspect="equal", xticks=[], yticks=[], title="barycentres of the four corners")
    square.grid(False)
