"""Barycentres against closed forms, POT and their optimality condition."""

from __future__ import annotations

from typing import Any

import mpmath
import numpy as np
import ot
import pytest
import torch

from ot_transformers import bures_barycenter, bures_distance, bures_geodesic, bures_map
from ot_transformers.errors import InvalidInput, NotConverged
from ot_transformers.metrics import bures_barycenter_result

RNG = np.random.default_rng(7)
W = np.array([0.1, 0.2, 0.3, 0.4])


def spd(d: int, *batch: int) -> Any:
    X = RNG.normal(size=(*batch, d, d + 3))
    return X @ np.swapaxes(X, -1, -2) / d


@pytest.mark.parametrize("scale", [1e-7, 1e-12, 1.0, 1e7])
def test_twice_the_same_small_multiple_of_the_identity(scale: float) -> None:
    """Known fault: the barycentre of 1e-7 I twice is not 1e-7 I."""
    result = bures_barycenter_result([scale * np.eye(3)] * 2)
    np.testing.assert_allclose(result.value, scale * np.eye(3), rtol=1e-14, atol=1e-14 * scale)
    assert result.converged


def test_optimality_condition_and_pot() -> None:
    S = spd(4, 4)
    result = bures_barycenter_result(S, W)
    assert result.converged
    assert result.error <= 1e-12
    maps = bures_map(result.value, S)
    np.testing.assert_allclose(np.einsum("i,ijk->jk", W, maps), np.eye(4), rtol=0, atol=1e-10)
    _, theirs = ot.gaussian.bures_wasserstein_barycenter(
        np.zeros((4, 4)), S, weights=W, num_iter=500, eps=1e-13
    )
    np.testing.assert_allclose(result.value, theirs, rtol=0, atol=1e-10)


def test_of_two_matrices_is_on_their_geodesic() -> None:
    A, B = spd(3), spd(3)
    np.testing.assert_allclose(
        bures_barycenter([A, B], [0.3, 0.7]), bures_geodesic(A, B, 0.7), rtol=0, atol=1e-11
    )
    np.testing.assert_allclose(bures_barycenter([A, B], [1.0, 0.0]), A, rtol=0, atol=1e-12)


def test_of_commuting_matrices_is_the_mean_of_roots() -> None:
    a = RNG.uniform(0, 3, size=(4, 5))
    a[0, 0] = a[1, 1] = 0.0
    S = np.stack([np.diag(row) for row in a])
    np.testing.assert_allclose(bures_barycenter(S, W), np.diag((W @ np.sqrt(a)) ** 2), rtol=0, atol=1e-11)


def test_of_rank_deficient_matrices_is_no_worse_than_its_neighbours() -> None:
    L = RNG.normal(size=(3, 4, 2))
    S = L @ np.swapaxes(L, 1, 2)
    result = bures_barycenter_result(S)
    assert result.converged
    value = (bures_distance(result.value, S, squared=True)).mean()
    # On the range of the mixture, which is everything: no direction of descent, singular ones included.
    for _ in range(20):
        B = np.eye(4) + 1e-3 * RNG.normal(size=(4, 4))
        assert bures_distance(B @ result.value @ B.T, S, squared=True).mean() >= value - 1e-12


def test_batches_members_and_weights_are_independent() -> None:
    S = spd(3, 2, 4)
    w = RNG.dirichlet(np.ones(4), size=2)
    together = bures_barycenter_result(S, w)
    assert together.value.shape == (2, 3, 3)
    for i in range(2):
        alone = bures_barycenter_result(S[i], w[i])
        np.testing.assert_allclose(together.value[i], alone.value, rtol=0, atol=1e-14)
        assert together.error[i] == pytest.approx(alone.error, rel=1e-2)
    same = bures_barycenter(S[0], w)
    np.testing.assert_allclose(same[1], bures_barycenter(S[0], w[1]), rtol=0, atol=1e-13)


def test_stopping_early_is_said() -> None:
    with pytest.warns(NotConverged, match="relative change"):
        bures_barycenter(spd(3, 4), max_iter=2)
    result = bures_barycenter_result(spd(3, 4), max_iter=2)
    assert not result.converged
    assert result.error > 1e-12


def test_derivative_is_that_of_finite_differences() -> None:
    S = torch.from_numpy(spd(3, 3)).requires_grad_()
    w = torch.tensor([0.2, 0.3, 0.5], dtype=torch.float64, requires_grad=True)

    def f(covs: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        return bures_barycenter(0.5 * (covs + covs.mT), weights / weights.sum())

    assert torch.autograd.gradcheck(f, (S, w), atol=1e-7)
    # I_3 twice: repeated eigenvalues, and half of each tangent.
    eye = torch.eye(3, dtype=torch.float64).repeat(2, 1, 1).requires_grad_()
    (g,) = torch.autograd.grad(bures_barycenter(eye).diagonal().sum(), eye)
    torch.testing.assert_close(g, 0.5 * eye.detach(), rtol=1e-12, atol=1e-13)


def test_no_derivative_at_a_singular_barycentre_is_an_error() -> None:
    S = torch.diag(torch.tensor([1.0, 0.0], dtype=torch.float64)).repeat(2, 1, 1).requires_grad_()
    with pytest.raises(InvalidInput, match="covs"):
        bures_barycenter(S)
    np.testing.assert_allclose(bures_barycenter(S.detach()), S.detach()[0], atol=1e-14)


def exact_barycenter(S: list[mpmath.matrix], w: list[mpmath.mpf]) -> mpmath.matrix:
    """Fixed-point iteration S <- S^{-1/2} (sum_i w_i (S^{1/2} S_i S^{1/2})^{1/2})^2 S^{-1/2}, to working precision."""

    def power(A: mpmath.matrix, p: float) -> mpmath.matrix:
        values, Q = mpmath.eigsy(A)
        return Q * mpmath.diag([x**p for x in values]) * Q.T

    B = mpmath.eye(S[0].rows)
    while True:
        root, inverse = power(B, 0.5), power(B, -0.5)
        mean = mpmath.zeros(B.rows)
        for A, weight in zip(S, w, strict=True):
            mean += weight * power(root * A * root, 0.5)
        new = inverse * mean * mean * inverse
        if mpmath.norm(new - B) < mpmath.mpf(10) ** (4 - mpmath.mp.dps):
            return new
        B = new


def test_second_derivatives_in_every_mode_against_40_digits() -> None:
    rng = np.random.default_rng(3)
    X, E = rng.normal(size=(2, 3, 3, 3))
    S, E = X @ np.swapaxes(X, 1, 2) + np.eye(3), E + np.swapaxes(E, 1, 2)
    w, v = np.array([0.2, 0.3, 0.5]), np.array([0.3, -0.1, -0.2])
    with mpmath.workdps(40):
        h = mpmath.mpf(10) ** -9
        low, mid, high = (
            exact_barycenter(
                [
                    mpmath.matrix(a.tolist()) + t * mpmath.matrix(e.tolist())
                    for a, e in zip(S, E, strict=True)
                ],
                [mpmath.mpf(float(a)) + t * mpmath.mpf(float(b)) for a, b in zip(w, v, strict=True)],
            )
            for t in (-h, 0 * h, h)
        )
        first = np.array(((high - low) / (2 * h)).tolist(), dtype=float)
        second = np.array(((high - 2 * mid + low) / h**2).tolist(), dtype=float)
    Sx, Ex, wx, vx = (torch.from_numpy(a) for a in (S, E, w, v))

    def f(t: torch.Tensor) -> torch.Tensor:
        return bures_barycenter(Sx + t * Ex, wx + t * vx)

    zero, D = torch.zeros((), dtype=torch.float64), torch.func
    for slope in (D.jacrev(f)(zero), D.jacfwd(f)(zero)):
        np.testing.assert_allclose(slope, first, rtol=0, atol=1e-11)
    curvatures = (
        D.hessian(f)(zero),
        D.jacfwd(D.jacfwd(f))(zero),
        D.jacrev(D.jacrev(f))(zero),
        D.vmap(D.hessian(f))(zero.expand(2))[1],
        torch.stack(
            [torch.autograd.functional.hessian(lambda t, k=k: f(t).reshape(-1)[k], zero) for k in range(9)]
        ),
    )
    for curvature in curvatures:
        np.testing.assert_allclose(curvature.reshape(3, 3), second, rtol=0, atol=1e-9)


def test_second_derivative_of_variances() -> None:
    # B = (sum_i w_i s_i^{1/2})^2.
    def f(s: torch.Tensor) -> torch.Tensor:
        return bures_barycenter(s.reshape(2, 1, 1), [0.5, 0.5])[0, 0]

    s = torch.tensor([1.0, 4.0], dtype=torch.float64)
    truth = torch.tensor([[-0.25, 0.0625], [0.0625, -0.015625]], dtype=torch.float64)
    torch.testing.assert_close(torch.func.hessian(f)(s), truth, rtol=1e-13, atol=0)
    torch.testing.assert_close(torch.autograd.functional.hessian(f, s), truth, rtol=1e-13, atol=0)


def test_vmap_is_the_loop_and_says_the_same() -> None:
    S = torch.from_numpy(spd(3, 2, 4))
    w = torch.from_numpy(RNG.dirichlet(np.ones(4), size=2))
    together = torch.func.vmap(bures_barycenter)(S, w)
    torch.testing.assert_close(together, bures_barycenter(S, w), rtol=0, atol=0)
    with pytest.warns(NotConverged, match="relative change"):
        torch.func.vmap(lambda s: bures_barycenter(s, max_iter=2))(S)
    singular = torch.diag(torch.tensor([1.0, 0.0], dtype=torch.float64)).expand(2, 3, 2, 2)
    torch.testing.assert_close(
        torch.func.vmap(bures_barycenter)(singular), singular[:, 0], rtol=0, atol=1e-14
    )
    with pytest.raises(InvalidInput, match="no derivative"):
        torch.func.vmap(torch.func.jacrev(bures_barycenter))(singular)
