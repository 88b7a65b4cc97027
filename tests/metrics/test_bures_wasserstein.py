"""The metric on Gaussians: means, factors, the inner product D^{-1}, exp, log, transport."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from ot_transformers import AffineVelocity, BuresWasserstein, Gaussian, Particles, Wasserstein
from ot_transformers.metrics import bures_barycenter

RNG = np.random.default_rng(6)
D = np.array([[1.0, 0.4, 0.0], [0.4, 2.0, 0.1], [0.0, 0.1, 0.5]])


def spd(d: int, *batch: int) -> Any:
    X = RNG.normal(size=(*batch, d, d + 3))
    return X @ np.swapaxes(X, -1, -2) / d


def gaussian(d: int = 3, *batch: int) -> Gaussian:
    return Gaussian(RNG.normal(size=(*batch, d)), spd(d, *batch))


def singular(d: int, r: int) -> Gaussian:
    return Gaussian.from_factor(RNG.normal(size=d), RNG.normal(size=(d, r)))


def test_reference_value(reference: Any) -> None:
    r = reference["bures_d3"]
    mu, nu = Gaussian(r["m0"][:, 0], r["S0"]), Gaussian(r["m1"][:, 0], r["S1"])
    assert BuresWasserstein().distance(mu, nu) ** 2 == pytest.approx(r["squared"], rel=1e-12)
    assert BuresWasserstein().geodesic(mu, nu).length ** 2 == pytest.approx(r["squared"], rel=1e-12)


def test_factors_give_what_covariances_give() -> None:
    for r, s in ((2, 2), (2, 5), (7, 3), (1, 4)):
        L, M = RNG.normal(size=(4, r)), RNG.normal(size=(4, s))
        m, n = RNG.normal(size=(2, 4))
        through_factors = BuresWasserstein().distance(Gaussian.from_factor(m, L), Gaussian.from_factor(n, M))
        through_covs = BuresWasserstein().distance(Gaussian(m, L @ L.T), Gaussian(n, M @ M.T))
        mixed = BuresWasserstein().distance(Gaussian.from_factor(m, L), Gaussian(n, M @ M.T))
        assert through_factors == pytest.approx(through_covs, rel=1e-12)
        assert mixed == pytest.approx(through_covs, rel=1e-12)


def test_particles_of_a_linear_image_are_at_the_distance_of_their_gaussians() -> None:
    # x -> m + T x with T symmetric PSD is optimal between clouds and between their Gaussians alike.
    x = RNG.normal(size=(6, 3))
    w = RNG.dirichlet(np.ones(6))
    y = x @ spd(3) + RNG.normal(size=3)
    mu, nu = Particles(x, w), Particles(y, w)
    theirs = Wasserstein().distance(mu, nu)
    assert BuresWasserstein().distance(mu.to_gaussian(), nu.to_gaussian()) == pytest.approx(theirs, rel=1e-11)


def test_mobility_is_the_change_of_coordinates() -> None:
    mu, nu = gaussian(), gaussian()
    w, U = np.linalg.eigh(D)
    R = (U / np.sqrt(w)) @ U.T
    pushed = [Gaussian(R @ g.mean, R @ g.cov @ R.T) for g in (mu, nu)]
    metric, plain = BuresWasserstein(D=D), BuresWasserstein()
    assert metric.distance(mu, nu) == pytest.approx(plain.distance(*pushed), rel=1e-12)
    half = metric.geodesic(mu, nu).at(0.5)
    white = plain.geodesic(*pushed).at(0.5)
    np.testing.assert_allclose(R @ half.cov @ R.T, white.cov, rtol=0, atol=1e-12)
    np.testing.assert_allclose(R @ half.mean, white.mean, rtol=0, atol=1e-12)


@pytest.mark.parametrize("mobility", [None, D], ids=["identity", "D"])
def test_exp_log_inner_and_transport(mobility: Any) -> None:
    metric = BuresWasserstein(D=mobility)
    mu, nu = gaussian(3, 2), gaussian(3, 2)
    v = metric.log(mu, nu)
    end = metric.exp(mu, v)
    np.testing.assert_allclose(end.mean, nu.mean, rtol=0, atol=1e-13)
    np.testing.assert_allclose(end.cov, nu.cov, rtol=0, atol=1e-11)
    length = metric.distance(mu, nu)
    np.testing.assert_allclose(metric.inner(mu, v, v), length**2, rtol=1e-11)
    half = metric.exp(mu, AffineVelocity(0.5 * v.b_t, 0.5 * v.M_t))
    np.testing.assert_allclose(half.cov, metric.geodesic(mu, nu).at(0.5).cov, rtol=0, atol=1e-11)
    backward = metric.log(nu, mu)
    moved = metric.parallel_transport(mu, nu, v)
    np.testing.assert_allclose(moved.M, -backward.M, rtol=0, atol=1e-8)
    np.testing.assert_allclose(moved.b, -backward.b, rtol=0, atol=1e-13)


def test_gradient_is_the_one_of_the_inner_product() -> None:
    # <grad F, v> = dF(v) for every gradient field v = D (b + 2 H' (x - m)).
    metric = BuresWasserstein(D=D)
    mu = gaussian()
    m, S = mu.mean_t, mu.cov_t
    g, b = (torch.from_numpy(RNG.normal(size=3)) for _ in range(2))
    H, K = (torch.from_numpy(spd(3)) for _ in range(2))
    Dt = torch.from_numpy(D)
    gradient = AffineVelocity(*metric.raw_gaussian_riesz(m, S, g, H))
    v = AffineVelocity(Dt @ b, 2 * Dt @ K)
    derivative = g @ v.b_t + torch.trace(H @ (v.M_t @ S + S @ v.M_t.mT))
    assert metric.inner(mu, gradient, v).item() == pytest.approx(derivative.item(), rel=1e-13)


def test_geodesic_of_singular_measures_of_different_rank() -> None:
    mu, nu = singular(5, 2), singular(5, 3)
    geodesic = BuresWasserstein().geodesic(mu, nu)
    a, b = geodesic.at(0.2), geodesic.at(0.9)
    assert BuresWasserstein().distance(a, b) == pytest.approx(0.7 * geodesic.length, rel=1e-12)
    assert geodesic.error < 1e-12
    assert BuresWasserstein().distance(geodesic.at(1.0), nu) < 1e-13
    assert int(a.rank()) <= 3


def test_near_singular_measures_keep_their_digits() -> None:
    L = RNG.normal(size=(6, 2))
    E = RNG.normal(size=(6, 2))
    mean = np.zeros(6)
    # Exact first order: BW(L L^T, (L + h E)(L + h E)^T) / h tends to |E - L Omega| at the best skew Omega.
    G = L.T @ L
    X = L.T @ E - E.T @ L
    omega = X[0, 1] / np.trace(G) * np.array([[0.0, 1.0], [-1.0, 0.0]])
    truth = np.linalg.norm(E - L @ omega)
    for h in (1e-5, 1e-8):
        near = Gaussian.from_factor(mean, L + h * E)
        value = BuresWasserstein().distance(Gaussian.from_factor(mean, L), near)
        assert value / h == pytest.approx(truth, rel=10 * h + 1e-15 / h)


def test_batches_means_and_kinds() -> None:
    mu, nu = gaussian(2, 3), gaussian(2, 3)
    metric = BuresWasserstein()
    loop = [metric.distance(mu[i], nu[i]) for i in range(3)]
    np.testing.assert_allclose(metric.distance(mu, nu), loop, rtol=1e-13)
    same = Gaussian(nu.mean, mu.cov)
    np.testing.assert_allclose(
        metric.distance(mu, same), np.linalg.norm(mu.mean - nu.mean, axis=-1), rtol=1e-13
    )
    tensor = Gaussian(torch.tensor(mu.mean), torch.tensor(mu.cov))
    assert isinstance(metric.distance(tensor, nu), torch.Tensor)
    assert metric.geodesic(tensor, nu).at(0.5).kind == "torch"
    assert isinstance(metric.geodesic(mu, nu).at(0.5).cov, np.ndarray)
    assert isinstance(BuresWasserstein(D=torch.eye(2)).distance(mu, nu), torch.Tensor)


def test_gradient_through_means_covariances_and_factors() -> None:
    m = torch.from_numpy(RNG.normal(size=3)).requires_grad_()
    L = torch.from_numpy(RNG.normal(size=(3, 2))).requires_grad_()
    nu = singular(3, 2)

    def f(mean: torch.Tensor, factor: torch.Tensor) -> torch.Tensor:
        return BuresWasserstein(D=D).distance(Gaussian.from_factor(mean, factor), nu)

    assert torch.autograd.gradcheck(f, (m, L))
    assert torch.autograd.gradgradcheck(f, (m, L))


def test_barycenter_of_gaussians() -> None:
    g = gaussian(3, 4)
    w = np.array([0.1, 0.2, 0.3, 0.4])
    center = BuresWasserstein().barycenter(g, w)
    np.testing.assert_allclose(center.mean, w @ g.mean, rtol=0, atol=1e-14)
    np.testing.assert_allclose(center.cov, bures_barycenter(g.cov, w), rtol=0, atol=1e-13)
    with_d = BuresWasserstein(D=D)
    at_d = with_d.barycenter(g, w)
    # First-order condition: sum_i w_i log_center(mu_i) = 0.
    logs = with_d.log(at_d, g)
    np.testing.assert_allclose(np.einsum("i,ijk->jk", w, logs.M), 0, atol=1e-10)


@pytest.mark.parametrize("metric", [BuresWasserstein(), Wasserstein(), BuresWasserstein(D=4 * np.eye(2))])
@pytest.mark.parametrize("size", [1e160, 1e-200])
def test_means_whose_squares_overflow_or_vanish(metric: Any, size: float) -> None:
    mu, nu = Gaussian([3 * size, 0.0], np.eye(2)), Gaussian([0.0, -4 * size], np.eye(2))
    unit = metric.distance(Gaussian([5.0, 0.0], np.eye(2)), Gaussian([0.0, 0.0], np.eye(2)))
    assert metric.distance(mu, nu) == pytest.approx(size * unit, rel=1e-15)
    m = torch.tensor([3 * size, 0.0], dtype=torch.float64, requires_grad=True)
    value = metric.distance(Gaussian(m, torch.eye(2, dtype=torch.float64)), nu)
    (g,) = torch.autograd.grad(value, m)
    np.testing.assert_allclose(g, np.array([0.6, 0.8]) * unit / 5, rtol=1e-14)
