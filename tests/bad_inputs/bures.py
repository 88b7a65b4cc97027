"""Bad inputs of the Bures-Wasserstein geometry."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch

from ot_transformers.energies import KLDivergence
from ot_transformers.measures import AffineVelocity, Gaussian, Particles
from ot_transformers.metrics import (
    BuresWasserstein,
    bures_barycenter,
    bures_distance,
    bures_exp,
    bures_geodesic,
    bures_inner,
    bures_log,
    bures_map,
    bures_transport,
)

I2 = np.eye(2)
SKEW = np.array([[0.0, 1.0], [-1.0, 0.0]])
G = Gaussian(np.zeros(2), I2)
PAIR = Gaussian(np.zeros((2, 2)), I2)
TURN = AffineVelocity(torch.zeros(2).double(), torch.from_numpy(SKEW))
WIDE = AffineVelocity(torch.zeros(3).double(), torch.eye(3).double())
MANY = np.repeat(I2[None], 2000, 0)

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
    ("complex", lambda: bures_distance(I2 * 1j, I2), "S0 must be real"),
    ("vector", lambda: bures_distance(np.ones(2), I2), "S0 must be a matrix"),
    ("batches", lambda: bures_distance(np.stack([I2] * 2), np.stack([I2] * 3)), "do not broadcast: S0"),
    ("large-batch-indefinite", lambda: bures_distance(MANY, -MANY), "S1 must be positive semi.*-1"),
    ("log-no-map", lambda: bures_log(np.diag([1.0, 0.0]), I2), "no map sends it to S1"),
    ("inner-asymmetric", lambda: bures_inner(I2, I2, SKEW), "map_tangent must be symmetric"),
    ("exp-dimension", lambda: bures_exp(I2, np.eye(3)), "map_tangent has dimension 3"),
    ("exp-cov-tangent", lambda: bures_exp(I2, cov_tangent=SKEW), "cov_tangent must be symmetric"),
    ("transport-tol", lambda: bures_transport(I2, 2 * I2, I2, tol=0.0), "tol must be > 0"),
    ("geodesic-time-text", lambda: bures_geodesic(I2, I2, "half"), "t must be a numeric array"),
    ("barycentre-count", lambda: bures_barycenter([I2, I2], [1.0]), r"weights must be \(\.\.\., 2\)"),
    ("barycentre-iterations", lambda: bures_barycenter([I2, I2], max_iter=0), "max_iter must be at least 1"),
    ("barycentre-tol", lambda: bures_barycenter([I2, I2], tol=-1), "tol must be > 0"),
    ("barycentre-indefinite", lambda: bures_barycenter([I2, -I2]), "covs must be positive semi-definite"),
    ("metric-barycentre", lambda: BuresWasserstein().barycenter(G), "measures must be a batch"),
    (
        "metric-batches",
        lambda: BuresWasserstein().distance(PAIR, Gaussian(np.zeros((3, 2)), I2)),
        "broadcast: mu",
    ),
    ("metric-D-dimension", lambda: BuresWasserstein(np.eye(3)).distance(G, G), "D acts on dimension 3"),
    ("metric-D-asymmetric", lambda: BuresWasserstein(SKEW), "D must be symmetric"),
    ("metric-time", lambda: BuresWasserstein().geodesic(G, G).at(2.0), "t must lie in"),
    ("metric-exp-array", lambda: BuresWasserstein().exp(G, I2), "tangent must be an AffineVelocity"),
    ("metric-inner-dimension", lambda: BuresWasserstein().inner(G, WIDE, WIDE), "v has dimension 3"),
    (
        "metric-transport-rotation",
        lambda: BuresWasserstein().parallel_transport(G, G, TURN),
        r"tangent\.M must be symmetric",
    ),
    ("jko-batch", lambda: BuresWasserstein().proximal(KLDivergence(G), PAIR, 1.0), "single Gaussian"),
    ("jko-tol", lambda: BuresWasserstein().proximal(KLDivergence(G), G, 1.0, tol=0.0), "tol must be > 0"),
]
