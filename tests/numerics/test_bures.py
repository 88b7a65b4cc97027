"""Bures-Wasserstein numerics against 60-digit arithmetic, finite differences and each other."""

from __future__ import annotations

import mpmath
import numpy as np
import pytest
import torch
from torch import Tensor

from ot_transformers.numerics.bures import (
    align,
    bures_map_raw,
    bures_squared,
    bures_squared_factors,
    covariance_factor,
)
from ot_transformers.numerics.bures_nuclear import nuclear_norm
from ot_transformers.numerics.bures_polar import polar

RNG = np.random.default_rng(20)
EYE = torch.eye(3, dtype=torch.float64)


def spd(d: int, *batch: int, condition: float = 20.0) -> Tensor:
    Q = np.linalg.qr(RNG.normal(size=(*batch, d, d)))[0]
    w = np.exp(-np.log(condition) * np.linspace(0, 1, d))
    S = (Q * w) @ np.swapaxes(Q, -1, -2)
    return torch.from_numpy(0.5 * (S + np.swapaxes(S, -1, -2)))


def exact_squared(S0: Tensor, S1: Tensor) -> float:
    """BW^2 to 60 digits."""
    with mpmath.workdps(60):
        A, B = (mpmath.matrix(S.tolist()) for S in (S0, S1))
        w, Q = mpmath.eigsy(A)
        R = Q * mpmath.diag([mpmath.sqrt(max(x, 0)) for x in w]) * Q.T
        cross = mpmath.eigsy(R * B * R, eigvals_only=True)
        trace = sum(A[i, i] + B[i, i] for i in range(A.rows))
        return float(trace - 2 * sum(mpmath.sqrt(max(x, 0)) for x in cross))


PAIRS = {
    "random": lambda: (spd(5), spd(5)),
    "condition 1e8": lambda: (spd(5, condition=1e8), spd(5, condition=1e8)),
    "distance 1e-2": lambda: (lambda S: (S, S + 1e-2 * spd(5)))(spd(5)),
    "distance 1e-5": lambda: (lambda S: (S, S + 1e-5 * spd(5)))(spd(5)),
    "times 1 + 1e-8": lambda: (lambda S: (S, S * (1 + 1e-8)))(spd(5)),
    "times 1 + 1e-12": lambda: (lambda S: (S, S * (1 + 1e-12)))(spd(5)),
    "times 1 + 1e-8, condition 1e6": lambda: (lambda S: (S, S * (1 + 1e-8)))(spd(5, condition=1e6)),
}


@pytest.mark.parametrize("pair", PAIRS.values(), ids=PAIRS)
def test_squared_distance_keeps_its_digits_however_near(pair: object) -> None:
    S0, S1 = pair()  # type: ignore[operator]
    truth = exact_squared(S0, S1)
    condition = float(torch.linalg.cond(S0))
    # Far: d ulp of the traces. Near: d ulp cond(S0), relative.
    bound = 1e-14 * max(1.0, condition / 20)
    far = 1e-14 * float(S0.trace() + S1.trace()) / truth
    assert abs(float(bures_squared(S0, S1)) / truth - 1) < (far if truth > 1e-1 else bound)


def test_trace_form_loses_below_1e_7_and_this_one_does_not() -> None:
    """Known fault: the trace form has no digit left at S against S (1 + 1e-8)."""
    import ot

    S = spd(4)
    T = S * (1 + 1e-8)
    truth = exact_squared(S, T)
    zero = np.zeros((1, 4))
    theirs = ot.gaussian.bures_wasserstein_distance(zero, zero, S.numpy()[None], T.numpy()[None], paired=True)
    assert abs(float(np.ravel(theirs)[0]) ** 2 / truth - 1) > 1e-2
    assert abs(float(bures_squared(S, T)) / truth - 1) < 1e-12


def test_distance_of_a_matrix_to_itself_is_zero_with_a_finite_gradient() -> None:
    """Known fault: NaN, in the value or in the gradient."""
    for S in (EYE, spd(4), torch.zeros(3, 3, dtype=torch.float64), torch.diag(torch.tensor([1.0, 1.0, 0.0]))):
        S = S.double().clone().requires_grad_()
        value = bures_squared(S, S.detach())
        (g,) = torch.autograd.grad(value, S)
        assert value.item() == 0.0
        on_range = S.detach() @ g
        assert bool(torch.isfinite(g).all())
        assert float(on_range.abs().max()) < 1e-14
        factor = covariance_factor(S.detach())
        assert float(bures_squared_factors(factor, factor)) < 1e-24


def test_hessian_at_equality_is_that_of_scalars() -> None:
    # BW^2(s I, I) = d (s^(1/2) - 1)^2 has second derivative d / 2 at s = 1.
    def f(s: Tensor) -> Tensor:
        return bures_squared(s * EYE, EYE)

    one = torch.ones((), dtype=torch.float64)
    assert float(torch.autograd.functional.hessian(f, one)) == pytest.approx(1.5, rel=1e-14)


def test_derivatives_of_the_distance_are_those_of_finite_differences() -> None:
    a, b = (torch.from_numpy(RNG.normal(size=(2, 3, 3))).requires_grad_() for _ in range(2))

    def f(p: Tensor, q: Tensor) -> Tensor:
        return bures_squared(p @ p.mT, q @ q.mT)

    assert torch.autograd.gradcheck(f, (a, b), check_forward_ad=True)
    assert torch.autograd.gradgradcheck(f, (a, b))


def test_gradient_at_I3_and_repeated_eigenvalues() -> None:
    """Known fault: gradients by eigenvector differences are NaN where eigenvalues repeat."""
    S = EYE.clone().requires_grad_()
    (g,) = torch.autograd.grad(bures_squared(S, 4 * EYE), S)
    torch.testing.assert_close(g, -EYE, rtol=1e-14, atol=1e-15)  # I - T, T = 2 I
    R = torch.diag(torch.tensor([1.0, 1.0, 2.0], dtype=torch.float64)).requires_grad_()
    assert torch.autograd.gradcheck(lambda r: bures_squared(0.5 * (r + r.mT), 3 * EYE), (R,))
    (g,) = torch.autograd.grad(bures_squared_factors(R, 2 * EYE), R)
    torch.testing.assert_close(g, 2 * (R.detach() - 2 * EYE), rtol=1e-14, atol=1e-14)


def test_factor_derivatives_of_unequal_widths() -> None:
    p = torch.from_numpy(RNG.normal(size=(4, 3))).requires_grad_()
    q = torch.from_numpy(RNG.normal(size=(4, 2))).requires_grad_()
    assert torch.autograd.gradcheck(bures_squared_factors, (p, q), check_forward_ad=True)
    assert torch.autograd.gradgradcheck(bures_squared_factors, (p, q))


def test_function_transforms_agree_with_reverse_mode() -> None:
    A, B = spd(3), spd(3)

    def f(s: Tensor) -> Tensor:
        return bures_squared(A + s * s * EYE, B + s.exp() * A)

    points = torch.linspace(0.1, 1, 4, dtype=torch.float64)
    one = torch.ones((), dtype=torch.float64)

    def second(s: Tensor) -> Tensor:
        return torch.func.jvp(lambda u: torch.func.jvp(f, (u,), (one,))[1], (s,), (one,))[1]

    reverse = torch.stack([torch.autograd.functional.hessian(f, s) for s in points])
    torch.testing.assert_close(torch.func.vmap(second)(points), reverse, rtol=1e-11, atol=0)
    torch.testing.assert_close(torch.func.vmap(torch.func.hessian(f))(points), reverse, rtol=1e-11, atol=0)
    slope = torch.func.vmap(torch.func.grad(f))(points)
    numeric = torch.stack([(f(s + 1e-5) - f(s - 1e-5)) / 2e-5 for s in points])
    torch.testing.assert_close(slope, numeric, rtol=1e-8, atol=0)


@pytest.mark.parametrize("d", [1, 2, 4])
def test_map_sends_one_covariance_to_the_other_with_its_derivatives(d: int) -> None:
    S0, S1 = spd(d, 3, condition=1e4), spd(d, 3)
    T = bures_map_raw(S0, S1)
    torch.testing.assert_close(T @ S0 @ T, S1, rtol=0, atol=1e-12)
    assert float(torch.linalg.eigvalsh(T).min()) > 0
    a, b = (torch.from_numpy(RNG.normal(size=(d, d))).requires_grad_() for _ in range(2))

    def f(p: Tensor, q: Tensor) -> Tensor:
        eye = torch.eye(d, dtype=torch.float64)
        return bures_map_raw(p @ p.mT + eye, q @ q.mT + eye)

    assert torch.autograd.gradcheck(f, (a, b), check_forward_ad=True)
    assert torch.autograd.gradgradcheck(f, (a, b))


def test_map_of_a_singular_covariance_leaves_its_range() -> None:
    L = torch.from_numpy(RNG.normal(size=(5, 2)))
    M = spd(5)
    S0 = L @ L.mT
    S1 = M @ S0 @ M
    T = bures_map_raw(S0, S1)
    torch.testing.assert_close(T @ S0 @ T, S1, rtol=0, atol=1e-13)
    assert float(torch.linalg.eigvalsh(T).min()) > -1e-14
    batch = bures_map_raw(torch.stack([S0, M]), torch.stack([S1, S1]))
    torch.testing.assert_close(batch[0], T, rtol=0, atol=1e-13)
    torch.testing.assert_close(batch[1], bures_map_raw(M, S1), rtol=0, atol=1e-13)


def test_alignment_is_the_best_of_all_rotations() -> None:
    A, B = (torch.from_numpy(RNG.normal(size=(4, 3))) for _ in range(2))
    turned = align(A, B)
    torch.testing.assert_close(turned @ turned.mT, B @ B.mT, rtol=1e-13, atol=1e-13)
    cross = A.mT @ turned
    torch.testing.assert_close(cross, cross.mT, rtol=0, atol=1e-13)
    assert float(torch.linalg.eigvalsh(cross).min()) >= -1e-13


def test_polar_factor_is_differentiable_at_repeated_singular_values() -> None:
    M = (2 * EYE).clone().requires_grad_()
    assert torch.autograd.gradcheck(polar, (M,), check_forward_ad=True)
    assert torch.autograd.gradgradcheck(polar, (M,))


@pytest.mark.parametrize("d", [3, 5, 8])
def test_nuclear_norm_in_step_is_that_of_an_svd(d: int) -> None:
    n = 1600
    plain = RNG.normal(size=(n, d, d))
    graded = plain * np.exp(RNG.uniform(-20, 0, size=(n, 1, d)))
    low_rank = plain[:, :, :2] @ plain[:, :2]
    special = plain * (RNG.uniform(size=(n, d, d)) < 0.3)
    special[0], special[1], special[2] = 0.0, np.eye(d), 1e-200 * np.eye(d)
    special[3] = 1e200 * plain[3]
    for M in (plain, graded, low_rank, special):
        t = torch.from_numpy(M)
        truth = torch.linalg.svdvals(t).sum(-1)
        torch.testing.assert_close(nuclear_norm(t), truth, rtol=8e-15, atol=0)
    wide = torch.from_numpy(plain[:, :2])
    torch.testing.assert_close(nuclear_norm(wide), torch.linalg.svdvals(wide).sum(-1), rtol=8e-15, atol=0)


def test_batch_is_the_loop() -> None:
    """Known fault: a batch that differs from the loop; members of every kind in one batch."""
    L = torch.from_numpy(RNG.normal(size=(3, 2)))
    S0 = torch.stack([spd(3), spd(3), EYE, L @ L.mT, spd(3, condition=1e9), torch.zeros_like(EYE)])
    S1 = torch.stack([spd(3), S0[1] * (1 + 1e-9), EYE, 2 * L @ L.mT, spd(3), EYE])
    together = bures_squared(S0, S1)
    alone = torch.stack([bures_squared(a, b) for a, b in zip(S0, S1, strict=True)])
    torch.testing.assert_close(together, alone, rtol=1e-12, atol=0)
    assert float(together[5]) == pytest.approx(3.0, rel=1e-15)
    many = bures_squared(S0.repeat(300, 1, 1), S1.repeat(300, 1, 1)).reshape(300, 6)
    torch.testing.assert_close(many, together.expand(300, 6), rtol=1e-11, atol=1e-30)


def test_129_samples_in_dimension_128_in_single_precision() -> None:
    """Known fault: NaN from the square root of a nearly singular covariance in float32."""
    x, y = (torch.from_numpy(RNG.normal(size=(129, 128)).astype(np.float32)) for _ in range(2))
    S0, S1 = torch.cov(x.mT), torch.cov(y.mT)
    value = bures_squared(S0.requires_grad_(), S1)
    (g,) = torch.autograd.grad(value, S0)
    truth = bures_squared(S0.detach().double(), S1.double())
    assert bool(torch.isfinite(g).all())
    assert value.item() == pytest.approx(truth.item(), rel=1e-4)
