"""Riemannian Hessians against closed forms and against second derivatives along geodesics."""

from __future__ import annotations

from typing import Any

import mpmath as mp
import numpy as np
import pytest
import torch

from ot_transformers import (
    AffineVelocity,
    BuresWasserstein,
    Gaussian,
    InteractionEnergy,
    KLDivergence,
    Particles,
    SelfTransportEnergy,
    TwistedGeodesic,
    TwistedWasserstein,
    Wasserstein,
    probe_convexity,
    riemannian_hessian,
)
from ot_transformers.numerics.twisted import geodesic_acceleration, kernel_at, twisted_square

A2 = np.array([[-1.0, 0.2], [0.2, 0.6]])
D2 = np.array([[2.0, 0.3], [0.3, 0.5]])


@pytest.mark.parametrize("x", [[0.0, 0.0], [0.3, -0.7], [1.5, 1.0], [-3.0, 0.5]])
def test_dirac_mass_in_the_twisted_metric(x: list[float]) -> None:
    # V = I, A = -I: the Hessian is (|x|^2 - 1) g in every direction.
    metric = TwistedWasserstein(-np.eye(2), np.eye(2))
    hessian = riemannian_hessian(InteractionEnergy(-np.eye(2)), metric, Particles([x]))
    truth = x[0] ** 2 + x[1] ** 2 - 1
    pair = hessian.min_eigenpair()
    assert abs(pair.value - truth) <= pair.error + 1e-15
    for v in ([[1.0, 0.0]], [[0.6, -2.0]]):
        ratio = hessian.quadratic_form(v) / hessian.norm_squared(v)
        assert ratio == pytest.approx(truth, abs=1e-13)
        np.testing.assert_allclose(hessian.matvec(np.array(v)), truth * np.array(v), atol=1e-13)


def test_dirac_mass_in_w2() -> None:
    for x in (-1.3, 0.0, 0.4):
        hessian = riemannian_hessian(InteractionEnergy(-1.0), Wasserstein(), Particles([[x]]))
        assert hessian.quadratic_form([[1.0]]) == pytest.approx((2 * x**2 - 1) * np.exp(-(x**2)), abs=1e-14)


def test_quadratic_form_is_the_second_derivative_along_twisted_geodesics() -> None:
    rng = np.random.default_rng(3)
    metric = TwistedWasserstein(A2, D=D2, sign=-1)
    cloud = Particles(0.6 * rng.normal(size=(4, 2)), rng.dirichlet(np.ones(4)))
    for energy in (InteractionEnergy(A2), SelfTransportEnergy(A2, tol=1e-13)):
        v = rng.normal(size=(4, 2))
        hessian = riemannian_hessian(energy, metric, cloud)
        curve = TwistedGeodesic.from_velocity(metric, cloud, 0.3 * v)
        probe = probe_convexity(energy, curve, ts=[0.0, 0.5, 0.9])
        assert probe.consistent  # second differences of values along the integrated geodesic
        assert not np.isnan(probe.differences[1:]).any()
        assert probe.second_derivatives[0] == pytest.approx(0.09 * hessian.quadratic_form(v), rel=1e-10)
        assert probe.speed_squared == pytest.approx(0.09 * hessian.norm_squared(v), rel=1e-9)
        assert hessian.norm_squared(v) == pytest.approx(float(metric.inner(cloud, v, v)), rel=1e-12)


def test_acceleration_solves_the_euler_lagrange_equation() -> None:
    """The Christoffel term against automatic differentiation of the Lagrangian g / 2."""
    rng = np.random.default_rng(0)
    x, v, w = (
        torch.tensor(t) for t in (rng.normal(size=(5, 2)), rng.normal(size=(5, 2)), rng.dirichlet(np.ones(5)))
    )
    A, D = torch.tensor(A2), torch.tensor(D2)

    def lagrangian(p: Any, u: Any) -> Any:
        return 0.5 * twisted_square(u, w, D, kernel_at(p, w, A).log_g)

    mass = torch.func.hessian(lagrangian, argnums=1)(x, v).reshape(10, 10)
    mixed = torch.func.jvp(lambda p: torch.func.grad(lagrangian, argnums=1)(p, v), (x,), (v,))[1]
    force = torch.func.grad(lagrangian)(x, v) - mixed
    a = torch.linalg.solve(mass, force.reshape(-1)).reshape(5, 2)
    assert (a - geodesic_acceleration(x, v, A, D, kernel_at(x, w, A))).abs().max() < 1e-13


@pytest.mark.parametrize("metric", [Wasserstein(), Wasserstein(D=D2), TwistedWasserstein(A2, D=D2, sign=-1)])
def test_hessian_is_symmetric_and_lanczos_finds_the_dense_eigenvalue(metric: Any) -> None:
    rng = np.random.default_rng(5)
    cloud = Particles(rng.normal(size=(60, 2)))  # 120 > the dense limit
    hessian = riemannian_hessian(InteractionEnergy(A2), metric, cloud)
    H = torch.stack([hessian.raw_matvec(e) for e in torch.eye(hessian.dim, dtype=torch.float64)])
    assert (H - H.mT).abs().max() < 1e-12 * H.abs().max()
    pair = hessian.min_eigenpair()
    w = torch.linalg.eigvalsh(H)
    assert pair.converged
    assert abs(pair.value - float(w[0])) <= pair.error
    assert pair.error < 1e-6 * float(w.abs().max())
    assert hessian.norm_squared(pair.direction) == pytest.approx(1.0)
    assert hessian.quadratic_form(pair.direction) == pytest.approx(pair.value)
    again = riemannian_hessian(InteractionEnergy(A2), metric, cloud).min_eigenpair()
    assert (again.direction == pair.direction).all()


def test_bures_hessian_of_kl_and_its_smallest_eigenvalue() -> None:
    # Hess KL = precision on means; on maps |S^(1/2) X T^(-1/2)|^2 + tr X^2: at least the smallest precision.
    target = Gaussian(np.zeros(2), np.diag([0.5, 4.0]))
    g = Gaussian([0.3, 1.0], [[0.7, 0.2], [0.2, 1.1]])
    hessian = riemannian_hessian(KLDivergence(target), BuresWasserstein(), g)
    b, X = np.array([0.4, -1.0]), np.array([[0.3, 0.5], [0.5, -0.2]])
    v = AffineVelocity(torch.tensor(b), torch.tensor(X), "numpy")
    precision = np.diag([2.0, 0.25])
    truth = b @ precision @ b + np.trace(X @ g.cov @ X @ precision) + np.trace(X @ X)
    assert hessian.quadratic_form(v) == pytest.approx(truth, rel=1e-11)
    assert hessian.norm_squared(v) == pytest.approx(float(BuresWasserstein().inner(g, v, v)), rel=1e-13)
    pair = hessian.min_eigenpair()
    assert pair.value == pytest.approx(0.25, abs=1e-9)
    assert np.abs(pair.direction.b) == pytest.approx([0.0, 1.0], abs=1e-8)


def test_bures_hessian_with_mobility_and_at_a_singular_gaussian() -> None:
    for metric, g in (
        (BuresWasserstein(D=D2), Gaussian([0.3, -0.2], [[0.5, 0.1], [0.1, 0.3]])),
        (BuresWasserstein(), Gaussian.from_factor([0.3, -0.2], [[0.5], [0.2]])),
    ):
        energy = InteractionEnergy(A2)
        hessian = riemannian_hessian(energy, metric, g)
        v = hessian.min_eigenpair().direction

        def value(s: float, metric: Any = metric, g: Gaussian = g, v: Any = v, energy: Any = energy) -> float:
            return float(energy.value(metric.exp(g, AffineVelocity(s * v.b_t, s * v.M_t, "numpy"))))

        h = 1e-3
        fourth = (-value(2 * h) + 16 * value(h) - 30 * value(0) + 16 * value(-h) - value(-2 * h)) / (
            12 * h**2
        )
        assert hessian.quadratic_form(v) == pytest.approx(fourth, abs=1e-8)
        assert float(metric.inner(g, v, v)) == pytest.approx(1.0)


def test_twisted_hessian_restricted_to_gaussians_of_the_line() -> None:
    # ds^2 = d sigma^2 / (1 - sigma^4)^(3/2), E = (1 - sigma^4)^(-1/2) / 2: one coordinate, closed form.
    sigma = 0.6
    hessian = riemannian_hessian(
        InteractionEnergy(-1.0), TwistedWasserstein(-1.0, 1.0), Gaussian([0.0], [[sigma**2]])
    )
    with mp.workdps(40):
        g = lambda s: (1 - s**4) ** mp.mpf(-1.5)  # noqa: E731
        E = lambda s: (1 - s**4) ** mp.mpf(-0.5) / 2  # noqa: E731
        s = mp.mpf("0.6")
        truth = (mp.diff(E, s, 2) - mp.diff(g, s) / (2 * g(s)) * mp.diff(E, s)) / g(s)
    spread = AffineVelocity(
        torch.zeros(1, dtype=torch.float64), torch.ones((1, 1), dtype=torch.float64), "numpy"
    )
    ratio = hessian.quadratic_form(spread) / hessian.norm_squared(spread)
    assert ratio == pytest.approx(float(truth), rel=1e-12)


def test_twisted_hessian_restricted_to_gaussians_along_the_exponential() -> None:
    metric = TwistedWasserstein(A2, D=D2, sign=-1)
    g = Gaussian([0.2, -0.1], [[0.4, 0.1], [0.1, 0.3]])
    energy = InteractionEnergy(A2)
    hessian = riemannian_hessian(energy, metric, g)
    rng = np.random.default_rng(2)
    v = AffineVelocity(torch.tensor(rng.normal(size=2)), torch.tensor(0.3 * rng.normal(size=(2, 2))), "numpy")
    v = hessian.raw_chart.wrap(
        hessian.raw_chart.tangent(hessian.raw_chart.coordinates(v)), "numpy"
    )  # horizontal
    assert hessian.norm_squared(v) == pytest.approx(float(metric.inner(g, v, v)), rel=1e-12)

    def value(s: float) -> float:
        return float(energy.value(metric.exp(g, AffineVelocity(s * v.b_t, s * v.M_t, "numpy"))))

    h = 1e-2
    fourth = (-value(2 * h) + 16 * value(h) - 30 * value(0) + 16 * value(-h) - value(-2 * h)) / (12 * h**2)
    assert hessian.quadratic_form(v) == pytest.approx(fourth, abs=2e-6)


def test_a_particle_of_weight_zero_does_not_count() -> None:
    cloud = Particles([[0.2], [1.0], [5.0]], [0.4, 0.6, 0.0])
    small = Particles([[0.2], [1.0]], [0.4, 0.6])
    for metric in (Wasserstein(), TwistedWasserstein(-1.0, 1.0)):
        full, part = (
            riemannian_hessian(InteractionEnergy(-1.0), metric, c).min_eigenpair() for c in (cloud, small)
        )
        assert full.value == pytest.approx(part.value, abs=1e-12)
        assert full.direction[2] == 0


def test_permuted_tokens_have_the_same_modulus_and_rotated_ones_too() -> None:
    rng = np.random.default_rng(8)
    x, w = rng.normal(size=(5, 2)), rng.dirichlet(np.ones(5))
    order, (Q, _) = rng.permutation(5), np.linalg.qr(rng.normal(size=(2, 2)))
    metric, turned = (
        TwistedWasserstein(A2, D=D2, sign=-1),
        TwistedWasserstein(Q @ A2 @ Q.T, D=Q @ D2 @ Q.T, sign=-1),
    )
    value = riemannian_hessian(InteractionEnergy(A2), metric, Particles(x, w)).min_eigenpair().value
    other = (
        riemannian_hessian(InteractionEnergy(A2), metric, Particles(x[order], w[order])).min_eigenpair().value
    )
    third = (
        riemannian_hessian(InteractionEnergy(Q @ A2 @ Q.T), turned, Particles(x @ Q.T, w))
        .min_eigenpair()
        .value
    )
    assert other == pytest.approx(value, rel=1e-12)
    assert third == pytest.approx(value, rel=1e-11)


def test_twisted_geodesic_between_clouds_arrives_and_keeps_its_speed() -> None:
    rng = np.random.default_rng(4)
    metric = TwistedWasserstein(-np.eye(2), np.eye(2))
    mu, nu = (Particles(0.7 * rng.normal(size=(3, 2))) for _ in range(2))
    curve = TwistedGeodesic(metric, mu, nu)
    assert curve.end_gap < 1e-8
    assert curve.speed_drift < 1e-9
    assert float(curve.speed_squared()) == pytest.approx(float(metric.distance(mu, nu)) ** 2, rel=1e-7)
