"""Geodesics of the twisted metric as solutions of their second-order equation."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from scipy.integrate import solve_ivp
from torch import Tensor

from .tilted import safe_log
from .twisted import raw_acceleration
from .twisted_gaussians import gaussian_acceleration

__all__ = [
    "Acceleration",
    "GeodesicRun",
    "cloud_acceleration",
    "follow_geodesic",
    "gaussian_factor_acceleration",
]

Acceleration = Callable[[Tensor, Tensor], Tensor]
"""(position, velocity) -> d2q/dt2, tensors of one shape."""


@dataclass(frozen=True, eq=False)
class GeodesicRun:
    """A geodesic followed from t = 0.

    Attributes
    ----------
    reached : float, 1 or the time at which it left every bounded set
    evaluations : int, accelerations evaluated
    """

    reached: float
    evaluations: int
    _end: np.ndarray[Any, Any]
    _dense: Any
    _like: Tensor

    def at(self, t: Any) -> tuple[Tensor, Tensor]:
        """Position and velocity at a time, or at times (T,) of a dense run, of the shape of the start."""
        flat = self._end if self._dense is None else self._dense(np.asarray(t, dtype=np.float64)).T
        y = torch.from_numpy(np.ascontiguousarray(flat)).to(self._like)
        y = y.reshape(*flat.shape[:-1], 2, *self._like.shape)
        axis = y.ndim - 1 - self._like.ndim
        return y.select(axis, 0), y.select(axis, 1)


def follow_geodesic(
    acceleration: Acceleration, q: Tensor, v: Tensor, *, rtol: float, dense: bool = False
) -> GeodesicRun:
    """Integrate d2q/dt2 = acceleration(q, dq/dt) over [0, 1] in float64 (DOP853).

    With `dense` the interpolant gives every time, else only the end is kept.
    """
    like = q.detach()
    q0, v0 = (t.detach().double().cpu() for t in (q, v))

    def slope(_: float, y: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
        p, u = torch.from_numpy(y).reshape(2, *q0.shape)
        return torch.cat([u.reshape(-1), acceleration(p, u).reshape(-1)]).numpy()

    start = torch.cat([q0.reshape(-1), v0.reshape(-1)]).numpy()
    size = max(float(np.abs(start).max()), 1e-300)
    with torch.no_grad(), np.errstate(over="ignore", invalid="ignore"), warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)
        run = solve_ivp(
            slope, (0.0, 1.0), start, method="DOP853", rtol=rtol, atol=1e-3 * rtol * size, max_step=0.25,
            dense_output=dense,
        )  # fmt: skip
    done = run.status == 0 and bool(np.isfinite(run.y).all())
    return GeodesicRun(1.0 if done else float(run.t[-1]), int(run.nfev), run.y[:, -1], run.sol, like)


def cloud_acceleration(shape: torch.Size, weights: Tensor, A: Tensor, D: Tensor) -> Acceleration:
    """The acceleration on clouds of a shape (n, d), in float64."""
    w, A, D = (t.detach().double().cpu() for t in (weights, A, D))
    log_w, Dinv, AD = safe_log(w), torch.linalg.inv(D), A @ D

    def acceleration(x: Tensor, v: Tensor) -> Tensor:
        x, v = x.reshape(shape), v.reshape(shape)
        P = torch.softmax(torch.addmm(log_w, x @ A, x.mT), -1)
        q = (v @ Dinv * v).sum(-1, keepdim=True)
        return raw_acceleration(x, v, A, AD, q, P, P @ x)

    return acceleration


def gaussian_factor_acceleration(A: Tensor, D: Tensor) -> Acceleration:
    """The acceleration on (mean, factor) side by side, (d, 1 + r), in float64."""
    A, D = (t.detach().double().cpu() for t in (A, D))
    Dinv = torch.linalg.inv(D)

    def acceleration(q: Tensor, v: Tensor) -> Tensor:
        return gaussian_acceleration(q, v, A, D, Dinv)

    return acceleration
