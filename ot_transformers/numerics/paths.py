"""Shortest paths between two points of a Riemannian space by spectral path optimisation.

A path is a polynomial in s on [0, 1] given by its values at Chebyshev-Lobatto nodes. For any clock rho > 0,

    d^2 = min int_0^1 g(x', x') / rho ds * int_0^1 rho ds

over all paths (Cauchy-Schwarz), attained where sqrt(g) is proportional to rho. With rho the speed of the
first guess, huge changes of the metric along a path need no fine grid in time. The integrals are Gauss-Legendre
sums, the minimum is found by preconditioned L-BFGS; for smooth geodesics the error falls exponentially in the
degree, and degrees are doubled until two lengths agree.
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

__all__ = ["Path", "shortest_path"]

LogSpeed = Callable[[Tensor, Tensor], Tensor]
"""(points (q, k), velocities (q, k)) -> log of the squared speed (q,)."""


@dataclass(frozen=True, eq=False)
class Path:
    """A polynomial path and its length.

    Attributes
    ----------
    nodes : Tensor (N + 1, k), values at Chebyshev-Lobatto nodes
    log_length : float
    error : float, relative: difference of the last two degrees plus the defect of the minimisation
    converged : bool
    degrees, lengths : what was computed
    gradient : float, relative norm of the gradient at the end
    """

    nodes: Tensor
    log_length: float
    error: float
    converged: bool
    degrees: tuple[int, ...]
    log_lengths: tuple[float, ...]
    gradient: float

    def evaluate(self, s: float) -> tuple[Tensor, Tensor]:
        """Point and derivative at a parameter s in [0, 1], (k,) each."""
        V, dV = _matrices(self.nodes.shape[0] - 1, np.array([s]))
        value, slope = (torch.from_numpy(a).to(self.nodes) @ self.nodes for a in (V, dV))
        return value[0], slope[0]

    def parameter(self, log_speed: LogSpeed, t: float) -> float:
        """The parameter s at which a fraction t of the length is behind: constant speed in t."""
        if t <= 0 or t >= 1:
            return float(min(max(t, 0.0), 1.0))
        N = self.nodes.shape[0] - 1

        def fraction(s: float) -> float:
            x, w = np.polynomial.legendre.leggauss(2 * N + 8)
            V, dV = _matrices(N, 0.5 * s * (x + 1))
            y, dy = (torch.from_numpy(a).to(self.nodes) @ self.nodes for a in (V, dV))
            speed = torch.exp(0.5 * log_speed(y, dy) - self.log_length).cpu().numpy()
            return float(0.5 * s * (w @ speed))

        from scipy.optimize import brentq

        total = fraction(1.0)
        return float(brentq(lambda s: fraction(s) / total - t, 0.0, 1.0, xtol=1e-14, rtol=1e-14))


@lru_cache(maxsize=64)
def _chebyshev(N: int) -> tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]:
    """Nodes on [0, 1] and barycentric weights."""
    k = np.arange(N + 1)
    nodes = 0.5 * (1 - np.cos(np.pi * k / N))
    weights = (-1.0) ** k
    weights[[0, -1]] *= 0.5
    return nodes, weights


def _matrices(N: int, s: np.ndarray[Any, Any]) -> tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]:
    """Values and derivatives at s of the Lagrange polynomials on the Chebyshev nodes, (q, N + 1) each."""
    nodes, w = _chebyshev(N)
    D = nodes[:, None] - nodes[None, :]
    np.fill_diagonal(D, 1.0)
    diff = (w[None, :] / w[:, None]) / D
    np.fill_diagonal(diff, 0.0)
    np.fill_diagonal(diff, -diff.sum(1))
    gap = s[:, None] - nodes[None, :]
    hit = np.abs(gap) < 1e-15
    terms = w[None, :] / np.where(hit, 1.0, gap)
    V = terms / terms.sum(1, keepdims=True)
    rows = hit.any(1)
    V[rows] = hit[rows].astype(float)
    return V, V @ diff


@lru_cache(maxsize=64)
def _quadrature(N: int) -> tuple[np.ndarray[Any, Any], np.ndarray[Any, Any], np.ndarray[Any, Any]]:
    """Values, derivatives and weights at Gauss-Legendre points."""
    x, w = np.polynomial.legendre.leggauss(2 * N + 4)
    V, dV = _matrices(N, 0.5 * (x + 1))
    return V, dV, 0.5 * w


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
    """
    log_lengths: list[float] = []
    nodes: Tensor | None = None
    angles = torch.zeros(n_turn, dtype=start.dtype, device=start.device)
    used: list[int] = []
    gradient, error, converged = np.inf, np.inf, False
    best = _straight(start, end, 2)
    best_length = _fine_length(log_speed, best)
    for N in degrees:
        guess = _interpolated(nodes, N) if nodes is not None else _straight(start, end, N)
        nodes, angles, own_length, gradient, defect = _optimise(
            log_speed, guess, scale, angles, turn, tol=tol, max_iter=max_iter
        )
        used.append(N)
        # A low degree can slip between its own quadrature points: believe a finer rule only.
        log_length = _fine_length(log_speed, nodes)
        log_lengths.append(log_length)
        slip = abs(float(np.expm1(np.clip(own_length - log_length, -50.0, 50.0))))
        if log_length <= best_length:
            best, best_length = nodes, log_length
        else:
            nodes = _interpolated(best, N)
        if len(log_lengths) > 1:
            change = float(np.expm1(np.clip(log_lengths[-1] - log_lengths[-2], -50.0, 50.0)))
            error = abs(change) + defect + slip
            converged = bool(error <= tol)
            if converged:
                break
    return Path(best, best_length, float(error), converged, tuple(used), tuple(log_lengths), float(gradient))


def _fine_length(log_speed: LogSpeed, nodes: Tensor) -> float:
    """log of the length of a path, by a rule of at least four times the points that it was optimised with."""
    N = nodes.shape[0] - 1
    x, w = np.polynomial.legendre.leggauss(8 * N + 64)
    V, dV = (torch.from_numpy(a).to(nodes) for a in _matrices(N, 0.5 * (x + 1)))
    with torch.no_grad():
        speed = 0.5 * log_speed(V @ nodes, dV @ nodes)
        value = torch.logsumexp(torch.log(torch.from_numpy(0.5 * w).to(nodes)) + speed, -1)
    return float(value) if bool(torch.isfinite(value)) else np.inf


def _straight(start: Tensor, end: Tensor, N: int) -> Tensor:
    s = torch.from_numpy(_chebyshev(N)[0]).to(start).unsqueeze(-1)
    return (1 - s) * start + s * end


def _interpolated(nodes: Tensor, N: int) -> Tensor:
    V, _ = _matrices(nodes.shape[0] - 1, _chebyshev(N)[0])
    return torch.from_numpy(V).to(nodes) @ nodes


def _optimise(
    log_speed: LogSpeed,
    guess: Tensor,
    scale: Tensor,
    angles: Tensor,
    turn: Callable[[Tensor], Tensor] | None,
    *,
    tol: float,
    max_iter: int,
) -> tuple[Tensor, Tensor, float, float, float]:
    """One degree: nodes, angles, log length, relative gradient, and the relative defect it implies."""
    N, k = guess.shape[0] - 1, guess.shape[1]
    V, dV, w = (torch.from_numpy(a).to(guess) for a in _quadrature(N))
    inner0 = guess[1:-1]
    with torch.no_grad():
        clock = 0.5 * log_speed(V @ guess, dV @ guess)
    if not bool(torch.isfinite(clock).all()):
        clock = torch.zeros_like(clock)  # the guess touches the border of the domain: a uniform clock
    clock = clock - torch.logsumexp(torch.log(w) + clock, -1)  # int rho ds = 1
    rho = torch.exp(clock)
    base = float(_log_action(log_speed(V @ guess, dV @ guess).detach(), w, clock))
    base = base if np.isfinite(base) else 0.0
    # Where g is about rho^2 times a constant form, the Hessian is twice this stiffness.
    # (Floored: the stiffness must stay regular where the clock spans hundreds of orders.)
    K = (dV.mT * (w * (rho + 1e-6 * rho.max()))) @ dV
    Rinv = torch.linalg.inv(torch.linalg.cholesky(K[1:-1, 1:-1]).mT)
    ramp = torch.from_numpy(_chebyshev(N)[0]).to(guess).unsqueeze(-1)
    m = (N - 1) * k

    def nodes_of(z: Tensor) -> Tensor:
        inner = inner0 + (Rinv @ z[:m].reshape(N - 1, k)) * scale
        if turn is None:
            return torch.cat([guess[:1], inner, guess[-1:]], 0)
        # The interior follows the moving end along the ramp, so that smooth paths stay smooth.
        shift = turn(angles + z[m:]) - guess[-1]
        return torch.cat([guess[:1], inner + ramp[1:-1] * shift, guess[-1:] + shift], 0)

    def evaluate(batch: Tensor) -> tuple[Tensor, Tensor]:
        with torch.enable_grad():
            z = batch[0].detach().requires_grad_()
            nodes = nodes_of(z)
            value = torch.exp(_log_action(log_speed(V @ nodes, dV @ nodes), w, clock) - base)
            (g,) = torch.autograd.grad(value, z)
        value = torch.where(torch.isfinite(value), value, torch.full_like(value, torch.inf))
        return value.detach().reshape(1), torch.nan_to_num(g).reshape(1, -1)

    z0 = torch.zeros(1, m + angles.numel(), dtype=guess.dtype, device=guess.device)
    # The relative error of the length is |gradient|^2 / 8 where the Hessian is 2; allow for a quarter of that.
    goal = torch.full((1,), max(0.5 * tol**0.5, 1e-10), dtype=guess.dtype, device=guess.device)
    found = lbfgs(evaluate, z0, scale=0.5, tolerance=goal, max_iter=max_iter)
    value, norm = max(float(found.value), 1e-300), float(found.gradient_norm)
    nodes = nodes_of(found.y[0]).detach()
    new_angles = (angles + found.y[0, m:]).detach()
    return nodes, new_angles, 0.5 * (base + float(np.log(value))), norm / value, norm**2 / (2 * value)


def _log_action(log_g: Tensor, w: Tensor, clock: Tensor) -> Tensor:
    """log of int g / rho ds, with int rho ds = 1."""
    return torch.logsumexp(torch.log(w) + log_g - clock, -1)
