"""JKO steps of Gaussians against closed forms, their optimality condition, and the flow they tend to."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from ot_transformers import (
    BuresWasserstein,
    Gaussian,
    KLDivergence,
    SelfTransportEnergy,
    SquaredWasserstein,
    jko,
)
from ot_transformers.energies import Energy
from ot_transformers.metrics._bures_proximal import exact_rank

RNG = np.random.default_rng(8)
STANDARD = KLDivergence(Gaussian(np.zeros(3), np.eye(3)))
D = np.array([[1.0, 0.4, 0.0], [0.4, 2.0, 0.1], [0.0, 0.1, 0.5]])


class Functional(Energy):
    """An energy from a formula in the mean and the covariance."""

    def __init__(self, formula: Any) -> None:
        self.formula = formula

    def raw_gaussian(self, mean: Tensor, cov: Tensor) -> Tensor:
        return self.formula(mean, cov)


def trace(S: Tensor) -> Tensor:
    return S.diagonal(dim1=-2, dim2=-1).sum(-1)


def gaussian() -> Gaussian:
    X = RNG.normal(size=(3, 6))
    return Gaussian(RNG.normal(size=3), X @ X.T / 3)


def test_step_of_the_divergence_to_a_standard_gaussian() -> None:
    # In the eigenbasis of S, x = sqrt(s+) solves (1 + tau) x^2 - sqrt(s) x - tau = 0; m+ = m / (1 + tau).
    mu, tau = gaussian(), 0.3
    result = BuresWasserstein().proximal(STANDARD, mu, tau, tol=1e-12)
    s, U = np.linalg.eigh(mu.cov)
    x = (np.sqrt(s) + np.sqrt(s + 4 * tau * (1 + tau))) / (2 * (1 + tau))
    assert result.converged
    np.testing.assert_allclose(result.measure.cov, (U * x**2) @ U.T, rtol=0, atol=1e-11)
    np.testing.assert_allclose(result.measure.mean, mu.mean / (1 + tau), rtol=0, atol=1e-12)


def test_step_of_a_quadratic_potential_is_linear() -> None:
    P = torch.from_numpy((X := RNG.normal(size=(3, 3))) @ X.T)
    c = torch.from_numpy(RNG.normal(size=3))
    potential = Functional(lambda m, S: 0.5 * (m @ P @ m + trace(P @ S)) + c @ m)
    mu, tau = gaussian(), 0.7
    for mobility in (None, D):
        result = BuresWasserstein(D=mobility).proximal(potential, mu, tau, tol=1e-12)
        Dm = np.eye(3) if mobility is None else mobility
        inverse = np.linalg.inv(np.eye(3) + tau * Dm @ P.numpy())
        np.testing.assert_allclose(
            result.measure.mean, inverse @ (mu.mean - tau * Dm @ c.numpy()), atol=1e-11
        )
        np.testing.assert_allclose(result.measure.cov, inverse @ mu.cov @ inverse.T, rtol=0, atol=1e-11)


@pytest.mark.parametrize("mobility", [None, D], ids=["identity", "D"])
def test_backward_map_at_the_minimiser(mobility: Any) -> None:
    energy = SelfTransportEnergy(-np.eye(3) + 0.3 * np.ones((3, 3)))
    mu, tau = gaussian(), 0.4
    result = BuresWasserstein(D=mobility).proximal(energy, mu, tau, tol=1e-12)
    g, H = energy.raw_gaussian_gradient(result.measure.mean_t, result.measure.cov_t)
    Dm = np.eye(3) if mobility is None else mobility
    B = np.eye(3) + 2 * tau * Dm @ H.numpy()
    np.testing.assert_allclose(B @ result.measure.cov @ B.T, mu.cov, rtol=0, atol=1e-10)
    np.testing.assert_allclose(result.measure.mean + tau * Dm @ g.numpy(), mu.mean, rtol=0, atol=1e-11)
    assert result.energy_after <= result.energy_before


def test_steps_tend_to_the_ornstein_uhlenbeck_flow_at_order_one() -> None:
    mu, t_end = gaussian(), 0.5
    decay = np.exp(-2 * t_end)
    truth = Gaussian(np.exp(-t_end) * mu.mean, np.eye(3) + decay * (mu.cov - np.eye(3)))
    metric, errors = BuresWasserstein(), []
    for n in (5, 10, 20):
        nu: Any = mu
        for _ in range(n):
            nu = metric.proximal(STANDARD, nu, t_end / n, tol=1e-11).measure
        errors.append(metric.distance(nu, truth))
    orders = np.log2(np.array(errors[:-1]) / errors[1:])
    np.testing.assert_allclose(orders, 1.0, atol=0.06)


@pytest.mark.parametrize("tau", [1e-3, 1.0, 1e3])
def test_the_objective_never_increases(tau: float) -> None:
    metric = BuresWasserstein()
    for energy in (STANDARD, SelfTransportEnergy(np.eye(3)), -1.0 * SelfTransportEnergy(-np.eye(3))):
        mu = gaussian()
        result = metric.proximal(energy, mu, tau)
        moved = metric.distance(mu, result.measure) ** 2 / (2 * tau)
        assert result.energy_after + moved <= result.energy_before + 1e-12 * (1 + abs(result.energy_before))
        if result.converged:
            assert result.gradient_norm <= 1e-9


def test_energy_that_is_infinite_outside_its_domain() -> None:
    # Pulls outwards with a barrier at tr S = 3: the fixed point leaves the domain, line searches must not.
    def barrier(m: Tensor, S: Tensor) -> Tensor:
        room = 3.0 - trace(S)
        return torch.where(room > 0, -torch.log(room.clamp_min(1e-300)) - 40 * trace(S).sqrt(), torch.inf)

    mu = Gaussian(np.zeros(3), 0.9 * np.eye(3))
    result = BuresWasserstein().proximal(Functional(barrier), mu, 2.0)
    size = np.trace(result.measure.cov)
    assert 2.7 < size < 3.0
    # One unknown, r = sqrt(tr S): 2 r / (3 - r^2) - 40 + (r - r0) / tau = 0.
    r = np.sqrt(size)
    assert 2 * r / (3 - r**2) - 40 + (r - np.sqrt(2.7)) / 2.0 == pytest.approx(0, abs=1e-5)
    assert result.converged


def test_rank_is_kept_exactly_and_far_below_the_dimension() -> None:
    L = RNG.normal(size=(12, 4)) / 4
    mu = Gaussian.from_factor(np.zeros(12), L)
    A = RNG.normal(size=(12, 12)) / 12
    energy = SelfTransportEnergy(A + A.T)
    result = BuresWasserstein().proximal(energy, mu, 0.5)
    assert result.converged
    assert result.measure.factor.shape == (12, 4)
    assert int(result.measure.rank()) == 4


def test_warm_start_and_stopping_early() -> None:
    mu = gaussian()
    metric = BuresWasserstein()
    cold = metric.proximal(STANDARD, mu, 0.5)
    warm = metric.proximal(STANDARD, mu, 0.5, warm_start=cold.measure)
    assert warm.n_iter <= 1 < cold.n_iter
    np.testing.assert_allclose(warm.measure.cov, cold.measure.cov, rtol=0, atol=1e-8)
    short = metric.proximal(STANDARD, mu, 0.5, tol=1e-14, max_iter=1)
    assert not short.converged
    assert short.gradient_norm > 1e-14


def test_single_precision_converges_to_its_own_rounding() -> None:
    mu = gaussian()
    single = Gaussian(mu.mean.astype(np.float32), mu.cov.astype(np.float32))
    target = KLDivergence(Gaussian(np.zeros(3, np.float32), np.eye(3, dtype=np.float32)))
    result = BuresWasserstein().proximal(target, single, 0.3)
    assert result.converged
    assert result.measure.cov.dtype == np.float32
    truth = BuresWasserstein().proximal(STANDARD, mu, 0.3).measure.cov
    np.testing.assert_allclose(result.measure.cov, truth, rtol=0, atol=3e-5)


@pytest.mark.parametrize("tau", [1e-6, 1e-10, 1e-14, 1e-17])
@pytest.mark.parametrize("mobility", [None, D])
def test_tiny_steps_without_a_covariance_are_solved_to_the_ulp_of_the_mean(tau: float, mobility: Any) -> None:
    mu = Gaussian([1.0, 1e3, -3.0], np.zeros((3, 3)))
    energy = Functional(lambda m, S: 0.5 * (m.square().sum(-1) + trace(S)))
    result = BuresWasserstein(D=mobility).proximal(energy, mu, tau)
    assert result.converged
    step = np.linalg.solve(np.eye(3) + tau * (np.eye(3) if mobility is None else mobility), mu.mean)
    np.testing.assert_allclose(result.measure.mean, step, rtol=0, atol=1e3 * 2e-15)
    assert bool((result.measure.cov == 0).all())


def test_a_covariance_below_the_ulp_of_the_mean_is_solved_for() -> None:
    mu = Gaussian([1.0, 0.0, 0.0], 1e-30 * np.eye(3))
    result = BuresWasserstein().proximal(Functional(lambda m, S: 0.5 * trace(S)), mu, 1.0)
    assert result.converged
    np.testing.assert_allclose(result.measure.cov, 0.25e-30 * np.eye(3), rtol=1e-8, atol=0)


def test_rounding_off_the_range_of_a_singular_covariance_does_not_become_a_direction() -> None:
    rng = np.random.default_rng(0)
    L, X = rng.normal(size=(6, 4)), rng.normal(size=(6, 6))
    mu = Gaussian(np.zeros(6), L @ L.T)
    factor = exact_rank(mu.factor_t)
    torch.testing.assert_close(factor @ factor.mT, mu.cov_t, rtol=0, atol=1e-14)
    assert int((factor == 0).all(0).sum()) == 2
    energy = SquaredWasserstein(Gaussian(np.zeros(6), X @ X.T))
    for tau in (3.0, 100.0):
        assert int(BuresWasserstein().proximal(energy, mu, tau).measure.rank()) == 4
    wide = torch.cat([factor[:, :4], factor[:, :4]], -1)
    assert int((exact_rank(wide) == 0).all(0).sum()) == 4


@pytest.mark.parametrize("tau", [1e-6, 1e-9, 1e-11])
def test_tiny_steps_move_as_the_gradient_says(tau: float) -> None:
    rng = np.random.default_rng(31)
    M = rng.normal(size=(3, 3))
    mu = Gaussian(rng.normal(size=3), M @ M.T)
    energy = SelfTransportEnergy(np.diag([-0.3, -0.2, 0.1]), eps=1.0)
    after = jko(energy, mu, tau=tau, n_steps=1).states[-1]
    expected = -np.asarray(energy.wasserstein_gradient(mu).b)
    assert np.linalg.norm((after.mean - mu.mean) / tau - expected) <= 0.01 * np.linalg.norm(expected)
