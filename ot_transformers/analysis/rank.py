"""Numerical rank of covariances and clouds, with the tolerance that it depends on."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from ..arrays import Array, as_matrix, check_nonnegative, check_symmetric, common_kind, to_kind
from ..errors import InvalidInput
from ..measures import Gaussian, Particles

__all__ = ["numerical_rank"]


def numerical_rank(measure: Any, tol: float | None = None, *, absolute: float | None = None) -> Array:
    """Count the directions in which a measure (or a covariance matrix) has extent.

    The rank of S = L L^T is the number of eigenvalues of S above a threshold:

    - default: rounding level. Through a factor, (max(d, r) ulp)^2 * lambda_max: a factor keeps the digits of
      small eigenvalues, so this is the exact rank up to rounding. From a covariance, d ulp * lambda_max.
      Of a cloud, also max(n, d) ulp * max |x|: its mean is known to that only, and so is a token's place.
    - `tol`: tol * lambda_max, invariant under scaling of the measure.
    - `absolute`: a fixed threshold, which is not: clusters at a small scale count as rank 0.

    Parameters
    ----------
    measure : Gaussian, Particles, or array (..., d, d) (a covariance)
    tol, absolute : float >= 0, at most one of them

    Returns
    -------
    integer array (...)

    Raises
    ------
    InvalidInput
        Both thresholds given, a negative one, or an array that is not a symmetric matrix.
    """
    if tol is not None and absolute is not None:
        raise InvalidInput("give tol or absolute, not both")
    if tol is not None:
        check_nonnegative(tol, "tol")
    if absolute is not None:
        check_nonnegative(absolute, "absolute")
    if isinstance(measure, Gaussian | Particles):
        gaussian = measure.to_gaussian() if isinstance(measure, Particles) else measure
        if absolute is None and isinstance(measure, Particles):
            return to_kind(_rank_of_cloud(measure, gaussian, tol), common_kind(measure))
        if absolute is None:
            return gaussian.rank(tol)
        if gaussian.has_factor:
            w = torch.linalg.svdvals(gaussian.factor_t.detach()).square()
        else:
            w = torch.linalg.eigvalsh(gaussian.cov_t.detach())
        return to_kind((w > absolute).sum(-1), common_kind(measure))
    S, kind = as_matrix(measure, "measure", square=True)
    check_symmetric(S, "measure")
    return to_kind(_rank_of_covariance(S.detach(), tol, absolute), kind)


def _rank_of_covariance(S: Tensor, tol: float | None, absolute: float | None) -> Tensor:
    w = torch.linalg.eigvalsh(0.5 * (S + S.mT))
    if absolute is not None:
        return (w > absolute).sum(-1)
    relative = S.shape[-1] * torch.finfo(S.dtype).eps if tol is None else tol
    return (w > relative * w.abs().amax(-1, keepdim=True)).sum(-1)


def _rank_of_cloud(cloud: Particles, gaussian: Gaussian, tol: float | None) -> Tensor:
    s = torch.linalg.svdvals(gaussian.factor_t.detach())
    rounding = max(cloud.n, cloud.dim) * torch.finfo(s.dtype).eps
    relative = rounding if tol is None else math.sqrt(tol)
    floor = rounding * cloud.x_t.detach().abs().amax((-2, -1)).unsqueeze(-1)
    return (s > torch.maximum(relative * s.amax(-1, keepdim=True), floor)).sum(-1)
