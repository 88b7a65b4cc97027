"""Shortest polygonal paths between two points of a Riemannian space, extrapolated in the number of segments.

The nodes x_0, ..., x_N of a polygon minimise its discretised action

    S_N = sum_k l_k^2 / rho_k >= (sum_k l_k)^2,    sum_k rho_k = 1,

l_k the length of the segment [x_k, x_{k+1}] and rho_k the time it is given, traversed at constant speed. That is a
discrete Lagrangian which is symmetric under exchange of the ends of a segment, so it generates a flow with
an expansion in even powers of 1/N (Hairer, Lubich, Wanner, Geometric Numerical Integration, IX), and so have its
minimum and the length of the minimiser:

    L_N = L + c_2 / N^2 + c_4 / N^4 + ...,

each L_N the length of a path that exists. From N/4, N/2 and N segments Richardson extrapolation removes c_2 and c_4.

The times are those of the first guess, rho_k = int rho ds over its pieces in its parameter s. Pieces are cut at
equal steps of sigma(s) = (s + int_0^s rho^(1/2) / int_0^1 rho^(1/2)) / 2: the same functions at every N, as the
expansion demands, with nodes where a path turns and where the metric is large. (The square root makes rho ds / dsigma
fall linearly where rho falls exponentially, within 1 / |x| of far ends.) Lengths of segments are Gauss sums on
panels, which are equal steps of sigma too.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from .paths import LogSpeed, Path, excess, gauss, lobatto, minimised

__all__ = ["Polygon", "extrapolated", "shortest_polygon"]

_ROUGH = 2
"""Panels of a segment in the minimisation, by Simpson's rule: its error is one of the even powers, 1/N^4.

A rule without end points would be cheated where the metric changes by orders within a segment: its minimiser puts
nodes so that the ends of segments, which are long, lie between the points. Simpson's overestimates exponentials.
"""

_FINE = 4
"""Panels of a segment in lengths."""

_GAUSS = gauss(4)
_LOBATTO = (
    np.array([0.0, 0.5 - 0.5 * (3 / 7) ** 0.5, 0.5, 0.5 + 0.5 * (3 / 7) ** 0.5, 1.0]),
    np.array([0.05, 49 / 180, 16 / 45, 49 / 180, 0.05]),
)
"""Two rules on [0, 1] of about the same order. Lengths are of the first; the doubt in them is of the second, which sees
the ends of segments: rules without end points may agree on a value that misses a peak there."""

_CLOCK = 32
"""Degree of the polynomial through the logarithm of the speed of the guess."""


Rule = tuple[Tensor, Tensor]
"""Quadrature points and weights on the segments, (N, q) each."""


@dataclass(frozen=True, eq=False)
class Polygon:
    """A polygonal path and its extrapolated length.

    Attributes
    ----------
    start : Tensor (k,)
    offsets : Tensor (N + 1, k), displacement from the start at the nodes
    log_length : float, extrapolated
    error : float, relative
    converged : bool
    segments : tuple of int, what was computed
    log_lengths : tuple of float, of the polygons
    gradient : float, relative norm of the gradient at the end
    rule : the quadrature of the lengths
    """

    start: Tensor
    offsets: Tensor
    log_length: float
    error: float
    converged: bool
    segments: tuple[int, ...]
    log_lengths: tuple[float, ...]
    gradient: float
    rule: Rule

    @property
    def end(self) -> Tensor:
        """The end point (k,)."""
        return self.start + self.offsets[-1]

    def evaluate(self, s: float) -> tuple[Tensor, Tensor]:
        """Point and derivative at a parameter s in [0, 1], nodes at k / N: (k,) each."""
        N = len(self.offsets) - 1
        k = min(int(s * N), N - 1)
        step = self.offsets[k + 1] - self.offsets[k]
        return self.start + self.offsets[k] + (s * N - k) * step, N * step

    def parameter(self, log_speed: LogSpeed, t: float) -> float:
        """The parameter s at which a fraction t of the length is behind: constant speed in t."""
        if t <= 0 or t >= 1:
            return float(min(max(t, 0.0), 1.0))
        N = len(self.offsets) - 1
        with torch.no_grad():
            logs = _log_segments(log_speed, self.start, self.offsets, self.rule).cpu().numpy()
        past = np.concatenate([[0.0], np.cumsum(np.exp(logs - np.logaddexp.reduce(logs)))])
        k = min(int(np.searchsorted(past, t, side="right")) - 1, N - 1)
        x, w = (t[k] for t in self.rule)
        step = self.offsets[k + 1] - self.offsets[k]

        def fraction(u: float) -> float:
            points = self.start + self.offsets[k] + (u * x).unsqueeze(-1) * step
            with torch.no_grad():
                speed = torch.exp(0.5 * log_speed(points, step.expand_as(points)) - float(logs[k]))
            return u * float(w @ speed)

        from scipy.optimize import brentq

        share = (t - past[k]) / max(past[k + 1] - past[k], 1e-300)
        u = brentq(lambda u: fraction(u) - min(share, 1.0) * fraction(1.0), 0.0, 1.0, xtol=1e-14)
        return float((k + u) / N)


def shortest_polygon(
    log_speed: LogSpeed,
    guess: Path,
    *,
    scale: Tensor,
    tol: float,
    segments: int,
    max_iter: int = 400,
) -> Polygon:
    """Minimise the discretised action over polygons of N/4, N/2 and N segments between the ends of a path.

    Parameters
    ----------
    log_speed : callable, differentiable; NaN or inf where the path leaves the domain
    guess : Path
        Where to start, and what the times of the segments are taken from.
    scale : Tensor (k,)
        Lengths of the coordinates, as in `shortest_path`.
    tol : float
        Relative error of the length to reach; `converged` says whether it was.
    segments : int
        N, a multiple of 4.
    max_iter : int
        Iterations of L-BFGS at each number of segments.
    """
    cut, behind = _times(log_speed, guess)
    start = guess.start
    log_lengths: list[float] = []
    counts = (segments // 4, segments // 2, segments)
    doubts: list[float] = []
    gradient = 0.0
    offsets, old = None, np.zeros(0)
    goal = max(0.02 * tol**0.5, 1e-6)
    for N in counts:
        s = cut(N)
        if offsets is None:
            offsets = guess.evaluate_many(s)[0] - start
            offsets[0], offsets[-1] = 0.0, guess.offsets[-1]
        else:
            offsets = _refined(offsets, old, s)
        fine, other = (_rule(cut(N * _FINE), _FINE, base, offsets) for base in (_GAUSS, _LOBATTO))
        found, gradient, loss = _minimised(
            log_speed,
            start,
            offsets,
            s,
            behind(s),
            _simpson(cut(N * _ROUGH), _ROUGH, offsets),
            scale,
            goal=goal,
            max_iter=max_iter,
        )
        before, length = (_log_length(log_speed, start, polygon, fine) for polygon in (offsets, found))
        if length <= before + 1e-12:
            offsets = found
        else:  # the quadrature was cheated after all: the polygon before is a path, too, and shorter
            length, loss = before, loss + min(abs(excess(length - before)), 1.0)
        check = _log_length(log_speed, start, offsets, other)
        doubts.append(loss + abs(excess(length - check)))
        log_lengths.append(length)
        old = s
    assert offsets is not None
    log_length, error = extrapolated(log_lengths, doubts)
    gap = guess.offsets[-1].abs().max().clamp_min(1e-300)
    rounding = 16 * torch.finfo(start.dtype).eps * (1 + float((start + guess.offsets[-1]).abs().max() / gap))
    error += min(rounding, 1.0)
    return Polygon(
        start, offsets, log_length, error, error <= tol, counts, tuple(log_lengths), gradient, fine
    )


def extrapolated(log_lengths: list[float], doubts: list[float]) -> tuple[float, float]:
    """Richardson extrapolation of lengths L at N/4, N/2 and N segments: log of the length, relative error.

    With a = L_{N/4} - L_{N/2} and b = L_{N/2} - L_N, about 4 b, the Romberg table is L_N, L_N - b / 3 and
    L_N - b / 3 + (a - 4 b) / 45 = (64 L_N - 20 L_{N/2} + L_{N/4}) / 45. The error is the last step of the table,
    increased up to the step of the column before where the ratio a / b is not yet 4, at least |b| / 128 (what the
    next step would be, were the ratio 4 by chance), and the relative doubts in the three lengths. Differences whose
    ratio is not within 2 and 8 are not those of an expansion in 1/N^2 yet: then L_N stands, with the larger of them
    as error.
    """
    last = log_lengths[-1]
    if not math.isfinite(last):
        return last, math.inf
    a, b = (excess(p - last) for p in log_lengths[:2])
    a -= b
    if b > 0 and 2 * b <= a <= 8 * b:
        step = (a - 4 * b) / 45
        doubt = (doubts[0] * (1 + a + b) + 20 * doubts[1] * (1 + b) + 64 * doubts[2]) / 45
        error = abs(step) * (1 + 15 * min(abs(a / b - 4), 1.0))
        return last + math.log1p(step - b / 3), max(error, b / 128) + doubt
    return last, max(abs(a), abs(b)) + doubts[-1]


def _times(log_speed: LogSpeed, guess: Path) -> tuple[Callable[[int], Any], Callable[[Any], Any]]:
    """Two functions: the cuts s (N + 1,) of [0, 1] into N pieces, and log int rho over the pieces between cuts."""
    nodes, _ = lobatto(_CLOCK)
    points, slopes = guess.evaluate_many(nodes)
    with torch.no_grad():
        log_g = 0.5 * log_speed(points, slopes).cpu().numpy()
    if not np.isfinite(log_g).all():
        log_g = np.zeros(_CLOCK + 1)  # the guess touches the border of the domain: a uniform clock
    clock = np.polynomial.Chebyshev.fit(nodes, log_g, _CLOCK, domain=[0.0, 1.0])
    x, w = gauss(16)
    # Cells that crowd at the ends, where far out the metric changes within 1 / |x|.
    edges, _ = lobatto(256)

    def log_integrals(s: np.ndarray[Any, Any], power: float = 1.0) -> np.ndarray[Any, Any]:
        step = np.diff(s)
        values = power * clock(s[:-1, None] + step[:, None] * x)
        top = values.max(1)
        inner = np.exp(values - top[:, None]) @ w
        return np.asarray(top + np.log(step * inner))

    logs = log_integrals(edges, 0.5)
    past = np.concatenate([[0.0], np.cumsum(np.exp(logs - logs.max()))])
    mixed = 0.5 * (edges + past / past[-1])

    from scipy.interpolate import PchipInterpolator

    inverse = PchipInterpolator(mixed, edges)

    def cut(N: int) -> np.ndarray[Any, Any]:
        s = np.array(inverse(np.arange(N + 1) / N))
        s[0], s[-1] = 0.0, 1.0
        return s

    def behind(s: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
        # Each piece from the cells within it, so that steep clocks are integrated where they are steep.
        fine = np.union1d(edges, s)
        cells, owner = log_integrals(fine), np.searchsorted(s, 0.5 * (fine[:-1] + fine[1:])) - 1
        out = np.full(len(s) - 1, -np.inf)
        np.logaddexp.at(out, owner, cells)
        return out - np.logaddexp.reduce(out)

    return cut, behind


def _refined(offsets: Tensor, old: np.ndarray[Any, Any], new: np.ndarray[Any, Any]) -> Tensor:
    """The same polygon with twice the nodes; every other of them is an old one."""
    share = torch.from_numpy((new[1::2] - old[:-1]) / np.diff(old)).to(offsets).unsqueeze(-1)
    out = offsets.new_empty(len(new), offsets.shape[1])
    out[::2] = offsets
    out[1::2] = (1 - share) * offsets[:-1] + share * offsets[1:]
    return out


def _panels(s: np.ndarray[Any, Any], panels: int) -> np.ndarray[Any, Any]:
    """Ends of the panels in the unit parameters of segments, (N, panels + 1), from the cuts of all panels."""
    ends = np.concatenate([s[:-1].reshape(-1, panels), s[panels::panels, None]], 1)
    return np.asarray((ends - ends[:, :1]) / (ends[:, -1:] - ends[:, :1]))


def _rule(
    s: np.ndarray[Any, Any],
    panels: int,
    base: tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]],
    like: Tensor,
) -> Rule:
    """A rule on [0, 1] on each panel."""
    x, w = base
    ends = _panels(s, panels)
    step = np.diff(ends)[..., None]
    pair = (ends[:, :-1, None] + step * x, step * w)
    points, weights = (torch.from_numpy(a.reshape(len(ends), -1)).to(like) for a in pair)
    return points, weights


def _simpson(s: np.ndarray[Any, Any], panels: int, like: Tensor) -> Rule:
    """Simpson's rule on each panel."""
    ends = _panels(s, panels)
    step = np.diff(ends)
    points, weights = np.zeros((2, len(ends), 2 * panels + 1))
    points[:, ::2], points[:, 1::2] = ends, 0.5 * (ends[:, 1:] + ends[:, :-1])
    weights[:, 1::2] = step * 4 / 6
    weights[:, :-1:2] += step / 6
    weights[:, 2::2] += step / 6
    return torch.from_numpy(points).to(like), torch.from_numpy(weights).to(like)


def _log_length(log_speed: LogSpeed, start: Tensor, offsets: Tensor, rule: Rule) -> float:
    with torch.no_grad():
        return float(torch.logsumexp(_log_segments(log_speed, start, offsets, rule), 0))


def _log_segments(log_speed: LogSpeed, start: Tensor, offsets: Tensor, rule: Rule) -> Tensor:
    """log of the lengths of the segments (N,)."""
    x, w = rule
    step = offsets[1:] - offsets[:-1]
    points = start + offsets[:-1].unsqueeze(1) + x.unsqueeze(-1) * step.unsqueeze(1)
    slopes = step.unsqueeze(1).expand_as(points)
    k = offsets.shape[-1]
    speed = log_speed(points.reshape(-1, k), slopes.reshape(-1, k)).reshape(x.shape)
    return torch.logsumexp(torch.log(w) + 0.5 * speed, -1)


def _minimised(
    log_speed: LogSpeed,
    start: Tensor,
    guess: Tensor,
    s: np.ndarray[Any, Any],
    log_rho: np.ndarray[Any, Any],
    rule: Rule,
    scale: Tensor,
    *,
    goal: float,
    max_iter: int,
) -> tuple[Tensor, float, float]:
    """One number of segments: displacements, relative gradient, and the relative defect that it implies."""
    N, k = guess.shape[0] - 1, guess.shape[1]
    rho = torch.from_numpy(log_rho).to(guess)
    # Where l_k^2 / rho_k is about rho_k |x_{k+1} - x_k|^2 / (s_{k+1} - s_k)^2 in units of scale, the Hessian is twice
    # this stiffness. (Floored: it must stay regular where the times span hundreds of orders.)
    steps = np.diff(s)
    rate = np.exp(log_rho) / steps
    stiff = (rate + 1e-6 * rate.max()) / steps
    K = np.diag(stiff[:-1] + stiff[1:]) - np.diag(stiff[1:-1], 1) - np.diag(stiff[1:-1], -1)
    Rinv = torch.linalg.inv(torch.linalg.cholesky(torch.from_numpy(K).to(guess)).mT)

    def log_action(offsets: Tensor) -> Tensor:
        return torch.logsumexp(2 * _log_segments(log_speed, start, offsets, rule) - rho, 0)

    def offsets_of(z: Tensor) -> Tensor:
        inner = guess[1:-1] + (Rinv @ z.reshape(N - 1, k)) * scale
        return torch.cat([guess[:1], inner, guess[-1:]], 0)

    with torch.no_grad():
        base = float(log_action(guess))
    base = base if math.isfinite(base) else 0.0

    z, _, gradient, defect = minimised(
        lambda z: log_action(offsets_of(z)),
        base,
        guess.new_zeros((N - 1) * k),
        goal=goal,
        max_iter=max_iter,
    )
    return offsets_of(z).detach(), gradient, defect
