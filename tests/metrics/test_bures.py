"""Functions of covariances: references, closed forms, POT, and the identities of the geometry."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import ot
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from ot_transformers import (
    bures_distance,
    bures_exp,
    bures_geodesic,
    bures_log,
    bures_map,
)
from ot_transformers.errors import InvalidInput
from ot_transformers.metrics import bures_inner, bures_transport

RNG = np.random.default_rng(5)


def spd(d: int, *batch: int, rng: np.random.Generator = RNG) -> Any:
    X = rng.normal(size=(*batch, d, d + 3))
    return X @ np.swapaxes(X, -1, -2) / d


def sym(d: int, rng: np.random.Generator = RNG) -> Any:
    X = rng.normal(size=(d, d))
    return X + X.T


def test_reference_values(reference: Any) -> None:
    far, near = reference["bures_d3"], reference["bures_close"]
    shift = ((far["m0"] - far["m1"]) ** 2).sum()
    value = bures_distance(far["S0"], far["S1"], squared=True) + shift
    assert value == pytest.approx(far["squared"], rel=1e-12)
    close = bures_distance(near["S0"], near["S0"] * (1 + 1e-8), squared=True)
    # S0 (1 + 1e-8) in double precision is off by ulp / 1e-8, relative.
    assert close == pytest.approx(near["squared"], rel=5e-8)


def test_against_pot_on_well_separated_pairs() -> None:
    S0, S1 = spd(6, 20), spd(6, 20)
    zero = np.zeros((20, 6))
    theirs = ot.gaussian.bures_wasserstein_distance(zero, zero, S0, S1, paired=True)
    np.testing.assert_allclose(bures_distance(S0, S1), theirs, rtol=1e-12)
    np.testing.assert_allclose(bures_distance(S0, S1, squared=True), theirs**2, rtol=1e-12)
    maps = [
        ot.gaussian.bures_wasserstein_mapping(zero[0], zero[0], a, b)[0] for a, b in zip(S0, S1, strict=True)
    ]
    np.testing.assert_allclose(bures_map(S0, S1), maps, rtol=0, atol=1e-11)


def test_commuting_matrices_and_one_dimension() -> None:
    Q = np.linalg.qr(RNG.normal(size=(4, 4)))[0]
    a, b = RNG.uniform(0.1, 3, size=(2, 4))
    truth = np.linalg.norm(np.sqrt(a) - np.sqrt(b))
    assert bures_distance((Q * a) @ Q.T, (Q * b) @ Q.T) == pytest.approx(truth, rel=1e-13)
    assert bures_distance(9.0, 4.0) == pytest.approx(1.0, rel=1e-15)
    np.testing.assert_allclose(bures_map(9.0, 4.0), [[2 / 3]], rtol=1e-15)
    np.testing.assert_allclose(bures_geodesic(9.0, 4.0, 0.5), [[6.25]], rtol=1e-15)


def test_rank_below_d() -> None:
    """Known fault: NaN for covariances of rank < d. Two rank-one matrices: |a|^2 + |b|^2 - 2 |<a, b>|."""
    a, b = RNG.normal(size=(2, 5))
    truth = a @ a + b @ b - 2 * abs(a @ b)
    assert bures_distance(np.outer(a, a), np.outer(b, b), squared=True) == pytest.approx(truth, rel=1e-12)
    half = bures_geodesic(np.outer(a, a), np.outer(b, b), 0.5)
    c = 0.5 * (a + np.sign(a @ b) * b)
    np.testing.assert_allclose(half, np.outer(c, c), rtol=0, atol=1e-13)
    assert bures_distance(np.outer(a, a), np.zeros((5, 5))) == pytest.approx(np.linalg.norm(a), rel=1e-14)


def test_geodesic_cross_term_of_matrices_that_do_not_commute() -> None:
    """Known fault: t (1 - t) (S0 T + T S0) replaced by 2 (S0 S1)^{1/2} symmetrised, right if they commute alone."""
    S0, S1 = np.array([[2.0, 0.3], [0.3, 0.5]]), np.array([[0.7, -0.6], [-0.6, 1.5]])
    assert np.abs(S0 @ S1 - S1 @ S0).max() > 0.5
    T = bures_map(S0, S1)
    for t in (0.0, 0.3, 1.0):
        B = (1 - t) * np.eye(2) + t * T
        np.testing.assert_allclose(bures_geodesic(S0, S1, t), B @ S0 @ B, rtol=1e-13)


@pytest.mark.parametrize("singular", [False, True])
def test_geodesic_has_constant_speed(singular: bool) -> None:
    S0, S1 = spd(4), spd(4)
    if singular:
        L, M = RNG.normal(size=(2, 4, 2))
        S0, S1 = L @ L.T, M @ M.T
    length = bures_distance(S0, S1)
    times = np.array([0.0, 0.25, 0.7, 1.0])
    points = bures_geodesic(S0, S1, times)
    for i, s in enumerate(times):
        for j, t in enumerate(times):
            assert bures_distance(points[i], points[j]) == pytest.approx(
                abs(t - s) * length, rel=1e-7, abs=1e-7
            )
    np.testing.assert_allclose(points[[0, 3]], [S0, S1], rtol=0, atol=1e-13)


def test_exp_inverts_log_with_both_kinds_of_tangent() -> None:
    S0, S1 = spd(3, 2), spd(3, 2)
    X = bures_log(S0, S1)
    np.testing.assert_allclose(bures_exp(S0, X), S1, rtol=0, atol=1e-12)
    np.testing.assert_allclose(bures_exp(S0, cov_tangent=X @ S0 + S0 @ X), S1, rtol=0, atol=1e-12)
    np.testing.assert_allclose(bures_inner(S0, X, X), bures_distance(S0, S1, squared=True), rtol=1e-12)


def test_the_metric_is_the_second_derivative_of_the_squared_distance() -> None:
    S, X = torch.from_numpy(spd(3)), torch.from_numpy(sym(3))

    def f(t: torch.Tensor) -> torch.Tensor:
        return bures_distance(S, bures_exp(S, t * X), squared=True)

    zero = torch.zeros((), dtype=torch.float64)
    second = torch.autograd.functional.hessian(f, zero)
    assert second.item() == pytest.approx(2 * bures_inner(S, X, X).item(), rel=1e-12)


def test_parallel_transport_keeps_inner_products_and_inverts() -> None:
    S0, S1 = spd(3), spd(3)
    Y, Z = sym(3), sym(3)
    y, z = bures_transport(S0, S1, Y), bures_transport(S0, S1, Z)
    assert bures_inner(S1, y, z) == pytest.approx(bures_inner(S0, Y, Z), rel=1e-9)
    np.testing.assert_allclose(bures_transport(S1, S0, y), Y, rtol=0, atol=1e-8)
    # The velocity of a geodesic is parallel: it arrives as minus the log backwards.
    moved = bures_transport(S0, S1, bures_log(S0, S1))
    np.testing.assert_allclose(moved, -bures_log(S1, S0), rtol=0, atol=1e-8)


def test_parallel_transport_of_commuting_matrices_is_a_scaling() -> None:
    # Diagonal, so flat in the coordinates s = S^{1/2}: y s^{1/2} is constant, that is Y1 = Y0 (S0 / S1)^{1/2}.
    a, b, y = RNG.uniform(0.5, 2, size=(3, 4))
    moved = bures_transport(np.diag(a), np.diag(b), np.diag(y), tol=1e-12)
    np.testing.assert_allclose(moved, np.diag(y * np.sqrt(a / b)), rtol=0, atol=1e-12)


def test_parallel_transport_is_the_limit_of_schilds_ladder() -> None:
    # One rung: diagonal of the geodesic parallelogram; error O(h^2) after 1 / h rungs.
    S0, S1, Y = spd(2), spd(2), sym(2)
    truth = bures_transport(S0, S1, Y)

    def ladder(n: int) -> Any:
        points = bures_geodesic(S0, S1, np.linspace(0, 1, n + 1))
        eps = 1.0 / n
        V = eps * Y
        for A, B in itertools.pairwise(points):
            tip = bures_exp(A, V)
            middle = bures_geodesic(tip, B, 0.5)
            end = bures_exp(A, 2 * bures_log(A, middle))
            V = bures_log(B, end)
        return V / eps

    errors = [np.abs(ladder(n) - truth).max() for n in (20, 40, 80)]
    orders = np.log2(np.array(errors[:-1]) / errors[1:])
    assert np.all(orders > 0.9)
    assert np.abs(2 * ladder(80) - ladder(40) - truth).max() < 0.2 * errors[-1]


@settings(max_examples=20, deadline=None)
@given(st.integers(0, 2**31), st.integers(1, 4))
def test_metric_axioms_and_equivariance(seed: int, d: int) -> None:
    rng = np.random.default_rng(seed)
    A, B, C = spd(d, 3, rng=rng)
    Q = np.linalg.qr(rng.normal(size=(d, d)))[0]
    ab = bures_distance(A, B)
    assert ab == pytest.approx(bures_distance(B, A), rel=1e-10)
    assert ab <= (bures_distance(A, C) + bures_distance(C, B)) * (1 + 1e-12)
    assert bures_distance(Q @ A @ Q.T, Q @ B @ Q.T) == pytest.approx(ab, rel=1e-10)
    assert bures_distance(4 * A, 4 * B) == pytest.approx(2 * ab, rel=1e-12)
    assert bures_distance(A, A) == 0
    inverse = bures_map(B, A) @ bures_map(A, B)
    np.testing.assert_allclose(inverse, np.eye(d), rtol=0, atol=1e-14 * np.linalg.cond(A) * np.linalg.cond(B))


def test_numpy_torch_single_precision_and_batches_agree() -> None:
    S0, S1 = spd(3, 2, 1), spd(3, 4)
    value = bures_distance(S0, S1)
    assert isinstance(value, np.ndarray)
    assert isinstance(bures_distance(S0[0, 0], S1[0]), float)
    theirs = bures_distance(torch.from_numpy(S0), S1)
    np.testing.assert_array_equal(theirs.numpy(), value)
    loop = [[bures_distance(S0[i, 0], S1[j]) for j in range(4)] for i in range(2)]
    np.testing.assert_allclose(value, loop, rtol=1e-13)
    single = bures_distance(S0.astype(np.float32), S1.astype(np.float32))
    assert single.dtype == np.float32
    np.testing.assert_allclose(single, value, rtol=1e-5)


def test_callers_arrays_are_left_alone_and_not_shared() -> None:
    """Known fault: a caller's array changed in place."""
    S0, S1, X = spd(3), spd(3), sym(3)
    copies = [a.copy() for a in (S0, S1, X)]
    for a in (S0, S1, X):
        a.setflags(write=False)
    bures_distance(S0, S1), bures_map(S0, S1), bures_log(S0, S1), bures_transport(S0, S1, X)
    out = bures_exp(S0, np.zeros((3, 3)))
    out += 1
    bures_geodesic(S0, S1, 0.0)[:] = 7
    for a, b in zip((S0, S1, X), copies, strict=True):
        np.testing.assert_array_equal(a, b)


def test_gradients_of_the_public_functions() -> None:
    S0 = torch.from_numpy(spd(3)).requires_grad_()
    S1 = torch.from_numpy(spd(3)).requires_grad_()

    def even(S: torch.Tensor) -> torch.Tensor:
        return 0.5 * (S + S.mT)

    for f in (
        lambda a, b: bures_distance(even(a), even(b)),
        lambda a, b: bures_map(even(a), even(b)),
        lambda a, b: bures_geodesic(even(a), even(b), 0.3),
    ):
        assert torch.autograd.gradcheck(f, (S0, S1), atol=1e-6)
    small = [torch.from_numpy(spd(2)).requires_grad_() for _ in range(2)]
    Y = torch.diag(torch.tensor([1.0, -0.5], dtype=torch.float64))
    assert torch.autograd.gradcheck(
        lambda a, b: bures_transport(even(a), even(b), Y, tol=1e-5), small, atol=1e-6, fast_mode=True
    )
    same = S0.detach().requires_grad_()
    (g,) = torch.autograd.grad(bures_distance(same, S0.detach()), same)
    assert bool((g == 0).all())
    curve = torch.eye(3, dtype=torch.float64, requires_grad=True)
    (g,) = torch.autograd.grad(bures_geodesic(curve, 4 * curve.detach(), 0.5).sum(), curve)
    assert bool(torch.isfinite(g).all())


def test_function_transforms_of_the_geodesic_agree_with_reverse_mode() -> None:
    S0, S1, X = (torch.from_numpy(spd(3)) for _ in range(3))
    one = torch.ones((), dtype=torch.float64)

    def f(s: torch.Tensor) -> torch.Tensor:
        return bures_geodesic(S0 + s * s * X, S1 + s.exp() * X, 0.4)[0, 1]

    def second(s: torch.Tensor) -> torch.Tensor:
        return torch.func.jvp(lambda u: torch.func.jvp(f, (u,), (one,))[1], (s,), (one,))[1]

    points = torch.tensor([0.1, 0.7], dtype=torch.float64)
    reverse = torch.stack([torch.autograd.functional.hessian(f, s) for s in points])
    torch.testing.assert_close(torch.stack([second(s) for s in points]), reverse, rtol=1e-11, atol=0)
    torch.testing.assert_close(torch.func.vmap(second)(points), reverse, rtol=1e-11, atol=0)


def test_maps_and_transport_under_vmap_are_the_loop() -> None:
    S0, S1 = torch.from_numpy(spd(3, 4)), torch.from_numpy(spd(3, 4))
    X = S0 - S1
    moved = torch.func.vmap(bures_transport)(S0, S1, X)
    loop = torch.stack([bures_transport(*members) for members in zip(S0, S1, X, strict=True)])
    # Steps are shared: the loop's own error, 1e-10 relative.
    torch.testing.assert_close(moved, loop, rtol=0, atol=1e-9 * float(loop.abs().max()))
    half = torch.func.vmap(bures_transport, in_dims=(0, None, None))(S0, S1[0], X[0])
    torch.testing.assert_close(half[1], bures_transport(S0[1], S1[0], X[0]), rtol=0, atol=1e-9)
    # A singular member beside regular ones, and the map to it leaves its range.
    L = torch.from_numpy(RNG.normal(size=(3, 2)))
    S0[0] = L @ L.mT
    S1[0] = X[1] @ X[1] @ S0[0] @ X[1] @ X[1]
    T = torch.func.vmap(bures_map)(S0, S1)
    torch.testing.assert_close(T @ S0 @ T, S1, rtol=1e-9, atol=1e-9)
    torch.testing.assert_close(T, torch.stack([bures_map(a, b) for a, b in zip(S0, S1, strict=True)]))
    mid = torch.func.vmap(lambda a, b: bures_geodesic(a, b, 0.3))(S0, S1)
    torch.testing.assert_close(mid, bures_geodesic(S0, S1, 0.3), rtol=1e-9, atol=1e-9)
    slope = torch.func.vmap(torch.func.jacrev(bures_map))(S0[1:], S1[1:])
    torch.testing.assert_close(slope[0], torch.func.jacrev(bures_map)(S0[1], S1[1]))


def test_no_map_is_an_error_under_vmap_too() -> None:
    S0 = torch.stack([torch.eye(2), torch.diag(torch.tensor([1.0, 0.0]))]).double()
    with pytest.raises(InvalidInput, match="S0 is singular"):
        torch.func.vmap(lambda S: bures_map(S, torch.eye(2, dtype=torch.float64)))(S0)


@pytest.mark.parametrize("scale", [1e300, 1e-300])
def test_entries_whose_products_overflow(scale: float) -> None:
    A, B = spd(3), spd(3)
    root = np.sqrt(scale)
    np.testing.assert_allclose(bures_distance(scale * A, scale * B), root * bures_distance(A, B), rtol=1e-13)
    np.testing.assert_allclose(bures_map(scale * A, scale * B), bures_map(A, B), rtol=1e-11)
    np.testing.assert_allclose(bures_geodesic(scale * A, scale * B, 0.5), scale * bures_geodesic(A, B, 0.5))
    S = torch.from_numpy(scale * A).requires_grad_()
    (g,) = torch.autograd.grad(bures_distance(S, torch.from_numpy(scale * B), squared=True), S)
    np.testing.assert_allclose(g, np.eye(3) - bures_map(A, B), rtol=1e-11, atol=1e-12)
    assert bures_distance([[scale]], [[4 * scale]]) == pytest.approx(root, rel=1e-15)
