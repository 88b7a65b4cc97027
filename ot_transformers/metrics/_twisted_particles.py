"""The twisted metric on clouds: Hamiltonian geodesics and labelled shortest paths."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import torch
from scipy.integrate import solve_ivp
from scipy.optimize import NoConvergence, newton_krylov
from torch import Tensor

from ..errors import InvalidInput
from ..measures import Particles
from ..numerics.paths import Path, shortest_path
from ..numerics.tilted import log_interaction, safe_log
from ..numerics.twisted import geodesic_acceleration, kernel_at, log_speed

__all__ = ["cloud_exp", "cloud_path", "polygon_action", "refined_velocity"]

_SHOT = 1e-10
"""Miss at which shooting stops."""


def cloud_exp(
    x: Tensor, v: Tensor, weights: Tensor, A: Tensor, D: Tensor, rtol: float
) -> tuple[Tensor, float]:
    """Follow the geodesic from x with velocity v for unit time: the end (n, d) and the relative energy drift.

    In (x, v) the geodesic equation involves only normalised weights, so nothing overflows; the Hamiltonian
    H = g(v, v) / 2 is conserved and measures the error.
    """
    shape = x.shape
    Dinv = torch.linalg.inv(D)

    def rhs(_: float, y: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
        z = torch.from_numpy(y).to(x).reshape(2, *shape)
        a = geodesic_acceleration(z[0], z[1], A, D, kernel_at(z[0], weights, A))
        return torch.stack([z[1], a]).reshape(-1).double().cpu().numpy()

    y0 = torch.stack([x, v]).reshape(-1).double().cpu().numpy()
    size = max(float(np.abs(y0).max()), 1e-300)
    run = solve_ivp(rhs, (0.0, 1.0), y0, method="DOP853", rtol=rtol, atol=rtol * 1e-3 * size, max_step=0.25)
    if run.status != 0 or not np.all(np.isfinite(run.y[:, -1])):
        raise InvalidInput(
            f"tangent leads out of the space at t = {run.t[-1]:.4g} < 1: the twisted space is not complete "
            "(for A < 0 infinity is at a finite distance)"
        )
    z = torch.from_numpy(run.y[:, -1]).to(x).reshape(2, *shape)
    before = float(log_speed(x, v, weights, A, Dinv))
    after = float(log_speed(z[0], z[1], weights, A, Dinv))
    drift = 0.0 if before == -math.inf else abs(math.expm1(after - before))
    return z[0], drift


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
) -> Path:
    """Shortest path between labelled clouds (k, d)."""
    k, d = x.shape

    def speed(points: Tensor, slopes: Tensor) -> Tensor:
        return log_speed(points.reshape(-1, k, d), slopes.reshape(-1, k, d), weights, A, Dinv)

    with torch.no_grad():
        middle = 0.5 * (log_interaction(x, weights, A) + log_interaction(y, weights, A))
        half = -0.5 * (safe_log(weights) + middle)
        half = (half - half[torch.isfinite(half)].min()).clamp_max(20.0)
        unit = torch.exp(half)
        # Coordinates in which the metric is about one number times the identity, and the chord has length 1.
        size = float(((y - x).square().sum(-1) / unit.square()).sum().sqrt())
    spread = root.diagonal().abs()
    scale = (unit.unsqueeze(-1) * spread).reshape(-1) * max(size, 1e-300) / max(float(spread.mean()), 1e-300)
    return shortest_path(
        speed,
        x.reshape(-1),
        y.reshape(-1),
        scale=scale,
        tol=tol,
        degrees=degrees,
        guess=guess,
        polish=polish,
    )


def refined_velocity(a: Particles, v: Tensor, end: Tensor, A: Tensor, D: Tensor) -> Tensor:
    """Newton-Krylov on exp(v) = end, from a velocity that is nearly right."""
    x, w, goal = a.x_t.detach().double(), a.weights_t.detach().double(), end.double()

    def miss(z: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
        y, _ = cloud_exp(x, torch.from_numpy(z).reshape(x.shape), w, A, D, 1e-11)
        return (y - goal).reshape(-1).numpy()

    try:
        if float(np.abs(miss(v.double().reshape(-1).numpy())).max()) <= _SHOT:
            return v
        z = newton_krylov(miss, v.double().reshape(-1).numpy(), f_tol=_SHOT, maxiter=8)
    except (NoConvergence, InvalidInput):
        return v  # the velocity of the path, exact to about the square root of its length's error
    return torch.from_numpy(np.asarray(z)).reshape(x.shape).to(a.dtype)


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
