"""The debiased entropic cost of Gaussians against 60 digits, however near, and its derivatives."""

from __future__ import annotations

import mpmath
import numpy as np
import pytest
import torch
from torch import Tensor

from ot_transformers.numerics.gaussian_divergence import divergence_slope, gaussian_divergence

RNG = np.random.default_rng(41)


def normal(*shape: int) -> Tensor:
    return torch.from_numpy(RNG.normal(size=shape))


def root(A: mpmath.matrix) -> mpmath.matrix:
    w, Q = mpmath.eigsy(A)
    return Q * mpmath.diag([mpmath.sqrt(max(x, 0)) for x in w]) * Q.T


def spectrum(P: mpmath.matrix, N: mpmath.matrix) -> tuple[mpmath.matrix, list[mpmath.mpf]]:
    """P^{1/2} V and h = (1 + sqrt(1 + 4 w)) / 2, w and V of P^{1/2} N P^{1/2}."""
    R = root(P)
    w, V = mpmath.eigsy(R * N * R)
    return R * V, [(1 + mpmath.sqrt(1 + 4 * max(x, 0))) / 2 for x in w]


def exact(S: Tensor, T: Tensor) -> tuple[mpmath.mpf, mpmath.matrix]:
    """D and dD/dS = (C(S; S) - C(T; S)) / 2; to be called at 60 digits."""
    a, b = (mpmath.matrix(A.tolist()) for A in (S, T))

    def f(P: mpmath.matrix, N: mpmath.matrix) -> mpmath.mpf:
        return sum(1 - h + mpmath.log(h) / 2 for h in spectrum(P, N)[1])

    def conditional(P: mpmath.matrix, N: mpmath.matrix) -> mpmath.matrix:
        X, h = spectrum(P, N)
        return X * mpmath.diag([1 / x for x in h]) * X.T

    return f(a, b) - (f(a, a) + f(b, b)) / 2, (conditional(a, a) - conditional(b, a)) / 2


@pytest.mark.parametrize("d", [1, 4])
@pytest.mark.parametrize("scale", [1e-3, 1.0, 1e4])
@pytest.mark.parametrize("size", [1e-14, 1e-8, 1e-4, 1e-2, 0.2, 1.0])
def test_value_and_slope_keep_their_digits_however_near(d: int, scale: float, size: float) -> None:
    """In units of eps: far below it, at it, far above it."""
    X, Y = normal(d, d + 2), normal(d, d)
    S = scale * X @ X.mT / d
    B = torch.eye(d, dtype=S.dtype) + size * Y / torch.linalg.matrix_norm(Y)
    S, T = (0.5 * (A + A.mT) for A in (S, B @ S @ B.mT))
    condition = float(torch.linalg.cond(S))
    with mpmath.workdps(60):
        value, slope = exact(S, T)
        error = float(abs(mpmath.mpf(float(gaussian_divergence(S, T))) / value - 1))
        away = mpmath.matrix(divergence_slope(S, T).tolist()) - slope
        slope_error = float(mpmath.norm(away) / mpmath.norm(slope))
    # Distant pairs by their terms, of which D is at least (1/4)^2 / 16 or so; near ones and slopes by one equation.
    assert error <= 1e-12
    assert slope_error <= 1e-15 * d * max(condition, 10)


def test_off_the_range_of_a_singular_covariance() -> None:
    S = torch.diag(torch.tensor([3.0, 0.0, 0.0], dtype=torch.float64))
    for size in (1e-12, 1e-5, 0.1):
        X = normal(3, 3)
        T = S + size * X @ X.mT
        with mpmath.workdps(60):
            value, _ = exact(S, T)
            assert float(abs(mpmath.mpf(float(gaussian_divergence(S, T))) / value - 1)) <= 1e-13


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_never_negative_and_zero_at_equality(dtype: torch.dtype) -> None:
    for d in (1, 3, 8):
        for rank in range(d + 1):
            X = normal(40, d, rank) * torch.from_numpy(10.0 ** RNG.uniform(-6, 0, size=(40, 1, rank)))
            S = torch.from_numpy(10.0 ** RNG.uniform(-6, 6, size=(40, 1, 1))) * X @ X.mT
            B = torch.eye(d) + torch.from_numpy(10.0 ** RNG.uniform(-16, 0, size=(40, 1, 1))) * normal(
                40, d, d
            )
            S, T = S.to(dtype), (B @ S @ B.mT).to(dtype)
            assert bool((gaussian_divergence(S, T) >= 0).all())
            assert bool((gaussian_divergence(S, S) == 0).all())
            assert bool((divergence_slope(S, S) == 0).all())


@pytest.mark.parametrize("size", [0.0, 1e-3, 1.0])
def test_derivatives_of_near_and_distant_pairs(size: float) -> None:
    X, Y = normal(3, 4), normal(3, 3)
    S = X @ X.mT / 3
    T = S + size * Y @ Y.mT

    def f(a: Tensor, b: Tensor) -> Tensor:
        return gaussian_divergence(S + 0.5 * (a + a.mT), T + 0.5 * (b + b.mT))

    a, b = (torch.zeros(3, 3, dtype=S.dtype, requires_grad=True) for _ in range(2))
    assert torch.autograd.gradcheck(f, (a, b), check_forward_ad=True, atol=1e-8)
    assert torch.autograd.gradgradcheck(f, (a, b), atol=1e-7)

    def g(s: Tensor) -> Tensor:
        return gaussian_divergence(S + s * Y @ Y.mT, T + s * s * torch.eye(3, dtype=S.dtype))

    points = torch.tensor([0.1, 0.4], dtype=S.dtype)
    reverse = torch.stack([torch.autograd.functional.hessian(g, s) for s in points])
    torch.testing.assert_close(torch.func.vmap(torch.func.hessian(g))(points), reverse, rtol=1e-11, atol=0)
    forward = torch.stack([torch.func.jacfwd(torch.func.jacfwd(g))(s) for s in points])
    torch.testing.assert_close(forward, reverse, rtol=1e-11, atol=0)


def test_batch_is_the_loop() -> None:
    X = normal(3, 4)
    S = (X @ X.mT).expand(4, 3, 3)
    T = S + torch.tensor([0.0, 1e-6, 1e-1, 10.0], dtype=S.dtype)[:, None, None] * torch.eye(3, dtype=S.dtype)
    alone = torch.stack([gaussian_divergence(a, b) for a, b in zip(S, T, strict=True)])
    torch.testing.assert_close(gaussian_divergence(S, T), alone, rtol=1e-13, atol=0)
    torch.testing.assert_close(torch.func.vmap(gaussian_divergence)(S, T), alone, rtol=1e-13, atol=0)
