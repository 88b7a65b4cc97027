"""Bad inputs of the Bures-Wasserstein geometry."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from ot_transformers.energies import KLDivergence
from ot_transformers.measures import Gaussian, Particles
from ot_transformers.metrics import (
    BuresWasserstein,
    bures_barycenter,
    bures_distance,
    bures_exp,
    bures_geodesic,
    bures_map,
    bures_transport,
)

I2 = np.eye(2)
SKEW = np.array([[0.0, 1.0], [-1.0, 0.0]])
G = Gaussian(np.zeros(2), I2)

ROWS: list[tuple[str, Callable[[], object], str]] = [
    ("S0-not-square", lambda: bures_distance(np.ones((2, 3)), I2), "S0 must be square"),
    ("S1-indefinite", lambda: bures_distance(I2, -I2), "S1 must be positive semi-definite"),
    ("S1-asymmetric", lambda: bures_distance(I2, SKEW), "S1 must be symmetric"),
    ("dimensions", lambda: bures_distance(I2, np.eye(3)), "S0 has dimension 2, S1 has dimension 3"),
    ("nan", lambda: bures_distance(np.nan * I2, I2), "S0 has"),
    ("no-map", lambda: bures_map(np.diag([1.0, 0.0]), I2), "S0 is singular"),
    ("time", lambda: bures_geodesic(I2, 2 * I2, 1.5), "t must lie in"),
    ("times-shape", lambda: bures_geodesic(I2, 2 * I2, np.zeros((2, 2))), "t must be a number"),
    ("exp-none", lambda: bures_exp(I2), "map_tangent or cov_tangent"),
    ("exp-both", lambda: bures_exp(I2, I2, cov_tangent=I2), "map_tangent or cov_tangent"),
    ("exp-skew", lambda: bures_exp(I2, SKEW), "map_tangent must be symmetric"),
    ("transport-dimension", lambda: bures_transport(I2, 2 * I2, np.eye(3)), "map_tangent has dimension 3"),
    ("barycentre-shape", lambda: bures_barycenter(I2), "covs must be"),
    ("barycentre-weights", lambda: bures_barycenter(np.stack([I2, I2]), [0.5, 0.6]), "weights must sum to 1"),
    (
        "barycentre-negative",
        lambda: bures_barycenter(np.stack([I2, I2]), [1.5, -0.5]),
        "weights must be nonneg",
    ),
    ("metric-D", lambda: BuresWasserstein(np.diag([1.0, 0.0])), "D must be positive definite"),
    (
        "metric-particles",
        lambda: BuresWasserstein().distance(Particles(np.zeros((2, 2))), G),
        "mu must be a Gaussian",
    ),
    (
        "metric-dimension",
        lambda: BuresWasserstein().distance(G, Gaussian(0.0, 1.0)),
        "mu has dimension 2, nu",
    ),
    ("jko-tau", lambda: BuresWasserstein().proximal(KLDivergence(G), G, -1.0), "tau must be > 0"),
]
