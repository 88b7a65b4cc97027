"""The twisted metric on clouds: Hamiltonian geodesics, shortest paths, matchings."""

from __future__ import annotations

import math
import warnings
from typing import Any

import numpy as np
import torch
from scipy import special
from scipy.integrate import solve_ivp
from scipy.optimize import linear_sum_assignment
from torch import Tensor

from ..errors import InvalidInput, NotConverged
from ..numerics.paths import Path, shortest_path
from ..numerics.tilted import log_interaction, safe_log
from ..numerics.transport import transport_plan
from ..numerics.twisted import geodesic_acceleration, kernel_at, log_speed

__all__ = ["cloud_exp", "cloud_path", "dirac_distance", "labelled"]

_SWAPS = 4
_SWAP_LIMIT = 256


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


def labelled(
    x: Tensor, wx: Tensor, y: Tensor, wy: Tensor, A: Tensor, Dinv: Tensor, matching: str
) -> tuple[Tensor, Tensor, Tensor, np.ndarray[Any, Any] | None]:
    """Two clouds as labelled pairs: points (k, d), points (k, d), weights (k,), permutation if it is one."""
    same = x.shape == y.shape and bool(torch.allclose(wx, wy, rtol=1e-12, atol=0.0))
    if matching == "identity":
        if not same:
            raise InvalidInput("matching 'identity' needs clouds of equal size and weights")
        return x, y, wx, np.arange(x.shape[0])
    uniform = x.shape == y.shape and bool((wx == wx[0]).all()) and bool((wy == wy[0]).all())
    if x.shape[-1] == 1 and uniform:
        # On the line particles never cross: the monotone matching is the only candidate.
        order = torch.empty_like(x[:, 0], dtype=torch.long)
        order[x[:, 0].argsort(stable=True)] = y[:, 0].argsort(stable=True)
        return x, y[order], wx, order.cpu().numpy()
    if uniform:
        _, columns = linear_sum_assignment(_chord_cost(x, wx, y, wy, A, Dinv))
        return x, y[torch.from_numpy(columns).to(y.device)], wx, columns
    # Masses differ: the pieces of the optimal W_2 plan are the particles that move.
    half = torch.linalg.cholesky(Dinv)
    plan = transport_plan(x @ half, wx, y @ half, wy, 2.0)
    return x[plan.rows], y[plan.cols], plan.mass / plan.mass.sum(), None


def _chord_cost(
    x: Tensor, wx: Tensor, y: Tensor, wy: Tensor, A: Tensor, Dinv: Tensor
) -> np.ndarray[Any, Any]:
    """|x_i - y_j|^2_{D^-1} times the geometric mean of G at the two ends, scaled to stay finite."""
    gap = x.unsqueeze(-2) - y.unsqueeze(-3)
    square = (gap @ Dinv * gap).sum(-1)
    half = 0.5 * (log_interaction(x, wx, A).unsqueeze(-1) + log_interaction(y, wy, A).unsqueeze(-2))
    return (square * torch.exp((half - half.max()).clamp_min(-600.0))).detach().double().cpu().numpy()


def cloud_path(
    x: Tensor,
    y: Tensor,
    weights: Tensor,
    A: Tensor,
    Dinv: Tensor,
    root: Tensor,
    tol: float,
    degrees: tuple[int, ...],
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
    return shortest_path(speed, x.reshape(-1), y.reshape(-1), scale=scale, tol=tol, degrees=degrees)


def improve_matching(
    path: Path, x: Tensor, y: Tensor, weights: Tensor, A: Tensor, Dinv: Tensor
) -> np.ndarray[Any, Any] | None:
    """A better permutation of equal-weight targets under the field G of the current path, if there is one.

    The cost of sending i to j is that of the straight line from x_i to y_j through the frozen field; the best
    exchange of all targets is a linear assignment. None where the identity is already best.
    """
    k, d = x.shape
    if k > _SWAP_LIMIT or k < 2:
        return None
    s, w = np.polynomial.legendre.leggauss(2)
    total = torch.zeros(k, k, dtype=x.dtype, device=x.device)
    shift = float(log_interaction(x, weights, A).max())
    for si, wi in zip(0.5 * (s + 1), 0.5 * w, strict=True):
        keys = (path.evaluate(float(si))[0].reshape(k, d) @ A).mT
        for i in range(k):  # one row of lines after another: k x k scores, in cache
            line = (1 - si) * x[i] + si * y
            total[i] += wi * (torch.exp((line @ keys - shift).clamp_max_(600.0)) @ weights)
    gap = x.unsqueeze(1) - y.unsqueeze(0)
    cost = (total * (gap @ Dinv * gap).sum(-1)).double().cpu().numpy()
    _, columns = linear_sum_assignment(cost)
    if cost[np.arange(k), columns].sum() >= np.trace(cost) * (1 - 1e-12):
        return None
    return columns


def matched_path(
    x: Tensor,
    wx: Tensor,
    y: Tensor,
    wy: Tensor,
    A: Tensor,
    Dinv: Tensor,
    root: Tensor,
    *,
    matching: str,
    tol: float,
    degrees: tuple[int, ...],
) -> tuple[Path, Tensor, Tensor, Tensor, dict[str, Any]]:
    """Path, both labelled clouds, weights and details; the matching improved by exchanges while they pay."""
    a, b, w, permutation = labelled(x, wx, y, wy, A, Dinv, matching)
    exchanges = 0
    if matching == "optimal" and permutation is not None and x.shape[-1] > 1 and a.shape[0] > 1:
        for _ in range(_SWAPS):
            rough = cloud_path(a, b, w, A, Dinv, root, 1e-3, (2, 4))
            better = improve_matching(rough, a, b, w, A, Dinv)
            if better is None:
                break
            trial = b[torch.from_numpy(better).to(b.device)]
            new = cloud_path(a, trial, w, A, Dinv, root, 1e-3, (2, 4))
            if new.log_length >= rough.log_length - 1e-9:
                break
            b, permutation, exchanges = trial, permutation[better], exchanges + 1
    path = cloud_path(a, b, w, A, Dinv, root, tol, degrees)
    details = {
        "matching": permutation,
        "exchanges": exchanges,
        "degrees": path.degrees,
        "log_length": path.log_length,
        "gradient": path.gradient,
    }
    if not path.converged:
        warnings.warn(
            f"twisted geodesic: relative error {path.error:.2e} > tol {tol:.1e} at degree {path.degrees[-1]}",
            NotConverged,
            stacklevel=4,
        )
    return path, a, b, w, details


def dirac_distance(a: float, D: float, x: float, y: float) -> float:
    """D^{-1/2} |int_x^y e^{a s^2 / 2} ds|: the distance of Dirac masses on the line, in closed form."""
    low, high = min(x, y), max(x, y)
    if low == high:
        return 0.0
    if abs(a) * (high - low) * max(abs(low), abs(high)) < 8.0 or a == 0:
        s, w = np.polynomial.legendre.leggauss(48)
        points = 0.5 * (high - low) * (s + 1) + low
        top = float(np.max(0.5 * a * points**2))
        value = 0.5 * (high - low) * float(w @ np.exp(0.5 * a * points**2 - top))
        log_value = math.log(value) + top
    elif a < 0:
        c = math.sqrt(-0.5 * a)
        if low * high > 0:
            # Both on one side: differences of erf lose the tail, those of erfc keep it.
            near, far = sorted((abs(low), abs(high)))
            tail = special.erfcx(c * near) - special.erfcx(c * far) * math.exp(c * c * (near**2 - far**2))
            log_value = math.log(0.5 * math.sqrt(math.pi) / c * tail) - (c * near) ** 2
        else:
            log_value = math.log(
                0.5 * math.sqrt(math.pi) / c * (special.erf(c * high) - special.erf(c * low))
            )
    else:
        c = math.sqrt(0.5 * a)
        top = c * c * max(low**2, high**2)

        def part(s: float) -> float:
            return float(special.dawsn(c * s) * math.exp(c * c * s * s - top))

        log_value = math.log((part(high) - part(low)) / c) + top
    log_value -= 0.5 * math.log(D)
    return math.exp(log_value) if log_value < 709.7 else math.inf
