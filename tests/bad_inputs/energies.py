"""Bad inputs of the energies (the Sinkhorn ones have their own file)."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch

from ot_transformers import (
    Entropy,
    Gaussian,
    GaussianFunctional,
    InteractionEnergy,
    KLDivergence,
    Particles,
    PotentialEnergy,
    SquaredWasserstein,
)

CLOUD = Particles(np.eye(3))
NORMAL = Gaussian(np.zeros(3), np.eye(3))
NORMAL5 = Gaussian(np.zeros(5), np.eye(5))
SINGULAR = Gaussian(np.zeros(3), np.diag([1.0, 1.0, 0.0]))


def norm(x: torch.Tensor) -> torch.Tensor:
    return x.square().sum(-1)


THREE = Gaussian(np.zeros((3, 3)), np.eye(3))
TWO = Gaussian(np.zeros((2, 3)), np.eye(3))

ROWS: list[tuple[str, Callable[[], object], str]] = [
    ("interaction-not-square", lambda: InteractionEnergy(np.ones((2, 3))), r"A must be square"),
    ("interaction-vector", lambda: InteractionEnergy(np.ones(3)), r"A must be a matrix"),
    ("interaction-nan", lambda: InteractionEnergy(np.full((2, 2), np.nan)), r"A has 4 NaN"),
    ("interaction-complex", lambda: InteractionEnergy(np.eye(2) * 1j), r"A must be real"),
    ("interaction-dimension", lambda: InteractionEnergy(np.eye(2)).value(CLOUD), r"measure has dimension 3"),
    (
        "interaction-log-dimension",
        lambda: InteractionEnergy(np.eye(2)).log_value(NORMAL),
        r"measure has dimension 3",
    ),
    (
        "interaction-measure",
        lambda: InteractionEnergy(np.eye(2)).value("cloud"),
        r"measure must be a Gaussian",
    ),
    ("kl-target-cloud", lambda: KLDivergence(CLOUD), r"target must be a Gaussian"),
    (
        "kl-target-singular",
        lambda: KLDivergence(SINGULAR),
        r"target must have a regular covariance, got rank 2",
    ),
    ("kl-on-particles", lambda: KLDivergence(NORMAL).value(CLOUD), r"not defined on particles: .*\+infinity"),
    (
        "kl-gradient-on-particles",
        lambda: KLDivergence(NORMAL).wasserstein_gradient(CLOUD),
        r"not defined on particles",
    ),
    (
        "kl-gradient-singular",
        lambda: KLDivergence(NORMAL).wasserstein_gradient(SINGULAR),
        r"singular covariance of measure",
    ),
    (
        "kl-batch",
        lambda: KLDivergence(TWO).value(THREE),
        r"do not broadcast: measure \(3,\), KLDivergence \(2,\)",
    ),
    (
        "interaction-batch",
        lambda: InteractionEnergy(np.ones((2, 3, 3))).value(np.ones((3, 4, 3))),
        r"do not broadcast: measure \(3,\), InteractionEnergy \(2,\)",
    ),
    ("kl-dimension", lambda: KLDivergence(NORMAL).value(NORMAL5), r"measure has dimension 5"),
    ("entropy-on-particles", lambda: Entropy().value(CLOUD), r"Entropy is not defined on particles"),
    ("potential-not-callable", lambda: PotentialEnergy(3.0), r"f must be callable"),
    ("potential-nodes", lambda: PotentialEnergy(norm, n_nodes=0), r"n_nodes must be at least 2"),
    ("potential-shape", lambda: PotentialEnergy(lambda x: x).value(CLOUD), r"f must take a tensor"),
    (
        "potential-numpy",
        lambda: PotentialEnergy(lambda x: 1.0).value(CLOUD),
        r"f must take a tensor .* float 1\.0",
    ),
    ("potential-high-dimension", lambda: PotentialEnergy(norm).value(NORMAL5), r"dimension <= 4, got 5"),
    ("potential-many-nodes", lambda: PotentialEnergy(norm, n_nodes=99).value(NORMAL), r"n_nodes = 99"),
    ("potential-error-of-cloud", lambda: PotentialEnergy(norm).quadrature_error(CLOUD), r"gaussian must be"),
    ("functional-not-callable", lambda: GaussianFunctional("f"), r"f must be callable"),
    (
        "functional-shape",
        lambda: GaussianFunctional(lambda m, S: S).value(NORMAL),
        r"f must give a tensor of shape",
    ),
    (
        "functional-on-particles",
        lambda: GaussianFunctional(lambda m, S: m[..., 0]).value(CLOUD),
        r"on particles",
    ),
    (
        "squared-wasserstein-target",
        lambda: SquaredWasserstein([1.0]),
        r"target must be a Gaussian, Particles",
    ),
    ("squared-wasserstein-kinds", lambda: SquaredWasserstein(CLOUD).value(NORMAL), r"target is a cloud"),
    ("squared-wasserstein-kinds-2", lambda: SquaredWasserstein(NORMAL).value(CLOUD), r"target is a Gaussian"),
    ("factor-text", lambda: Entropy() * "two", r"factor must be a number"),
    ("factor-nan", lambda: float("nan") * Entropy(), r"factor must be finite"),
    (
        "sum-of-dimensions",
        lambda: InteractionEnergy(np.eye(2)) + InteractionEnergy(np.eye(3)),
        r"energies act on dimensions 2 and 3",
    ),
]
