"""The twisted metric on Gaussians: restricted lengths, the softmax closure, the full distance by quadrature."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from scipy.integrate import quad

from ot_transformers.attention import SoftmaxAttention
from ot_transformers.energies import InteractionEnergy, KLDivergence
from ot_transformers.errors import InvalidInput
from ot_transformers.measures import AffineVelocity, Gaussian, Particles
from ot_transformers.metrics import TwistedWasserstein
from ot_transformers.metrics._twisted_quadrature import hermite_nodes
from ot_transformers.numerics.twisted_gaussians import gaussian_log_speed

A = np.array([[0.4, -0.3], [-0.3, -0.5]])
D = np.array([[1.5, 0.4], [0.4, 0.8]])
MU = Gaussian(np.array([0.3, -0.2]), np.array([[0.5, 0.1], [0.1, 0.3]]))
NU = Gaussian(np.array([-0.1, 0.2]), np.array([[0.3, -0.1], [-0.1, 0.6]]))
METRIC = TwistedWasserstein(A, D=D)


def test_restricted_reference(reference: Any) -> None:
    for row in reference["gaussian_restricted_twisted_1d"]:
        metric = TwistedWasserstein(row["a"], D=row["D"])
        mu, nu = Gaussian(0.0, row["sigma0"] ** 2), Gaussian(0.0, row["sigma1"] ** 2)
        assert float(metric.distance(mu, nu)) == pytest.approx(row["distance"], rel=1e-10)


def test_speed_against_gauss_hermite_quadrature() -> None:
    m, L = MU.mean_t, torch.linalg.cholesky(MU.cov_t)
    gen = torch.Generator().manual_seed(0)
    dm, dL = torch.randn(2, generator=gen).double(), torch.randn(2, 2, generator=gen).double()
    z, w = hermite_nodes(40, 2)
    x = m + z @ L.T
    G = torch.exp(x @ torch.from_numpy(A) @ x.T) @ w
    v = dm + z @ dL.T  # M (x - m) = dL L^{-1} L z
    exact = (w * G * (v @ torch.linalg.inv(torch.from_numpy(D)) * v).sum(-1)).sum()
    found, inside = gaussian_log_speed(
        m, L, dm, dL, torch.from_numpy(A), torch.linalg.inv(torch.from_numpy(D))
    )
    assert bool(inside)
    assert float(torch.exp(found)) == pytest.approx(float(exact), rel=1e-11)


@pytest.mark.parametrize("sign", [1, -1])
def test_gradient_flow_of_the_interaction_energy_is_the_softmax_closure(sign: int) -> None:
    energy = -sign * InteractionEnergy(A)
    b, M = METRIC.raw_gaussian_riesz(MU.mean_t, MU.cov_t, *energy.raw_gaussian_gradient(MU.mean_t, MU.cov_t))
    closure = SoftmaxAttention(A, sign * D @ A).affine(MU)
    np.testing.assert_allclose(-b.numpy(), closure.b, rtol=1e-12, atol=1e-14)
    np.testing.assert_allclose(-M.numpy(), closure.M, rtol=1e-12, atol=1e-14)


def test_softmax_closure_also_at_a_singular_covariance() -> None:
    S = np.array([[0.5, 0.25], [0.25, 0.125]])
    g = Gaussian(np.array([0.3, -0.2]), S)
    b, M = METRIC.raw_gaussian_riesz(
        g.mean_t, g.cov_t, *InteractionEnergy(A).raw_gaussian_gradient(g.mean_t, g.cov_t)
    )
    closure = SoftmaxAttention(A, D @ A).affine(g)
    np.testing.assert_allclose(b.numpy(), closure.b, rtol=1e-12, atol=1e-14)
    np.testing.assert_allclose(M.numpy(), closure.M, rtol=1e-12, atol=1e-14)


def test_riesz_representative_of_any_energy() -> None:
    energy = KLDivergence(NU)
    g, H = energy.raw_gaussian_gradient(MU.mean_t, MU.cov_t)
    b, M = METRIC.raw_gaussian_riesz(MU.mean_t, MU.cov_t, g, H)
    rng = np.random.default_rng(0)
    w = AffineVelocity(
        torch.from_numpy(rng.standard_normal(2)), torch.from_numpy(rng.standard_normal((2, 2))), "numpy"
    )
    rate = float((g * w.b_t).sum() + 2 * (H @ w.M_t @ MU.cov_t).diagonal().sum())
    assert float(METRIC.inner(MU, AffineVelocity(b, M, "numpy"), w)) == pytest.approx(rate, rel=1e-11)


def test_distance_is_symmetric_and_log_inverts_exp() -> None:
    g = METRIC.geodesic(MU, NU)
    assert g.converged
    assert float(METRIC.distance(NU, MU)) == pytest.approx(float(g.length), rel=1e-8)
    v = METRIC.log(MU, NU)
    end = METRIC.exp(MU, v)
    np.testing.assert_allclose(end.mean, NU.mean, atol=1e-6)
    np.testing.assert_allclose(end.cov, NU.cov, atol=1e-6)
    assert float(METRIC.inner(MU, v, v)) == pytest.approx(float(g.length) ** 2, rel=1e-7)
    np.testing.assert_allclose(
        g.at(0.5).cov, METRIC.exp(MU, AffineVelocity(0.5 * v.b_t, 0.5 * v.M_t)).cov, atol=1e-5
    )


def test_triangle_inequality() -> None:
    third = Gaussian(np.array([0.0, 0.4]), 0.2 * np.eye(2))
    ab, bc, ac = (float(METRIC.distance(*p)) for p in ((MU, NU), (NU, third), (MU, third)))
    assert ac < ab + bc
    assert float(METRIC.distance(MU, MU)) == 0.0


def test_without_interaction_it_is_bures_wasserstein() -> None:
    from ot_transformers.metrics import BuresWasserstein

    flat = TwistedWasserstein(np.zeros((2, 2)), D=D, tol=1e-10)
    assert float(flat.distance(MU, NU)) == pytest.approx(
        float(BuresWasserstein(D).distance(MU, NU)), rel=1e-9
    )


def test_full_distance_lies_below_the_restricted_one() -> None:
    metric = TwistedWasserstein(-1.0, D=1.0)
    mu, nu = Gaussian(0.0, 0.3**2), Gaussian(0.0, 0.8**2)
    full = metric.quadrature_geodesic(mu, nu, nodes=(8, 12, 16))
    assert float(full.length) == pytest.approx(0.5580, abs=5e-5)
    assert float(full.error) < 1e-7
    assert float(metric.distance(mu, nu)) == pytest.approx(0.5622174, abs=5e-8)
    two = METRIC.quadrature_geodesic(MU, NU, nodes=(6, 8))
    assert float(two.length) <= float(METRIC.distance(MU, NU)) + float(two.error)


def test_outside_the_domain_is_an_error() -> None:
    metric = TwistedWasserstein(np.eye(2), D=np.eye(2))
    with pytest.raises(InvalidInput, match="domain"):
        metric.distance(Gaussian(np.zeros(2), 2 * np.eye(2)), Gaussian(np.zeros(2), 0.1 * np.eye(2)))


def test_mixed_measures_are_an_error() -> None:
    with pytest.raises(InvalidInput, match="both"):
        METRIC.distance(MU, Particles(np.zeros((3, 2))))


def test_proximal_step_tends_to_the_closure_at_order_one() -> None:
    metric = TwistedWasserstein(-np.eye(2), D=D)
    energy = InteractionEnergy(-np.eye(2))
    closure = SoftmaxAttention(-np.eye(2), D).affine(MU)  # V = -D A, sign -1: descends E
    errors = []
    for tau in (0.02, 0.01, 0.005):
        step = metric.proximal(energy, MU, tau)
        assert step.converged
        assert step.energy_after < step.energy_before
        errors.append(np.abs((step.measure.mean - MU.mean) / tau - closure.b).max())
    orders = np.log2(np.array(errors[:-1]) / errors[1:])
    np.testing.assert_allclose(orders, 1.0, atol=0.1)


def test_derivatives_of_the_restricted_distance_by_differences() -> None:
    metric = TwistedWasserstein(A, D=D, tol=1e-12)
    inputs = [t.clone().requires_grad_() for t in (MU.mean_t, MU.cov_t, NU.mean_t, NU.cov_t)]

    def distance(m0: torch.Tensor, S0: torch.Tensor, m1: torch.Tensor, S1: torch.Tensor) -> torch.Tensor:
        return metric.distance(Gaussian(m0, S0), Gaussian(m1, S1))

    grads = torch.autograd.grad(distance(*inputs), inputs)
    for k, g in enumerate(grads):
        move = torch.randn(g.shape, generator=torch.Generator().manual_seed(k), dtype=torch.float64)
        move = move + move.mT if k % 2 else move
        ends = [
            float(distance(*(t.detach() + (s * move if i == k else 0.0) for i, t in enumerate(inputs))))
            for s in (1e-4, -1e-4)
        ]
        assert float((g * move).sum()) == pytest.approx((ends[0] - ends[1]) / 2e-4, rel=1e-5)


def test_gaussians_through_infinity() -> None:
    """Narrow Gaussians far apart about the origin: the ray to infinity has a closed speed, e^{-m^2 a/(1+as)/2}."""
    metric = TwistedWasserstein(-np.eye(2), D=np.eye(2))
    s = 0.01
    mu, nu = (Gaussian(np.array([r, 0.0]), s * np.eye(2)) for r in (2.5, -2.5))
    ray = quad(lambda m: np.exp(-m * m / (2 * (1 + s))), 2.5, np.inf, epsabs=0, epsrel=1e-12)[0]
    bound = 2 * ray / np.sqrt(np.sqrt((1 - s * s) ** 2))  # Z has the factor det(I - s^2)^{-1/2} in d = 2
    assert float(metric.distance(mu, nu)) == pytest.approx(bound, rel=1e-9)


def test_batch_of_gaussians_is_the_loop() -> None:
    means, covs = np.stack([MU.mean, NU.mean]), np.stack([MU.cov, NU.cov])
    batch, third = Gaussian(means, covs), Gaussian(np.zeros(2), 0.2 * np.eye(2))
    together = METRIC.geodesic(batch, third)
    for k, g in enumerate((MU, NU)):
        alone = METRIC.geodesic(g, third)
        assert float(together.length[k]) == float(alone.length)
        np.testing.assert_array_equal(together.at(0.3).cov[k], alone.at(0.3).cov)
