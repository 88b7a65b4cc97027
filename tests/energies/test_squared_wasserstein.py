"""W_2^2 / 2 to a target: closed forms, POT, and the gradient x - T(x)."""

from __future__ import annotations

import numpy as np
import ot
import pytest
import torch
from scipy.optimize import minimize

from ot_transformers import (
    Gaussian,
    GaussianFunctional,
    Particles,
    SquaredWasserstein,
    gradient_flow,
    jko_step,
)
from ot_transformers.energies import Energy
from ot_transformers.numerics.bures import bures_squared

RNG = np.random.default_rng(3)


@pytest.mark.parametrize("d", [1, 3])
def test_value_against_pot_in_a_batch(d: int) -> None:
    x, y = RNG.normal(size=(4, 7, d)), RNG.normal(size=(5, d))
    w, v = RNG.dirichlet(np.ones(7), size=4), RNG.dirichlet(np.ones(5))
    value = SquaredWasserstein(Particles(y, v)).value(Particles(x, w))
    expected = [0.5 * ot.emd2(a, v, ot.dist(p, y)) for p, a in zip(x, w, strict=True)]
    np.testing.assert_allclose(value, expected, rtol=1e-11)


@pytest.mark.parametrize("d", [1, 2])
def test_gradient_is_x_minus_the_barycentric_projection(d: int) -> None:
    x, y = RNG.normal(size=(2, 7, d)), RNG.normal(size=(2, 5, d))
    w, v = RNG.dirichlet(np.ones(7), size=2), RNG.dirichlet(np.ones(5), size=2)
    energy = SquaredWasserstein(Particles(y, v))
    field = energy.wasserstein_gradient(Particles(x, w))
    for k in range(2):
        plan = ot.emd(w[k], v[k], ot.dist(x[k], y[k]))
        np.testing.assert_allclose(field[k], x[k] - plan @ y[k] / w[k][:, None], rtol=1e-10, atol=1e-12)
    automatic = Energy.raw_particles_gradient(energy, torch.from_numpy(x), torch.from_numpy(w))
    np.testing.assert_allclose(field, automatic, rtol=1e-10, atol=1e-12)


def test_translation_is_the_optimal_map() -> None:
    x, shift = RNG.normal(size=(20, 3)), np.array([1.0, -2.0, 0.5])
    field = SquaredWasserstein(x[RNG.permutation(20)] + shift).wasserstein_gradient(Particles(x))
    np.testing.assert_allclose(field, np.broadcast_to(-shift, x.shape), rtol=1e-12)


def test_gaussians_of_commuting_covariances() -> None:
    a, b = np.array([1.0, 4.0, 0.0]), np.array([9.0, 1.0, 2.0])
    m, n = np.array([0.1, 0.2, 0.3]), np.array([1.0, 0.0, -1.0])
    energy = SquaredWasserstein(Gaussian(n, np.diag(b)))
    value = energy.value(Gaussian(m, np.diag(a)))
    expected = 0.5 * (((m - n) ** 2).sum() + ((np.sqrt(a) - np.sqrt(b)) ** 2).sum())
    assert value == pytest.approx(expected, rel=1e-13)
    regular = a + np.array([0.0, 0.0, 1.0])
    field = energy.wasserstein_gradient(Gaussian(m, np.diag(regular)))
    np.testing.assert_allclose(field.b, m - n, rtol=1e-14)
    np.testing.assert_allclose(field.M, np.diag(1 - np.sqrt(b / regular)), rtol=1e-11, atol=1e-12)


def half_square(x: np.ndarray, T: np.ndarray) -> float:
    """BW^2(x x^T, T) / 2 by singular values."""
    nuclear = np.linalg.svd(x.T @ np.linalg.cholesky(T), compute_uv=False).sum()
    return 0.5 * ((x**2).sum() + np.trace(T)) - nuclear


def best_of_rank(T: np.ndarray, r: int) -> np.ndarray:
    """The nearest covariance of rank r by minimisation over factors, from several starts."""
    d = len(T)
    runs = [
        minimize(lambda y: half_square(y.reshape(d, r), T), RNG.normal(size=d * r), method="BFGS", tol=1e-12)
        for _ in range(3)
    ]
    x = min(runs, key=lambda run: run.fun).x.reshape(d, r)
    return x @ x.T


@pytest.mark.parametrize("start", ["covariance", "factor"])
@pytest.mark.parametrize("closed", [True, False])
def test_flow_from_a_singular_gaussian_keeps_its_rank_and_finds_the_nearest(start: str, closed: bool) -> None:
    X = RNG.normal(size=(3, 3))
    T = X @ X.T + np.eye(3)
    t = torch.from_numpy(T)
    energy = SquaredWasserstein(Gaussian(np.zeros(3), T))
    if not closed:
        energy = GaussianFunctional(lambda m, S: 0.5 * (m.square().sum(-1) + bures_squared(S, t)))
    L = np.array([[1.0, 0.0], [0.0, 2.0], [0.0, 0.0]])
    mu = Gaussian(np.ones(3), L @ L.T) if start == "covariance" else Gaussian.from_factor(np.ones(3), L)
    run = gradient_flow(energy, mu, 120.0)
    best = best_of_rank(T, 2)
    assert int(run.states[-1].rank()) == 2
    np.testing.assert_allclose(run.states[-1].cov, best, rtol=0, atol=1e-5)
    # The smallest eigenvalue is lost. S = L L^T has rounding of 1 ulp off its range, of which the value sees the root.
    assert run.energies["energy"][-1] == pytest.approx(0.5 * np.linalg.eigvalsh(T)[0], abs=3e-7)


def test_flow_leaves_a_range_that_the_target_does_not_see() -> None:
    energy = SquaredWasserstein(Gaussian(np.zeros(2), np.diag([0.0, 4.0])))
    run = gradient_flow(energy, Gaussian(np.zeros(2), np.diag([1.0, 0.0])), 40.0)
    np.testing.assert_allclose(run.states[-1].cov, np.diag([0.0, 4.0]), atol=1e-12)


@pytest.mark.parametrize("tau", [0.1, 1.0, 100.0])
def test_step_from_a_singular_gaussian_is_the_minimum_over_factors(tau: float) -> None:
    T = np.array([[1.0, 0.5], [0.5, 1.0]])
    L = np.array([[1.0], [0.0]])

    def objective(y: np.ndarray) -> float:
        return half_square(y[:, None], T) + ((y - L[:, 0]) ** 2).sum() / (2 * tau)

    truth = minimize(objective, [1.0, 0.1], method="BFGS", tol=1e-12)
    energy = SquaredWasserstein(Gaussian(np.zeros(2), T))
    step = jko_step(energy, Gaussian(np.zeros(2), L @ L.T), tau=tau)
    assert step.converged
    assert int(step.measure.rank()) == 1
    np.testing.assert_allclose(step.measure.cov, np.outer(truth.x, truth.x), rtol=0, atol=1e-6)


def test_gradient_at_a_singular_gaussian() -> None:
    T = np.array([[1.0, 0.5], [0.5, 1.0]])
    energy = SquaredWasserstein(Gaussian(np.zeros(2), T))
    for mu in (
        Gaussian(np.zeros(2), np.diag([1.0, 0.0])),
        Gaussian.from_factor(np.zeros(2), [[1.0], [0.0]]),
    ):
        M = energy.wasserstein_gradient(mu).M
        np.testing.assert_allclose(M, M.T, rtol=0, atol=0)
        np.testing.assert_allclose(M[:, 0], [0.0, -0.5], rtol=0, atol=1e-15)


def test_gradient_of_a_factor_is_differentiable() -> None:
    T = Gaussian(np.zeros(3), np.diag([1.0, 2.0, 3.0]))
    m, L = torch.zeros(3, dtype=torch.float64), torch.from_numpy(RNG.normal(size=(3, 2)))

    def field(factor: torch.Tensor) -> torch.Tensor:
        return SquaredWasserstein(T).raw_gaussian_gradient_of_factor(m, factor)[1] @ factor

    assert torch.autograd.gradcheck(field, (L.clone().requires_grad_(),))
    torch.testing.assert_close(field(L), field(L.clone().requires_grad_()).detach(), rtol=0, atol=1e-12)
