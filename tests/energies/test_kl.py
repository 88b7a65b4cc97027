"""KL and entropy of Gaussians against independent formulas, to full accuracy near equality."""

from __future__ import annotations

import math

import mpmath
import numpy as np
import pytest
import torch
from torch.distributions import MultivariateNormal, kl_divergence

from ot_transformers import Entropy, Gaussian, InvalidInput, KLDivergence
from ot_transformers.energies import Energy

RNG = np.random.default_rng(1)


def random_spd(d: int, *batch: int) -> torch.Tensor:
    X = torch.from_numpy(RNG.normal(size=(*batch, d, 2 * d)))
    return X @ X.mT / d


def test_against_torch_distributions_in_a_batch() -> None:
    S, T = random_spd(4, 5), random_spd(4)
    m, n = torch.from_numpy(RNG.normal(size=(5, 4))), torch.from_numpy(RNG.normal(size=4))
    expected = kl_divergence(MultivariateNormal(m, S), MultivariateNormal(n, T))
    energy = KLDivergence(Gaussian(n, T))
    torch.testing.assert_close(energy.value(Gaussian(m, S)), expected, rtol=1e-12, atol=0)
    one = energy.value(Gaussian(m[2], S[2]))
    torch.testing.assert_close(one, expected[2], rtol=1e-12, atol=0)


@pytest.mark.parametrize("delta", [1e-10, -1e-8, 1e-5, 1e-2, -0.3, 0.45, -0.49, 0.51, 3.0])
def test_near_equality_nothing_cancels(delta: float) -> None:
    # d = 1: the covariances differ by exactly h (a float), KL = (x - log(1 + x)) / 2 with x = h / T.
    T = 0.75
    S = T + T * delta
    with mpmath.workdps(40):
        x = (mpmath.mpf(S) - T) / T
        expected = float((x - mpmath.log(1 + x)) / 2)
    assert KLDivergence(Gaussian(0.0, T)).value(Gaussian(0.0, S)) == pytest.approx(expected, rel=3e-14)


def test_near_equal_matrices_are_nonnegative_and_of_second_order() -> None:
    T = random_spd(6)
    X = random_spd(6)
    energy = KLDivergence(Gaussian(torch.zeros(6, dtype=torch.float64), T))
    W = torch.linalg.solve(T, X)
    for h in (1e-4, 1e-6):
        value = energy.raw_gaussian(torch.zeros(6, dtype=torch.float64), T + h * X)
        # KL = h^2 tr((T^-1 X)^2) / 4 + O(h^3)
        assert float(value) / h**2 == pytest.approx(float(torch.trace(W @ W)) / 4, rel=1e4 * h)
    assert float(energy.value(Gaussian(torch.zeros(6, dtype=torch.float64), T))) == 0.0


def test_gradient_to_second_order() -> None:
    n, T = torch.from_numpy(RNG.normal(size=3)), random_spd(3)
    m, S = torch.from_numpy(RNG.normal(size=3)), random_spd(3)
    energy = KLDivergence(Gaussian(n, T))
    for a, b in zip(
        energy.raw_gaussian_gradient(m, S), Energy.raw_gaussian_gradient(energy, m, S), strict=True
    ):
        torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-13)
    H = energy.raw_gaussian_gradient(m, S)[1]
    torch.testing.assert_close(H, 0.5 * (torch.linalg.inv(T) - torch.linalg.inv(S)), rtol=1e-11, atol=1e-11)

    def value(m: torch.Tensor, X: torch.Tensor) -> torch.Tensor:
        return energy.raw_gaussian(m, 0.5 * (X + X.mT))

    inputs = (m.requires_grad_(), S.requires_grad_())
    assert torch.autograd.gradcheck(value, inputs, check_forward_ad=True)
    assert torch.autograd.gradgradcheck(value, inputs)


def test_gradient_vanishes_with_full_relative_accuracy_near_the_target() -> None:
    T = torch.diag(torch.tensor([1.0, 4.0], dtype=torch.float64))
    h = torch.diag(torch.tensor([2.0**-40, 0.0], dtype=torch.float64))
    H = KLDivergence(Gaussian(torch.zeros(2, dtype=torch.float64), T)).raw_gaussian_gradient(
        torch.zeros(2, dtype=torch.float64), T + h
    )[1]
    assert float(H[0, 0]) == pytest.approx(0.5 * 2.0**-40 / (1 + 2.0**-40), rel=1e-15)


def test_singular_source_is_infinite_without_nan() -> None:
    cov = torch.stack([torch.eye(2), torch.diag(torch.tensor([1.0, 0.0]))]).double().requires_grad_()
    value = KLDivergence(Gaussian(np.zeros(2), np.eye(2))).raw_gaussian(torch.zeros(2, 2).double(), cov)
    assert value.tolist() == [0.0, math.inf]
    (g,) = torch.autograd.grad(value.sum(), cov)
    assert (g == 0).all()
    with pytest.raises(InvalidInput, match="singular covariance of measure"):
        KLDivergence(Gaussian(np.zeros(2), np.eye(2))).wasserstein_gradient(
            Gaussian(np.zeros(2), np.diag([1.0, 0.0]))
        )


def test_entropy_is_that_of_the_normal_law_and_kl_is_entropy_plus_potential() -> None:
    S, T = random_spd(3), random_spd(3)
    m, n = torch.from_numpy(RNG.normal(size=3)), torch.from_numpy(RNG.normal(size=3))
    entropy = Entropy().value(Gaussian(m, S))
    torch.testing.assert_close(entropy, -MultivariateNormal(m, S).entropy(), rtol=1e-13, atol=0)
    u = m - n
    log_target = -0.5 * (
        torch.trace(torch.linalg.solve(T, S)) + u @ torch.linalg.solve(T, u) + torch.logdet(2 * math.pi * T)
    )
    kl = KLDivergence(Gaussian(n, T)).value(Gaussian(m, S))
    torch.testing.assert_close(kl, entropy - log_target, rtol=1e-11, atol=0)
    g, H = Entropy().raw_gaussian_gradient(m, S)
    torch.testing.assert_close(H, Energy.raw_gaussian_gradient(Entropy(), m, S)[1], rtol=1e-11, atol=1e-12)
    assert (g == 0).all()
    assert Entropy().value(Gaussian(np.zeros(2), np.diag([1.0, 0.0]))) == math.inf
