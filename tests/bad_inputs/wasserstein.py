"""Bad inputs of the Wasserstein metrics, of measures on grids and of JKO steps on them."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from ot_transformers import (
    ConditionalWasserstein,
    Entropy,
    Gaussian,
    InteractionEnergy,
    KLDivergence,
    Particles,
    PositionedParticles,
    Wasserstein,
)
from ot_transformers.flows.grid_jko import grid_jko
from ot_transformers.measures import GridMeasure

CLOUD = Particles(np.eye(3))
NORMAL = Gaussian(np.zeros(3), np.eye(3))
ENERGY = InteractionEnergy(np.eye(3))
TOKENS = PositionedParticles(np.eye(3), [0.0, 0.5, 1.0])
AXIS = np.linspace(0.0, 1.0, 5)
GRID = GridMeasure(AXIS, np.full(5, 0.2))

ROWS: list[tuple[str, Callable[[], object], str]] = [
    ("p-below-one", lambda: Wasserstein(p=0.5), r"p must be >= 1, got 0\.5"),
    ("p-infinite", lambda: Wasserstein(p=np.inf), r"p must be finite"),
    ("D-with-p", lambda: Wasserstein(p=1, D=np.eye(2)), r"D is an inner product, for p = 2 only"),
    ("D-indefinite", lambda: Wasserstein(D=np.diag([1.0, -1.0])), r"D must be positive definite.* -1"),
    ("D-singular", lambda: Wasserstein(D=np.diag([1.0, 0.0])), r"D must be positive definite"),
    ("D-not-symmetric", lambda: Wasserstein(D=np.array([[1.0, 0.5], [0.0, 1.0]])), r"D must be symmetric"),
    (
        "D-dimension",
        lambda: Wasserstein(D=np.eye(2)).distance(CLOUD, CLOUD),
        r"mu has dimension 3, D acts on",
    ),
    (
        "dimensions",
        lambda: Wasserstein().distance(CLOUD, np.eye(2)),
        r"mu has dimension 3, nu has dimension 2",
    ),
    ("kinds", lambda: Wasserstein().distance(CLOUD, NORMAL), r"mu and nu must both be"),
    ("line", lambda: Wasserstein().distance(np.ones(3), np.ones(3)), r"x must be a cloud"),
    ("gaussians-p1", lambda: Wasserstein(p=1).distance(NORMAL, NORMAL), r"p must be 2 between Gaussians"),
    (
        "batches",
        lambda: Wasserstein().distance(np.ones((2, 4, 3)), np.ones((3, 4, 3))),
        r"batch dimensions do not broadcast|broadcast",
    ),
    ("time", lambda: Wasserstein().geodesic(CLOUD, CLOUD).at(1.5), r"t must lie in \[0, 1\]"),
    ("exp-shape", lambda: Wasserstein().exp(CLOUD, np.ones((2, 3))), r"v must be a field"),
    ("exp-p1", lambda: Wasserstein(p=1).exp(CLOUD, np.eye(3)), r"p must be 2 as a Riemannian metric"),
    ("inner-shape", lambda: Wasserstein().inner(CLOUD, np.eye(3), np.ones((3, 2))), r"w must be a field"),
    (
        "inner-gaussian",
        lambda: Wasserstein().inner(NORMAL, np.eye(3), np.eye(3)),
        r"v must be an AffineVelocity",
    ),
    ("proximal-tau", lambda: Wasserstein().proximal(ENERGY, CLOUD, 0.0), r"tau must be > 0"),
    ("proximal-tol", lambda: Wasserstein().proximal(ENERGY, CLOUD, 1.0, tol=-1.0), r"tol must be >= 0"),
    (
        "proximal-iterations",
        lambda: Wasserstein().proximal(ENERGY, CLOUD, 1.0, max_iter=0),
        r"max_iter must be",
    ),
    (
        "proximal-dimension",
        lambda: Wasserstein().proximal(InteractionEnergy(np.eye(2)), CLOUD, 1.0),
        r"energy acts on dimension 2, mu has dimension 3",
    ),
    (
        "proximal-warm-start",
        lambda: Wasserstein().proximal(ENERGY, CLOUD, 1.0, warm_start=Particles(np.ones((2, 3)))),
        r"warm_start has shape \(2, 3\)",
    ),
    (
        "proximal-kl",
        lambda: Wasserstein().proximal(KLDivergence(NORMAL), CLOUD, 1.0),
        r"not defined on particles",
    ),
    ("conditional-p", lambda: ConditionalWasserstein(p=0), r"p must be >= 1"),
    ("conditional-tol", lambda: ConditionalWasserstein(tol=0.0), r"tol must be > 0"),
    (
        "conditional-cloud",
        lambda: ConditionalWasserstein().distance(CLOUD, TOKENS),
        r"mu must be PositionedParticles",
    ),
    (
        "conditional-marginals",
        lambda: ConditionalWasserstein().distance(TOKENS, PositionedParticles(np.eye(3), [0.0, 0.0, 1.0])),
        r"same position marginal; at s = 0 mu has mass",
    ),
    (
        "grid-not-uniform",
        lambda: GridMeasure([0.0, 1.0, 3.0], np.ones(3) / 3),
        r"axes\[0\] must be increasing",
    ),
    ("grid-decreasing", lambda: GridMeasure(AXIS[::-1], np.full(5, 0.2)), r"axes\[0\] must be increasing"),
    ("grid-shape", lambda: GridMeasure(AXIS, np.full(4, 0.25)), r"mass must end in the grid's shape \(5,\)"),
    (
        "grid-negative",
        lambda: GridMeasure(AXIS, [0.5, 0.6, -0.1, 0.0, 0.0]),
        r"mass must be nonnegative.* -0\.1",
    ),
    ("grid-sum", lambda: GridMeasure(AXIS, np.ones(5)), r"mass must sum to 1; the sum is off by 4"),
    (
        "grid-three-axes",
        lambda: GridMeasure([AXIS] * 3, np.ones((5, 5, 5)) / 125),
        r"axes must be 1 or 2 arrays",
    ),
    ("grid-gaussian", lambda: GridMeasure.from_gaussian(NORMAL, AXIS), r"gaussian must be one Gaussian"),
    (
        "grid-jko-measure",
        lambda: grid_jko(Entropy(), CLOUD, 0.1, 1, eps=0.1),
        r"measure must be a GridMeasure",
    ),
    ("grid-jko-eps", lambda: grid_jko(Entropy(), GRID, 0.1, 1, eps=0.0), r"eps must be > 0"),
    ("grid-jko-steps", lambda: grid_jko(Entropy(), GRID, 0.1, 0, eps=0.1), r"n_steps must be at least 1"),
    ("grid-jko-energy", lambda: grid_jko("KL", GRID, 0.1, 1, eps=0.1), r"energy must be an Energy"),
    ("grid-jko-dimension", lambda: grid_jko(ENERGY, GRID, 0.1, 1, eps=0.1), r"measure has dimension 1"),
    ("grid-jko-sign", lambda: grid_jko(-Entropy(), GRID, 0.1, 1, eps=0.1), r"energy has the factor -1"),
    (
        "grid-jko-blur",
        lambda: grid_jko(Entropy(), GRID, 0.1, 1, eps=0.3, compensate_blur=True),
        r"energy has the factor -0\.5 after taking off the blur",
    ),
]
