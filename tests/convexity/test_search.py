"""The search for nonconvexity: its quotient is the Hessian's, and its gradient is right."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from ot_transformers import (
    AffineVelocity,
    BuresWasserstein,
    Gaussian,
    InteractionEnergy,
    TwistedWasserstein,
    Wasserstein,
    find_nonconvexity,
    load_witness,
    probe_convexity,
    riemannian_hessian,
)
from ot_transformers.convexity import search

A = np.array([[-1.0, 0.2], [0.2, -0.6]])
D = np.array([[1.5, 0.3], [0.3, 0.8]])
ENERGY = InteractionEnergy(A)
CASES: dict[str, tuple[Any, type]] = {
    "clouds": (Wasserstein(D=D), search._Clouds),
    "clouds-twisted": (TwistedWasserstein(A, D=D, sign=-1), search._Clouds),
    "gaussians": (BuresWasserstein(D=D), search._Gaussians),
    "gaussians-twisted": (TwistedWasserstein(A, D=D, sign=-1), search._TwistedGaussians),
}


@pytest.mark.parametrize("case", CASES)
def test_quotient_is_that_of_the_hessian_and_its_gradient_that_of_differences(case: str) -> None:
    metric, kind = CASES[case]
    problem = kind(ENERGY, metric, 2, 3, 0.7)
    theta = problem.draw(torch.Generator().manual_seed(4))
    hessian = riemannian_hessian(ENERGY, metric, problem.measure(theta))
    rng = np.random.default_rng(0)
    u = torch.from_numpy(rng.standard_normal(hessian.dim))
    tangent = hessian.raw_chart.wrap(hessian.raw_chart.tangent(u), "numpy")
    z = np.concatenate([theta, problem.direction(tangent)])
    value, slope = problem.quotient(z)
    np.testing.assert_allclose(value, float(u @ hessian.raw_matvec(u) / (u @ u)), rtol=1e-9)
    steps = 1e-5 * np.eye(len(z))
    central = [(problem.quotient(z + h)[0] - problem.quotient(z - h)[0]) / 2e-5 for h in steps]
    np.testing.assert_allclose(slope, central, atol=1e-7 * np.abs(slope).max() + 1e-8)


def test_skew_part_of_a_direction_does_not_change_the_modulus_of_twisted_gaussians() -> None:
    metric, kind = CASES["gaussians-twisted"]
    problem = kind(ENERGY, metric, 2, 1, 0.7)
    theta = problem.draw(torch.Generator().manual_seed(4))
    rng = np.random.default_rng(1)
    b, M = rng.standard_normal(2), rng.standard_normal((2, 2))
    S = np.asarray(problem.measure(theta).cov)
    rotation = np.array([[0.0, 1.0], [-1.0, 0.0]]) @ np.linalg.inv(S)  # M S + S M^T = 0
    values = [problem.quotient(np.concatenate([theta, b, (M + c * rotation).ravel()]))[0] for c in (0.0, 0.3)]
    np.testing.assert_allclose(values[1], values[0], rtol=1e-10)


def test_search_among_twisted_gaussians_finds_the_modulus_of_small_ones(tmp_path: Any) -> None:
    """d = 1, A = -1, m = 0: E = (1 - s^4)^(-1/2) / 2 and the metric (1 - s^4)^(-3/2) ds^2, so Hess E >= -1."""
    metric = TwistedWasserstein(A=-1.0, D=1.0, sign=-1)
    witness = find_nonconvexity(InteractionEnergy(-1.0), metric, kind="gaussian", n_starts=3, radius=1.0)
    assert witness.negative
    assert -1.0 < witness.modulus < -0.99
    assert isinstance(witness.direction, AffineVelocity)
    probe = probe_convexity(witness.energy, witness.geodesic(0.01))
    np.testing.assert_allclose(
        probe.second_derivatives[0] / probe.speed_squared[0], witness.modulus, rtol=1e-9
    )
    again = load_witness(witness.save(tmp_path / "witness.npz"))
    assert again.modulus == witness.modulus
    np.testing.assert_array_equal(again.direction.M, witness.direction.M)


def test_twisted_gaussian_hessian_along_the_scale_is_the_closed_form() -> None:
    """In arc length dl = (1 - s^4)^(-3/4) ds the energy has dE/dl = s^3 (1 - s^4)^(-3/4), differentiated once more."""
    metric = TwistedWasserstein(A=-1.0, D=1.0, sign=-1)
    s = 0.7
    q = 1 - s**4
    exact = q**0.75 * (3 * s**2 * q**-0.75 + 3 * s**6 * q**-1.75)
    hessian = riemannian_hessian(InteractionEnergy(-1.0), metric, Gaussian([0.0], [[s**2]]))
    v = AffineVelocity(torch.zeros(1), torch.ones((1, 1)), "numpy")
    np.testing.assert_allclose(
        float(hessian.quadratic_form(v)) / float(hessian.norm_squared(v)), exact, rtol=1e-12
    )
