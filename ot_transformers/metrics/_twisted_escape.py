"""Ways to infinity in the twisted metric: where x^T A x < 0 the space is not complete.

Shifted by s e with e^T A e < 0, a cloud has G of order e^{s^2 e^T A e}: infinity is at a finite distance. There
everything costs nothing, also turning to another such direction, as long as the set {e : e^T A e < 0} connects
the two. So mu and nu are joined through infinity, by a way whose length bounds the distance from above.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from ..numerics.minimise import lbfgs
from ..numerics.paths import LogSpeed, Path, gauss

__all__ = ["Side", "Way", "through_infinity"]

_POINTS = 160
_DROP = 80.0
"""Where the squared speed has fallen by e^-80 the rest of a ray is below rounding."""


@dataclass(frozen=True, eq=False)
class Ray:
    """A straight way to infinity: log of its length, the flat direction (k,) and how far it matters."""

    log_length: float
    direction: Tensor
    reach: float


def rays_to_infinity(
    log_speed: LogSpeed,
    start: Tensor,
    lift: Callable[[Tensor], Tensor],
    A: Tensor,
    mean: Tensor,
    *,
    refine: bool,
) -> dict[int, Ray]:
    """The shortest rays found, one for each connected part of {e : e^T A e < 0}: {0: ...} or {+1: ..., -1: ...}.

    Parameters
    ----------
    log_speed : (points (q, k), velocities (q, k)) -> log of the squared speed (q,)
    start : Tensor (k,)
    lift : callable, a direction e (d,) -> the flat velocity (k,) that shifts the measure by e
    mean : Tensor (d,), one of the directions to try
    refine : bool
        Minimise over directions by L-BFGS from the best of those tried.
    """
    a, U = torch.linalg.eigh(A)
    k = int((a < -1e-12 * a.abs().max()).sum())
    if k == 0:
        return {}
    tries = [s * U[:, i] for i in range(k) for s in (1.0, -1.0)]
    if float(mean @ A @ mean) < 0 and A.shape[-1] > 1:
        tries += [mean / mean.norm(), -mean / mean.norm()]

    def length(e: Tensor) -> tuple[Tensor, float]:
        return _ray_length(log_speed, start, lift(e))

    best: dict[int, tuple[float, Tensor]] = {}
    for e in tries:
        part = 0 if k > 1 else (1 if float(e @ U[:, 0]) > 0 else -1)
        with torch.no_grad():
            value = float(length(e)[0])
        if value < best.get(part, (math.inf, e))[0]:
            best[part] = (value, e)
    found = {}
    for part, (value, e) in best.items():
        if refine and A.shape[-1] > 1:
            value, e = _refined(length, e, value)
        found[part] = Ray(value, lift(e), length(e)[1])
    return found


def _refined(
    length: Callable[[Tensor], tuple[Tensor, float]], e: Tensor, value: float
) -> tuple[float, Tensor]:
    def evaluate(batch: Tensor) -> tuple[Tensor, Tensor]:
        with torch.enable_grad():
            c = batch[0].detach().requires_grad_()
            log_length, _ = length(c / c.norm())
            if not bool(torch.isfinite(log_length)):
                return torch.full((1,), torch.inf, dtype=c.dtype), torch.zeros_like(batch)
            (g,) = torch.autograd.grad(log_length, c)
        return log_length.detach().reshape(1), g.reshape(1, -1)

    goal = torch.full((1,), 1e-7, dtype=e.dtype, device=e.device)
    out = lbfgs(evaluate, e.reshape(1, -1), scale=0.3, tolerance=goal, max_iter=30)
    found = out.y[0] / out.y[0].norm()
    return (float(out.value), found) if float(out.value) < value else (value, e)


def _ray_length(log_speed: LogSpeed, start: Tensor, v: Tensor) -> tuple[Tensor, float]:
    """log of int_0^inf of the speed along start + s v, and where the integrand has died; inf if it does not."""
    powers = 2.0 ** torch.arange(-8, 44, 0.25, dtype=start.dtype, device=start.device)
    with torch.no_grad():
        values = log_speed(start + powers.unsqueeze(-1) * v, v.expand(len(powers), -1))
        top = torch.cummax(values, 0).values
        dead = values < top - _DROP
        dead[-1] = bool(torch.isfinite(values[0])) and bool(dead[-1])
    if not bool(dead[-1]):
        return torch.full((), torch.inf, dtype=start.dtype, device=start.device), math.inf
    # From the first power after which all are dead.
    first = int((~dead).nonzero().max()) + 1
    reach = float(powers[first])
    x, w = gauss(_POINTS)
    s = torch.from_numpy(reach * x).to(start).unsqueeze(-1)
    log_w = torch.from_numpy(np.log(reach * w)).to(start)
    return torch.logsumexp(log_w + 0.5 * log_speed(start + s * v, v.expand(len(x), -1)), -1), reach


@dataclass(frozen=True, eq=False)
class Side:
    """A measure as a point of a flat space, for `through_infinity`.

    Attributes
    ----------
    log_speed, start, lift, mean : as in `rays_to_infinity`
    bend : callable (start (k,), end (k,)) -> a path that is not longer than the straight one, or None
    """

    log_speed: LogSpeed
    start: Tensor
    lift: Callable[[Tensor], Tensor]
    mean: Tensor
    bend: Callable[[Tensor, Tensor], Path] | None


@dataclass(frozen=True)
class Way:
    """log length of a way through infinity, and the relative error estimate of its two halves."""

    log_length: float
    error: float


def through_infinity(sides: tuple[Side, Side], A: Tensor, log_length: float) -> Way | None:
    """The shortest way found from one measure to infinity and back to the other.

    It is worked out only where it may be shorter than a path of that log length; None where there is none, or
    it is more than twice as long.
    """
    if bool((torch.linalg.eigvalsh(A) >= 0).all()):
        return None

    def rays(refine: bool) -> list[tuple[Ray, Ray]]:
        first, second = (
            rays_to_infinity(s.log_speed, s.start, s.lift, A, s.mean, refine=refine) for s in sides
        )
        return [(first[part], second[part]) for part in first.keys() & second.keys()]

    pairs = rays(refine=False)
    if not pairs or min(_together(*p) for p in pairs) > log_length + math.log(2.5):
        return None
    pairs = rays(refine=True)
    near = [p for p in pairs if _together(*p) < log_length + math.log(1.6)]
    if not near or sides[0].bend is None:
        return Way(min(_together(*p) for p in pairs), 0.0)
    return min((_bent_way(sides, p) for p in near), key=lambda way: way.log_length)


def _together(first: Ray, second: Ray) -> float:
    return float(np.logaddexp(first.log_length, second.log_length))


def _bent_way(sides: tuple[Side, Side], rays: tuple[Ray, Ray]) -> Way:
    logs, errors = [], []
    for side, ray in zip(sides, rays, strict=True):
        assert side.bend is not None
        path = side.bend(side.start, side.start + ray.reach * ray.direction)
        logs.append(min(path.log_length, ray.log_length))
        errors.append(min(path.error, 1.0))
    total = float(np.logaddexp(logs[0], logs[1]))
    return Way(total, sum(e * math.exp(g - total) for e, g in zip(errors, logs, strict=True)))
