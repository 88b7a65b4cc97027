"""Twisted geodesics as curves: between Gaussians against closed forms, between far clouds, and what they say."""

from __future__ import annotations

import warnings
from typing import Any

import mpmath as mp
import numpy as np
import pytest
import torch

from ot_transformers import (
    AffineVelocity,
    Gaussian,
    InteractionEnergy,
    KLDivergence,
    Particles,
    SelfTransportEnergy,
    TwistedGeodesic,
    TwistedWasserstein,
    probe_convexity,
    riemannian_hessian,
)
from ot_transformers.errors import InvalidInput, NotConverged
from ot_transformers.numerics.twisted_gaussians import (
    gaussian_acceleration,
    gaussian_form,
    gaussian_log_speed,
    horizontal,
    skew_basis,
)

A2 = np.array([[-0.8, 0.2], [0.2, 0.5]])
D2 = np.array([[1.5, 0.3], [0.3, 0.5]])


def gaussians() -> tuple[Gaussian, Gaussian]:
    return (
        Gaussian([0.2, -0.1], [[0.3, 0.1], [0.1, 0.2]]),
        Gaussian([-0.3, 0.2], [[0.15, -0.05], [-0.05, 0.4]]),
    )


@pytest.mark.parametrize("energy", ["interaction", "self-transport", "KL"])
def test_second_derivatives_between_gaussians_of_the_line(energy: str) -> None:
    # ds^2 = d sigma^2 / (D (1 - sigma^4)^(3/2)): sigma'' = -3 sigma^3 / (1 - sigma^4) sigma'^2, one coordinate.
    metric = TwistedWasserstein(-1.0, D=0.5)
    curve = TwistedGeodesic(metric, Gaussian([0.0], [[0.3**2]]), Gaussian([0.0], [[0.8**2]]))
    assert curve.converged
    target = KLDivergence(Gaussian([0.0], [[2.0]]))
    F = {"interaction": InteractionEnergy(-1.0), "self-transport": SelfTransportEnergy(-1.0), "KL": target}
    probe = probe_convexity(F[energy], curve, ts=[0.1, 0.4, 0.9])
    assert probe.consistent
    for t, found, error, square in zip(
        probe.t, probe.second_derivatives, probe.errors, probe.speed_squared, strict=True
    ):
        sigma = float(np.sqrt(curve.at(float(t)).cov[0, 0]))
        rate2 = float(square) * 0.5 * (1 - sigma**4) ** 1.5
        bend = -3 * sigma**3 / (1 - sigma**4) * rate2
        first, second = derivatives(energy, sigma)
        exact = second * rate2 + first * bend
        assert error < 1e-11 * max(1.0, abs(exact))
        # The reference itself is rounded too: an ulp of sigma and of the speed.
        assert abs(found - exact) <= error + 2e-14 * (abs(second * rate2) + abs(first * bend))


def derivatives(energy: str, s: float) -> tuple[float, float]:
    """dF/d sigma and d2F/d sigma2."""
    if energy == "interaction":  # (1 - s^4)^(-1/2) / 2
        r = 1 - s**4
        return s**3 * r**-1.5, 3 * s**2 * r**-1.5 + 6 * s**6 * r**-2.5
    if energy == "KL":  # (s^2 / 2 - 1 - log(s^2 / 2)) / 2
        return s / 2 - 1 / s, 0.5 + 1 / s**2
    with mp.workdps(40):

        def half_transport(x: Any) -> Any:  # (1 - h + log(h) / 2) / 2, h = (1 + (1 + 4 s^4)^(1/2)) / 2
            top = (1 + mp.sqrt(1 + 4 * x**4)) / 2
            return (1 - top + mp.log(top) / 2) / 2

        return tuple(float(mp.diff(half_transport, mp.mpf(s), k)) for k in (1, 2))  # type: ignore[return-value]


@pytest.mark.parametrize("rank", [2, 1])
def test_acceleration_of_gaussians_solves_the_euler_lagrange_equation(rank: int) -> None:
    """Closed form against automatic differentiation of g / 2 in mean and factor."""
    rng = np.random.default_rng(1)
    A, D = torch.tensor(A2), torch.tensor(D2)
    Dinv = torch.linalg.inv(D)
    q, v = (torch.tensor(0.5 * rng.normal(size=(2, 1 + rank))) for _ in range(2))

    def lagrangian(p: Any, u: Any) -> Any:
        return 0.5 * torch.exp(gaussian_log_speed(p[:, 0], p[:, 1:], u[:, 0], u[:, 1:], A, Dinv)[0])

    mass = torch.func.hessian(lagrangian, argnums=1)(q, v).reshape(q.numel(), -1)
    mixed = torch.func.jvp(lambda p: torch.func.grad(lagrangian, argnums=1)(p, v), (q,), (v,))[1]
    force = torch.func.grad(lagrangian, argnums=0)(q, v)
    expected = torch.linalg.solve(mass, (force - mixed).reshape(-1)).reshape(q.shape)
    found = gaussian_acceleration(q, v, A, D, Dinv)
    torch.testing.assert_close(found, expected, rtol=1e-11, atol=1e-12)
    log_z, K = gaussian_form(q, A)
    form = torch.exp(log_z) * torch.kron(Dinv.contiguous(), K.contiguous())
    torch.testing.assert_close(form, mass, rtol=1e-11, atol=1e-13)


def test_horizontal_velocities_are_the_shortest_and_stay_so() -> None:
    rng = np.random.default_rng(2)
    A, D = torch.tensor(A2), torch.tensor(D2)
    q, v = (torch.tensor(0.5 * rng.normal(size=(2, 3))) for _ in range(2))
    Dinv = torch.linalg.inv(D)
    lift = horizontal(q, v, A, Dinv)
    _, K = gaussian_form(q, A)
    W = torch.nn.functional.pad(q[:, 1:] @ skew_basis(2, q)[0], (1, 0))
    assert float((W * (Dinv @ lift @ K)).sum().abs()) < 1e-14
    # the same velocity of the covariance
    moved = [(u[:, 1:] @ q[:, 1:].T + q[:, 1:] @ u[:, 1:].T) for u in (v, lift)]
    torch.testing.assert_close(moved[0], moved[1], rtol=0, atol=1e-14)


def test_geodesic_between_gaussians_arrives_and_has_the_hessian_as_second_derivative() -> None:
    metric = TwistedWasserstein(A2, D=D2)
    mu, nu = gaussians()
    curve = TwistedGeodesic(metric, mu, nu)
    assert curve.converged
    assert curve.end_gap < 1e-7
    assert curve.speed_drift < 1e-10
    assert float(curve.speed_squared()) == pytest.approx(float(metric.distance(mu, nu)) ** 2, rel=1e-7)
    end = curve.at(1.0)
    np.testing.assert_allclose(end.mean, nu.mean, atol=1e-6)
    np.testing.assert_allclose(end.cov, nu.cov, atol=1e-6)
    v = metric.log(mu, nu)
    for energy in (InteractionEnergy(A2), SelfTransportEnergy(A2), KLDivergence(nu)):
        probe = probe_convexity(energy, curve, ts=[0.0, 0.5, 0.8])
        hessian = riemannian_hessian(energy, metric, mu)
        assert probe.consistent
        assert probe.second_derivatives[0] == pytest.approx(float(hessian.quadratic_form(v)), rel=1e-9)
        assert probe.speed_squared[0] == pytest.approx(float(hessian.norm_squared(v)), rel=1e-10)
        assert (probe.errors < 1e-10).all()


def test_geodesic_of_a_gaussian_from_a_velocity_is_the_exponential() -> None:
    metric = TwistedWasserstein(A2, D=D2)
    mu, nu = gaussians()
    log = metric.log(mu, nu)
    v = AffineVelocity(0.5 * log.b_t, 0.5 * log.M_t, "numpy")
    end, expected = TwistedGeodesic.from_velocity(metric, mu, v).at(1.0), metric.exp(mu, v)
    np.testing.assert_allclose(end.mean, expected.mean, atol=1e-9)
    np.testing.assert_allclose(end.cov, expected.cov, atol=1e-9)


def test_gaussians_that_have_no_geodesic_are_refused() -> None:
    metric = TwistedWasserstein(-np.eye(2), D=np.eye(2))
    mu, nu = gaussians()
    flat = Gaussian.from_factor([0.0, 0.0], [[0.5], [0.0]])
    with pytest.raises(InvalidInput, match="measure must be a regular Gaussian"):
        TwistedGeodesic(metric, flat, nu)
    with pytest.raises(InvalidInput, match="outside the domain"):
        TwistedGeodesic(metric, Gaussian([0.0, 0.0], 2.0 * np.eye(2)), nu)
    with pytest.raises(InvalidInput, match="both Gaussians or both Particles"):
        TwistedGeodesic(metric, mu, Particles([[0.0, 0.0]]))
    with pytest.raises(InvalidInput, match="velocity must be an AffineVelocity"):
        TwistedGeodesic.from_velocity(metric, mu, np.zeros((2, 2)))


@pytest.mark.parametrize("sign", [1.0, -1.0])
def test_thirty_away_does_not_overflow(sign: float) -> None:
    metric = TwistedWasserstein(sign * np.eye(2), D=np.eye(2))
    near = TwistedGeodesic(
        metric, Particles([[30.0, 0.0], [30.0, 0.1]]), Particles([[30.01, 0.0], [30.0, 0.11]])
    )
    assert near.converged
    assert near.end_gap < 1e-9
    assert near.speed_drift < 1e-9
    assert np.isfinite(near.at(0.5).x).all()


def test_a_geodesic_that_does_not_arrive_says_so() -> None:
    """Across |x| = 30 the metric e^{|x|^2} sends every geodesic to the origin: shooting is hopeless, and it is said."""
    metric = TwistedWasserstein(np.eye(2), D=np.eye(2))
    mu, nu = Particles([[30.0, 0.0]]), Particles([[30.2, 0.5]])
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        curve = TwistedGeodesic(metric, mu, nu)
    assert not curve.converged
    assert any(issubclass(w.category, NotConverged) and "misses" in str(w.message) for w in caught)
    # The gap is the true one, and the curve a geodesic all the same.
    end = curve.at(1.0).x
    assert curve.end_gap == pytest.approx(float(np.linalg.norm(end - [[30.2, 0.5]])), rel=1e-12)
    assert curve.speed_drift < 1e-9
