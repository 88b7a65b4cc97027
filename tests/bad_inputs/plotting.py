"""Bad inputs of the figures."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from ot_transformers import Gaussian, Particles
from ot_transformers.plotting import plot_eigenvalues, plot_ellipses, plot_energy, plot_particles, plot_rate

G = Gaussian(np.zeros(2), np.eye(2))
ROWS: list[tuple[str, Callable[[], object], str]] = [
    ("empty flow", lambda: plot_ellipses([]), "flow must be a Trajectory or a list of measures"),
    ("cloud for ellipses", lambda: plot_ellipses([Particles(np.eye(2))]), "flow must be a Gaussian"),
    ("Gaussian for particles", lambda: plot_particles([G]), "flow must be Particles"),
    ("times too short", lambda: plot_ellipses([G, G], times=[0.0]), r"times must have shape \(2,\)"),
    ("n_std zero", lambda: plot_ellipses([G], n_std=0.0), "n_std must be > 0"),
    (
        "tokens appear",
        lambda: plot_particles([Particles(np.eye(2)), Particles(np.ones((3, 2)))]),
        "flow must keep",
    ),
    ("vector of eigenvalues", lambda: plot_eigenvalues(values=np.ones(3)), r"values must be \(T, d\)"),
    ("energy lengths", lambda: plot_energy({"a": (np.ones(2), np.ones(3))}), "curves"),
    ("rate of zero", lambda: plot_rate([1.0, 2.0], [1.0, 0.0]), "x and y must be positive"),
]
