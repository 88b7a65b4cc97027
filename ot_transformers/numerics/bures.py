"""Bures-Wasserstein distance, maps and couplings of covariance factors: raw, batched, singular matrices allowed.

Everything goes through factors S = L L^T. The optimal coupling of N(0, S0) and N(0, S1) aligns the factors by
an orthogonal matrix O (the polar factor of L1^T L0): X0 = L0 z, X1 = L1 O z, and

    BW^2(S0, S1) = |L0 - L1 O|_F^2 = tr S0 + tr S1 - 2 |L0^T L1|_nuclear.

The first form has no cancellation; the second (singular values only) is faster and used for distant pairs.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch
from torch import Tensor

from ..spd import eigh_psd, sqrt_psd, symmetrise

__all__ = [
    "align",
    "bures_map_raw",
    "bures_squared",
    "bures_squared_factors",
    "covariance_factor",
    "safe_sqrt",
]

_NEAR = 1e-2
"""Below this fraction of tr S0 + tr S1 the trace form has lost two digits: use the Procrustes form."""


def safe_sqrt(x: Tensor) -> Tensor:
    """sqrt(x) for x >= 0, with derivative 0 instead of infinite at 0."""
    positive = x > 0
    return torch.where(positive, torch.where(positive, x, 1.0).sqrt(), 0.0)


def covariance_factor(S: Tensor) -> Tensor:
    """A factor L (..., d, d), L L^T = S: Cholesky where S is safely regular, else the symmetric square root."""
    L, regular = _cholesky(S)
    if bool(regular.all()):
        return L
    w, U = eigh_psd(S)
    return torch.where(regular[..., None, None], L, (U * w.sqrt().unsqueeze(-2)) @ U.mT)


def _cholesky(S: Tensor) -> tuple[Tensor, Tensor]:
    """Cholesky factor, and where its pivots are all above rounding of the largest diagonal entry."""
    L, info = torch.linalg.cholesky_ex(symmetrise(S))
    pivot = L.detach().diagonal(dim1=-2, dim2=-1).square()
    scale = S.detach().diagonal(dim1=-2, dim2=-1).amax(-1)
    floor = 16 * S.shape[-1] * torch.finfo(S.dtype).eps * scale
    # A NaN pivot (failed factorisation) compares False.
    return L, (info == 0) & (pivot > floor.unsqueeze(-1)).all(-1)


def align(L0: Tensor, L1: Tensor) -> Tensor:
    """The factor L1 O (..., d, r) nearest to L0 among those of S1: X0 = L0 z, X1 = L1 O z is optimal.

    Factors of different width are padded with zero columns; the result has the width of the wider one.
    """
    r = max(L0.shape[-1], L1.shape[-1])
    A = torch.nn.functional.pad(L0, (0, r - L0.shape[-1]))
    B = torch.nn.functional.pad(L1, (0, r - L1.shape[-1]))
    P, _, Qh = torch.linalg.svd(A.mT @ B)
    turned = B @ (Qh.mT @ P.mT)
    # Among nearly equal factors rounding in the polar factor of an ill-conditioned product can lose to O = I.
    worse = (A - turned).square().sum((-2, -1)) > (A - B).square().sum((-2, -1))
    return torch.where(worse[..., None, None], B, turned)


def bures_squared_factors(L0: Tensor, L1: Tensor) -> Tensor:
    """BW^2 of L0 L0^T and L1 L1^T, (...); derivative 2 <L0 - L1 O, dL0> + 2 <L1 O - L0, dL1 O>, first order."""
    batch = torch.broadcast_shapes(L0.shape[:-2], L1.shape[:-2])
    L0, L1 = L0.expand(*batch, *L0.shape[-2:]), L1.expand(*batch, *L1.shape[-2:])
    out: Tensor = _FactorDistance.apply(L0, L1)  # type: ignore[no-untyped-call]
    return out


def _squared(L0: Tensor, L1: Tensor) -> Tensor:
    """BW^2 by the cheaper form that keeps its digits."""
    total = L0.square().sum((-2, -1)) + L1.square().sum((-2, -1))
    far = total - 2.0 * _nuclear(L0.mT @ L1)
    near = far <= _NEAR * total
    if not bool(near.any()):
        return far
    shape = (*near.shape, *L0.shape[-2:]), (*near.shape, *L1.shape[-2:])
    A, B = L0.expand(shape[0])[near], L1.expand(shape[1])[near]
    width = max(A.shape[-1], B.shape[-1])
    turned = align(A, B)
    exact = (torch.nn.functional.pad(A, (0, width - A.shape[-1])) - turned).square().sum((-2, -1))
    out = far.clone()
    out[near] = exact
    return out


def _nuclear(M: Tensor) -> Tensor:
    """Sum of singular values.

    Where M is well conditioned the eigenvalues of M^T M give it in half the time: their error is
    d ulp lambda_max, that of the sum at most d ulp sigma_max (cond M) / 2 <= 160 d ulp sigma_max here.
    """
    r = min(M.shape[-2:])
    if r > 64 or M.shape[:-2].numel() < 64:
        return torch.linalg.svdvals(M).sum(-1)
    w = torch.linalg.eigvalsh(M.mT @ M if M.shape[-1] == r else M @ M.mT)
    total = w.clamp_min(0.0).sqrt().sum(-1)
    bad = w[..., 0] < 1e-5 * w[..., -1]
    if bool(bad.any()):
        total[bad] = torch.linalg.svdvals(M[bad]).sum(-1)
    return total


def _in_threads(function: Callable[[Tensor, Tensor], Tensor], a: Tensor, b: Tensor) -> Tensor:
    """Apply to large batches in parallel: LAPACK takes one small matrix after another, on one core."""
    count, threads = a.shape[:-2].numel(), torch.get_num_threads()
    if threads < 2 or a.device.type != "cpu" or count < 512 or a.shape[-1] > 64:
        return function(a, b)
    parts = (torch.chunk(t.reshape(-1, *t.shape[-2:]), threads) for t in (a, b))
    with ThreadPoolExecutor(threads) as pool:
        done = list(pool.map(function, *parts))
    return torch.cat(done).reshape(a.shape[:-2])


def _squared_of_covariances(S0: Tensor, S1: Tensor) -> Tensor:
    value = _squared(covariance_factor(S0), covariance_factor(S1))
    return torch.where((S0 == S1).all(-1).all(-1), torch.zeros_like(value), value)


class _FactorDistance(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, L0: Tensor, L1: Tensor) -> Tensor:
        ctx.save_for_backward(L0, L1)
        return _squared(L0, L1)

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Any) -> Any:
        L0, L1 = ctx.saved_tensors
        g = 2.0 * grad_outputs[0][..., None, None]
        r0, r1 = L0.shape[-1], L1.shape[-1]
        width = max(r0, r1)
        first = torch.nn.functional.pad(L0, (0, width - r0)) - align(L0, L1)
        second = torch.nn.functional.pad(L1, (0, width - r1)) - align(L1, L0)
        return g * first[..., :r0], g * second[..., :r1]


def bures_squared(S0: Tensor, S1: Tensor) -> Tensor:
    """BW^2(S0, S1) (...) of PSD matrices, exactly 0 for equal ones.

    The derivative is <I - T01, dS0> + <I - T10, dS1> with T the optimal maps (on the range, where a matrix is
    singular), so repeated eigenvalues and equal matrices are harmless; the maps are differentiable again.
    """
    batch = torch.broadcast_shapes(S0.shape[:-2], S1.shape[:-2])
    d = S0.shape[-1]
    A, B = S0.expand(*batch, d, d), S1.expand(*batch, d, d)
    if torch.autograd.forward_ad._current_level < 0:
        out: Tensor = _Distance.apply(A, B)  # type: ignore[no-untyped-call]
        return out
    # Nested forward mode does not carry outer tangents through saved inputs: derivatives from the trace form.
    R = sqrt_psd(A)
    trace = (A + B - 2.0 * sqrt_psd(symmetrise(R @ B @ R))).diagonal(dim1=-2, dim2=-1).sum(-1)
    return trace + (_squared_of_covariances(A.detach(), B.detach()) - trace.detach())


class _Distance(torch.autograd.Function):
    generate_vmap_rule = False

    @staticmethod
    def forward(S0: Tensor, S1: Tensor) -> Tensor:
        return _in_threads(_squared_of_covariances, S0, S1)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        ctx.save_for_backward(*inputs)

    @staticmethod
    def vmap(info: Any, in_dims: tuple[Any, ...], S0: Tensor, S1: Tensor) -> tuple[Tensor, int]:
        S0 = S0.unsqueeze(0) if in_dims[0] is None else S0.movedim(in_dims[0], 0)
        S1 = S1.unsqueeze(0) if in_dims[1] is None else S1.movedim(in_dims[1], 0)
        return bures_squared(S0, S1), 0

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Any) -> Any:
        S0, S1 = ctx.saved_tensors
        g = grad_outputs[0][..., None, None]
        eye = torch.eye(S0.shape[-1], dtype=S0.dtype, device=S0.device)
        first = g * (eye - bures_map_raw(S0, S1)) if ctx.needs_input_grad[0] else None
        second = g * (eye - bures_map_raw(S1, S0)) if ctx.needs_input_grad[1] else None
        return first, second


def bures_map_raw(S0: Tensor, S1: Tensor) -> Tensor:
    """The optimal map T = T^T >= 0 from N(0, S0) to N(0, S1): T S0 T = S1 (..., d, d).

    Where S0 is regular, T = C^{-T} (C^T S1 C)^{1/2} C^{-1} with the Cholesky factor C of S0. Where it is
    singular, T acts on the range of S0 and is 0 on its complement: T = R^+ (R S1 R)^{1/2} R^+, R = S0^{1/2}
    and R^+ its inverse on the range; mass of S1 outside what T can reach is not transported.
    """
    # The two branches are data-dependent; both are computed where a batch mixes them.
    C, regular = _cholesky(S0)
    everywhere, nowhere = bool(regular.all()), not bool(regular.any())
    if everywhere:
        return _regular_map(C, S1)
    w, U = eigh_psd(S0.detach())
    inverse = torch.where(w > 0, 1 / torch.where(w > 0, w, 1.0).sqrt(), 0.0)
    R, Rp = (U * w.sqrt().unsqueeze(-2)) @ U.mT, (U * inverse.unsqueeze(-2)) @ U.mT
    singular = symmetrise(Rp @ sqrt_psd(symmetrise(R @ S1 @ R)) @ Rp)
    if nowhere:
        return singular
    eye = torch.eye(S0.shape[-1], dtype=S0.dtype, device=S0.device)
    mask = regular[..., None, None]
    return torch.where(mask, _regular_map(torch.where(mask, C, eye), S1), singular)


def _regular_map(C: Tensor, S1: Tensor) -> Tensor:
    inner = sqrt_psd(symmetrise(C.mT @ S1 @ C))
    half = torch.linalg.solve_triangular(C.mT, inner, upper=True)
    return symmetrise(torch.linalg.solve_triangular(C.mT, half.mT, upper=True))
