"""Bad inputs of the twisted metric."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from ot_transformers.energies import InteractionEnergy
from ot_transformers.measures import AffineVelocity, Gaussian, Particles
from ot_transformers.metrics import TwistedWasserstein

I2 = np.eye(2)
SKEW = np.array([[0.0, 1.0], [-1.0, 0.0]])
METRIC = TwistedWasserstein(-I2, D=I2)
CLOUD = Particles(np.zeros((3, 2)))
WIDE = Gaussian(np.zeros(2), 2 * I2)
UNIT = Gaussian(np.zeros(2), 0.1 * I2)

ROWS: list[tuple[str, Callable[[], object], str]] = [
    ("A-not-square", lambda: TwistedWasserstein(np.ones((2, 3)), D=I2), "A must be square"),
    ("A-batch", lambda: TwistedWasserstein(np.ones((2, 2, 2)), D=I2), "A must be one matrix"),
    ("A-nan", lambda: TwistedWasserstein(np.nan * I2, D=I2), "A has"),
    ("A-skew-with-D", lambda: TwistedWasserstein(SKEW, D=I2), "A must be symmetric"),
    ("A-skew-with-V", lambda: TwistedWasserstein(SKEW, I2), "A is not symmetric"),
    ("both", lambda: TwistedWasserstein(I2, I2, D=I2), "give V or D"),
    ("neither", lambda: TwistedWasserstein(I2), "give V or D"),
    ("V-shape", lambda: TwistedWasserstein(I2, np.eye(3)), "V must have the shape of A"),
    ("V-mixed-signs", lambda: TwistedWasserstein(I2, np.diag([1.0, -1.0])), "not positive definite"),
    ("D-indefinite", lambda: TwistedWasserstein(I2, D=np.diag([1.0, -1.0])), "D must be positive definite"),
    ("D-singular", lambda: TwistedWasserstein(I2, D=np.diag([1.0, 0.0])), "D must be positive definite"),
    ("D-shape", lambda: TwistedWasserstein(I2, D=np.eye(3)), "D must have the shape of A"),
    ("sign", lambda: TwistedWasserstein(I2, D=I2, sign=2), "sign must be"),
    ("tol", lambda: TwistedWasserstein(I2, D=I2, tol=0.0), "tol must be"),
    ("mixed", lambda: METRIC.distance(CLOUD, UNIT), "mu and nu must be both"),
    (
        "dimension",
        lambda: METRIC.distance(Particles(np.zeros((3, 1))), Particles(np.ones((3, 1)))),
        "mu has dimension",
    ),
    ("two-dimensions", lambda: METRIC.distance(CLOUD, Particles(np.zeros((3, 1)))), "dimension"),
    ("domain", lambda: METRIC.distance(WIDE, UNIT), "mu lies outside the domain"),
    ("matching", lambda: METRIC.geodesic(CLOUD, CLOUD, matching="best"), "matching must be one of"),
    (
        "identity-sizes",
        lambda: METRIC.geodesic(CLOUD, Particles(np.ones((2, 2))), matching="identity"),
        "matching",
    ),
    (
        "batches",
        lambda: METRIC.distance(Particles(np.zeros((2, 3, 2))), Particles(np.zeros((3, 3, 2)))),
        "mu",
    ),
    ("max-degree", lambda: METRIC.geodesic(CLOUD, CLOUD, max_degree=4), "max_degree must be"),
    ("method", lambda: METRIC.geodesic(CLOUD, CLOUD, method="shooting"), "method must be one of"),
    ("segments", lambda: METRIC.geodesic(CLOUD, CLOUD, method="segments", segments=4), "segments must be"),
    (
        "segments-odd",
        lambda: METRIC.geodesic(CLOUD, CLOUD, method="segments", segments=10),
        "segments must be a multiple of 4",
    ),
    ("segments-float", lambda: METRIC.geodesic(CLOUD, CLOUD, segments=16.0), "segments must be"),  # type: ignore[arg-type]
    ("segments-gaussians", lambda: METRIC.geodesic(UNIT, UNIT, method="segments"), "method 'segments'"),
    ("time", lambda: METRIC.geodesic(CLOUD, Particles(np.ones((3, 2)))).at(2.0), "t must lie"),
    ("inner-shape", lambda: METRIC.inner(CLOUD, np.zeros(2), np.zeros((3, 2))), "v must have the shape"),
    ("inner-kind", lambda: METRIC.inner(UNIT, np.zeros(2), np.zeros(2)), "v must be an AffineVelocity"),
    (
        "inner-domain",
        lambda: METRIC.inner(WIDE, *2 * [AffineVelocity(WIDE.mean_t, WIDE.cov_t)]),
        "mu lies outside",
    ),
    ("log-matching", lambda: METRIC.log(CLOUD, CLOUD, matching="best"), "matching must be one of"),
    ("tangent-shape", lambda: METRIC.exp(CLOUD, np.zeros((2, 2))), "tangent must have the shape"),
    ("tangent-kind", lambda: METRIC.exp(UNIT, np.zeros((2, 2))), "tangent must be an AffineVelocity"),
    (
        "log-weights",
        lambda: METRIC.log(CLOUD, Particles(np.ones((3, 2)), [0.5, 0.25, 0.25])),
        "different weights",
    ),
    ("action-shape", lambda: METRIC.action(np.zeros((1, 3, 2))), "points must be"),
    ("tau", lambda: METRIC.proximal(InteractionEnergy(-I2), CLOUD, 0.0), "tau must be > 0"),
    (
        "proximal-dim",
        lambda: METRIC.proximal(InteractionEnergy(-1.0), Particles([[1.0]]), 0.1),
        "mu has dimension",
    ),
    (
        "quadrature-particles",
        lambda: METRIC.quadrature_geodesic(CLOUD, CLOUD),
        "mu and nu must be single Gaussians",
    ),
    ("quadrature-nodes", lambda: METRIC.quadrature_geodesic(UNIT, UNIT, nodes=(8,)), "nodes must hold"),
    ("exp-outside", lambda: METRIC.exp(WIDE, AffineVelocity(WIDE.mean_t, WIDE.cov_t)), "mu lies outside"),
]
