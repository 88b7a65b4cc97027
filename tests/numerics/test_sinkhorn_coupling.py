"""The Gaussian coupling: reference values, its equation, quadrature, and derivatives at singular S."""

from __future__ import annotations

from typing import Any

import mpmath
import numpy as np
import pytest
import torch
from torch import Tensor

from ot_transformers.numerics.coupling import (
    coupling_covariance,
    coupling_covariance_of_factor,
    gaussian_self_transport,
    gaussian_transport,
    quadratic_potential,
)
from ot_transformers.numerics.sinkhorn import sinkhorn
from ot_transformers.spd import symmetrise


def problem(d: int, rank: int, seed: int = 0) -> tuple[Tensor, Tensor]:
    g = torch.Generator().manual_seed(seed)
    L = torch.randn(d, rank, generator=g, dtype=torch.float64)
    return L, torch.randn(d, d, generator=g, dtype=torch.float64)


@pytest.mark.parametrize("case", ["closure_d3", "closure_d4_singular_S_rank2_A_rank1"])
def test_reference_values(reference: Any, case: str) -> None:
    r = reference[case]
    S, A = torch.from_numpy(r["S"]), torch.from_numpy(r["A"])
    C = r["sinkhorn"]["C"]
    w, U = torch.linalg.eigh(S)
    factor = U * w.clamp_min(0).sqrt()
    for got in (coupling_covariance(S, A), coupling_covariance_of_factor(factor, A)):
        np.testing.assert_allclose(got.numpy(), C, rtol=1e-12, atol=1e-12 * np.abs(C).max())


def test_self_transport_reference_value(reference: Any) -> None:
    r = reference["self_ot_d3"]
    m, S, A = (torch.from_numpy(r[k]) for k in ("m", "S", "A"))
    value = gaussian_self_transport(S, A) - (m.mT @ A @ m).squeeze()
    assert float(value) == pytest.approx(r["value"], rel=1e-12)


@pytest.mark.parametrize("rank", [1, 2, 4, 7])
@pytest.mark.parametrize("scale", [1e-6, 1.0, 1e3])
def test_the_equation_and_the_factor_form(rank: int, scale: float) -> None:
    L, B = problem(4, rank)
    S, B = L @ L.mT, scale * B
    for C in (coupling_covariance(S, B), coupling_covariance_of_factor(L, B)):
        residual = C + C @ (B @ S @ B.mT) @ C - S
        assert float(residual.abs().max()) <= 1e-11 * float(S.abs().max()) * max(1.0, scale)


def test_small_coupling_loses_no_digits() -> None:
    """OT / eps = -w / 2 + O(w^2) for tiny w; 1 - h + log(h) / 2 has no digit left at w = 1e-17."""
    S, B = torch.eye(1).double(), torch.full((1, 1), 10**-8.5, dtype=torch.float64)
    w = float(B) ** 2
    assert float(gaussian_self_transport(S, B)) == pytest.approx(-w / 2, rel=1e-14)


def test_two_gaussians_against_quadrature() -> None:
    """Sinkhorn on Gauss-Hermite nodes (spectrally accurate), value, conditional variance and potential."""
    z, w = np.polynomial.hermite_e.hermegauss(50)
    z, w = torch.from_numpy(z)[:, None], torch.from_numpy(w / w.sum())
    s, t, A, eps = 0.8, 1.1, torch.full((1, 1), -0.9, dtype=torch.float64), 0.7
    r = sinkhorn(s * z, w, t * z, w, A, eps, tol=1e-12)
    S, T = torch.full((1, 1), s**2, dtype=torch.float64), torch.full((1, 1), t**2, dtype=torch.float64)
    assert float(eps * gaussian_transport(S, T, A / eps)) == pytest.approx(float(r.value), rel=1e-10)
    C = coupling_covariance(S, A / eps, T)
    slope = (C @ A / eps).squeeze()  # E[y | x] = C B x
    inner = (z.abs() < 3).squeeze()
    torch.testing.assert_close(r.mean_y[inner], slope * s * z[inner], rtol=0, atol=1e-9)
    N = A @ S @ A.mT / eps**2
    G = quadratic_potential(C, N)
    curve = r.g + 0.5 * eps * G.squeeze() * (t * z.squeeze()) ** 2
    torch.testing.assert_close(curve[inner], curve[inner].mean().expand(int(inner.sum())), rtol=0, atol=1e-8)


def test_singular_covariance_is_the_limit_of_regular_ones() -> None:
    L, B = problem(3, 2)
    S, P = L @ L.mT, torch.eye(3).double()
    C = coupling_covariance(S, B)
    gaps = [float((coupling_covariance(S + h * P, B) - C).abs().max()) for h in (1e-4, 1e-6)]
    assert gaps[1] < 0.02 * gaps[0]  # smooth in S: error of order h, and not h^(1/2)


@pytest.mark.parametrize("rank", [1, 3])
def test_derivatives_to_second_order(rank: int) -> None:
    L, B = problem(3, rank)
    P, _ = problem(3, 3, seed=1)
    P = P @ P.mT
    S = (L @ L.mT + (0.1 * P if rank == 3 else 0)).requires_grad_()
    B = B.requires_grad_()

    def covariance(S: Tensor, B: Tensor) -> Tensor:
        return coupling_covariance(symmetrise(S), B)

    def value(S: Tensor, B: Tensor) -> Tensor:
        return gaussian_transport(symmetrise(S), symmetrise(2 * S + P), B)

    if rank == 3:
        for function in (covariance, value):
            assert torch.autograd.gradcheck(function, (S, B), check_forward_ad=True)
            assert torch.autograd.gradgradcheck(function, (S, B))
    factor = L.requires_grad_()
    assert torch.autograd.gradcheck(coupling_covariance_of_factor, (factor, B), check_forward_ad=True)
    assert torch.autograd.gradgradcheck(coupling_covariance_of_factor, (factor, B))
    # A symmetric B has a route of its own, but also derivatives in directions that are not symmetric.
    even = (B + B.mT).detach().requires_grad_()
    assert torch.autograd.gradcheck(coupling_covariance_of_factor, (factor, even), check_forward_ad=True)
    assert torch.autograd.gradgradcheck(coupling_covariance_of_factor, (factor, even))


def test_derivatives_at_singular_S_leave_the_range_rightly() -> None:
    """S + t P with P of full rank: derivatives at t = 0+ against the Taylor coefficients of a fit in t."""
    L, B = problem(3, 1)
    P, _ = problem(3, 3, seed=1)
    S, P = L @ L.mT, P @ P.mT
    for function in (lambda S: coupling_covariance(S, B)[0, 1], lambda S: gaussian_self_transport(S, B)):
        t = torch.zeros((), dtype=torch.float64, requires_grad=True)
        (first,) = torch.autograd.grad(function(S + t * P), t, create_graph=True)
        (second,) = torch.autograd.grad(first, t)
        nodes = 2e-3 * (1 - np.cos(np.pi * np.arange(11) / 10)) / 2
        values = [float(function(S + s * P)) for s in nodes]
        fit = np.polynomial.Polynomial.fit(nodes, values, 8).convert()
        assert float(first.detach()) == pytest.approx(fit.coef[1], rel=1e-6)
        assert float(second) == pytest.approx(2 * fit.coef[2], rel=2e-2)


def test_batch_and_vmap_give_what_the_loop_gives() -> None:
    problems = [problem(3, k, seed=k) for k in (1, 2, 3)]
    S = torch.stack([L @ L.mT for L, _ in problems])
    B = torch.stack([B for _, B in problems])
    for C in (coupling_covariance(S, B), torch.func.vmap(coupling_covariance)(S, B)):
        for k in range(3):
            torch.testing.assert_close(C[k], coupling_covariance(S[k], B[k]), rtol=0, atol=1e-14)
    gradient = torch.func.vmap(torch.func.grad(gaussian_self_transport))(S, B)
    alone = torch.func.grad(gaussian_self_transport)(S[1], B[1])
    torch.testing.assert_close(gradient[1], alone, rtol=1e-12, atol=1e-13)


@pytest.mark.parametrize("symmetric", [True, False])
@pytest.mark.parametrize("stretch", [1e4, 1e8])
def test_stretched_covariances_keep_their_digits(stretch: float, symmetric: bool) -> None:
    """Against 60 digits. The eigenvalues of K K^T leave no digit of C where cond S is 1e16, singular values all."""
    rng = np.random.default_rng(0)
    L, B = rng.standard_normal((3, 3)) * [stretch, 1.0, 1e-3], rng.standard_normal((3, 3))
    B = B + B.T if symmetric else B
    with mpmath.workdps(60):
        l, b = mpmath.matrix(L.tolist()), mpmath.matrix(B.tolist())  # noqa: E741
        K = l.T * b * l
        w, Q = mpmath.eigsy(mpmath.eye(3) + 4 * K * K.T)
        half = Q * mpmath.diag([mpmath.sqrt(x) for x in w]) * Q.T
        exact = 2 * l * mpmath.inverse(mpmath.eye(3) + half) * l.T
        C = np.array(exact.tolist(), dtype=float)
    got = coupling_covariance_of_factor(torch.from_numpy(L), torch.from_numpy(B)).numpy()
    np.testing.assert_allclose(got, C, rtol=0, atol=1e-13 * np.abs(C).max())
