"""JKO steps in the twisted metric against minimisations that know nothing of its paths."""

from __future__ import annotations

import numpy as np
import pytest
from scipy.integrate import quad
from scipy.optimize import minimize, minimize_scalar

from ot_transformers import (
    Gaussian,
    InteractionEnergy,
    NotConverged,
    Particles,
    PotentialEnergy,
    SelfTransportEnergy,
    TwistedWasserstein,
    Wasserstein,
    jko_step,
)


@pytest.mark.parametrize("tau", [0.1, 1.0, 5.0])
@pytest.mark.parametrize("a", [-1.0, 0.5])
def test_dirac_masses_of_the_line_have_a_closed_distance(a: float, tau: float) -> None:
    """d(x, y) = D^(-1/2) |int e^(a s^2 / 2) ds|: a scalar equation, F'(y) + d d' / tau = 0."""
    D, x = 0.7, 0.8
    metric = TwistedWasserstein(a, D=D)
    energy = PotentialEnergy(lambda p: 0.5 * (p + 0.4).square().sum(-1))
    step = metric.proximal(energy, Particles([[x]]), tau, tol=1e-12)
    y = float(step.measure.x[0, 0])
    d = abs(quad(lambda s: np.exp(a * s * s / 2), y, x, epsabs=0, epsrel=1e-13)[0]) / D**0.5
    assert step.converged
    assert d == pytest.approx(float(metric.distance(Particles([[x]]), step.measure)), rel=1e-10)
    assert y + 0.4 == pytest.approx(d * np.exp(a * y * y / 2) / D**0.5 / tau, rel=1e-10)


@pytest.mark.parametrize("tau", [0.2, 1.0])
def test_two_particles_against_shooting(tau: float) -> None:
    """Minimise F(exp v) + |v|^2 / (2 tau) over the initial velocities of Hamiltonian geodesics."""
    A, D = np.array([[-1.0, 0.3], [0.3, 0.4]]), np.array([[1.0, 0.2], [0.2, 0.5]])
    metric, energy = TwistedWasserstein(A, D=D), InteractionEnergy(A)
    mu = Particles([[0.6, -0.2], [-0.3, 0.5]], [0.3, 0.7])

    def objective(v: np.ndarray) -> float:
        field = v.reshape(2, 2)
        return float(energy.value(metric.exp(mu, field)) + metric.inner(mu, field, field) / (2 * tau))

    step = metric.proximal(energy, mu, tau, tol=1e-11)
    found = minimize(objective, (step.measure.x - mu.x).ravel(), method="BFGS", options={"gtol": 1e-7})
    length = float(metric.geodesic(mu, step.measure, matching="identity").length)
    assert step.converged
    assert step.energy_after + length**2 / (2 * tau) == pytest.approx(found.fun, rel=1e-9)
    np.testing.assert_allclose(step.measure.x, metric.exp(mu, found.x.reshape(2, 2)).x, atol=2e-5)
    assert float(metric.distance(mu, step.measure)) == pytest.approx(length, rel=1e-7)


@pytest.mark.parametrize("tau", [0.1, 2.0])
def test_gaussian_of_the_line_against_the_scalar_metric(tau: float) -> None:
    """ds^2 = d sigma^2 / (D (1 - a^2 sigma^4)^(3/2)) on centred Gaussians."""
    a, D, sigma = -1.0, 0.6, 0.7
    energy = PotentialEnergy(lambda p: 0.5 * p.square().sum(-1))
    step = TwistedWasserstein(a, D=D).proximal(energy, Gaussian(0.0, sigma**2), tau, tol=1e-12)

    def length(s: float) -> float:
        return quad(lambda u: (1 - a * a * u**4) ** -0.75, s, sigma, epsabs=0, epsrel=1e-13)[0] / D**0.5

    s = float(step.measure.cov[0, 0]) ** 0.5
    assert step.converged
    assert s == pytest.approx(length(s) * (1 - a * a * s**4) ** -0.75 / D**0.5 / tau, rel=1e-9)
    best = minimize_scalar(
        lambda u: 0.5 * u * u + length(u) ** 2 / (2 * tau), bounds=(0.01, sigma), method="bounded"
    )
    assert 0.5 * s * s + length(s) ** 2 / (2 * tau) == pytest.approx(best.fun, rel=1e-9)


def test_an_objective_without_bound_is_given_up_with_a_warning() -> None:
    mu = Particles(np.random.default_rng(0).normal(size=(5, 2)))
    # The second falls so fast that it overflows before the tokens are far.
    for energy in (SelfTransportEnergy(0.5 * np.eye(2)), -1.0 * InteractionEnergy(0.5 * np.eye(2))):
        for metric in (Wasserstein(), TwistedWasserstein(-np.eye(2), D=np.eye(2))):
            with pytest.warns(NotConverged, match="unbounded below"):
                step = jko_step(energy, mu, 1e3, metric)
            assert not step.converged
            assert step.energy_after < step.energy_before


@pytest.mark.parametrize(("x0", "found"), [(0.3, False), (1.0, True), (-0.5, True)])
def test_where_the_metric_has_vanished_nothing_is_called_converged(x0: float, found: bool) -> None:
    """A long first step leaves for infinity, where every gradient is 0: the minimiser is near, or it says no."""
    metric = TwistedWasserstein(-1.0, D=0.5, sign=-1)
    step = metric.proximal(InteractionEnergy(-1.0), Particles([[x0]]), 100.0)
    assert step.converged == found
    assert step.energy_after <= step.energy_before
    if found:
        x = float(step.measure.x[0, 0])
        # F' + d d' / tau = 0 with d' = e^{-x^2/2} / sqrt(D), F' = -x e^{-x^2}
        length, _ = quad(lambda s: np.exp(-(s**2) / 2), x0, x)
        assert x * np.exp(-(x**2)) == pytest.approx(length / 0.5 * np.exp(-(x**2) / 2) / 100.0, rel=1e-4)
        assert abs(x) < 4


def test_energies_of_a_batch_are_those_of_its_members_to_the_bit() -> None:
    metric, energy = TwistedWasserstein(-np.eye(2), D=np.eye(2)), InteractionEnergy(-np.eye(2))
    x = np.random.default_rng(0).normal(size=(2, 3, 2))
    together = metric.proximal(energy, Particles(x), 0.1)
    alone = [metric.proximal(energy, Particles(cloud), 0.1) for cloud in x]
    for name in ("energy_before", "energy_after"):
        assert getattr(together, name).tolist() == [getattr(step, name) for step in alone]
