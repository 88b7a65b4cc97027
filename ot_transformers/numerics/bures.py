"""Bures-Wasserstein distances and couplings of covariances: raw, batched, singular matrices allowed.

Distant pairs go through factors S = L L^T. The optimal coupling of N(0, S0) and N(0, S1) aligns the factors by
an orthogonal matrix O (the transposed polar factor of L0^T L1): X0 = L0 z, X1 = L1 O z, and

    BW^2(S0, S1) = |L0 - L1 O|_F^2 = tr S0 + tr S1 - 2 |L0^T L1|_nuclear.

Near pairs of regular matrices go through their difference E = S1 - S0, which floating-point numbers hold
exactly: the map T = I + X solves S0 X + X S0 + X S0 X = E, and BW^2 = tr X S0 X has no cancellation.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ..arrays import check_psd
from ..forward_mode import nested_jvp, pair_jvp, to_front
from ..spd import eigh_psd, symmetrise
from .bures_batch import squared_in_step
from .bures_map import bures_map_raw, cholesky_regular
from .bures_nuclear import nuclear_norm
from .bures_polar import align
from .threads import few_threads

__all__ = [
    "align",
    "bures_map_raw",
    "bures_squared",
    "bures_squared_factors",
    "covariance_factor",
    "hypotenuse",
    "safe_sqrt",
]

_NEAR = 1e-2
"""Below this fraction of tr S0 + tr S1 the trace form has lost two digits: use another one."""
_SMALL = 0.25
"""Difference, relative to S0 in the metric of S0, below which the iteration for the map contracts well."""


def safe_sqrt(x: Tensor) -> Tensor:
    """sqrt(x) for x >= 0, with derivative 0 instead of infinite at 0."""
    positive = x > 0
    return torch.where(positive, torch.where(positive, x, 1.0).sqrt(), 0.0)


def hypotenuse(shift: Tensor, spread: Tensor) -> Tensor:
    """(|shift|^2 + spread)^{1/2} (...) of shift (..., d) and spread (...) >= 0; derivative 0 at 0.

    In units of the larger one, so that a shift of 1e160 does not overflow, nor one of 1e-200 vanish.
    """
    size = torch.maximum(shift.detach().abs().amax(-1), safe_sqrt(spread.detach()))
    positive = size > 0
    # A power of two: no digit changes.
    unit = torch.where(positive, torch.exp2(torch.log2(torch.where(positive, size, 1.0)).ceil()), 1.0)
    return unit * safe_sqrt((shift / unit.unsqueeze(-1)).square().sum(-1) + spread / unit / unit)


def covariance_factor(S: Tensor) -> Tensor:
    """A factor L (..., d, d), L L^T = S: Cholesky where S is safely regular, else the symmetric square root."""
    S = symmetrise(S)
    L, regular = cholesky_regular(S)
    if bool(regular.all()):
        return L
    if S.ndim == 2 or not bool(regular.any()):
        w, U = eigh_psd(S)
        return (U * w.sqrt().unsqueeze(-2)) @ U.mT
    out = L.clone()
    w, U = eigh_psd(S[~regular])
    out[~regular] = (U * w.sqrt().unsqueeze(-2)) @ U.mT
    return out


def bures_squared(S0: Tensor, S1: Tensor, names: tuple[str, str] | None = None) -> Tensor:
    """BW^2(S0, S1) (...) of PSD matrices, exactly 0 for equal ones.

    The derivative is <I - T01, dS0> + <I - T10, dS1> with T the optimal maps, so repeated eigenvalues and equal
    matrices are harmless; the maps are differentiable again. At singular matrices it is the derivative along
    the matrices of their rank (`bures_singular` says what holds off the range).
    With `names`, that the (symmetric) matrices are PSD is checked on the way, and an error names the argument.
    """
    batch = torch.broadcast_shapes(S0.shape[:-2], S1.shape[:-2])
    d = S0.shape[-1]
    with few_threads(8.0 * d**3):
        out: Tensor = _Distance.apply(S0.expand(*batch, d, d), S1.expand(*batch, d, d), names)  # type: ignore[no-untyped-call]
    return out


def bures_squared_factors(L0: Tensor, L1: Tensor) -> Tensor:
    """BW^2 of L0 L0^T and L1 L1^T, (...); derivative 2 <L0 - L1 O, dL0> + 2 <L1 - L0 O^T, dL1>."""
    batch = torch.broadcast_shapes(L0.shape[:-2], L1.shape[:-2])
    L0, L1 = L0.expand(*batch, *L0.shape[-2:]), L1.expand(*batch, *L1.shape[-2:])
    with few_threads(8.0 * L0.shape[-2] ** 2 * max(L0.shape[-1], L1.shape[-1])):
        out: Tensor = _FactorDistance.apply(L0, L1)  # type: ignore[no-untyped-call]
    return out


def _far(L0: Tensor, L1: Tensor) -> tuple[Tensor, Tensor]:
    """The trace form, and where it has lost digits."""
    total = L0.square().sum((-2, -1)) + L1.square().sum((-2, -1))
    far = total - 2.0 * nuclear_norm(L0.mT @ L1)
    return far, far <= _NEAR * total


def _procrustes(L0: Tensor, L1: Tensor) -> Tensor:
    return (_widened(L0, L1) - align(L0, L1)).square().sum((-2, -1))


def _widened(L: Tensor, other: Tensor) -> Tensor:
    """L with zero columns up to the width of the other factor."""
    return torch.nn.functional.pad(L, (0, max(0, other.shape[-1] - L.shape[-1])))


def _squared_of_factors(L0: Tensor, L1: Tensor) -> Tensor:
    value, near = _far(L0, L1)
    if not bool(near.any()):
        return value
    return value.masked_scatter(near, _procrustes(L0[near], L1[near]))


def _squared_of_covariances(S0: Tensor, S1: Tensor, names: tuple[str, str] | None) -> Tensor:
    fast = squared_in_step(S0, S1, _NEAR)
    if fast is not None and bool(fast[1].all()):
        return fast[0]
    rest = slice(None) if fast is None else ~fast[1]
    A, B = S0[rest], S1[rest]
    if names is not None:
        check_psd(A, names[0])
        check_psd(B, names[1])
    return _each(A, B) if fast is None else fast[0].masked_scatter(~fast[1], _each(A, B))


def _each(S0: Tensor, S1: Tensor) -> Tensor:
    """BW^2 by the form that suits each pair."""
    L0, L1 = covariance_factor(S0), covariance_factor(S1)
    value, near = _far(L0, L1)
    if not bool(near.any()):
        return value
    exact, good = _by_difference(S0[near], S1[near])
    if not bool(good.all()):
        exact = exact.masked_scatter(~good, _procrustes(L0[near][~good], L1[near][~good]))
        exact = torch.where((S0[near] == S1[near]).all(-1).all(-1), 0.0, exact)
    return value.masked_scatter(near, exact)


def _by_difference(S0: Tensor, S1: Tensor) -> tuple[Tensor, Tensor]:
    """BW^2 of near pairs (k, d, d) from E = S1 - S0, and where that is valid.

    In the eigenbasis of S0, X_ij = (E - X S0 X)_ij / (l_i + l_j), and BW^2 = sum_ij l_j X_ij^2.
    """
    # The error of an eigenvalue is d ulp |S0|: relative to a small one it is amplified, but by no difference.
    w, U = eigh_psd(S0)
    lowest, eps = w[..., :1], torch.finfo(w.dtype).eps
    pair = w.unsqueeze(-1) + w.unsqueeze(-2)
    inverse = torch.where(pair > 0, 1 / torch.where(pair > 0, pair, 1.0), 0.0)
    E = U.mT @ symmetrise(S1 - S0) @ U
    X = inverse * E
    good = (lowest[..., 0] > 64 * w.shape[-1] * eps * w[..., -1]) & (torch.linalg.matrix_norm(X) < _SMALL)
    X = torch.where(good[..., None, None], X, 0.0)
    E = torch.where(good[..., None, None], E, 0.0)
    for _ in range(60):
        new = inverse * (E - X @ (w.unsqueeze(-1) * X))
        settled = (new - X).abs().amax((-2, -1)) <= 4 * eps * new.abs().amax((-2, -1))
        X = new
        if bool(settled.all()):
            break
    return (w.unsqueeze(-2) * X.square()).sum((-2, -1)), good


class _Distance(torch.autograd.Function):
    @staticmethod
    def forward(S0: Tensor, S1: Tensor, names: tuple[str, str] | None) -> Tensor:
        return _squared_of_covariances(S0, S1, names)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        ctx.save_for_backward(*inputs[:2])
        ctx.save_for_forward(*inputs[:2])

    @staticmethod
    def vmap(info: Any, in_dims: tuple[Any, ...], S0: Tensor, S1: Tensor, names: Any) -> tuple[Tensor, int]:
        A, B = to_front(info, in_dims[:2], S0, S1)
        return bures_squared(A, B, names), 0

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Any) -> Any:
        S0, S1 = ctx.saved_tensors
        g = grad_outputs[0][..., None, None]
        first = g * _slope(S0, S1) if ctx.needs_input_grad[0] else None
        second = g * _slope(S1, S0) if ctx.needs_input_grad[1] else None
        return first, second, None

    @staticmethod
    @nested_jvp
    def jvp(ctx: Any, *tangents: Any) -> Any:
        return pair_jvp(_slope, ctx.saved_tensors, tangents)


def _slope(S0: Tensor, S1: Tensor) -> Tensor:
    """I - T, the derivative of BW^2 in S0."""
    return torch.eye(S0.shape[-1], dtype=S0.dtype, device=S0.device) - bures_map_raw(S0, S1)


class _FactorDistance(torch.autograd.Function):
    @staticmethod
    def forward(L0: Tensor, L1: Tensor) -> Tensor:
        return _squared_of_factors(L0, L1)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        ctx.save_for_backward(*inputs)
        ctx.save_for_forward(*inputs)

    @staticmethod
    def vmap(info: Any, in_dims: tuple[Any, ...], *args: Tensor) -> tuple[Tensor, int]:
        return bures_squared_factors(*to_front(info, in_dims, *args)), 0

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Any) -> Any:
        L0, L1 = ctx.saved_tensors
        g = 2.0 * grad_outputs[0][..., None, None]
        return g * _factor_slope(L0, L1), g * _factor_slope(L1, L0)

    @staticmethod
    @nested_jvp
    def jvp(ctx: Any, *tangents: Any) -> Any:
        return 2.0 * pair_jvp(_factor_slope, ctx.saved_tensors, tangents)


def _factor_slope(L0: Tensor, L1: Tensor) -> Tensor:
    return (_widened(L0, L1) - align(L0, L1))[..., : L0.shape[-1]]
