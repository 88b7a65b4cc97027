"""Bures-Wasserstein barycentres."""

from __future__ import annotations

import warnings
from dataclasses import dataclass

import torch
from torch import Tensor

from ..arrays import (
    Array,
    ArrayLike,
    as_matrix,
    as_tensor,
    check_count,
    check_positive,
    check_psd,
    common_kind,
    readable,
    to_kind,
)
from ..errors import InvalidInput, NotConverged
from ..numerics.bures import align, bures_map_raw, covariance_factor
from ..spd import symmetrise

__all__ = ["Barycenter", "bures_barycenter", "bures_barycenter_result"]

_IMPLICIT_LIMIT = 24


@dataclass(frozen=True, eq=False)
class Barycenter:
    """Result of `bures_barycenter_result`.

    Attributes
    ----------
    value : array (d, d), the barycentre
    error : float, |sum_i w_i L_i O_i - L|_F / |L|_F at the end (0 at a fixed point)
    converged : bool
    n_iter : int
    """

    value: Array
    error: float
    converged: bool
    n_iter: int


def bures_barycenter(
    covs: ArrayLike, weights: ArrayLike | None = None, *, tol: float = 1e-12, max_iter: int = 1000
) -> Array:
    """Barycentre argmin_S sum_i w_i BW^2(S, S_i) of covariances (k, d, d); see `bures_barycenter_result`.

    Warns with `NotConverged` where the iteration stops before its tolerance.
    """
    result = bures_barycenter_result(covs, weights, tol=tol, max_iter=max_iter)
    if not result.converged:
        warnings.warn(
            f"barycentre: relative change {result.error:.2e} > tol {tol:.1e} after {result.n_iter} iterations",
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
    covs : array (k, d, d)
        PSD, singular allowed.
    weights : array (k,), optional
        Nonnegative, summing to 1. Default 1/k.
    tol : float
        Relative change of the factor at which to stop.
    max_iter : int

    Notes
    -----
    Differentiable once (implicitly, by one Newton step on sum_i w_i T_i = I) for d <= 24 and a regular
    barycentre; detached otherwise.

    Raises
    ------
    InvalidInput
        Not PSD, wrong shapes, or weights that are negative or do not sum to 1.

    References
    ----------
    Alvarez-Esteban, del Barrio, Cuesta-Albertos, Matran, *A fixed-point approach to barycenters in
    Wasserstein space*, 2016.
    """
    S, _ = as_matrix(covs, "covs", square=True)
    if S.ndim != 3:
        raise InvalidInput(f"covs must be (k, d, d), got shape {tuple(S.shape)}")
    check_psd(S, "covs")
    check_positive(tol, "tol")
    check_count(max_iter, "max_iter")
    w = _weights(S, weights)
    S = symmetrise(S)
    factors = covariance_factor(S.detach())
    keep = w.detach()[:, None, None]
    # Start from the largest member, turned to nothing: any factor of full width in the joint range will do.
    L = align_sum(covariance_factor(symmetrise((keep * S.detach()).sum(0))), factors, keep)
    error, n_iter = float("inf"), 0
    floor = 8 * S.shape[-1] * torch.finfo(S.dtype).eps
    while n_iter < max_iter and error > max(tol, floor):
        new = align_sum(L, factors, keep)
        size = float(torch.linalg.matrix_norm(new))
        error = float(torch.linalg.matrix_norm(new - L)) / size if size > 0 else 0.0
        L, n_iter = new, n_iter + 1
    value = symmetrise(L @ L.mT)
    if S.requires_grad or w.requires_grad:
        value = _implicit(value, S, w)
    return Barycenter(to_kind(value, common_kind(covs, weights)), error, error <= max(tol, floor), n_iter)


def align_sum(L: Tensor, factors: Tensor, weights: Tensor) -> Tensor:
    """sum_i w_i L_i O_i, each factor aligned to L."""
    return (weights * align(L.expand_as(factors), factors)).sum(0)


def _weights(S: Tensor, weights: ArrayLike | None) -> Tensor:
    if weights is None:
        return torch.full(S.shape[:1], 1.0 / S.shape[0], dtype=S.dtype, device=S.device)
    w, _ = as_tensor(weights, "weights")
    if w.shape != S.shape[:1]:
        raise InvalidInput(f"weights must be ({S.shape[0]},), got shape {tuple(w.shape)}")
    if readable(w) and bool((w < 0).any()):
        raise InvalidInput(f"weights must be nonnegative; the smallest is {float(w.detach().min()):.6g}")
    if readable(w) and abs(float(w.detach().sum()) - 1) > 1e-6:
        raise InvalidInput(f"weights must sum to 1; the sum is off by {abs(float(w.detach().sum()) - 1):.6g}")
    return (w / w.sum()).to(S.dtype)


def _implicit(value: Tensor, S: Tensor, w: Tensor) -> Tensor:
    """Attach the implicit derivative: one Newton step on sum_i w_i T(S -> S_i) = I from the solution."""
    d = value.shape[-1]
    if d > _IMPLICIT_LIMIT or int(torch.linalg.matrix_rank(value, hermitian=True)) < d:
        return value
    base = value.detach()

    def residual(Z: Tensor, covs: Tensor, weights: Tensor) -> Tensor:
        maps = bures_map_raw(symmetrise(Z).expand_as(covs), covs)
        return (weights[:, None, None] * maps).sum(0) - torch.eye(d, dtype=Z.dtype, device=Z.device)

    J = torch.autograd.functional.jacobian(lambda Z: residual(Z, S.detach(), w.detach()), base)
    J = J.reshape(d * d, d * d)
    # J acts on symmetric matrices; on skew ones it is 0, and there the identity makes it invertible.
    basis = torch.eye(d * d, dtype=J.dtype, device=J.device).reshape(d * d, d, d)
    skew = (0.5 * (basis - basis.mT)).reshape(d * d, d * d)
    r = residual(base, S, w).reshape(-1)
    step = torch.linalg.solve(J + skew, (r - r.detach()).unsqueeze(-1)).reshape(d, d)
    return base - symmetrise(step)
