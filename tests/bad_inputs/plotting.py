"""Bad inputs of the figures."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from matplotlib.figure import Figure

from ot_transformers import Gaussian, Particles
from ot_transformers.plotting import (
    animate_ellipses,
    animate_particles,
    disc_coordinates,
    plot_cone,
    plot_disc,
    plot_eigenvalues,
    plot_ellipses,
    plot_energy,
    plot_particles,
    plot_phase,
    plot_rank_histogram,
    plot_rate,
    save_animation,
)

G = Gaussian(np.zeros(2), np.eye(2))
COVS = np.stack([[np.eye(2)] * 3] * 4)
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
    ("cone of 3 x 3", lambda: plot_cone(np.ones((4, 2, 1, 1)) * np.eye(3)), r"cov must be \(..., 2, 2\)"),
    ("cone without a batch", lambda: plot_cone(np.stack([np.eye(2)] * 3)), r"covs must be \(T, B, 2, 2\)"),
    (
        "cone on plain axes",
        lambda: plot_cone(COVS, ax=Figure().add_subplot()),
        'ax must have projection="3d"',
    ),
    ("cone of NaN", lambda: plot_cone(COVS * np.nan), "cov"),
    ("unknown view", lambda: plot_cone(COVS, view="top"), "view must be one of"),
    ("shape of zero", lambda: disc_coordinates(np.zeros((2, 2))), "cov must have a positive trace"),
    ("disc without a batch", lambda: plot_disc(np.stack([np.eye(2)] * 3)), r"covs must be \(T, B, 2, 2\)"),
    ("no phase diagram", lambda: plot_phase({"a": 1}), "diagram must be a PhaseDiagram"),
    ("ranks without labels", lambda: plot_rank_histogram([[1, 2]], [], dim=3), "labels must name each"),
    (
        "rank above the dimension",
        lambda: plot_rank_histogram([[1, 4]], ["a"], dim=3),
        "ranks must lie in -1..3",
    ),
    (
        "animation of no state",
        lambda: animate_particles([]),
        "flow must be a Trajectory or a list of measures",
    ),
    ("ellipses of a cloud", lambda: animate_ellipses([Particles(np.eye(2))]), "flow must be a Gaussian"),
    ("no frames", lambda: animate_ellipses([G, G], n_frames=0), "n_frames must be"),
    ("no trail", lambda: animate_particles([Particles(np.eye(2))] * 2, trail=0), "trail must be"),
    ("frames a second", lambda: save_animation(animate_ellipses([G, G]), "f.gif", fps=0), "fps must be"),
    ("suffix of animation", lambda: save_animation(animate_ellipses([G, G]), "f.avi"), "path must end in"),
]
