r"""
A certified witness of nonconvexity
===================================

For :math:`V = I, A = -I` softmax attention descends the interaction energy
:math:`E(\mu) = \frac12 \iint e^{-\langle x, y\rangle} d\mu(x) d\mu(y)` in the twisted metric. Is that energy
convex along the geodesics of the metric? No: here is a cloud of three points, a direction, and a proof by ball
arithmetic.
"""

# %%
# The energy, the metric, and a search
# ------------------------------------
# ``find_nonconvexity`` looks for the measure and the direction with the most negative modulus
# :math:`\mathrm{Hess}\,E(v, v) / |v|^2`. Dirac masses have the modulus :math:`|x|^2 - 1`, so that -1 is what to expect.

import json
import tempfile
from pathlib import Path

import matplotlib as mpl
import matplotlib.pyplot as plt
import numpy as np

import ot_transformers as otf
from ot_transformers.plotting import COLOURS, STYLE, plot_chord, plot_second_derivative

A, V = -np.eye(2), np.eye(2)
energy, metric = otf.InteractionEnergy(A), otf.TwistedWasserstein(A, V)
witness = otf.find_nonconvexity(energy, metric, n=3, radius=1.0, n_starts=3, seed=4)
print(f"modulus {witness.modulus:.6f} +- {witness.error:.0e}")

# %%
# The proof
# ---------
# The witness is rounded to rationals; the second derivative there is enclosed by balls, so that every rounding error is
# accounted for. The certificate is a JSON file that can be proved again from its rationals alone.

certificate = witness.certify()
path = certificate.save(Path(tempfile.mkdtemp()) / "certificate.json")
print(certificate.claim)
print("second derivative in", json.loads(path.read_text())["enclosure"]["second_derivative"])
print("checked again:", otf.check_certificate(path).valid)

# %%
# Changing one digit of the file breaks the proof.

changed = json.loads(path.read_text())
changed["x"][0][0] = "1/7"
path.write_text(json.dumps(changed))
print("after a change:", otf.check_certificate(path).reason)

# %%
# What it looks like
# ------------------
# Left: the tokens along the geodesic. Middle: the energy lies above its chord where it is concave. Right: Dirac
# masses in the plane, where the modulus is known in closed form: negative inside the unit circle.

curve = witness.curve
with mpl.rc_context(STYLE):
    fig, (left, middle, right) = plt.subplots(1, 3, figsize=(12.6, 3.9), layout="constrained")
    path_x = np.stack([curve.at(t).x for t in np.linspace(0, 1, 41)])
    for k in range(path_x.shape[1]):
        left.plot(*path_x[:, k].T, color=COLOURS[k])
        left.plot(*path_x[0, k], "o", color=COLOURS[k], ms=6)
        left.annotate(
            "",
            xy=path_x[-1, k],
            xytext=path_x[-4, k],
            arrowprops={"arrowstyle": "-|>", "color": COLOURS[k], "lw": 1.7},
        )
    left.set(title="three tokens along a twisted geodesic", xlabel="$x_1$", ylabel="$x_2$")
    left.margins(0.15)
    plot_chord(energy, curve, ax=middle)
    middle.set_title("the energy exceeds its chord")
    middle.legend()
    inset = middle.inset_axes((0.12, 0.13, 0.36, 0.34))
    plot_second_derivative(otf.probe_convexity(energy, curve), ax=inset)
    inset.set(xlabel="", ylabel="", title="$F''/|\\dot\\mu|^2$")
    inset.title.set_fontsize(8)
    inset.tick_params(labelsize=7)

    grid = np.linspace(-1.5, 1.5, 21)
    modulus = np.array(
        [
            [
                otf.riemannian_hessian(energy, metric, otf.Particles([[x, y]])).min_eigenpair().value
                for x in grid
            ]
            for y in grid
        ]
    )
    image = right.pcolormesh(grid, grid, modulus, cmap="RdBu", vmin=-1.5, vmax=1.5, shading="gouraud")
    right.contour(grid, grid, modulus, levels=[0.0], colors="0.15", linewidths=1.4)
    right.set(title=r"modulus at Dirac masses, $|x|^2 - 1$", xlabel="$x_1$", ylabel="$x_2$", aspect="equal")
    right.grid(visible=False)
    fig.colorbar(image, ax=right, shrink=0.85)
plt.show()
