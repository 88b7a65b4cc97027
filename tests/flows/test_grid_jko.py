"""Entropic JKO on a grid against exact Gaussian maps, the heat equation and the Ornstein-Uhlenbeck flow."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from ot_transformers import (
    Entropy,
    Gaussian,
    InteractionEnergy,
    KLDivergence,
    NotConverged,
    Particles,
    PotentialEnergy,
)
from ot_transformers.flows.grid_jko import grid_jko
from ot_transformers.measures import GridMeasure

AXIS = np.linspace(-6.0, 6.0, 121)


def start(axis: np.ndarray = AXIS) -> GridMeasure:
    return GridMeasure.from_gaussian(Gaussian(0.3, 0.6), axis)


def exact_step(s: float, eps: float, entropy: float) -> float:
    """The variance after a step from N(m, s), entropy = tau sigma, checked by its stationarity equations."""
    c = 0.5 * (s - eps + math.sqrt((s + eps) ** 2 + 4 * s * entropy))
    v = c * (c + eps) / s
    assert 1 - s / c == pytest.approx(entropy / v, rel=1e-10)  # d/dv of the joint problem
    assert s * v - c * c == pytest.approx(eps * c, rel=1e-10)  # d/dc
    return v


def test_heat_steps_are_the_exact_entropic_ones() -> None:
    tau, eps, s = 0.1, 0.04, 0.6
    # Wide enough that the mass outside, e^{-8.7^2 / 2 v}, is below 1e-16.
    path = grid_jko(Entropy(), start(np.linspace(-9.0, 9.0, 181)), tau, 3, eps=eps, tol=1e-11)
    assert path.status == "completed"
    assert path.converged.all()
    assert (path.marginal_errors <= 1e-11).all()
    for state in path.states[1:]:
        s = exact_step(s, eps, tau)
        assert state.cov[0, 0] == pytest.approx(s, rel=1e-9)
        assert state.mean[0] == pytest.approx(0.3, rel=1e-9)


def test_no_energy_is_a_blur_of_variance_eps() -> None:
    path = grid_jko(0.0 * Entropy(), start(), 0.1, 2, eps=0.05)
    np.testing.assert_allclose([p.cov[0, 0] for p in path.states], [0.6, 0.65, 0.7], rtol=1e-9)


def test_order_one_in_tau_to_the_heat_equation_with_the_blur_compensated() -> None:
    t_end, errors = 0.2, []
    for n_steps in (2, 4, 8):
        tau = t_end / n_steps
        path = grid_jko(Entropy(), start(), tau, n_steps, eps=0.2 * tau, compensate_blur=True)
        errors.append(abs(path.states[-1].cov[0, 0] - (0.6 + 2 * t_end)))
    np.testing.assert_allclose(np.log2(np.array(errors[:-1]) / errors[1:]), 1.0, atol=0.15)


def test_order_one_in_tau_to_the_ornstein_uhlenbeck_flow() -> None:
    # KL to N(0, 1): mean e^{-t} m, variance 1 + e^{-2t} (s - 1).
    t_end, errors = 0.4, []
    energy = KLDivergence(Gaussian(0.0, 1.0))
    for n_steps in (2, 4, 8):
        tau = t_end / n_steps
        path = grid_jko(energy, start(), tau, n_steps, eps=0.1 * tau, compensate_blur=True)
        mean, var = path.states[-1].mean[0], path.states[-1].cov[0, 0]
        errors.append((abs(mean - 0.3 * math.exp(-t_end)), abs(var - (1 - 0.4 * math.exp(-2 * t_end)))))
        assert (np.diff(path.energies) < 0).all()
        # The energy on the grid is the closed form up to the quadrature of the grid.
        assert path.energies[0] == pytest.approx(energy.value(Gaussian(0.3, 0.6)), rel=1e-8)
    np.testing.assert_allclose(np.log2(np.array(errors[:-1]) / errors[1:]), 1.0, atol=0.2)


def test_potential_step_is_the_exact_gaussian_one() -> None:
    # F = E k x^2 / 2: pi(y | x) is normal of mean x / (1 + tau k) and variance eps / (1 + tau k).
    k, tau, eps = 1.5, 0.2, 0.05
    path = grid_jko(PotentialEnergy(lambda x: 0.5 * k * x[..., 0] ** 2), start(), tau, 1, eps=eps)
    shrink = 1 / (1 + tau * k)
    assert path.n_iter[0] <= 2  # a potential alone needs no iteration
    assert path.states[1].mean[0] == pytest.approx(0.3 * shrink, rel=1e-9)
    assert path.states[1].cov[0, 0] == pytest.approx(0.6 * shrink**2 + eps * shrink, rel=1e-9)


def test_interaction_enters_as_its_first_variation() -> None:
    A, tau, eps = -0.8, 0.1, 0.05
    mu = start()
    w, x = mu.mass, AXIS
    frozen = torch.from_numpy(np.exp(A * np.outer(x, x)) @ w)

    def first_variation(points: torch.Tensor) -> torch.Tensor:
        assert len(points) == len(frozen)
        return frozen

    implicit = grid_jko(PotentialEnergy(first_variation), mu, tau, 1, eps=eps)
    step = grid_jko(InteractionEnergy(A), mu, tau, 1, eps=eps)
    np.testing.assert_allclose(step.states[1].mass, implicit.states[1].mass, rtol=1e-12, atol=1e-300)
    expected = InteractionEnergy(A).value(Particles(x[:, None], w))
    assert step.energies[0] == pytest.approx(expected, rel=1e-13)


def test_plane_separates_into_lines_and_batches_into_members() -> None:
    axis = np.linspace(-4.0, 4.0, 33)
    eps, tau = 0.2, 0.2
    g = GridMeasure.from_gaussian(Gaussian(np.array([0.3, -0.2]), np.diag([0.6, 0.9])), [axis, axis])
    plane = grid_jko(KLDivergence(Gaussian(np.zeros(2), np.diag([1.0, 0.5]))), g, tau, 1, eps=eps, tol=1e-12)
    lines = [
        grid_jko(
            KLDivergence(Gaussian(0.0, t)),
            GridMeasure.from_gaussian(Gaussian(m, s), axis),
            tau,
            1,
            eps=eps,
            tol=1e-12,
        )
        for m, s, t in ((0.3, 0.6, 1.0), (-0.2, 0.9, 0.5))
    ]
    product = np.multiply.outer(lines[0].states[1].mass, lines[1].states[1].mass)
    np.testing.assert_allclose(plane.states[1].mass, product, atol=1e-12)
    both = GridMeasure(axis, np.stack([lines[0].states[0].mass, lines[1].states[0].mass]))
    energy = KLDivergence(Gaussian(0.0, 1.0))
    together = grid_jko(energy, both, tau, 2, eps=eps, tol=1e-12)
    for k in range(2):
        alone = grid_jko(energy, lines[k].states[0], tau, 2, eps=eps, tol=1e-12)
        np.testing.assert_allclose(together.states[2].mass[k], alone.states[2].mass, atol=1e-12)


def test_fault_kernel_underflow_and_empty_nodes() -> None:
    # eps = 1e-4 on a grid of width 12: e^{-144 / 2e-4} is 0 in floating point, and most nodes have no mass.
    mass = np.zeros(121)
    mass[[10, 60]] = 0.25, 0.75
    mu = GridMeasure(AXIS, mass)
    path = grid_jko(PotentialEnergy(lambda x: 0.0 * x[..., 0]), mu, 0.1, 1, eps=1e-4)
    assert path.status == "completed"
    np.testing.assert_allclose(path.states[1].mass, mass, atol=1e-12)  # grid step 0.1 >> eps^(1/2): no blur


def test_not_converged_is_said() -> None:
    path = grid_jko(Entropy(), start(), 0.1, 2, eps=0.01, max_iter=3)
    assert path.status == "not converged"
    assert not path.converged.any()
    assert (path.marginal_errors > 1e-9).all()


def at_node(k: int, n: int = 121) -> np.ndarray:
    mass = np.zeros(n)
    mass[k] = 1.0
    return mass


def test_the_blur_does_not_raise_the_energy() -> None:
    """Known fault: from the minimum of a potential, the blur of a step raised F by 0.0045."""
    energy = PotentialEnergy(lambda x: 0.5 * x[..., 0] ** 2)
    path = grid_jko(energy, GridMeasure(AXIS, at_node(60)), 0.1, 3, eps=0.05)
    assert path.status == "completed"
    assert (np.diff(path.energies) <= 1e-9).all()
    assert (path.eps < 0.05).all()
    np.testing.assert_allclose(path.states[-1].mass, at_node(60), atol=1e-9)
    # Away from the minimum nothing rises: the step is the one of the eps that was given.
    off = grid_jko(energy, GridMeasure(AXIS, at_node(70)), 0.1, 1, eps=0.05)
    assert off.eps[0] == 0.05
    assert off.states[1].cov[0, 0] == pytest.approx(0.05 / 1.1, rel=1e-9)


def test_interaction_steps_of_any_size_lower_the_energy() -> None:
    """Known fault: the first variation at the old masses overshot, F rose by 5 and then by 126."""
    energy = InteractionEnergy(1.0)
    for tau, eps in ((0.1, 0.01), (1.0, 0.05), (100.0, 0.01)):
        path = grid_jko(energy, start(), tau, 3, eps=eps)
        assert (np.diff(path.energies) <= 1e-9).all()
        # E_A >= 1/2, with equality for the mass at 0.
        assert (path.energies >= 0.5).all()
    assert path.energies[-1] == pytest.approx(0.5, abs=1e-4)


def test_where_the_linearisation_overshoots_the_step_is_the_implicit_one() -> None:
    A, tau, eps = 1.0, 4.0, 0.05
    mu = GridMeasure.from_gaussian(Gaussian(0.5, 0.1), AXIS)
    energy = InteractionEnergy(A)
    kernel = np.exp(A * np.outer(AXIS, AXIS))
    explicit = grid_jko(PotentialEnergy(lambda x: torch.from_numpy(kernel @ mu.mass)), mu, tau, 1, eps=eps)
    masses = explicit.states[1].mass
    assert 0.5 * masses @ kernel @ masses > energy.value(mu.to_particles()) + 0.1
    path = grid_jko(energy, mu, tau, 1, eps=eps)
    assert path.status == "completed"
    assert path.eps[0] == eps
    # First order: p is the step of the potential dF/dmu at p itself.
    own = torch.from_numpy(kernel @ path.states[1].mass)
    again = grid_jko(PotentialEnergy(lambda x: own), mu, tau, 1, eps=eps)
    np.testing.assert_allclose(again.states[1].mass, path.states[1].mass, atol=1e-6)


def test_members_of_a_batch_choose_their_own_eps() -> None:
    masses = np.stack([at_node(60), start().mass, at_node(80)])
    energy = InteractionEnergy(1.0) + 0.01 * Entropy()
    together = grid_jko(energy, GridMeasure(AXIS, masses), 1.0, 2, eps=0.02)
    assert (np.diff(together.energies, axis=0) <= 1e-9).all()
    for k in range(3):
        alone = grid_jko(energy, GridMeasure(AXIS, masses[k]), 1.0, 2, eps=0.02)
        np.testing.assert_array_equal(together.eps[:, k], alone.eps)
        np.testing.assert_allclose(together.states[2].mass[k], alone.states[2].mass, atol=1e-7)


def test_a_step_that_can_only_rise_stays_and_says_so() -> None:
    # At the minimum of KL, with scalings cut short: no eps gives a step that does not rise.
    target = Gaussian(0.0, 1.0)
    mu = GridMeasure.from_gaussian(target, AXIS)
    with pytest.warns(NotConverged, match="the measure stayed"):
        path = grid_jko(KLDivergence(target), mu, 10.0, 1, eps=0.05, max_iter=2)
    np.testing.assert_array_equal(path.states[1].mass, mu.mass)
    assert path.energies[1] == path.energies[0]
    assert not path.converged.any()
    assert path.status == "not converged"
    assert path.eps[0] == 0


def test_single_precision_steps_converge_to_their_rounding() -> None:
    axis = AXIS.astype(np.float32)
    mass = start().mass.astype(np.float32)
    single = grid_jko(Entropy(), GridMeasure(axis, mass), 0.1, 1, eps=0.05)
    double = grid_jko(Entropy(), start(), 0.1, 1, eps=0.05)
    assert single.status == "completed"
    assert single.states[1].mass.dtype == np.float32
    np.testing.assert_allclose(single.states[1].mass, double.states[1].mass, atol=1e-5)
