"""Adaptive integration of batches of ODEs, each member with its own step, to save times and through blow-up.

The Runge-Kutta method and the step size controller are torchode's; the loop around them is here because it
lands on save times exactly, stops members one by one (converged, blown up, out of steps) without disturbing
the others, and shortens steps with the growth rate, so that they are even in the rescaled time
d tau = (1 + rho) dt in which a blow-up lies at infinity.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torchode
from torch import Tensor

from ._blow_up import Growth

__all__ = ["BLOWN_UP", "CONVERGED", "OUT_OF_STEPS", "RUNNING", "Run", "integrate"]

RUNNING, CONVERGED, BLOWN_UP, OUT_OF_STEPS = 0, 1, 2, 3
_RANGE = {torch.float64: 1e140, torch.float32: 1e17}
"""States larger than this (their squares still finite) leave the floating range."""
_WINDOW, _HOPELESS = 500, 1e9
"""Steps over which a pace is measured, and how many times too slow for the steps left it has to be to give up."""

VectorField = Callable[[Tensor, Tensor], Tensor]


@dataclass
class Run:
    """What `integrate` found; B members of n features, T save times.

    Attributes
    ----------
    ys : list of T tensors (B, n), frozen at the last state for members that ended
    code : (B,) RUNNING (reached the end), CONVERGED, BLOWN_UP or OUT_OF_STEPS
    t_last : (B,) float64
    blow_up : (B,) estimated blow-up time, inf where there is none
    remainder : (B,) size of the extrapolation from t_last to it
    n_steps, n_accepted : (B,) integers
    n_evaluations : int
    """

    ys: list[Tensor]
    code: Tensor
    t_last: Tensor
    blow_up: Tensor
    remainder: Tensor
    n_steps: Tensor
    n_accepted: Tensor
    n_evaluations: int


def _in_range(y: Tensor) -> Tensor:
    return y.detach().abs().amax(-1) <= _RANGE[y.dtype]


def integrate(
    field: VectorField,
    y0: Tensor,
    save: Sequence[float],
    *,
    rtol: float,
    atol: float,
    max_steps: int,
    blocks: list[Tensor],
    scale: Callable[[Tensor], Tensor],
    converged: Callable[[Tensor, Tensor], Tensor] | None = None,
    alive: Tensor | None = None,
    origin: float | None = None,
    progress: Callable[[float], None] | None = None,
) -> Run:
    """Integrate dy/dt = field(t (B,), y (B, n)) from save[0] to save[-1].

    Parameters
    ----------
    field : callable
    y0 : Tensor (B, n)
    save : increasing times, the first is the initial one
    rtol, atol : floats
        Local error per step <= atol * scale(y) + rtol * |y|, root mean square over features.
    max_steps : int
    blocks : index tensors of the parts of y with growth rates of their own
    scale : callable y (B, n) -> (B, n), the sizes that `atol` refers to
    converged : callable (y, dy/dt) -> (B,) bool, optional
        Members for which it holds stop there.
    alive : (B,) bool, optional
        Members to integrate; the others stay.
    origin : float, optional
        Start of the flow of which this is a piece; save[0] by default.
    """
    B = y0.shape[0]
    grid = torch.tensor(list(save), dtype=torch.float64, device=y0.device)
    end = grid[-1].expand(B)
    t = grid[0].expand(B).clone()
    tiny = 1e3 * torch.finfo(y0.dtype).tiny
    term = torchode.ODETerm(field, with_stats=False)
    method = torchode.Tsit5(term=term)
    control = torchode.PIDController(atol=atol, rtol=rtol, pcoeff=0.3, icoeff=0.4, dcoeff=0.0, term=term)
    control.rtol = torch.tensor(rtol, dtype=y0.dtype, device=y0.device)
    control.atol = (atol * scale(y0.detach())).clamp_min(tiny)
    problem = torchode.InitialValueProblem(y0, t_start=t, t_end=end)
    stats: dict[str, Any] = {}
    dt, c_state, f0 = control.init(term, problem, method.convergence_order(), None, stats=stats, args=None)
    state = method.init(term, problem, f0, stats=stats, args=None)
    evaluations = 2
    code = torch.zeros(B, dtype=torch.long, device=y0.device)
    running = torch.ones(B, dtype=torch.bool, device=y0.device) if alive is None else alive.clone()
    # Beyond the range at the start, squares and with them all error estimates overflow: there is nothing to try.
    lost = running & ~(_in_range(y0) & torch.isfinite(state.prev_vf1.detach()).all(-1))
    code, running = torch.where(lost, OUT_OF_STEPS, code), running & ~lost
    growth = Growth(t, y0, state.prev_vf1, blocks, save[0] if origin is None else origin)
    y, index = y0, torch.ones(B, dtype=torch.long, device=y0.device)
    ys: list[Tensor] = [y0] + [y0] * (len(grid) - 1)
    n_steps = torch.zeros_like(code)
    n_accepted = torch.zeros_like(code)
    mark, sweeps = t, 0
    if converged is not None:
        still = converged(y, state.prev_vf1) & running
        code, running = torch.where(still, CONVERGED, code), running & ~still
    dt = dt.detach().to(torch.float64)
    while bool(running.any()):
        target = grid[index.clamp_max(len(grid) - 1)]
        left = target - t
        clipped = dt >= left * (1 - 1e-10)
        step = torch.where(running, torch.where(clipped, left, dt), 0.0)
        result, _, new_state, _ = method.step(term, running, y, t, step, state, stats=stats, args=None)
        evaluations += 6
        control.atol = (atol * scale(y.detach())).clamp_min(tiny)
        with torch.no_grad():
            accept, dt_next, new_control, _ = control.adapt_step_size(t, step, y, result, c_state, stats)
        finite = torch.isfinite(result.y.detach()).all(-1) & torch.isfinite(new_state.prev_vf1.detach()).all(
            -1
        )
        accept = accept & finite & running
        dt_next = dt_next.to(torch.float64)
        # An error estimate that overflowed gives a step that is not a number.
        dt_next = torch.where(finite & torch.isfinite(dt_next), dt_next, 0.1 * step)
        y = torch.where(accept.unsqueeze(-1), result.y, y)
        state = method.merge_states(accept, new_state, state)
        c_state = control.merge_states(running & finite, new_control, c_state)
        landed = accept & clipped
        t = torch.where(landed, target, torch.where(accept, t + step, t))
        # A clipped step says nothing against the step that was planned.
        dt_next = torch.where(landed, torch.maximum(dt, dt_next), dt_next)
        dt = torch.where(running, dt_next / growth.update(accept, t, y, state.prev_vf1), dt)
        n_steps, n_accepted = n_steps + running, n_accepted + accept
        for i in torch.unique(index[landed]).tolist():
            here = (landed & (index == i)).unsqueeze(-1)
            ys[i] = torch.where(here, y, ys[i])
        index = index + landed
        steep = running & growth.blown_up(end)
        code = torch.where(steep, BLOWN_UP, code)
        wide = accept & ~_in_range(y)
        stuck = (n_steps >= max_steps) | ((step <= 4e-16 * t.abs()) & ~landed)
        sweeps += 1
        if sweeps % _WINDOW == 0:
            # Towards t_end = 1e300 at a pace of 1: unless time grows geometrically, or a blow-up or rest may end it.
            reach = _HOPELESS * (t - mark) * (max_steps - n_steps) / _WINDOW
            slow = (t - grid[0] < 2 * (mark - grid[0])) & (growth.falls == 0) & (grid[-1] - t > reach)
            stuck = stuck | (slow & (converged is None))
            mark = t
        running = running & ~steep & (index < len(grid))
        spent = running & (wide | stuck)
        code, running = torch.where(spent, OUT_OF_STEPS, code), running & ~spent
        if converged is not None:
            still = converged(y, state.prev_vf1) & running & accept
            code, running = torch.where(still, CONVERGED, code), running & ~still
        if progress is not None:
            progress(float(((t - grid[0]) / (grid[-1] - grid[0]).clamp_min(1e-300)).min()))
    for i in range(1, len(grid)):
        ys[i] = torch.where((index <= i).unsqueeze(-1), y, ys[i])
    blown = code == BLOWN_UP
    remainder = torch.where(blown, growth.remainder(), 0.0)
    blow_up = torch.where(blown, t + remainder, torch.inf)
    return Run(ys, code, t, blow_up, remainder, n_steps, n_accepted, evaluations)
