"""Potential energies and functionals of mean and covariance against closed forms."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from torch import Tensor

from ot_transformers import Gaussian, GaussianFunctional, InteractionEnergy, Particles, PotentialEnergy
from ot_transformers.energies import Energy

RNG = np.random.default_rng(2)
M = torch.tensor([0.3, -0.2], dtype=torch.float64)
S = torch.tensor([[1.0, 0.2], [0.2, 0.5]], dtype=torch.float64)


def quartic(x: Tensor) -> Tensor:
    return x[..., 0] ** 4 + x[..., 0] * x[..., 1] ** 2


def test_quadrature_is_exact_for_polynomials() -> None:
    m0, m1, s, t, c = 0.3, -0.2, 1.0, 0.5, 0.2
    expected = m0**4 + 6 * m0**2 * s + 3 * s**2 + m0 * (m1**2 + t) + 2 * m1 * c
    energy = PotentialEnergy(quartic)
    assert float(energy.value(Gaussian(M, S))) == pytest.approx(expected, rel=1e-13)
    field = energy.wasserstein_gradient(Gaussian(M, S))
    g = [4 * (m0**3 + 3 * m0 * s) + m1**2 + t, 2 * (m0 * m1 + c)]
    hess = [[12 * (m0**2 + s), 2 * m1], [2 * m1, 2 * m0]]
    np.testing.assert_allclose(field.b, g, rtol=1e-12)
    np.testing.assert_allclose(field.M, hess, rtol=1e-12)  # 2 H = E Hess f


def test_gradient_at_a_singular_covariance_sees_the_null_directions() -> None:
    _, H = PotentialEnergy(lambda x: (x**4).sum(-1)).raw_gaussian_gradient(
        M, torch.diag(torch.tensor([1.0, 0.0], dtype=torch.float64))
    )
    np.testing.assert_allclose(np.diag(H), [6 * (0.09 + 1.0), 6 * 0.04], rtol=1e-12)


def test_quadrature_error_is_an_estimate_of_the_error() -> None:
    # E e^{a x} = e^{a^2 s / 2}; few nodes, so that there is an error to see.
    energy = PotentialEnergy(lambda x: torch.exp(3.0 * x[..., 0]), n_nodes=8)
    g = Gaussian(0.0, 1.0)
    error = abs(float(energy.value(g)) - math.exp(4.5))
    assert error > 1e-3
    assert error <= float(energy.quadrature_error(g))
    fine = PotentialEnergy(lambda x: torch.exp(3.0 * x[..., 0]))
    assert float(fine.value(g)) == pytest.approx(math.exp(4.5), rel=1e-12)


@pytest.mark.parametrize("d", [1, 3, 4])
def test_dimensions_up_to_four(d: int) -> None:
    c = torch.linspace(0.2, 0.7, d, dtype=torch.float64)
    value = PotentialEnergy(lambda x: torch.cos((x * c).sum(-1))).value(Gaussian(np.zeros(d), np.eye(d)))
    assert value == pytest.approx(math.exp(-0.5 * float(c @ c)), rel=1e-9)


def test_particles_value_gradient_and_batch() -> None:
    x, w = RNG.normal(size=(3, 5, 2)), RNG.dirichlet(np.ones(5), size=3)
    energy = PotentialEnergy(quartic)
    value = energy.value(Particles(x, w))
    expected = (w * (x[..., 0] ** 4 + x[..., 0] * x[..., 1] ** 2)).sum(-1)
    np.testing.assert_allclose(value, expected, rtol=1e-14)
    field = energy.wasserstein_gradient(Particles(x, w))
    np.testing.assert_allclose(field[..., 1], 2 * x[..., 0] * x[..., 1], rtol=1e-14)
    # Also where a token has weight 0: the field lives on all of R^d.
    absent = energy.wasserstein_gradient(Particles(x[0], [0.0, 0.25, 0.25, 0.25, 0.25]))
    np.testing.assert_allclose(absent, field[0], rtol=1e-14)


def test_gradient_of_a_linear_and_of_a_constant_potential() -> None:
    energy = PotentialEnergy(lambda x: x[..., 0])
    _, H = energy.raw_gaussian_gradient(M, S)
    assert (H == 0).all()
    constant = PotentialEnergy(lambda x: torch.ones(x.shape[:-1], dtype=x.dtype))
    assert (constant.wasserstein_gradient(Particles(M[None])) == 0).all()


def test_gaussian_functional_is_differentiated_in_mean_and_covariance() -> None:
    energy = GaussianFunctional(lambda m, S: (m @ S @ m) + torch.logdet(S))
    g, H = energy.raw_gaussian_gradient(M, S)
    torch.testing.assert_close(g, 2 * S @ M, rtol=1e-14, atol=0)
    torch.testing.assert_close(H, torch.outer(M, M) + torch.linalg.inv(S), rtol=1e-13, atol=0)


def test_algebra_of_energies() -> None:
    A = np.array([[0.2, 0.1], [-0.3, 0.4]])
    first, second = InteractionEnergy(A), PotentialEnergy(quartic)
    combined = 2.0 * first - second * 0.5 + (-first)
    mu = Particles(RNG.normal(size=(6, 2)))
    g = Gaussian(M, 0.5 * S)
    for measure in (mu, g):
        expected = 1.0 * float(first.value(measure)) - 0.5 * float(second.value(measure))
        assert float(combined.value(measure)) == pytest.approx(expected, rel=1e-13)
    np.testing.assert_allclose(
        combined.wasserstein_gradient(mu),
        first.wasserstein_gradient(mu) - 0.5 * second.wasserstein_gradient(mu),
        rtol=1e-12,
    )
    np.testing.assert_allclose(
        combined.wasserstein_gradient(g).M,
        first.wasserstein_gradient(g).M - 0.5 * second.wasserstein_gradient(g).M,
        rtol=1e-12,
    )
    assert combined.dim == 2
    automatic = Energy.raw_particles_gradient(combined, mu.x_t, mu.weights_t)
    np.testing.assert_allclose(combined.wasserstein_gradient(mu), automatic, rtol=1e-11, atol=1e-13)
