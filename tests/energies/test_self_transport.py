"""Self-transport energy: reference value, quadrature, gradients against differences and autograd."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from ot_transformers.attention import SinkhornAttention
from ot_transformers.energies import SelfTransportEnergy
from ot_transformers.energies.base import Energy
from ot_transformers.measures import Gaussian, Particles


def problem(n: int, d: int, seed: int = 0) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    rng = np.random.default_rng(seed)
    return rng.normal(size=(n, d)), rng.dirichlet(np.ones(n)), rng.normal(size=(d, d)) / np.sqrt(d)


def test_reference_value(reference: Any) -> None:
    r = reference["self_ot_d3"]
    value = SelfTransportEnergy(r["A"]).value(Gaussian(r["m"].ravel(), r["S"]))
    assert value == pytest.approx(0.5 * r["value"], rel=1e-12)


@pytest.mark.parametrize("eps", [1.0, 0.3, 4.0])
@pytest.mark.parametrize("a", [0.9, -0.9])
def test_gaussian_value_and_gradient_against_quadrature(a: float, eps: float) -> None:
    """General eps is eps OT with A / eps: particles on Gauss-Hermite nodes are the independent evaluation."""
    z, w = np.polynomial.hermite_e.hermegauss(50)
    m, s = 0.4, 0.8
    nodes, gaussian = Particles((m + s * z)[:, None], w / w.sum()), Gaussian([m], [[s**2]])
    energy = SelfTransportEnergy(a, eps)
    assert energy.value(gaussian) == pytest.approx(float(energy.value(nodes)), rel=1e-9)
    field = energy.wasserstein_gradient(gaussian).at(nodes.x, gaussian)
    near = np.abs(z) < 3
    np.testing.assert_allclose(energy.wasserstein_gradient(nodes)[near], field[near], rtol=0, atol=1e-8)


@pytest.mark.parametrize("symmetric", [True, False])
@pytest.mark.parametrize("rank", [2, 3])
def test_gaussian_gradient_is_that_of_the_value(symmetric: bool, rank: int) -> None:
    _, _, A = problem(1, 3)
    A = A + A.T if symmetric else A
    rng = np.random.default_rng(1)
    L, m, P = rng.normal(size=(3, rank)), rng.normal(size=3), rng.normal(size=(3, 3))
    energy, S, P = SelfTransportEnergy(A, 0.7), torch.from_numpy(L @ L.T), torch.from_numpy(P + P.T)
    mean = torch.from_numpy(m)
    g, H = energy.raw_gaussian_gradient(mean, S)
    auto = Energy.raw_gaussian_gradient(energy, mean, S)
    torch.testing.assert_close(g, auto[0], rtol=1e-12, atol=1e-13)
    torch.testing.assert_close(H, auto[1], rtol=1e-11, atol=1e-12)
    for scaled, factor in ((energy, 1.0), (2.0 * energy + energy, 3.0)):
        found = scaled.raw_gaussian_gradient_of_factor(mean, torch.from_numpy(L))
        torch.testing.assert_close(found[0], factor * g, rtol=1e-12, atol=1e-13)
        torch.testing.assert_close(found[1], factor * H, rtol=1e-11, atol=1e-12)
    if rank == 3:
        h = 1e-5
        slope = (energy.raw_gaussian(mean, S + h * P) - energy.raw_gaussian(mean, S - h * P)) / (2 * h)
        assert float((H * P).sum()) == pytest.approx(float(slope), rel=1e-7)


@pytest.mark.parametrize("symmetric", [True, False])
def test_particle_gradient_is_that_of_the_value(symmetric: bool) -> None:
    x, w, A = problem(8, 2)
    A = A + A.T if symmetric else A
    energy = SelfTransportEnergy(A, 0.5, tol=1e-12)
    X, W = torch.from_numpy(x), torch.from_numpy(w)
    closed = energy.raw_particles_gradient(X, W)
    torch.testing.assert_close(closed, Energy.raw_particles_gradient(energy, X, W), rtol=0, atol=1e-9)
    h, direction = 1e-4, torch.from_numpy(np.random.default_rng(2).normal(size=x.shape))
    slope = (energy.raw_particles(X + h * direction, W) - energy.raw_particles(X - h * direction, W)) / (
        2 * h
    )
    assert float((W[:, None] * closed * direction).sum()) == pytest.approx(float(slope), rel=1e-6)


def test_sinkhorn_attention_is_its_gradient_for_symmetric_A() -> None:
    x, w, A = problem(30, 3)
    A = A + A.T
    mu = Particles(x, w)
    velocity = SinkhornAttention(A, A, eps=0.6).velocity(mu)
    np.testing.assert_allclose(-SelfTransportEnergy(A, 0.6).wasserstein_gradient(mu), velocity, atol=1e-12)
    gaussian = mu.to_gaussian()
    affine, gradient = (
        SinkhornAttention(A, A, eps=0.6).affine(gaussian),
        SelfTransportEnergy(A, 0.6).wasserstein_gradient(gaussian),
    )
    np.testing.assert_allclose(-gradient.M, affine.M, rtol=1e-11, atol=1e-12)
    np.testing.assert_allclose(-gradient.b, affine.b, rtol=1e-12)


def test_for_non_symmetric_A_it_is_not() -> None:
    """The first variation averages both potentials: the gradients differ by far more than rounding."""
    x, w, A = problem(30, 3)
    mu = Particles(x, w)
    gap = SelfTransportEnergy(A).wasserstein_gradient(mu) + SinkhornAttention(A, A).velocity(mu)
    assert np.abs(gap).max() > 0.1


def test_second_derivatives_on_particles() -> None:
    x, w, A = problem(4, 2)
    energy, W = SelfTransportEnergy(A + A.T, 0.5, tol=1e-13), torch.from_numpy(w)
    X = torch.from_numpy(x).requires_grad_()
    assert torch.autograd.gradcheck(lambda t: energy.raw_particles(t, W), X)
    assert torch.autograd.gradgradcheck(lambda t: energy.raw_particles(t, W), X)
    assert torch.autograd.gradcheck(lambda t: energy.raw_particles_gradient(t, W), X)


def test_a_tiny_covariance_keeps_its_digits() -> None:
    """OT = -eps w / 2 to first order, w = a^2 s^4 / eps^2: relative accuracy at w = 1e-16."""
    value = SelfTransportEnergy(1.0).value(Gaussian(0.0, [[1e-8]]))
    assert value == pytest.approx(-1e-16 / 4, rel=1e-12)


def test_a_dirac_and_a_flat_form() -> None:
    assert SelfTransportEnergy(2.0).value(np.array([[3.0]])) == pytest.approx(-9.0, rel=1e-14)
    assert SelfTransportEnergy(2.0).value(Gaussian(3.0, [[0.0]])) == pytest.approx(-9.0, rel=1e-14)
    assert SelfTransportEnergy(np.zeros((2, 2))).value(np.ones((5, 2))) == pytest.approx(0.0, abs=1e-14)


def test_batches_are_loops() -> None:
    x = np.random.default_rng(0).normal(size=(3, 10, 2))
    A = problem(1, 2)[2]
    together = SelfTransportEnergy(A, tol=1e-12).value(Particles(x))
    alone = [SelfTransportEnergy(A, tol=1e-12).value(Particles(t)) for t in x]
    np.testing.assert_allclose(together, alone, rtol=1e-12)
