"""Shortest paths between two points of a Riemannian space by spectral path optimisation.

A path is a polynomial in s on [0, 1] given by its values at Chebyshev-Lobatto nodes. For any clock rho > 0,

    d^2 = min int_0^1 g(x', x') / rho ds * int_0^1 rho ds

over all paths (Cauchy-Schwarz), attained where sqrt(g) is proportional to rho. With rho the speed of the
first guess, huge changes of the metric along a path need no fine grid in time. The integrals are Gauss-Legendre
sums, the minimum is found by preconditioned L-BFGS; for smooth geodesics the error falls exponentially in the
degree, and degrees are doubled until two lengths agree.

A path is held as its displacement from the start: derivatives of positions would lose the digits that two near
points share. The first guess bends away from the straight line, which may be a saddle by symmetry.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np
import torch
from torch import Tensor

from .minimise import lbfgs

__all__ = [
    "LogSpeed",
    "Path",
    "bent",
    "excess",
    "gauss",
    "interpolation",
    "lobatto",
    "minimised",
    "path_matrices",
    "shortest_path",
]

_GRADED = 0
"""In place of a number of Gauss points: the graded rule."""
_LEVELS = 36
"""Panels of the graded rule start at 2^-36."""

_BEND = 0.02
"""Bump of the first guess, as a fraction of the largest displacement."""

_SLIP = 1e-2
"""Relative doubt in a length, or loss against the path before, that calls for a second attempt."""

LogSpeed = Callable[[Tensor, Tensor], Tensor]
"""(points (q, k), velocities (q, k)) -> log of the squared speed (q,)."""


@dataclass(frozen=True, eq=False)
class Path:
    """A polynomial path and its length.

    Attributes
    ----------
    start : Tensor (k,)
    offsets : Tensor (N + 1, k), displacement from the start at Chebyshev-Lobatto nodes
    log_length : float
    error : float, relative: difference of the last two degrees plus the defect of the minimisation
    converged : bool
    degrees, lengths : what was computed
    gradient : float, relative norm of the gradient at the end
    """

    start: Tensor
    offsets: Tensor
    log_length: float
    error: float
    converged: bool
    degrees: tuple[int, ...]
    log_lengths: tuple[float, ...]
    gradient: float

    @property
    def end(self) -> Tensor:
        """The end point (k,)."""
        return self.start + self.offsets[-1]

    def evaluate(self, s: float) -> tuple[Tensor, Tensor]:
        """Point and derivative at a parameter s in [0, 1], (k,) each."""
        points, slopes = self.evaluate_many(np.array([s]))
        return points[0], slopes[0]

    def evaluate_many(self, s: np.ndarray[Any, Any]) -> tuple[Tensor, Tensor]:
        """Points and derivatives at parameters (q,), (q, k) each."""
        V, dV = (torch.from_numpy(a).to(self.offsets) for a in interpolation(self.offsets.shape[0] - 1, s))
        return self.start + V @ self.offsets, dV @ self.offsets

    def quadrature(self) -> tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]:
        """Gauss-Legendre parameters and weights (q,) at which the length of the path is exact to its error."""
        return gauss(4 * self.offsets.shape[0] + 16)

    def parameter(self, log_speed: LogSpeed, t: float) -> float:
        """The parameter s at which a fraction t of the length is behind: constant speed in t."""
        if t <= 0 or t >= 1:
            return float(min(max(t, 0.0), 1.0))
        N = self.offsets.shape[0] - 1

        def fraction(s: float) -> float:
            x, w = gauss(2 * N + 8)
            y, dy = self.evaluate_many(s * x)
            speed = torch.exp(0.5 * log_speed(y, dy) - self.log_length).cpu().numpy()
            return float(s * (w @ speed))

        from scipy.optimize import brentq

        total = fraction(1.0)
        return float(brentq(lambda s: fraction(s) / total - t, 0.0, 1.0, xtol=1e-14, rtol=1e-14))


@lru_cache(maxsize=64)
def lobatto(N: int) -> tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]:
    """Nodes on [0, 1] and barycentric weights."""
    k = np.arange(N + 1)
    nodes = 0.5 * (1 - np.cos(np.pi * k / N))
    weights = (-1.0) ** k
    weights[[0, -1]] *= 0.5
    return nodes, weights


def interpolation(N: int, s: np.ndarray[Any, Any]) -> tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]:
    """Values and derivatives at s of the Lagrange polynomials on the Chebyshev nodes, (q, N + 1) each."""
    nodes, w = lobatto(N)
    D = nodes[:, None] - nodes[None, :]
    np.fill_diagonal(D, 1.0)
    diff = (w[None, :] / w[:, None]) / D
    np.fill_diagonal(diff, 0.0)
    np.fill_diagonal(diff, -diff.sum(1))
    gap = s[:, None] - nodes[None, :]
    hit = np.abs(gap) < 1e-15
    terms = w[None, :] / np.where(hit, 1.0, gap)
    rows = hit.any(1)
    V = terms / np.where(rows, 1.0, terms.sum(1))[:, None]
    V[rows] = hit[rows].astype(float)
    return V, V @ diff


@lru_cache(maxsize=64)
def gauss(n: int) -> tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]:
    """Gauss-Legendre nodes and weights on [0, 1], read-only."""
    x, w = np.polynomial.legendre.leggauss(n)
    nodes, weights = 0.5 * (x + 1), 0.5 * w
    nodes.flags.writeable = weights.flags.writeable = False
    return nodes, weights


@lru_cache(maxsize=64)
def _matrices(N: int, points: int) -> tuple[np.ndarray[Any, Any], np.ndarray[Any, Any], np.ndarray[Any, Any]]:
    s, w = gauss(points) if points != _GRADED else _graded()
    return *interpolation(N, s), w.copy()


def path_matrices(N: int, points: int, like: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Values, derivatives and weights of polynomials of degree N at Gauss-Legendre points, as tensors."""
    V, dV, w = (torch.from_numpy(a).to(like) for a in _matrices(N, points))
    return V, dV, w


def _graded() -> tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]:
    """Composite Gauss points, in panels that shrink geometrically towards both ends."""
    half = np.concatenate([[0.0], 2.0 ** np.arange(-_LEVELS, -5.0), np.arange(2, 17) / 32])
    edges = np.concatenate([half, 1.0 - half[-2::-1]])
    s, w = gauss(12)
    sizes = np.diff(edges)[:, None]
    return (edges[:-1, None] + sizes * s).reshape(-1), (sizes * w).reshape(-1)


def shortest_path(
    log_speed: LogSpeed,
    start: Tensor,
    end: Tensor,
    *,
    scale: Tensor,
    tol: float,
    degrees: tuple[int, ...] = (4, 8, 16, 32, 64),
    max_iter: int = 400,
    turn: Callable[[Tensor], Tensor] | None = None,
    n_turn: int = 0,
    guess: Tensor | None = None,
    polish: float | None = None,
) -> Path:
    """Minimise the length over paths from `start` (k,) to `end` (k,).

    Parameters
    ----------
    log_speed : callable, differentiable; NaN or inf where the path leaves the domain
    scale : Tensor (k,)
        Lengths of the coordinates: a displacement of scale_i in coordinate i is of comparable cost for all i.
    tol : float
        Relative error of the length to reach.
    turn : callable (angles (n_turn,)) -> end (k,), optional
        A family of end points to minimise over as well (the fibre over the end measure).
    guess : Tensor (N + 1, k), optional
        Displacements to start from instead of the straight line.
    polish : float, optional
        Minimise on to this relative gradient, one degree further: velocities and derivatives of the length
        are exact to first order in the path only, while the length is to second.
    """
    gap = end - start
    log_lengths: list[float] = []
    angles = torch.zeros(n_turn, dtype=start.dtype, device=start.device)
    used: list[int] = []
    gradient, error, converged = np.inf, np.inf, False
    best = _straight(gap, 2) if guess is None else guess
    best_length, _ = _fine_length(log_speed, start, best)
    offsets = bent(gap, degrees[0]) if guess is None else _interpolated(guess, degrees[0])
    goal = max(0.2 * tol**0.5, 1e-10)
    for N in degrees:
        known = best_length
        tries = []
        for attempt in (offsets, _straight(best[-1], N)):
            found = _optimise(
                log_speed, start, _interpolated(attempt, N), scale, angles, turn, goal=goal, max_iter=max_iter
            )
            # A low degree can slip between its own quadrature points: believe finer rules only.
            fine, doubt = _fine_length(log_speed, start, found[0])
            tries.append((doubt > _SLIP, fine, doubt + _ratio(found[2] - fine), found))
            if doubt <= _SLIP and fine <= known + _SLIP:
                break
            # The optimiser left the road: once more, from the straight line.
        doubtful, log_length, slip, found = min(tries, key=lambda trial: trial[:2])
        offsets, angles, _, gradient, defect = found
        used.append(N)
        log_lengths.append(log_length)
        if doubtful or log_length > best_length:
            offsets = best
        else:
            best, best_length = offsets, log_length
        if len(log_lengths) > 1:
            error = _ratio(log_length - known) + defect + slip
            converged = bool(error <= tol)
            if converged:
                break
    if polish is not None and error <= 100 * tol:  # else minimising further is hopeless
        N = min(2 * used[-1], 64)
        offsets, _, _, gradient, _ = _optimise(
            log_speed, start, _interpolated(best, N), scale, angles, turn, goal=polish, max_iter=2 * max_iter
        )
        log_length, doubt = _fine_length(log_speed, start, offsets)
        if doubt <= _SLIP and log_length <= best_length + 1e-12:
            best, best_length = offsets, log_length
    # A path out to where everything is nearly free does all its way next to its ends, where any rule of Gauss has
    # few points: panels that shrink towards the ends see it, and their length is an upper bound of the distance.
    graded = _log_length(log_speed, start, best, _GRADED)
    unseen = _ratio(best_length - graded)
    if graded > best_length and unseen > 1e-10:
        best_length, error = graded, max(error, unseen)
        converged = converged and unseen <= tol
    ulp = 16 * torch.finfo(start.dtype).eps
    rounding = ulp * (1.0 + float((start.abs().max() + end.abs().max()) / gap.abs().max().clamp_min(1e-300)))
    return Path(
        start,
        best,
        best_length,
        float(error) + min(rounding, 1.0),
        converged,
        tuple(used),
        tuple(log_lengths),
        float(gradient),
    )


def _fine_length(log_speed: LogSpeed, start: Tensor, offsets: Tensor) -> tuple[float, float]:
    """log of the length of a path by a rule of at least four times the points that it was optimised with.

    The second number is how far another such rule disagrees, relative.
    """
    N = offsets.shape[0] - 1
    values = [_log_length(log_speed, start, offsets, points) for points in (6 * N + 45, 8 * N + 64)]
    return values[1], _ratio(values[1] - values[0])


def _log_length(log_speed: LogSpeed, start: Tensor, offsets: Tensor, points: int) -> float:
    """log of the length of a path by that many Gauss points, or by the graded rule; inf where it leaves the domain."""
    V, dV, w = path_matrices(offsets.shape[0] - 1, points, offsets)
    with torch.no_grad():
        speed = 0.5 * log_speed(start + V @ offsets, dV @ offsets)
        value = float(torch.logsumexp(torch.log(w) + speed, -1))
    return value if np.isfinite(value) else np.inf


def excess(difference: float) -> float:
    """e^difference - 1, finite: the relative difference of two lengths from that of their logarithms."""
    return float(np.expm1(np.clip(difference, -50.0, 50.0))) if np.isfinite(difference) else 1e20


def _ratio(difference: float) -> float:
    return abs(excess(difference))


def _straight(gap: Tensor, N: int) -> Tensor:
    return torch.from_numpy(lobatto(N)[0]).to(gap).unsqueeze(-1) * gap.unsqueeze(-2)


def bent(gap: Tensor, N: int) -> Tensor:
    """The straight line (..., N + 1, k) with a small bump in a fixed direction without symmetries."""
    k = gap.shape[-1]
    if k == 1:
        return _straight(gap, N)
    noise = torch.from_numpy(np.random.default_rng(0).standard_normal(k)).to(gap)
    bump = torch.from_numpy(np.sin(np.pi * lobatto(N)[0])).to(gap).unsqueeze(-1)
    return _straight(gap, N) + _BEND * gap.abs().amax(-1)[..., None, None] * bump * noise


def _interpolated(offsets: Tensor, N: int) -> Tensor:
    if offsets.shape[0] == N + 1:
        return offsets
    V, _ = interpolation(offsets.shape[0] - 1, lobatto(N)[0])
    return torch.from_numpy(V).to(offsets) @ offsets


def _optimise(
    log_speed: LogSpeed,
    start: Tensor,
    guess: Tensor,
    scale: Tensor,
    angles: Tensor,
    turn: Callable[[Tensor], Tensor] | None,
    *,
    goal: float,
    max_iter: int,
) -> tuple[Tensor, Tensor, float, float, float]:
    """One degree: displacements, angles, log length, relative gradient, and the relative defect it implies."""
    N, k = guess.shape[0] - 1, guess.shape[1]
    V, dV, w = path_matrices(N, 2 * N + 4, guess)
    inner0 = guess[1:-1]
    with torch.no_grad():
        log_g = log_speed(start + V @ guess, dV @ guess)
    clock = 0.5 * log_g
    if not bool(torch.isfinite(clock).all()):
        clock = torch.zeros_like(clock)  # the guess touches the border of the domain: a uniform clock
    clock = clock - torch.logsumexp(torch.log(w) + clock, -1)  # int rho ds = 1
    rho = torch.exp(clock)
    base = float(_log_action(log_g, w, clock))
    base = base if np.isfinite(base) else 0.0
    # Where g is about rho^2 times a constant form, the Hessian is twice this stiffness.
    # (Floored: the stiffness must stay regular where the clock spans hundreds of orders.)
    K = (dV.mT * (w * (rho + 1e-6 * rho.max()))) @ dV
    Rinv = torch.linalg.inv(torch.linalg.cholesky(K[1:-1, 1:-1]).mT)
    ramp = torch.from_numpy(lobatto(N)[0]).to(guess).unsqueeze(-1)
    m = (N - 1) * k

    def offsets_of(z: Tensor) -> Tensor:
        inner = inner0 + (Rinv @ z[:m].reshape(N - 1, k)) * scale
        if turn is None:
            return torch.cat([guess[:1], inner, guess[-1:]], 0)
        # The interior follows the moving end along the ramp, so that smooth paths stay smooth.
        shift = turn(angles + z[m:]) - start - guess[-1]
        return torch.cat([guess[:1], inner + ramp[1:-1] * shift, guess[-1:] + shift], 0)

    def log_action(z: Tensor) -> Tensor:
        offsets = offsets_of(z)
        return _log_action(log_speed(start + V @ offsets, dV @ offsets), w, clock)

    z0 = guess.new_zeros(m + angles.numel())
    z, log_value, gradient, defect = minimised(log_action, base, z0, goal=goal, max_iter=max_iter)
    new_angles = (angles + z[m:]).detach()
    return offsets_of(z).detach(), new_angles, 0.5 * (base + log_value), gradient, defect


def minimised(
    log_action: Callable[[Tensor], Tensor], base: float, z0: Tensor, *, goal: float, max_iter: int
) -> tuple[Tensor, float, float, float]:
    """Minimise e^{log_action - base}, about 1 and of Hessian about 2, from z0 (m,).

    Returns the minimiser, the logarithm of the minimum, its relative gradient, and the relative error of the length
    that this implies: |gradient|^2 / 8 where the Hessian is 2, and allowing for a 32nd of that Hessian.
    """

    def evaluate(batch: Tensor) -> tuple[Tensor, Tensor]:
        with torch.enable_grad():
            z = batch[0].detach().requires_grad_()
            value = torch.exp(log_action(z) - base)
            (g,) = torch.autograd.grad(value, z)
        value = torch.where(torch.isfinite(value), value, torch.full_like(value, torch.inf))
        return value.detach().reshape(1), torch.nan_to_num(g).reshape(1, -1)

    tolerance = z0.new_full((1,), goal)
    found = lbfgs(evaluate, z0.unsqueeze(0), scale=0.5, tolerance=tolerance, max_iter=max_iter)
    value, norm = max(float(found.value), 1e-300), float(found.gradient_norm)
    return found.y[0], float(np.log(value)), norm / value, 4 * norm**2 / value


def _log_action(log_g: Tensor, w: Tensor, clock: Tensor) -> Tensor:
    """log of int g / rho ds, with int rho ds = 1."""
    return torch.logsumexp(torch.log(w) + log_g - clock, -1)
