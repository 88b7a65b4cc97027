"""JKO steps in W_2 on particles: closed forms, first-order condition, order in tau, optimal matching."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from ot_transformers import InteractionEnergy, Particles, PotentialEnergy, SquaredWasserstein, Wasserstein

RNG = np.random.default_rng(7)
A = np.array([[-1.0, 0.2], [0.2, -0.5]])
D = np.array([[1.0, 0.3], [0.3, 0.7]])
ENERGY = InteractionEnergy(A)


@pytest.mark.parametrize("tau", [0.01, 1.0, 100.0])
def test_quadratic_potential_in_closed_form(tau: float) -> None:
    # F = E x^T H x / 2: (D^-1 / tau + H) y = D^-1 x / tau, token by token.
    H = np.array([[2.0, 0.5], [0.5, 1.0]])
    energy = PotentialEnergy(lambda x: 0.5 * ((x @ torch.from_numpy(H)) * x).sum(-1))
    x, w = RNG.normal(size=(8, 2)), RNG.dirichlet(np.ones(8))
    step = Wasserstein(D=D).proximal(energy, Particles(x, w), tau)
    Dinv = np.linalg.inv(D) / tau
    assert step.converged
    np.testing.assert_allclose(step.measure.x, x @ Dinv @ np.linalg.inv(Dinv + H), rtol=1e-7, atol=1e-8)
    np.testing.assert_array_equal(step.measure.weights, Particles(x, w).weights)


@pytest.mark.parametrize("tau", [0.05, 0.5, 1.0])
def test_squared_distance_steps_along_the_geodesic(tau: float) -> None:
    # argmin W(nu, target)^2 / 2 + W(nu, mu)^2 / (2 tau) is the geodesic at tau / (1 + tau).
    mu, target = Particles(RNG.normal(size=(20, 2))), Particles(RNG.normal(size=(20, 2)))
    step = Wasserstein().proximal(SquaredWasserstein(target), mu, tau)
    assert step.converged
    expected = Wasserstein().geodesic(mu, target).at(tau / (1 + tau))
    np.testing.assert_allclose(step.measure.x, expected.x, atol=1e-9)


@pytest.mark.parametrize("metric", [Wasserstein(), Wasserstein(D=D)], ids=["W2", "W2 with D"])
@pytest.mark.parametrize("tau", [0.1, 1.0, 10.0])
def test_first_order_condition_energy_decrease_and_matching(metric: Wasserstein, tau: float) -> None:
    x, w = RNG.normal(size=(12, 2)), RNG.dirichlet(np.ones(12))
    mu = Particles(x, w)
    step = metric.proximal(ENERGY, mu, tau)
    assert step.converged
    assert step.gradient_norm <= 1e-8
    moved = metric.distance(mu, step.measure)
    assert step.energy_after + moved**2 / (2 * tau) <= step.energy_before
    assert step.energy_after == pytest.approx(ENERGY.value(step.measure), rel=1e-14)
    # The displacement pulls back by D grad F, if the identity matching is the optimal one.
    back = x - step.measure.x
    labelled = np.sqrt(metric.inner(mu, back, back))
    assert labelled == pytest.approx(moved, rel=1e-9)
    field = ENERGY.wasserstein_gradient(step.measure) @ (np.eye(2) if metric.D is None else D)
    np.testing.assert_allclose(back, tau * field, atol=1e-7 * tau)


def test_order_one_in_tau_against_the_flow() -> None:
    x0 = RNG.normal(size=(6, 2))
    metric, t_end = Wasserstein(D=D), 0.4

    def rhs(x: np.ndarray) -> np.ndarray:
        return -ENERGY.wasserstein_gradient(Particles(x)) @ D

    x, h = x0, t_end / 200
    for _ in range(200):  # classical Runge-Kutta, error far below that of the steps
        k1 = rhs(x)
        k2 = rhs(x + 0.5 * h * k1)
        k3 = rhs(x + 0.5 * h * k2)
        k4 = rhs(x + h * k3)
        x = x + h / 6 * (k1 + 2 * k2 + 2 * k3 + k4)
    errors = []
    for n_steps in (4, 8, 16):
        mu = Particles(x0)
        for _ in range(n_steps):
            mu = metric.proximal(ENERGY, mu, t_end / n_steps).measure
        errors.append(metric.distance(mu, Particles(x)))
    orders = np.log2(np.array(errors[:-1]) / errors[1:])
    np.testing.assert_allclose(orders, 1.0, atol=0.1)
    assert abs(orders[1] - 1) < abs(orders[0] - 1) + 0.01


def test_a_step_that_crosses_re_solves_the_matching() -> None:
    # Every token is pulled to the mirror image of another one: labels cross, mass need not.
    targets = torch.tensor([[3.0, 0.0], [-3.0, 0.0]], dtype=torch.float64)
    energy = PotentialEnergy(
        lambda x: 0.5 * (x - (targets if x.shape[-2] == 2 else targets[:1])).square().sum(-1)
    )
    mu = Particles(np.array([[-1.0, 0.1], [1.0, -0.1]]))
    tau = 10.0
    step = Wasserstein().proximal(energy, mu, tau)
    moved = Wasserstein().distance(mu, step.measure)
    assert step.converged
    # y_i = (c_i + tau t_i) / (1 + tau) with the source c_i of the optimal matching, the other token.
    swapped = mu.x[::-1]
    np.testing.assert_allclose(step.measure.x, (swapped + tau * targets.numpy()) / (1 + tau), rtol=1e-8)
    assert moved**2 == pytest.approx(((step.measure.x - swapped) ** 2).sum(-1).mean(), rel=1e-10)


def test_batch_is_the_loop_and_warm_start_changes_nothing_but_the_work() -> None:
    x, w = RNG.normal(size=(3, 7, 2)), RNG.dirichlet(np.ones(7), size=3)
    w[0, 2] = 0.0
    w = w / w.sum(-1, keepdims=True)
    metric = Wasserstein()
    together = metric.proximal(ENERGY, Particles(x, w), 0.5, tol=1e-11)
    for k in range(3):
        alone = metric.proximal(ENERGY, Particles(x[k], w[k]), 0.5, tol=1e-11)
        np.testing.assert_allclose(together.measure.x[k], alone.measure.x, atol=1e-9)
        assert together.energy_after[k] == pytest.approx(alone.energy_after, rel=1e-12)
    np.testing.assert_array_equal(together.measure.x[0, 2], x[0, 2])  # no mass, no motion
    warm = metric.proximal(ENERGY, Particles(x, w), 0.5, tol=1e-11, warm_start=together.measure)
    np.testing.assert_allclose(warm.measure.x, together.measure.x, atol=1e-9)
    assert warm.n_iter <= 2 < together.n_iter


def test_no_step_from_a_stationary_point_and_not_converged_is_said() -> None:
    origin = Particles(np.zeros((4, 2)))
    step = Wasserstein().proximal(ENERGY, origin, 1.0)
    assert step.converged
    np.testing.assert_array_equal(step.measure.x, origin.x)
    short = Wasserstein().proximal(ENERGY, Particles(RNG.normal(size=(9, 2))), 50.0, max_iter=2)
    assert not short.converged
    assert short.gradient_norm > 1e-9
    assert short.energy_after < short.energy_before
