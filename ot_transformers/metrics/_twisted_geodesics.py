"""Geodesics of the twisted metric as results: between clouds, and between Gaussians in the restricted metric."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ..arrays import as_scalar
from ..errors import InvalidInput
from ..measures import Gaussian, Particles
from ..numerics.twisted import gaussian_log_speed, log_speed
from . import _twisted_gaussians as gaussians
from . import _twisted_particles as clouds
from .base import Geodesic

__all__ = [
    "between_clouds",
    "between_gaussians",
    "hermite_nodes",
    "initial_velocity",
    "member",
    "polygon_action",
    "quadrature_geodesic",
    "refined_velocity",
    "square_factor",
]


def between_clouds(
    a: Particles,
    b: Particles,
    A: Tensor,
    D: Tensor,
    *,
    tol: float,
    matching: str,
    degrees: tuple[int, ...],
    kind: Any,
) -> Geodesic:
    """Geodesic of two clouds."""
    x, y = a.x_t.detach().double(), b.x_t.detach().double()
    wx, wy = a.weights_t.detach().double(), b.weights_t.detach().double()
    if x.shape == y.shape and bool((x == y).all()) and bool((wx == wy).all()):
        return constant(a)
    Dinv = torch.linalg.inv(D)
    path, x0, x1, w, details = clouds.matched_path(
        x, wx, y, wy, A, Dinv, torch.linalg.cholesky(D), matching=matching, tol=tol, degrees=degrees
    )
    k, d = x0.shape
    length = math.exp(path.log_length) if path.log_length < 709 else math.inf
    error = path.error * length
    if k == 1 and d == 1:
        length = clouds.dirac_distance(float(A), float(D), float(x0), float(x1))
        error = 1e-14 * length
        details["closed_form"] = True

    def speed(points: Tensor, slopes: Tensor) -> Tensor:
        return log_speed(points.reshape(-1, k, d), slopes.reshape(-1, k, d), w, A, Dinv)

    uniform = k == a.n and a.uniform

    def at(t: float) -> Particles:
        s = path.parameter(speed, as_scalar(t, "t"))
        points = path.evaluate(s)[0].reshape(k, d).to(a.dtype)
        return Particles.unchecked(points, None if uniform else w.to(a.dtype), kind)

    details["initial_velocity"] = lambda: initial_velocity(path, speed).reshape(k, d).to(a.dtype)
    details["end"] = x1.to(a.dtype)
    return Geodesic(length, error, path.converged or "closed_form" in details, at, details)


def between_gaussians(
    a: Gaussian, b: Gaussian, A: Tensor, D: Tensor, *, tol: float, degrees: tuple[int, ...], kind: Any
) -> Geodesic:
    """Geodesic of two Gaussians in the restricted metric."""
    d = a.dim
    m0, m1 = a.mean_t.detach().double(), b.mean_t.detach().double()
    L0, L1 = (square_factor(g.factor_t.detach().double()) for g in (a, b))
    for m, L, name in ((m0, L0, "mu"), (m1, L1, "nu")):
        gaussians.check_domain(m, L, A, name)
    if bool((m0 == m1).all()) and bool((a.cov_t == b.cov_t).all()):
        return constant(a)
    Dinv = torch.linalg.inv(D)
    path = gaussians.gaussian_path(m0, L0, m1, L1, A, Dinv, tol, degrees)

    def speed(points: Tensor, slopes: Tensor) -> Tensor:
        p, q = gaussians.split(points, d), gaussians.split(slopes, d)
        return gaussian_log_speed(*p, *q, A, Dinv)[0]

    def at(t: float) -> Gaussian:
        m, L = gaussians.split(path.evaluate(path.parameter(speed, as_scalar(t, "t")))[0], d)
        return Gaussian.unchecked(m.to(a.dtype), factor=L.to(a.dtype), kind=kind)

    length = math.exp(path.log_length) if path.log_length < 709 else math.inf
    details = {
        "degrees": path.degrees,
        "log_length": path.log_length,
        "initial_velocity": lambda: initial_velocity(path, speed),
        "start": (m0, L0),
        "end": gaussians.split(path.nodes[-1], d),
        "upper_bound": True,
    }
    return Geodesic(length, path.error * length, path.converged, at, details)


def constant(a: Gaussian | Particles) -> Geodesic:
    """The geodesic from a measure to itself."""
    shape = a.x_t.shape if isinstance(a, Particles) else (a.dim * (1 + a.dim),)
    zero = torch.zeros(shape, dtype=a.dtype)
    details: dict[str, Any] = {"initial_velocity": lambda: zero, "log_length": -math.inf, "degrees": ()}
    if isinstance(a, Gaussian):
        details["start"] = details["end"] = (a.mean_t.double(), square_factor(a.factor_t.double()))
    return Geodesic(0.0, 0.0, True, lambda t: a, details)


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


def hermite_nodes(n: int, d: int) -> tuple[Tensor, Tensor]:
    """Nodes and weights for the standard normal law of R^d."""
    x, w = np.polynomial.hermite_e.hermegauss(n)
    w = w / w.sum()
    if d == 1:
        return torch.from_numpy(x[:, None].copy()), torch.from_numpy(w)
    grid = np.stack(np.meshgrid(x, x, indexing="ij"), -1).reshape(-1, 2)
    return torch.from_numpy(grid), torch.from_numpy(np.outer(w, w).reshape(-1))


def refined_velocity(a: Particles, v: Tensor, end: Tensor, A: Tensor, D: Tensor) -> Tensor:
    """Newton-Krylov on exp(v) = end, from a velocity that is nearly right."""
    from scipy.optimize import NoConvergence, newton_krylov

    x, w, goal = a.x_t.detach().double(), a.weights_t.detach().double(), end.double()

    def miss(z: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
        y, _ = clouds.cloud_exp(x, torch.from_numpy(z).reshape(x.shape), w, A, D, 1e-11)
        return (y - goal).reshape(-1).numpy()

    try:
        z = newton_krylov(miss, v.double().reshape(-1).numpy(), f_tol=1e-10, maxiter=8)
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


def member(measure: Any, index: tuple[int, ...], shape: tuple[int, ...]) -> Any:
    """Member of a batch under broadcasting."""
    own = measure.batch_shape
    if not own:
        return measure
    tail = index[len(shape) - len(own) :]
    return measure[tuple(0 if n == 1 else i for i, n in zip(tail, own, strict=True))]


def quadrature_geodesic(
    geodesic: Callable[..., Geodesic], a: Gaussian, b: Gaussian, nodes: tuple[int, ...]
) -> Geodesic:
    """Geodesics of Gauss-Hermite clouds for growing node counts, and the difference of the last two."""
    restricted = geodesic(a, b).details
    L0, L1 = restricted["start"][1], restricted["end"][1]
    found = []
    for n in nodes:
        z, w = hermite_nodes(n, a.dim)
        start = Particles(a.mean_t.detach().double() + z @ L0.mT, w)
        end = Particles(b.mean_t.detach().double() + z @ L1.mT, w)
        found.append(geodesic(start, end, matching="identity"))
    lengths = [float(g.length) for g in found]
    error = abs(lengths[-1] - lengths[-2]) + float(found[-1].error)
    details = {**found[-1].details, "lengths": lengths, "nodes": tuple(nodes)}
    return Geodesic(lengths[-1], error, found[-1].converged, found[-1].at, details)
