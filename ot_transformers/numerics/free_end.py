"""Proximal steps in a Riemannian space: paths from a point with a free end, by spectral path optimisation.

min over paths x from `start` of F(x(1)) + d^2 / (2 tau) with d the length of x; for any clock rho > 0 of integral 1,

    d^2 = min int_0^1 g(x', x') / rho ds,

attained where sqrt(g) is proportional to rho (Cauchy-Schwarz): minimising jointly over the path and its end is the
proximal step in the distance itself. A path is a polynomial given by its displacements at Chebyshev-Lobatto nodes. Its
degree is raised, with rho from the path before, until the solution of one degree is stationary for the next: that
gradient, by a finer quadrature, is the one reported.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from .minimise import Pairs, lbfgs
from .paths import LogSpeed, gauss, interpolation, lobatto

__all__ = ["FreeEnd", "Problem", "free_end"]

_DEGREES = (1, 2, 4, 8, 12, 18, 27, 40, 60)
"""The last one only checks."""

_GAIN = 0.01
"""How far a degree is minimised, of the gradient it starts with: the next one sees more of the path."""

_MEMORY = 30
"""Pairs of the quasi-Newton model: they serve several degrees."""

_SEEN = 10.0
"""A gradient within this factor of the one left by the degree before: the path is seen, minimise to the end."""

_RANGE = 7.0
"""log of the range of speeds that clocks and scales follow."""

_NEAR = 2.0
"""log of the change of the metric that a first step may bring."""

_HALVINGS = 60

_FLAT = 80.0
"""The metric has vanished where its log has fallen by this."""

_SHRINK = (1.0, 2.0**-5, 2.0**-10)
"""Shorter first steps for those that ended where the metric has vanished."""


class Problem(NamedTuple):
    """An energy and a metric about a point.

    Attributes
    ----------
    start : Tensor (k,)
    value_and_gradient : callable, point (k,) -> F, dF (k,)
    log_speed : callable, points and velocities (q, k) -> log g (q,), +inf outside the domain
    unit : callable, (..., k) -> (..., k), linear
        Coordinates in which g at the start is about the identity.
    growth : callable, points and velocities (q, k) -> log g (q,) and growth (q, groups)
        The second: log of g relative to the start, for groups of coordinates.
    far : callable, points (q, k) -> (q,) of bool
        Where the problem is taken to be unbounded.
    """

    start: Tensor
    value_and_gradient: Callable[[Tensor], tuple[float, Tensor]]
    log_speed: LogSpeed
    unit: Callable[[Tensor], Tensor]
    growth: Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]
    far: Callable[[Tensor], Tensor]


@dataclass(frozen=True, eq=False)
class FreeEnd:
    """Where a step leads.

    Attributes
    ----------
    end : Tensor (k,)
    converged : bool
    gradient_norm : float, of the path and its end jointly, relative to |grad F| at the start
    n_iter : int
    degree : int, of the path
    escaped : bool
        Whether the objective fell without bound.
    """

    end: Tensor
    converged: bool
    gradient_norm: float
    n_iter: int
    degree: int
    escaped: bool = False


def free_end(
    problem: Problem, tau: float, *, tol: float, max_iter: int, guess: Tensor | None = None
) -> FreeEnd:
    """Minimise F(x(1)) + d^2 / (2 tau) over paths from `problem.start`.

    Parameters
    ----------
    problem : Problem
    tau : float
    tol : float
        On the gradient, relative to |grad F| at the start (in the metric there).
    max_iter : int
        Iterations at most, over all degrees.
    guess : Tensor (k,), optional
        The end to start from, as a displacement in the unit coordinates; taken if it is better than staying.
    """
    path = problem.start.new_zeros(1, problem.start.numel())
    level = _Level(problem, tau, path)
    before, g = level.evaluate(level.coordinates(path))
    reference = float(g.norm())
    if not np.isfinite(float(before) + reference):
        return FreeEnd(problem.start, False, float("inf"), 0, 0)
    goal = max(tol, 1e-13) * max(reference, 1e-300)
    scale = tau * _first_fraction(problem, -tau * problem.unit(level.path(g)[-1]))
    spent = 0
    if guess is not None and float(level.evaluate(guess.reshape(1, -1))[0]) < float(before):
        # A guess may lie where all is flat, out of reach of the minimiser: half of the iterations are for it.
        # Its end is near the solution, better than what low degrees would make of it.
        warm = _raised(
            problem,
            tau,
            guess.reshape(path.shape),
            before,
            reference,
            goal,
            (max_iter + 1) // 2,
            scale,
            _DEGREES[2:],
        )
        spent = warm.n_iter
        if warm.converged or spent >= max_iter:
            return warm
    for shrink in _SHRINK:
        cold = _raised(problem, tau, path, before, reference, goal, max_iter - spent, shrink * scale)
        spent += cold.n_iter
        lost = not cold.escaped and _lost(problem, cold.end)
        if not lost or spent >= max_iter:
            break
    return replace(cold, n_iter=spent, converged=cold.converged and not lost)


def _raised(
    problem: Problem,
    tau: float,
    path: Tensor,
    before: Tensor,
    reference: float,
    goal: float,
    max_iter: int,
    scale: float,
    degrees: tuple[int, ...] = _DEGREES,
) -> FreeEnd:
    """Raise the degree of a path from the first of `degrees`, where it is straight.

    `scale` is the step along the gradient that minimising starts with.
    """
    level = _Level(problem, tau, path)
    n_iter, escaped, left = 0, False, 0.0
    pairs: Pairs = ()
    for N in degrees:
        coarse, path = level, _refined(path, N)
        level = _Level(problem, tau, path)
        z = level.coordinates(path)
        value, g = level.evaluate(z)
        norm, longer = float(g.norm()), not float(value) <= float(before)
        done = degrees[0] < N and norm <= goal and not longer
        if done or escaped or _DEGREES[-1] == N or n_iter >= max_iter:
            break
        if longer:  # a coarse rule saw too short a path
            z = torch.zeros_like(z)
        target = (
            0.5 * goal
            if not np.isfinite(norm) or (N >= 8 and norm <= _SEEN * left)
            else max(0.5 * goal, _GAIN * norm)
        )
        found = lbfgs(
            level.evaluate,
            z,
            scale=scale,
            tolerance=torch.full_like(value, target),
            max_iter=max_iter - n_iter,
            pairs=[(level.carried(s, coarse), level.carried(t, coarse)) for s, t in pairs],
            memory=_MEMORY,
            far=level.far,
        )
        left = float(found.gradient_norm)
        n_iter, path, pairs, escaped = n_iter + found.n_iter, level.path(found.y), found.pairs, found.escaped
    end = problem.start + problem.unit(path[-1])
    relative = norm / reference if reference > 0 else 0.0
    return FreeEnd(end, norm <= goal and not longer and not escaped, relative, n_iter, N, escaped)


def _lost(problem: Problem, end: Tensor) -> bool:
    """Whether the metric has vanished at an end: all is flat there, and a gradient of 0 says nothing."""
    points = end.unsqueeze(0)
    _, growth = problem.growth(points, torch.zeros_like(points))
    return bool((growth < -_FLAT).any())


def _first_fraction(problem: Problem, explicit: Tensor) -> float:
    """1, or less where the explicit step would leave for where the metric is another one.

    Where the metric vanishes everything is flat: from a first step that far there is no way back.
    """
    fraction = 1.0
    for _ in range(_HALVINGS):
        points = (problem.start + fraction * explicit).unsqueeze(0)
        _, growth = problem.growth(points, torch.zeros_like(points))
        if bool((growth.abs() <= _NEAR).all()):
            break
        fraction *= 0.5
    return fraction


class _Level:
    """The inner problem on paths of one degree, held as displacements (N, k) in the unit coordinates.

    The coordinates z of a path are those in which the action is |z|^2 for the metric along the path that the level
    starts with, group by group. In a constant metric: its end, and bumps orthogonal to the straight line.
    """

    def __init__(self, problem: Problem, tau: float, path: Tensor) -> None:
        self.problem, self.tau, self.shape = problem, tau, path.shape
        self._last: tuple[Tensor, tuple[Tensor, Tensor]] | None = None
        N = path.shape[0]
        s, w = gauss(N + 2)
        # The start does not move.
        V, dV = (torch.from_numpy(np.ascontiguousarray(a[:, 1:])).to(path) for a in interpolation(N, s))
        self.V, self.dV = V, dV
        self.log_w = torch.from_numpy(np.log(w)).to(path)
        log_g, growth = problem.growth(*self._curve(path))
        self.clock = self._clock(log_g)
        growth = (growth - self.clock.unsqueeze(-1)).clamp(-_RANGE, _RANGE)
        stiffness = torch.exp(self.log_w.unsqueeze(-1) + growth).mT.unsqueeze(-1)  # (groups, q, 1)
        self.root = torch.linalg.cholesky(dV.mT @ (stiffness * dV)).mT
        self.inverse = torch.linalg.inv(self.root)

    def _clock(self, log_g: Tensor) -> Tensor:
        """log rho at the quadrature points: the speed of a path, uniform where it has none."""
        clock = 0.5 * log_g
        if not bool(torch.isfinite(clock).all()):
            return torch.zeros_like(clock)
        clock = clock.clamp_min(float(clock.max()) - _RANGE)
        return clock - torch.logsumexp(self.log_w + clock, -1)

    def _curve(self, path: Tensor) -> tuple[Tensor, Tensor]:
        moved = self.problem.unit(path)
        return self.problem.start + self.V @ moved, self.dV @ moved

    def _grouped(self, matrices: Tensor, z: Tensor) -> Tensor:
        parts = z.reshape(self.shape[0], len(matrices), -1).movedim(0, 1)
        return (matrices @ parts).movedim(1, 0).reshape(self.shape)

    def coordinates(self, path: Tensor) -> Tensor:
        return self._grouped(self.root, path).reshape(1, -1)

    def path(self, z: Tensor) -> Tensor:
        return self._grouped(self.inverse, z)

    def carried(self, z: Tensor, coarse: _Level) -> Tensor:
        """A vector of coordinates of a coarser level in those of this one."""
        return self.coordinates(_refined(coarse.path(z), self.shape[0]))

    def far(self, z: Tensor) -> Tensor:
        return self.problem.far(self.problem.start + self.problem.unit(self.path(z)[-1:]))

    def evaluate(self, batch: Tensor) -> tuple[Tensor, Tensor]:
        """The objective (1,) and its gradient (1, N k); the last point is remembered."""
        if self._last is None or self._last[0] is not batch:
            self._last = batch, self._evaluate(batch)
        return self._last[1]

    def _evaluate(self, batch: Tensor) -> tuple[Tensor, Tensor]:
        path = self.path(batch)
        value, slope = self.problem.value_and_gradient(self.problem.start + self.problem.unit(path[-1]))
        with torch.enable_grad():
            z = batch.detach().requires_grad_()
            path = self.path(z)
            total = (slope.detach() * self.problem.unit(path[-1])).sum()
            action = torch.zeros_like(total)
            if bool((path.detach() != 0).any()):  # at rest the action and its gradient are 0, its log is not
                log_g = self.problem.log_speed(*self._curve(path))
                action = torch.exp(torch.logsumexp(self.log_w + log_g - self.clock, -1))
            (g,) = torch.autograd.grad(total + action / (2 * self.tau), z)
        objective = value + float(action.detach()) / (2 * self.tau)
        objective = objective if np.isfinite(objective) else np.inf
        return batch.new_full((1,), objective), torch.nan_to_num(g, nan=torch.inf)


def _refined(path: Tensor, N: int) -> Tensor:
    """The same path with N displacements."""
    if len(path) == N:
        return path
    V, _ = interpolation(len(path), lobatto(N)[0])
    return torch.from_numpy(np.ascontiguousarray(V[1:, 1:])).to(path) @ path
