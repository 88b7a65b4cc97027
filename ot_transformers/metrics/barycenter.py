"""Bures-Wasserstein barycentres."""

from __future__ import annotations

import warnings
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ..arrays import (
    Array,
    ArrayLike,
    as_matrix,
    as_tensor,
    broadcast_batch,
    check_count,
    check_positive,
    check_psd,
    common_kind,
    readable,
    to_kind,
)
from ..errors import InvalidInput, NotConverged
from ..forward_mode import nested_jvp, to_front, tracked, underlying
from ..numerics.bures import align, bures_map_raw, covariance_factor
from ..numerics.bures_map import map_derivative
from ..spd import numerical_rank_psd, symmetrise

__all__ = ["Barycenter", "bures_barycenter", "bures_barycenter_result"]


@dataclass(frozen=True, eq=False)
class Barycenter:
    """Result of `bures_barycenter_result`.

    Attributes
    ----------
    value : array (..., d, d), the barycentre
    error : array (...), |sum_i w_i L_i O_i - L|_F / |L|_F at the end (0 at a fixed point)
    converged : array (...) of bool
    n_iter : int
    """

    value: Array
    error: Array
    converged: Array
    n_iter: int


def bures_barycenter(
    covs: ArrayLike, weights: ArrayLike | None = None, *, tol: float = 1e-12, max_iter: int = 1000
) -> Array:
    """Barycentre argmin_S sum_i w_i BW^2(S, S_i) of covariances (..., k, d, d); see `bures_barycenter_result`.

    Warns with `NotConverged` where the iteration stops before its tolerance.
    """
    result = bures_barycenter_result(covs, weights, tol=tol, max_iter=max_iter)
    if not bool(underlying(torch.as_tensor(result.converged)).all()):
        worst = float(underlying(torch.as_tensor(result.error)).max())
        warnings.warn(
            f"barycentre: relative change {worst:.2e} > tol {tol:.1e} after {result.n_iter} iterations",
            NotConverged,
            stacklevel=2,
        )
    return result.value


def bures_barycenter_result(
    covs: ArrayLike, weights: ArrayLike | None = None, *, tol: float = 1e-12, max_iter: int = 1000
) -> Barycenter:
    r"""Barycentre argmin_S sum_i w_i BW^2(S, S_i), with what the iteration reached.

    The fixed-point iteration of Alvarez-Esteban et al., S <- S^{-1/2} (sum_i w_i (S^{1/2} S_i S^{1/2})^{1/2})^2
    S^{-1/2}, written for factors: L <- sum_i w_i L_i O_i, with O_i aligning the factor of S_i to L. No
    inverse is taken, so that singular covariances work, and the scale does not matter.

    Parameters
    ----------
    covs : array (..., k, d, d)
        PSD, singular allowed; leading dimensions are batch dimensions.
    weights : array (..., k), optional
        Nonnegative, summing to 1. Default 1/k.
    tol : float
        Relative change of the factor at which to stop.
    max_iter : int

    Notes
    -----
    Differentiable to second order, in every mode, where the barycentre is regular: implicitly, through
    sum_i w_i T_i = I and conjugate gradients (third derivatives are not the right ones). At a singular
    barycentre there is no derivative; asking for one is an error.

    Raises
    ------
    InvalidInput
        Not PSD, wrong shapes, or weights that are negative or do not sum to 1.

    References
    ----------
    Alvarez-Esteban, del Barrio, Cuesta-Albertos, Matran, *A fixed-point approach to barycenters in
    Wasserstein space*, 2016.

    Examples
    --------
    >>> result = bures_barycenter_result([[[1.0]], [[9.0]]])
    >>> float(result.value[0, 0]), bool(result.converged)
    (4.0, True)
    """
    S, _ = as_matrix(covs, "covs", square=True)
    if S.ndim < 3:
        raise InvalidInput(f"covs must be (..., k, d, d), got shape {tuple(S.shape)}")
    check_psd(S, "covs")
    check_positive(tol, "tol")
    check_count(max_iter, "max_iter")
    w = barycenter_weights(S, weights)
    batch = broadcast_batch([S.shape[:-3], w.shape[:-1]], ["covs", "weights"])
    S = symmetrise(S).expand(*batch, *S.shape[-3:])
    w = w.expand(*batch, S.shape[-3])
    floor = max(tol, 8 * S.shape[-1] * torch.finfo(S.dtype).eps)
    value, error, steps = _FixedPoint.apply(S.detach(), w.detach(), floor, max_iter)  # type: ignore[no-untyped-call]
    if tracked(S) or tracked(w):
        value = _with_derivative(value, S, w)
    kind, n_iter = common_kind(covs, weights), int(underlying(steps).max())
    return Barycenter(to_kind(value, kind), to_kind(error, kind), to_kind(error <= floor, kind), n_iter)


class _FixedPoint(torch.autograd.Function):
    """Barycentre, relative change of its factor and number of iterations; no derivative."""

    @staticmethod
    def forward(S: Tensor, w: Tensor, floor: float, max_iter: int) -> tuple[Tensor, Tensor, Tensor]:
        factors, keep = covariance_factor(S), w[..., None, None]
        # Start from the linear mixture: its range holds those of all members.
        L = _aligned_sum(covariance_factor((keep * S).sum(-3)), factors, keep)
        error, n_iter = torch.full(S.shape[:-3], torch.inf, dtype=S.dtype, device=S.device), 0
        while n_iter < max_iter and bool((error > floor).any()):
            new = _aligned_sum(L, factors, keep)
            size = torch.linalg.matrix_norm(new)
            change = torch.linalg.matrix_norm(new - L) / torch.where(size > 0, size, 1.0)
            # A member that has converged stays as it is: a batch gives what the loop gives.
            going = error > floor
            L = torch.where(going[..., None, None], new, L)
            error, n_iter = torch.where(going, change, error), n_iter + 1
        return symmetrise(L @ L.mT), error, torch.tensor(n_iter)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        pass

    @staticmethod
    def vmap(
        info: Any, in_dims: tuple[Any, ...], S: Tensor, w: Tensor, floor: float, max_iter: int
    ) -> tuple[Any, tuple[int, int, None]]:
        S, w = to_front(info, in_dims[:2], S, w)
        return _FixedPoint.apply(S, w, floor, max_iter), (0, 0, None)  # type: ignore[no-untyped-call]


def _aligned_sum(L: Tensor, factors: Tensor, weights: Tensor) -> Tensor:
    """sum_i w_i L_i O_i, each factor aligned to L."""
    return (weights * align(L.unsqueeze(-3).expand_as(factors), factors)).sum(-3)


def barycenter_weights(S: Tensor, weights: ArrayLike | None) -> Tensor:
    """Weights (..., k) for covariances (..., k, d, d), checked; 1/k by default."""
    k = S.shape[-3]
    if weights is None:
        return torch.full((k,), 1.0 / k, dtype=S.dtype, device=S.device)
    w, _ = as_tensor(weights, "weights", min_ndim=1)
    if w.shape[-1] != k:
        raise InvalidInput(f"weights must be (..., {k}), got shape {tuple(w.shape)}")
    if w.device != S.device:
        raise InvalidInput(f"covs is on device {S.device}, weights on {w.device}: move one of them")
    if readable(w) and bool((w < 0).any()):
        raise InvalidInput(f"weights must be nonnegative; the smallest is {float(w.detach().min()):.6g}")
    gap = (w.detach().sum(-1) - 1).abs()
    if readable(w) and bool((gap > (1e-6 if w.dtype == torch.float64 else 1e-4)).any()):
        raise InvalidInput(f"weights must sum to 1; the sum is off by {float(gap.max()):.6g}")
    return (w / w.sum(-1, keepdim=True)).to(S.dtype)


def _with_derivative(value: Tensor, S: Tensor, w: Tensor) -> Tensor:
    """Attach the derivatives of the root of r(B; S, w) = sum_i w_i T(B -> S_i) - I, exact to second order.

    Two chord steps B <- B + J^{-1} r(B), J = -dr/dB frozen at the root: after k of them B(S, w) is right to order
    k in changes of S and w, for each multiplies the error by I - J^{-1} J(S, w), of order one.
    """
    base = value.detach()
    if bool((underlying(numerical_rank_psd(base)) < base.shape[-1]).any()):
        raise InvalidInput("covs: the barycentre is singular and has no derivative; detach covs and weights")
    B = base
    for _ in range(2):
        r = (w[..., None, None] * bures_map_raw(B.unsqueeze(-3).expand_as(S), S)).sum(-3)
        # Less its value, which is what the fixed-point iteration left: the barycentre is the same with derivatives.
        step: Tensor = _InverseHessian.apply(r - r.detach(), base, S.detach(), w.detach())  # type: ignore[no-untyped-call]
        B = B + step
    return B


class _InverseHessian(torch.autograd.Function):
    """J^{-1} g, linear in g alone; J is the Hessian of a convex function, so it is its own adjoint."""

    @staticmethod
    def forward(g: Tensor, base: Tensor, S: Tensor, w: Tensor) -> Tensor:
        center = base.unsqueeze(-3).expand_as(S)
        T = bures_map_raw(center, S)

        def J(Z: Tensor) -> Tensor:
            pushed = symmetrise(T @ Z.unsqueeze(-3) @ T)
            return (w[..., None, None] * map_derivative(center, T, pushed)).sum(-3)

        return _conjugate_gradients(J, symmetrise(g))

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        ctx.save_for_backward(*inputs[1:])
        ctx.save_for_forward(*inputs[1:])

    @staticmethod
    def vmap(info: Any, in_dims: tuple[Any, ...], *args: Tensor) -> tuple[Tensor, int]:
        return _InverseHessian.apply(*to_front(info, in_dims, *args)), 0  # type: ignore[no-untyped-call]

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Any) -> Any:
        return _InverseHessian.apply(grad_outputs[0], *ctx.saved_tensors), None, None, None  # type: ignore[no-untyped-call]

    @staticmethod
    @nested_jvp
    def jvp(ctx: Any, *tangents: Any) -> Any:
        return _InverseHessian.apply(tangents[0], *ctx.saved_tensors)  # type: ignore[no-untyped-call]


def _conjugate_gradients(J: Any, g: Tensor) -> Tensor:
    """Solve J z = g for symmetric matrices (..., d, d), members independent of one another."""
    d = g.shape[-1]
    z, r = torch.zeros_like(g), g
    p, rr = r, (r * r).sum((-2, -1))
    goal = (8 * torch.finfo(g.dtype).eps) ** 2 * rr
    for _ in range(2 * d * (d + 1)):
        if bool((rr <= goal).all()):
            break
        Jp = J(p)
        curvature = (p * Jp).sum((-2, -1))
        usable = (curvature > 0) & (rr > goal)
        alpha = torch.where(usable, rr / torch.where(usable, curvature, 1.0), 0.0)[..., None, None]
        z, r = z + alpha * p, r - alpha * Jp
        new = (r * r).sum((-2, -1))
        p = r + (new / torch.where(rr > 0, rr, 1.0))[..., None, None] * p
        rr = torch.where(usable, new, rr)
        if not bool(usable.any()):
            break
    return z
