"""The twisted metric on clouds: Hamiltonian geodesics and labelled shortest paths."""

from __future__ import annotations

import contextlib
import math
import warnings
from typing import Any

import numpy as np
import torch
from scipy.optimize import NoConvergence, newton_krylov
from torch import Tensor

from ..errors import InvalidInput, NotConverged
from ..measures import Particles
from ..numerics.paths import LogSpeed, Path, shortest_path
from ..numerics.polygons import Polygon, shortest_polygon
from ..numerics.tilted import log_interaction, safe_log
from ..numerics.twisted import log_speed
from ..numerics.twisted_flow import cloud_acceleration, follow_geodesic

__all__ = [
    "cloud_exp",
    "cloud_path",
    "cloud_polygon",
    "flat_speed",
    "path_scale",
    "polygon_action",
    "refined_velocity",
]

_SHOT = 1e-10
"""Miss at which shooting stops."""

_NEAR = 0.1
"""Miss, relative to the displacement, from which on shooting is not tried."""

_EVALUATIONS = 12_000
"""Accelerations that shooting may evaluate: a second or two."""


def cloud_exp(
    x: Tensor, v: Tensor, weights: Tensor, A: Tensor, D: Tensor, rtol: float
) -> tuple[Tensor, float, int]:
    """Follow the geodesic from x with velocity v for unit time.

    Returns the end (n, d), the relative drift of the energy and the number of accelerations evaluated. In (x, v)
    the geodesic equation involves only normalised weights, so nothing overflows; H = g(v, v) / 2 is conserved
    and measures the error.
    """
    run = follow_geodesic(cloud_acceleration(x.shape, weights, A, D), x, v, rtol=rtol)
    if run.reached < 1.0:
        raise InvalidInput(
            f"tangent leads out of the space at t = {run.reached:.4g} < 1: the twisted space is not complete "
            "(for A < 0 infinity is at a finite distance)"
        )
    end, slope = run.at(1.0)
    Dinv = torch.linalg.inv(D)
    before = float(log_speed(x, v, weights, A, Dinv))
    after = float(log_speed(end, slope, weights, A, Dinv))
    drift = 0.0 if before == -math.inf else abs(math.expm1(after - before))
    return end, drift, run.evaluations


def cloud_path(
    x: Tensor,
    y: Tensor,
    weights: Tensor,
    A: Tensor,
    Dinv: Tensor,
    root: Tensor,
    tol: float,
    degrees: tuple[int, ...],
    guess: Tensor | None = None,
    polish: float | None = None,
    max_iter: int = 400,
) -> Path:
    """Shortest path between labelled clouds (k, d); `max_iter` a degree."""
    return shortest_path(
        flat_speed(x.shape, weights, A, Dinv),
        x.reshape(-1),
        y.reshape(-1),
        scale=path_scale(x, y, weights, A, root),
        tol=tol,
        degrees=degrees,
        guess=guess,
        polish=polish,
        max_iter=max_iter,
    )


def cloud_polygon(
    path: Path,
    shape: torch.Size,
    weights: Tensor,
    A: Tensor,
    Dinv: Tensor,
    root: Tensor,
    tol: float,
    segments: int,
) -> Polygon:
    """Shortest polygon of that many segments between the ends of a path of labelled clouds of a shape (k, d)."""
    x, y = path.start.reshape(shape), path.end.reshape(shape)
    scale = path_scale(x, y, weights, A, root)
    speed = flat_speed(shape, weights, A, Dinv)
    return shortest_polygon(speed, path, scale=scale, tol=tol, segments=segments)


def flat_speed(shape: torch.Size, weights: Tensor, A: Tensor, Dinv: Tensor) -> LogSpeed:
    """Squared speeds of clouds of a shape (k, d) that are given as vectors."""
    return lambda points, slopes: log_speed(
        points.reshape(-1, *shape), slopes.reshape(-1, *shape), weights, A, Dinv
    )


def path_scale(x: Tensor, y: Tensor, weights: Tensor, A: Tensor, root: Tensor) -> Tensor:
    """Lengths of the coordinates (..., k d), from the weights and G at the ends x and y (..., k, d)."""
    with torch.no_grad():
        middle = 0.5 * (log_interaction(x, weights, A) + log_interaction(y, weights, A))
        half = -0.5 * (safe_log(weights) + middle)
        least = torch.where(torch.isfinite(half), half, torch.inf).amin(-1, keepdim=True)
        unit = torch.exp((half - least).clamp_max(20.0))
        # Coordinates in which the metric is about one number times the identity, and the chord has length 1.
        size = ((y - x).square().sum(-1) / unit.square()).sum(-1).sqrt().clamp_min(1e-300)
        spread = root.diagonal().abs()
        spread = spread / spread.mean().clamp_min(1e-300)
        return (unit.unsqueeze(-1) * spread).flatten(-2) * size.unsqueeze(-1)


def refined_velocity(a: Particles, v: Tensor, end: Tensor, A: Tensor, D: Tensor) -> Tensor:
    """Newton-Krylov on exp(v) = end, from a velocity that is nearly right; a warning says where it stopped."""
    x, w, goal = a.x_t.detach().double(), a.weights_t.detach().double(), end.double()
    start = v.double().reshape(-1).numpy()
    best, least, spent = start, math.inf, 0

    def miss(z: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
        nonlocal best, least, spent
        if spent > _EVALUATIONS:
            raise NoConvergence
        y, _, evaluations = cloud_exp(x, torch.from_numpy(z).reshape(x.shape), w, A, D, 1e-11)
        gap, spent = (y - goal).reshape(-1).numpy(), spent + evaluations
        if float(np.abs(gap).max()) < least:
            best, least = np.array(z), float(np.abs(gap).max())
        return gap

    # The velocity of the path is exact to about the square root of its length's error: good enough to end with.
    with contextlib.suppress(NoConvergence, InvalidInput):
        miss(start)
        # Newton's method is for velocities that are nearly right; from far off it only takes long.
        if _SHOT < least <= _NEAR * float((goal - x).abs().max()):
            newton_krylov(miss, start, f_tol=_SHOT, maxiter=8)
    if least > _SHOT * max(1.0, float(goal.abs().max())) * 1e2:
        text = f"misses its end by {least:.2e}" if least < math.inf else "leads out of the space"
        warnings.warn(f"twisted logarithm: the exponential of it {text}", NotConverged, stacklevel=4)
    return torch.from_numpy(best).reshape(x.shape).to(a.dtype)


def polygon_action(x: Tensor, w: Tensor, A: Tensor, Dinv: Tensor, n_quadrature: int) -> Tensor:
    """Action of the piecewise linear path through clouds (k + 1, n, d) at equal times."""
    s, quad = np.polynomial.legendre.leggauss(n_quadrature)
    k = x.shape[0] - 1
    step = x[1:] - x[:-1]
    total = x.new_zeros(())
    for si, wi in zip(0.5 * (s + 1), 0.5 * quad, strict=True):
        log_g = log_speed(x[:-1] + si * step, k * step, w, A, Dinv)
        total = total + wi * torch.exp(log_g).mean()
    return total
