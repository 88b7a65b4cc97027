"""Batched L-BFGS for smooth problems that come with a good scale (proximal steps)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

__all__ = ["Minimum", "Pairs", "lbfgs"]

_MEMORY = 12
_ARMIJO = 1e-4
_HALVINGS = 40
_PATIENCE = 15


Pairs = Sequence[tuple[Tensor, Tensor]]


@dataclass(frozen=True, eq=False)
class Minimum:
    """Where a minimisation stopped.

    Attributes
    ----------
    y : Tensor (batch, k)
    value, gradient_norm : Tensor (batch,)
    converged : Tensor (batch,) of bool
        Gradient norm at most the tolerance given.
    n_iter : int
    pairs : list of (step, change of the gradient), (batch, k) each
        The model of the Hessian at the end, for a problem like this one.
    escaped : bool
        Whether a member was given up where `far` says so.
    """

    y: Tensor
    value: Tensor
    gradient_norm: Tensor
    converged: Tensor
    n_iter: int
    pairs: Pairs = ()
    escaped: bool = False


def lbfgs(
    evaluate: Callable[[Tensor], tuple[Tensor, Tensor]],
    y: Tensor,
    *,
    scale: float,
    tolerance: Tensor,
    max_iter: int,
    pairs: Pairs = (),
    memory: int = _MEMORY,
    far: Callable[[Tensor], Tensor] | None = None,
) -> Minimum:
    """Minimise each member of a batch by L-BFGS with Armijo backtracking; the value never increases.

    Parameters
    ----------
    evaluate : callable
        y (batch, k) -> value (batch,), gradient (batch, k), Euclidean; members independent of one another. A
        value that is not finite is stepped back from.
    y : Tensor (batch, k)
        Start.
    scale : float
        First guess of the inverse Hessian, scale * I.
    tolerance : Tensor (batch,)
        On the gradient norm.
    max_iter : int
    pairs : sequence of (step, change of the gradient), optional
        What is known of the Hessian at the start.
    memory : int
        Pairs kept.
    far : callable, y (batch, k) -> (batch,) of bool, optional
        Where the value is taken to fall without bound: the minimisation of a member ends there.

    Notes
    -----
    Near the minimum differences of values are rounding, or the noise of an inner iteration: a step is then
    also accepted if the value rises by at most 1e-12 of itself (64 ulp in float32) while the slope falls, and
    the best point by gradient norm is kept. Stops where neither value nor gradient norm
    has improved for 15 iterations.
    """
    value, gradient = evaluate(y)
    best = Minimum(y, value, _norm(gradient), _met(_norm(gradient), value, tolerance), 0)
    history = [_pair(s, t) for s, t in pairs][-memory:]
    escaped = torch.zeros_like(best.converged)
    ulp, noise = 4 * torch.finfo(y.dtype).eps, _noise(y)
    n_iter = stalled = 0
    while n_iter < max_iter and stalled < _PATIENCE and not bool((best.converged | escaped).all()):
        n_iter += 1
        direction = -_inverse_hessian(history, gradient, scale)
        slope = (direction * gradient).sum(-1)
        ascent = ~(slope < 0)
        direction = torch.where(ascent.unsqueeze(-1), -scale * gradient, direction)
        slope = torch.where(ascent, -scale * gradient.square().sum(-1), slope)
        step = torch.ones_like(value)
        waiting = ~(best.converged | escaped)
        new_y, new_value, new_gradient = y, value, gradient
        for _ in range(_HALVINGS):
            trial = y + step.unsqueeze(-1) * direction
            v, g = evaluate(trial)
            bound = value + _ARMIJO * step * slope + ulp * value.abs()
            # Differences of values within their noise say nothing: there the slope decides (Hager, Zhang 2005).
            level = (v <= value + noise * value.abs()) & (
                (direction * g).sum(-1).abs() <= (1 - 2 * _ARMIJO) * slope.abs()
            )
            good = waiting & ((v <= bound) | level) & torch.isfinite(g).all(-1)
            new_y, new_gradient = (
                torch.where(good.unsqueeze(-1), a, b) for a, b in ((trial, new_y), (g, new_gradient))
            )
            new_value = torch.where(good, v, new_value)
            waiting = waiting & ~good
            if not bool(waiting.any()):
                break
            step = torch.where(waiting, 0.5 * step, step)
        s, t = new_y - y, new_gradient - gradient
        if not bool((s != 0).any()):
            break
        history = [*history[1 - memory :], _pair(s, t)]
        y, value, gradient = new_y, new_value, new_gradient
        last, best = best, _better(best, y, value, _norm(gradient), tolerance)
        if far is not None:
            escaped = escaped | far(y)
        # An evaluation with noise (an inner iteration) leaves a floor below which no step helps.
        lower = last.value - best.value > ulp * best.value.abs()
        progress = ~(last.converged | escaped) & (lower | (best.gradient_norm < 0.9 * last.gradient_norm))
        stalled = 0 if bool(progress.any()) else stalled + 1
    known = [(s, t) for s, t, _ in history]
    converged = best.converged & ~escaped
    return replace(best, converged=converged, n_iter=n_iter, pairs=known, escaped=bool(escaped.any()))


def _pair(s: Tensor, t: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """(s, t, 1 / <s, t>); a pair without positive curvature is left out of that member's model (0)."""
    curvature = (s * t).sum(-1)
    usable = curvature > 1e-12 * _norm(s) * _norm(t)
    return s, t, torch.where(usable, 1 / torch.where(usable, curvature, 1.0), 0.0)


def _better(best: Minimum, y: Tensor, value: Tensor, norm: Tensor, tolerance: Tensor) -> Minimum:
    slack = _noise(y) * best.value.abs()
    better = (value < best.value - slack) | ((value <= best.value + slack) & (norm < best.gradient_norm))
    kept, chosen = torch.where(better, norm, best.gradient_norm), torch.where(better, value, best.value)
    return Minimum(
        torch.where(better.unsqueeze(-1), y, best.y),
        chosen,
        kept,
        _met(kept, chosen, tolerance),
        best.n_iter,
    )


def _met(norm: Tensor, value: Tensor, tolerance: Tensor) -> Tensor:
    """Converged: also at a finite value, for gradients where there is none may come as 0."""
    return (norm <= tolerance) & torch.isfinite(value)


def _noise(y: Tensor) -> float:
    return max(64 * torch.finfo(y.dtype).eps, 1e-12)


def _norm(v: Tensor) -> Tensor:
    return torch.linalg.vector_norm(v, dim=-1)


def _inverse_hessian(history: list[tuple[Tensor, Tensor, Tensor]], g: Tensor, scale: float) -> Tensor:
    """Two-loop recursion, each member with its own pairs."""
    q, alphas = g, []
    for s, t, rho in reversed(history):
        alpha = rho * (s * q).sum(-1)
        alphas.append(alpha)
        q = q - alpha.unsqueeze(-1) * t
    gamma = torch.full_like(g[..., 0], scale)
    if history:
        s, t, rho = history[-1]
        square = t.square().sum(-1)
        usable = (rho > 0) & (square > 0)
        gamma = torch.where(usable, (s * t).sum(-1) / torch.where(usable, square, 1.0), gamma)
    q = gamma.unsqueeze(-1) * q
    for (s, t, rho), alpha in zip(history, reversed(alphas), strict=True):
        beta = rho * (t * q).sum(-1)
        q = q + (alpha - beta).unsqueeze(-1) * s
    return q
