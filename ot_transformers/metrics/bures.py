"""The Bures-Wasserstein geometry of covariance matrices, as functions of matrices (..., d, d)."""

from __future__ import annotations

import warnings
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ..arrays import (
    Array,
    ArrayLike,
    Kind,
    as_matrix,
    as_tensor,
    broadcast_batch,
    check_positive,
    check_psd,
    check_symmetric,
    common_kind,
    readable,
    to_kind,
)
from ..errors import InvalidInput, NotConverged
from ..forward_mode import underlying
from ..numerics.bures import align, bures_map_raw, bures_squared, covariance_factor, safe_sqrt
from ..numerics.bures_transport import transport_along_map
from ..numerics.threads import few_threads
from ..spd import solve_lyapunov, symmetrise, transfer

__all__ = [
    "bures_distance",
    "bures_exp",
    "bures_geodesic",
    "bures_inner",
    "bures_log",
    "bures_map",
    "bures_transport",
]


def psd_pair(
    S0: ArrayLike, S1: ArrayLike, names: tuple[str, str] = ("S0", "S1")
) -> tuple[Tensor, Tensor, Kind]:
    """Validate two covariances and bring them to one dtype."""
    a, b, kind = _symmetric_pair(S0, S1, names)
    check_psd(a, names[0])
    check_psd(b, names[1])
    return a, b, kind


def _symmetric_pair(
    S0: ArrayLike, S1: ArrayLike, names: tuple[str, str] = ("S0", "S1")
) -> tuple[Tensor, Tensor, Kind]:
    """As `psd_pair`, without the check that they are PSD."""
    a, _ = as_matrix(S0, names[0], square=True)
    b, _ = as_matrix(S1, names[1], square=True)
    check_symmetric(a, names[0])
    check_symmetric(b, names[1])
    if a.shape[-1] != b.shape[-1]:
        raise InvalidInput(f"{names[0]} has dimension {a.shape[-1]}, {names[1]} has dimension {b.shape[-1]}")
    if a.device != b.device:
        raise InvalidInput(f"{names[0]} is on device {a.device}, {names[1]} on {b.device}: move one of them")
    broadcast_batch([a.shape[:-2], b.shape[:-2]], names)
    dtype = torch.promote_types(a.dtype, b.dtype)
    return a.to(dtype), b.to(dtype), common_kind(S0, S1)


def bures_distance(S0: ArrayLike, S1: ArrayLike, squared: bool = False) -> Array:
    r"""Bures-Wasserstein distance of covariances, BW^2 = tr S0 + tr S1 - 2 tr (S0^{1/2} S1 S0^{1/2})^{1/2}.

    Parameters
    ----------
    S0, S1 : array (..., d, d)
        PSD, singular allowed; batch dimensions broadcast.
    squared : bool
        Return BW^2 instead of BW.

    Returns
    -------
    array (...)

    Raises
    ------
    InvalidInput
        Not square, not symmetric, not PSD, or dimensions that do not match.

    Notes
    -----
    Distant pairs use the trace form. Near pairs of regular matrices use their difference: the relative error is
    d ulp cond(S0) however near they are, where the trace form loses everything below 1e-7. Near pairs of singular
    ones use |L0 - L1 O|_F over optimally aligned factors. Equal matrices give exactly 0. The derivative of BW at
    equal matrices is taken as 0; that of BW^2 is <I - T01, dS0> + <I - T10, dS1>, to any order. At a singular
    matrix it is the derivative along matrices of its rank; off its range BW^2 has one-sided slopes only, which are
    -infinity where the other matrix has mass that the map does not reach.

    References
    ----------
    Bhatia, Jain, Lim, *On the Bures-Wasserstein distance between positive definite matrices*, 2019.

    Examples
    --------
    >>> float(bures_distance([[1.0]], [[9.0]]))
    2.0
    """
    with few_threads(8.0 * (np.shape(S0) or (1,))[-1] ** 3):
        a, b, kind = _symmetric_pair(S0, S1)
        value = bures_squared(a, b, ("S0", "S1"))
        return to_kind(value if squared else safe_sqrt(value), kind)


def bures_map(S0: ArrayLike, S1: ArrayLike) -> Array:
    """The optimal map T from N(0, S0) to N(0, S1): T = T^T >= 0 with T S0 T = S1.

    Parameters
    ----------
    S0, S1 : array (..., d, d)
        PSD. Where S0 is singular, T is fixed on its range only; the T of least rank is given.

    Returns
    -------
    array (..., d, d)

    Raises
    ------
    InvalidInput
        Not PSD, or no map exists: S0 is singular and S1 is no image of it under a PSD matrix
        (|T S0 T - S1| > 1e-6 |S1|; transport then needs a coupling, see `bures_geodesic`).
    """
    a, b, kind = psd_pair(S0, S1)
    return to_kind(_checked_map(a, b), kind)


def _checked_map(a: Tensor, b: Tensor) -> Tensor:
    """The map, or the error that there is none."""
    T = bures_map_raw(a, b)
    if a.device.type == "meta":
        return T
    # In units of the largest entry, whose square may overflow. Under torch.vmap one error stands for all members.
    unit = b.detach().abs().amax((-2, -1), keepdim=True)
    unit = torch.where(unit > 0, unit, 1.0)
    gap = torch.linalg.matrix_norm((transfer(T, a) - b) / unit)
    size = torch.linalg.matrix_norm(b / unit)
    worst = float(underlying(gap / torch.where(size > 0, size, 1.0)).max())
    # A regular but ill-conditioned S0 leaves a residual of sqrt(ulp) at worst; a missing rank leaves one of order 1.
    if worst > (1e-6 if a.dtype == torch.float64 else 1e-2):
        raise InvalidInput(f"S0 is singular and no map sends it to S1: |T S0 T - S1| / |S1| = {worst:.2e}")
    return T


def bures_geodesic(S0: ArrayLike, S1: ArrayLike, t: ArrayLike) -> Array:
    r"""Point at t of the geodesic: S_t = L_t L_t^T, L_t = (1 - t) L0 + t L1 O, factors optimally aligned.

    For regular S0 this is ((1 - t) I + t T) S0 ((1 - t) I + t T). Through factors it holds for singular
    pairs too, where no map may exist.

    Parameters
    ----------
    S0, S1 : array (..., d, d)
    t : number, or array (k,) of times in [0, 1]

    Returns
    -------
    array (..., d, d) for a number t; (k, ..., d, d) for k times

    Raises
    ------
    InvalidInput
        t outside [0, 1], or matrices that are not PSD.
    """
    a, b, _ = psd_pair(S0, S1)
    times, _ = as_tensor(t, "t")
    if times.ndim > 1:
        raise InvalidInput(f"t must be a number or (k,), got shape {tuple(times.shape)}")
    if bool(((times < 0) | (times > 1)).any()):
        raise InvalidInput(
            f"t must lie in [0, 1], got values from {float(times.min()):g} to {float(times.max()):g}"
        )
    kind = common_kind(S0, S1, t)
    s = times.to(a).reshape(*times.shape, *([1] * max(a.ndim, b.ndim)))
    if not (readable(a) and readable(b)):
        # Under torch.vmap whether a matrix is singular cannot be asked; its map acts on the range.
        cross = symmetrise(bures_map_raw(a, b) @ a)
        return to_kind((1 - s) ** 2 * a + s**2 * b + 2 * s * (1 - s) * cross, kind)
    L0, L1 = covariance_factor(a), covariance_factor(b)
    L = (1 - s) * L0 + s * align(L0, L1)
    return to_kind(symmetrise(L @ L.mT), kind)


def bures_log(S0: ArrayLike, S1: ArrayLike) -> Array:
    """The map tangent T - I at S0 whose exponential is S1 (the velocity field of the geodesic at t = 0).

    The covariance tangent is (T - I) S0 + S0 (T - I).

    Raises
    ------
    InvalidInput
        As `bures_map`.
    """
    a, b, kind = psd_pair(S0, S1)
    T = _checked_map(a, b)
    return to_kind(T - torch.eye(T.shape[-1], dtype=T.dtype, device=T.device), kind)


def bures_exp(
    S: ArrayLike, map_tangent: ArrayLike | None = None, *, cov_tangent: ArrayLike | None = None
) -> Array:
    """The exponential (I + X) S (I + X) of a map tangent X, or of a covariance tangent X S + S X.

    Parameters
    ----------
    S : array (..., d, d)
    map_tangent : array (..., d, d), symmetric
    cov_tangent : array (..., d, d), symmetric; X then solves X S + S X = cov_tangent (S regular)

    Notes
    -----
    The curve t -> exp(t X) is minimising as long as I + t X is PSD.

    Raises
    ------
    InvalidInput
        Both or none of the tangents, or one that is not symmetric.
    """
    a, _ = as_matrix(S, "S", square=True)
    check_psd(a, "S")
    X, _ = _tangent(a, map_tangent, cov_tangent)
    eye = torch.eye(a.shape[-1], dtype=a.dtype, device=a.device)
    return to_kind(transfer(eye + X, symmetrise(a)), common_kind(S, map_tangent, cov_tangent))


def _tangent(S: Tensor, map_tangent: ArrayLike | None, cov_tangent: ArrayLike | None) -> tuple[Tensor, Kind]:
    if (map_tangent is None) == (cov_tangent is None):
        raise InvalidInput("give map_tangent or cov_tangent, one of them")
    name = "map_tangent" if cov_tangent is None else "cov_tangent"
    value: Any = map_tangent if cov_tangent is None else cov_tangent
    X, kind = as_matrix(value, name, square=True)
    check_symmetric(X, name)
    if X.shape[-1] != S.shape[-1]:
        raise InvalidInput(f"{name} has dimension {X.shape[-1]}, S has dimension {S.shape[-1]}")
    X = symmetrise(X.to(S.dtype))
    return (X if cov_tangent is None else solve_lyapunov(symmetrise(S), X)), kind


def bures_inner(S: ArrayLike, X: ArrayLike, Y: ArrayLike) -> Array:
    """The inner product tr(X S Y) of two map tangents at S, (...)."""
    a, _ = as_matrix(S, "S", square=True)
    check_psd(a, "S")
    x, _ = _tangent(a, X, None)
    y, _ = _tangent(a, Y, None)
    return to_kind((x @ a * y).sum((-2, -1)), common_kind(S, X, Y))


def bures_transport(S0: ArrayLike, S1: ArrayLike, map_tangent: ArrayLike, *, tol: float = 1e-10) -> Array:
    r"""Parallel transport of a map tangent along the geodesic from S0 to S1.

    With B = (1 - t) I + t T, S = B S0 B and W = (T - I) B^{-1} the velocity of the geodesic, the covariant
    derivative of the field x -> Y x is the projection of Y' + Y W on the symmetric maps in L^2(N(0, S)). It is 0 iff

        Y' S + S Y' = -(Y P + P^T Y),   P = W S = (T - I) S0 B,

    a linear equation that keeps inner products tr(Y S Z).

    Parameters
    ----------
    S0, S1 : array (..., d, d)
        S1 reached from S0 by a map (S0 regular, say).
    map_tangent : array (..., d, d), symmetric
    tol : float
        Relative error of the result. The Runge-Kutta method of order 4 is repeated with twice the steps until
        two results, extrapolated, agree to it.

    Returns
    -------
    array (..., d, d), the map tangent at S1

    Raises
    ------
    InvalidInput
        As `bures_map`; a tangent that is not symmetric.

    Warns
    -----
    NotConverged
        The tolerance was not reached with 4,096 steps.
    """
    a, b, _ = psd_pair(S0, S1)
    Y, _ = _tangent(a, map_tangent, None)
    check_positive(tol, "tol")
    broadcast_batch([a.shape[:-2], b.shape[:-2], Y.shape[:-2]], ["S0", "S1", "map_tangent"])
    T = _checked_map(a, b)
    moved, error = transport_along_map(a, T, Y, tol)
    if error > max(tol, 16 * torch.finfo(a.dtype).eps):
        warnings.warn(
            f"parallel transport: relative error {error:.1e} > tol {tol:.1e}", NotConverged, stacklevel=2
        )
    return to_kind(moved, common_kind(S0, S1, map_tangent))
