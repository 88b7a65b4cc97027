"""Geodesics of the twisted metric as results: between clouds, and between Gaussians in the restricted metric."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ..arrays import Array, Kind, check_choice, check_count, to_kind
from ..errors import InvalidInput, NotConverged
from ..measures import Gaussian, Measure, Particles
from ..numerics.paths import Path
from ..numerics.polygons import Polygon
from ..numerics.twisted_gaussians import gaussian_log_speed
from . import _twisted_gaussians as gaussians
from ._displacement import check_time
from ._twisted_escape import Side, Way, through_infinity
from ._twisted_line import line_log_distance, line_point, line_velocity
from ._twisted_matching import Labels, matched_path
from ._twisted_particles import cloud_path, cloud_polygon, flat_speed
from .base import Geodesic

__all__ = [
    "Found",
    "between_clouds",
    "between_gaussians",
    "initial_velocity",
    "segment_count",
    "square_factor",
    "warn",
]


@dataclass(frozen=True, eq=False)
class Found:
    """A geodesic and what its length depends on: the path, and the pairs of particles or the end rotation."""

    geodesic: Geodesic
    path: Path | None
    labels: Labels | None = None


def between_clouds(
    a: Particles,
    b: Particles,
    A: Tensor,
    D: Tensor,
    *,
    tol: float,
    matching: str,
    degrees: tuple[int, ...],
    kind: Kind,
    polish: float | None = None,
    segments: int | None = None,
) -> Found:
    """Geodesic of two clouds: of polynomials, or of polygons where `segments` is given."""
    mu, nu = ((c.x_t.detach().double(), c.weights_t.detach().double()) for c in (a, b))
    if mu[0].shape == nu[0].shape and all(bool((p == q).all()) for p, q in zip(mu, nu, strict=True)):
        return Found(constant(a, kind), None)
    Dinv, root = torch.linalg.inv(D), torch.linalg.cholesky(D)
    line = a.n == 1 and b.n == 1 and a.dim == 1
    if line and segments is None:
        return Found(on_the_line(a, float(mu[0]), float(nu[0]), float(A), float(D), kind), None)
    rough, labels, exchanges = matched_path(mu, nu, A, Dinv, root, matching)
    x0, x1, w = mu[0][labels.rows], nu[0][labels.cols], labels.mass
    if bool((x0 == x1).all()):
        return Found(constant(a, kind), None)
    sides = _cloud_side(mu, A, Dinv, root), _cloud_side(nu, A, Dinv, root)
    # (On the line the way from x past y to infinity and back is never shorter than that to y.)
    way = None if line else through_infinity(sides, A, rough.log_length)
    path: Path | Polygon | None = None
    guess = rough.offsets
    if segments is not None:
        path = cloud_polygon(rough, x0.shape, w, A, Dinv, root, tol, segments)
    elif way is not None and way.log_length < rough.log_length + 1e-3:
        # The path may run off to infinity: high degrees only if it turns out to be the shorter one.
        path = cloud_path(x0, x1, w, A, Dinv, root, tol, tuple(n for n in degrees if n <= 16), guess, polish)
        guess = path.offsets
    if path is None or (isinstance(path, Path) and minimising(path, way) and not path.converged):
        path = cloud_path(x0, x1, w, A, Dinv, root, tol, degrees, guess, polish)
    speed = flat_speed(x0.shape, w, A, Dinv)
    uniform = labels.permutation and a.uniform
    weights = None if uniform else w.to(a.dtype)

    def at(t: float) -> Particles:
        time = check_time(t)
        points = path.evaluate(path.parameter(speed, time))[0].reshape(x0.shape)
        points = x1 if time == 1 else points
        return Particles.unchecked(points.to(a.dtype), weights, kind)

    details = {
        **_facts(path, way),
        "matching": labels.cols.cpu().numpy() if labels.permutation else None,
        "exchanges": exchanges,
        "initial_velocity": lambda: initial_velocity(path, speed).reshape(x0.shape).to(a.dtype),
        "end": x1.to(a.dtype),
    }
    found = _geodesic(path, way, at, details, a.dtype, kind)
    return Found(found, path if isinstance(path, Path) else None, labels)


def _cloud_side(cloud: tuple[Tensor, Tensor], A: Tensor, Dinv: Tensor, root: Tensor) -> Side:
    x, w = cloud
    n, d = x.shape

    def bend(start: Tensor, end: Tensor) -> Path:
        ends = start.reshape(n, d), end.reshape(n, d)
        # An upper bound all the same: few iterations, for this is half of the work where the way is not taken.
        return cloud_path(*ends, w, A, Dinv, root, 1e-6, (4, 8, 16), max_iter=100)

    return Side(
        flat_speed(x.shape, w, A, Dinv),
        x.reshape(-1),
        lambda e: e.expand(n, d).reshape(-1),
        w @ x,
        bend,
    )


def on_the_line(a: Particles, x: float, y: float, A: float, D: float, kind: Kind) -> Geodesic:
    """Dirac masses of R, in closed form."""
    log_length = line_log_distance(A, D, x, y)
    length = _exp(log_length)

    def at(t: float) -> Particles:
        point = line_point(A, D, x, y, check_time(t))
        return Particles.unchecked(torch.full((1, 1), point, dtype=a.dtype), None, kind)

    details = {
        "log_length": log_length,
        "closed_form": True,
        "matching": np.zeros(1, dtype=int),
        "exchanges": 0,
        "degrees": (),
        "through_infinity": None,
        "initial_velocity": lambda: torch.full((1, 1), line_velocity(A, D, x, y), dtype=a.dtype),
        "end": torch.full((1, 1), y, dtype=a.dtype),
    }
    error = 1e-14 * length if length < math.inf else math.inf
    return Geodesic(_number(length, a.dtype, kind), _number(error, a.dtype, kind), True, at, details)


def segment_count(method: str, segments: int, measure: Measure) -> int | None:
    """Segments of polygons, None for polynomials; the arguments checked."""
    check_choice(method, "method", ("polynomial", "segments"))
    check_count(segments, "segments", 8)
    if segments % 4:
        raise InvalidInput(f"segments must be a multiple of 4, got {segments}")
    if method == "segments" and isinstance(measure, Gaussian):
        raise InvalidInput("method 'segments' is for Particles, mu and nu are Gaussians")
    return segments if method == "segments" else None


def between_gaussians(
    a: Gaussian,
    b: Gaussian,
    A: Tensor,
    D: Tensor,
    *,
    tol: float,
    degrees: tuple[int, ...],
    kind: Kind,
    polish: float | None = None,
) -> Found:
    """Geodesic of two Gaussians in the restricted metric."""
    d = a.dim
    m0, m1 = a.mean_t.detach().double(), b.mean_t.detach().double()
    L0, L1 = (square_factor(g.factor_t.detach().double()) for g in (a, b))
    for m, L, name in ((m0, L0, "mu"), (m1, L1, "nu")):
        gaussians.check_domain(m, L, A, name)
    if bool((m0 == m1).all()) and bool((a.cov_t == b.cov_t).all()):
        return Found(constant(a, kind), None)
    Dinv = torch.linalg.inv(D)

    def speed(points: Tensor, slopes: Tensor) -> Tensor:
        log_g, inside = gaussian_log_speed(*gaussians.split(points, d), *gaussians.split(slopes, d), A, Dinv)
        return torch.where(inside, log_g, torch.inf)

    rough = gaussians.gaussian_path(m0, L0, m1, L1, A, Dinv, 1e-3, (4,))
    still = torch.zeros(d * d, dtype=torch.float64, device=A.device)
    sides = tuple(
        Side(speed, gaussians.join(m, L), lambda e: torch.cat([e, still]), m, None)
        for m, L in ((m0, L0), (m1, L1))
    )
    way = through_infinity((sides[0], sides[1]), A, rough.log_length)
    if way is not None and way.log_length < rough.log_length + 1e-3:
        degrees = tuple(n for n in degrees if n <= 16)
    path = gaussians.gaussian_path(m0, L0, m1, L1, A, Dinv, tol, degrees, polish)

    def at(t: float) -> Gaussian:
        m, L = gaussians.split(path.evaluate(path.parameter(speed, check_time(t)))[0], d)
        return Gaussian.unchecked(m.to(a.dtype), factor=L.to(a.dtype), kind=kind)

    details = {
        **_facts(path, way),
        "initial_velocity": lambda: initial_velocity(path, speed),
        "start": (m0, L0),
        "end": gaussians.split(path.end, d),
        "upper_bound": True,
    }
    return Found(_geodesic(path, way, at, details, a.dtype, kind), path)


_LOG_MAX = 709.0


def _exp(log_length: float) -> float:
    return math.exp(log_length) if log_length < _LOG_MAX else math.inf


def _number(value: float, dtype: torch.dtype, kind: Kind) -> Array:
    return to_kind(torch.tensor(value, dtype=dtype), kind)


def _facts(path: Path | Polygon, way: Way | None) -> dict[str, Any]:
    infinity = None
    if way is not None:
        infinity = _exp(way.log_length)
    drawn: dict[str, Any] = (
        {"degrees": path.degrees}
        if isinstance(path, Path)
        else {"segments": path.segments, "lengths": tuple(_exp(value) for value in path.log_lengths)}
    )
    return {
        **drawn,
        "log_length": path.log_length,
        "gradient": path.gradient,
        "relative_error": path.error,
        "through_infinity": infinity,
        "through_infinity_error": None if way is None else way.error,
    }


def _geodesic(
    path: Path | Polygon,
    way: Way | None,
    at: Callable[[float], Measure],
    details: dict[str, Any],
    dtype: Any,
    kind: Kind,
) -> Geodesic:
    length = _exp(path.log_length)
    error = (path.error + torch.finfo(dtype).eps) * length
    details["minimising"] = shortest = minimising(path, way)
    return Geodesic(
        _number(length, dtype, kind), _number(error, dtype, kind), path.converged and shortest, at, details
    )


def minimising(path: Path | Polygon, way: Way | None) -> bool:
    """Whether a path is shorter than the way through infinity."""
    return way is None or way.log_length > path.log_length + 1e-5


def warn(geodesic: Geodesic, tol: float, *, of_distance: bool, stacklevel: int) -> None:
    """Say what is wrong with a geodesic, or with the distance taken from it."""
    facts = geodesic.details
    if facts.get("minimising", True):
        if not geodesic.converged:
            last = (
                f"degree {facts['degrees'][-1]}"
                if "degrees" in facts
                else f"{facts['segments'][-1]} segments"
            )
            text = f"relative error {facts['relative_error']:.2e} > tol {tol:.1e} at {last}"
            warnings.warn(f"twisted geodesic: {text}", NotConverged, stacklevel=stacklevel + 1)
    elif not of_distance:
        text = f"the way through infinity, of length {facts['through_infinity']:.8g}, is shorter"
        warnings.warn(f"twisted geodesic: no shortest path; {text}", NotConverged, stacklevel=stacklevel + 1)
    elif facts["through_infinity_error"] > max(tol, 1e-6):
        text = f"the shortest way runs through infinity, its error is {facts['through_infinity_error']:.1e} relative"
        warnings.warn(f"twisted distance: {text}", NotConverged, stacklevel=stacklevel + 1)


def constant(a: Gaussian | Particles, kind: Kind) -> Geodesic:
    """The geodesic from a measure to itself."""
    shape = a.x_t.shape if isinstance(a, Particles) else (a.dim * (1 + a.dim),)
    zero = torch.zeros(shape, dtype=a.dtype)
    details: dict[str, Any] = {
        "initial_velocity": lambda: zero,
        "log_length": -math.inf,
        "degrees": (),
        "through_infinity": None,
    }
    if isinstance(a, Particles):
        details.update(matching=np.arange(a.n), exchanges=0, end=a.x_t.detach())
    if isinstance(a, Gaussian):
        mean, factor = a.mean_t.detach().double(), a.factor_t.detach().double()
        details["start"] = details["end"] = (mean, square_factor(factor))
    rest = _number(0.0, a.dtype, kind)

    def at(t: float) -> Measure:
        check_time(t)
        return a

    return Geodesic(rest, rest, True, at, details)


def initial_velocity(path: Any, speed: Any) -> Tensor:
    """dx/dt at t = 0 in the parametrisation of constant speed."""
    point, slope = path.evaluate(0.0)
    log_s = float(speed(point.unsqueeze(0), slope.unsqueeze(0))[0])
    return slope * math.exp(path.log_length - 0.5 * log_s)


def square_factor(L: Tensor) -> Tensor:
    """A d x d factor of the same covariance."""
    d, r = L.shape
    if r == d:
        return L
    if r < d:
        return torch.nn.functional.pad(L, (0, d - r))
    return torch.linalg.qr(L.mT, mode="r").R.mT
