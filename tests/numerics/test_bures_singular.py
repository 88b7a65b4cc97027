"""Maps and derivatives at singular covariances: 60 digits along curves of fixed rank, factors, transforms."""

from __future__ import annotations

import mpmath
import numpy as np
import pytest
import torch
from torch import Tensor

from ot_transformers.numerics.bures import align, bures_map_raw, bures_squared
from ot_transformers.numerics.bures_singular import map_of_factor

RNG = np.random.default_rng(31)
SIZES = [(2, 1, 2), (4, 2, 4), (5, 3, 2), (5, 2, 2), (4, 1, 1)]
"""d, rank of S0, rank of S1."""


def normal(*shape: int) -> Tensor:
    return torch.from_numpy(RNG.normal(size=shape))


def exact_on_curve(L: Tensor, dL: Tensor, S1: Tensor, t: mpmath.mpf) -> mpmath.mpf:
    """BW^2((L + t dL)(L + t dL)^T, S1) = |L_t|^2 + tr S1 - 2 tr (L_t^T S1 L_t)^{1/2}."""
    X = mpmath.matrix(L.tolist()) + t * mpmath.matrix(dL.tolist())
    S = mpmath.matrix(S1.tolist())
    cross = mpmath.eigsy(X.T * S * X, eigvals_only=True)
    return (
        sum(x**2 for x in X)
        + sum(S[i, i] for i in range(S.rows))
        - 2 * sum(mpmath.sqrt(max(w, 0)) for w in cross)
    )


@pytest.mark.parametrize(("d", "r", "r1"), SIZES)
def test_derivatives_along_matrices_of_fixed_rank(d: int, r: int, r1: int) -> None:
    L, dL, L1 = normal(d, r), normal(d, r), normal(d, r1)
    S1 = L1 @ L1.mT

    def f(t: Tensor) -> Tensor:
        X = L + t * dL
        return bures_squared(X @ X.mT, S1)

    with mpmath.workdps(60):
        h = mpmath.mpf(10) ** -15
        low, mid, high = (exact_on_curve(L, dL, S1, t) for t in (-h, mpmath.mpf(0), h))
        first, second = float((high - low) / (2 * h)), float((high - 2 * mid + low) / h**2)
    zero = torch.zeros((), dtype=torch.float64)
    # S1 = L1 L1^T has rounding of 1 ulp off its range, of which exact arithmetic takes the root.
    slack = 1e-11 if r1 >= r else 1e-6
    assert float(torch.func.grad(f)(zero)) == pytest.approx(first, rel=slack, abs=slack)
    hessians = (
        torch.func.hessian(f)(zero),
        torch.func.jacfwd(torch.func.jacfwd(f))(zero),
        torch.func.vmap(torch.func.hessian(f))(zero.expand(2))[1],
    )
    for value in hessians:
        assert float(value) == pytest.approx(second, rel=100 * slack, abs=100 * slack)


@pytest.mark.parametrize(("d", "r"), [(2, 1), (4, 2), (5, 3)])
def test_where_a_map_exists_it_is_the_one_sided_derivative_too(d: int, r: int) -> None:
    L, M, E = normal(d, r), normal(d, d), normal(d, d)
    S0, M, E = L @ L.mT, M @ M.mT, E @ E.mT
    S1 = M @ S0 @ M
    T = bures_map_raw(S0, S1)
    torch.testing.assert_close(T @ S0 @ T, S1, rtol=1e-11, atol=1e-11)
    assert float(torch.linalg.eigvalsh(T).min()) > -1e-12
    slope = float(((torch.eye(d, dtype=T.dtype) - T) * E).sum())
    h = 1e-7
    quotient = float(bures_squared(S0 + h * E, S1) - bures_squared(S0, S1)) / h
    assert quotient == pytest.approx(slope, rel=1e-5)


def test_map_scales_to_entries_whose_products_overflow() -> None:
    for S0 in (normal(3, 3), normal(3, 2)):
        S0, S1 = S0 @ S0.mT, torch.eye(3, dtype=torch.float64)
        T = bures_map_raw(S0, S0 + 0.0 * S1)
        torch.testing.assert_close(
            bures_map_raw(1e290 * S0, 1e-290 * S0), 1e-290 * T, rtol=1e-11, atol=1e-301
        )


def test_map_of_a_factor_moves_it_to_its_partner() -> None:
    L0, L1 = normal(2, 5, 3), normal(5, 4)
    K = map_of_factor(L0, L1)
    torch.testing.assert_close(K, K.mT, rtol=0, atol=0)
    torch.testing.assert_close(K @ L0, align(L0, L1.expand(2, 5, 4))[..., :3], rtol=0, atol=1e-12)
    # Wide factors, and a rank below the width.
    wide = torch.cat([L0[0], L0[0]], -1) / 2**0.5
    torch.testing.assert_close(map_of_factor(wide, L1), K[0], rtol=0, atol=1e-12)
    # A graded factor: bounded, where the inverse of S0 on its range has entries of 1e20.
    graded = L0[0] * torch.tensor([1.0, 1e-5, 1e-10], dtype=torch.float64)
    torch.testing.assert_close(
        map_of_factor(graded, L1) @ graded, align(graded, L1)[..., :3], rtol=0, atol=1e-5
    )


def test_what_the_target_does_not_see_goes_to_what_is_left_of_it() -> None:
    e = torch.eye(4, dtype=torch.float64)
    L0 = torch.stack([e[0], 2 * e[1], 3 * e[2]], -1)
    L1 = torch.stack([5 * e[2], 7 * e[3]], -1)
    X1 = map_of_factor(L0, L1) @ L0
    torch.testing.assert_close(X1[:, 2], 5 * e[2], rtol=0, atol=1e-14)
    # The larger of the unseen directions e_1, 2 e_2 takes the 7 e_4 that is left.
    torch.testing.assert_close(X1[:, 1].abs(), 7 * e[3], rtol=0, atol=1e-14)
    torch.testing.assert_close(X1[:, 0], 0 * e[0], rtol=0, atol=1e-14)
