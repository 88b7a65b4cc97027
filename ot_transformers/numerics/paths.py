"""Shortest paths between two points of a Riemannian space by spectral path optimisation.

A path is a polynomial in s on [0, 1] given by its values at Chebyshev-Lobatto nodes; its length is taken by
Gauss-Legendre quadrature and minimised over the interior values by preconditioned L-BFGS. Length does not
depend on the parametrisation, so huge changes of the metric along a path need no fine grid in time. For
smooth geodesics the error falls exponentially in the degree: degrees are doubled until two lengths agree.
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
def _quadrature(N: int) -> tuple[np.ndarray[Any, Any], np.ndarray[Any, Any], np.ndarray[Any, Any], Any]:
    """Values, derivatives, weights at Gauss-Legendre points, and R with R^T R = interior stiffness."""
    x, w = np.polynomial.legendre.leggauss(2 * N + 8)
    V, dV = _matrices(N, 0.5 * (x + 1))
    w = 0.5 * w
    K = (dV.T * w) @ dV
    R = np.linalg.cholesky(K[1:-1, 1:-1]).T
    return V, dV, w, np.linalg.inv(R)


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
    for N in degrees:
        guess = _interpolated(nodes, N) if nodes is not None else _straight(start, end, N)
        nodes, angles, log_length, gradient, defect = _optimise(
            log_speed, guess, scale, angles, turn, tol=tol, max_iter=max_iter
        )
        used.append(N)
        log_lengths.append(log_length)
        if len(log_lengths) > 1:
            error = abs(np.expm1(log_lengths[-1] - log_lengths[-2])) + defect
            converged = bool(error <= tol)
            if converged:
                break
    return Path(nodes, log_lengths[-1], float(error), converged, tuple(used), tuple(log_lengths), float(gradient))  # type: ignore[arg-type]


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
    V, dV, w, Rinv = (torch.from_numpy(a).to(guess) for a in _quadrature(N))
    inner0 = guess[1:-1]
    with torch.no_grad():
        first = log_speed(V @ guess, dV @ guess)
        base = torch.logsumexp(torch.log(w) + 0.5 * first, -1)
    if not bool(torch.isfinite(base)):
        base = torch.zeros_like(base)
    s0, s1 = torch.from_numpy(_chebyshev(N)[0]).to(guess)[[0, -1]]
    del s0, s1
    ramp = torch.from_numpy(_chebyshev(N)[0]).to(guess).unsqueeze(-1)

    def nodes_of(z: Tensor) -> Tensor:
        inner = inner0 + (Rinv @ z[: (N - 1) * k].reshape(N - 1, k)) * scale
        if turn is None:
            return torch.cat([guess[:1], inner, guess[-1:]], 0)
        # The interior follows the moving end along the ramp, so that smooth paths stay smooth.
        shift = turn(angles + z[(N - 1) * k :]) - guess[-1]
        return torch.cat([guess[:1], inner + ramp[1:-1] * shift, guess[-1:] + shift], 0)

    def evaluate(batch: Tensor) -> tuple[Tensor, Tensor]:
        with torch.enable_grad():
            z = batch[0].detach().requires_grad_()
            nodes = nodes_of(z)
            speed = log_speed(V @ nodes, dV @ nodes)
            value = torch.exp(torch.logsumexp(torch.log(w) + 0.5 * speed, -1) - base).square()
            (g,) = torch.autograd.grad(value, z)
        bad = ~torch.isfinite(value)
        value = torch.where(bad, torch.full_like(value, torch.inf), value)
        return value.detach().reshape(1), torch.nan_to_num(g).reshape(1, -1)

    z0 = torch.zeros(1, (N - 1) * k + angles.numel(), dtype=guess.dtype, device=guess.device)
    goal = torch.full((1,), 0.1 * tol**0.5 * 1e-1, dtype=guess.dtype, device=guess.device)
    goal = goal.clamp_min(1e-9)
    found = lbfgs(evaluate, z0, scale=0.5, tolerance=goal, max_iter=max_iter)
    value, norm = float(found.value), float(found.gradient_norm)
    nodes = nodes_of(found.y[0]).detach()
    new_angles = (angles + found.y[0, (N - 1) * k :]).detach()
    gradient = norm / max(value, 1e-300)
    # A quadratic of Hessian 2 in these coordinates lies |gradient|^2 / 4 above its minimum.
    defect = 0.25 * norm**2 / max(value, 1e-300)
    return nodes, new_angles, float(base) + 0.5 * float(np.log(max(value, 1e-300))), gradient, defect
