"""Adaptive integration of batches of ODEs, each member with its own step, to save times and through blow-up.

The Runge-Kutta method and the step size controller are torchode's; the loop around them is here because it
lands on save times exactly, stops members one by one (converged, blown up, out of steps) without disturbing
the others, and follows the growth rate that tells a blow-up from exponential growth.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torchode
from torch import Tensor

__all__ = ["BLOWN_UP", "CONVERGED", "OUT_OF_STEPS", "RUNNING", "Run", "integrate"]

RUNNING, CONVERGED, BLOWN_UP, OUT_OF_STEPS = 0, 1, 2, 3
_STEEP = 1e8
"""rho * t beyond which growth is a blow-up: exponential growth overflows at rho t = 700."""
_RANGE = {torch.float64: 1e140, torch.float32: 1e17}
"""States larger than this (their squares still finite) leave the floating range."""

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


def integrate(
    field: VectorField,
    y0: Tensor,
    save: Sequence[float],
    *,
    rtol: float,
    atol: float,
    max_steps: int,
    converged: Callable[[Tensor, Tensor], Tensor] | None = None,
    turn: Callable[[Tensor, Tensor, Tensor], tuple[Tensor, Tensor]] | None = None,
    alive: Tensor | None = None,
    progress: Callable[[float], None] | None = None,
    origin: float = 0.0,
) -> Run:
    """Integrate dy/dt = field(t (B,), y (B, n)) from save[0] to save[-1].

    Parameters
    ----------
    field : callable
    y0 : Tensor (B, n)
    save : increasing times, the first is the initial one
    rtol, atol : floats
        Local error per step <= atol * rms(y0 member) + rtol * |y|, root mean square over features.
    max_steps : int
    converged : callable (y, dy/dt) -> (B,) bool, optional
        Members for which it holds stop there.
    turn : callable (y, dy/dt, which (B,)) -> (y, dy/dt), optional
        Change of gauge of the state of some members, called when they have grown a thousandfold.
    alive : (B,) bool, optional
        Members to integrate; the others stay.
    origin : float
        Time from which growth is counted (start of the flow when this is a later piece of it).
    """
    B = y0.shape[0]
    grid = torch.tensor(list(save), dtype=torch.float64, device=y0.device)
    end = grid[-1].expand(B)
    t = grid[0].expand(B).clone()
    term = torchode.ODETerm(field, with_stats=False)
    method = torchode.Tsit5(term=term)
    control = torchode.IntegralController(atol=atol, rtol=rtol, term=term)
    size = y0.detach().square().mean(-1, keepdim=True).sqrt()
    tiny = torch.finfo(y0.dtype).tiny
    control.atol = (atol * size).clamp_min(1e3 * tiny)  # scale-aware, per member
    control.rtol = torch.tensor(rtol, dtype=y0.dtype, device=y0.device)
    problem = torchode.InitialValueProblem(y0, t_start=t, t_end=end)
    stats: dict[str, Any] = {}
    dt, c_state, f0 = control.init(term, problem, method.convergence_order(), None, stats=stats, args=None)
    state = method.init(term, problem, f0, stats=stats, args=None)
    evaluations = 2
    code = torch.zeros(B, dtype=torch.long, device=y0.device)
    running = torch.ones(B, dtype=torch.bool, device=y0.device) if alive is None else alive.clone()
    growth = _Growth(t, y0, state.prev_vf1)
    y, index = y0, torch.ones(B, dtype=torch.long, device=y0.device)
    turned = y0.detach().abs().amax(-1)
    ys: list[Tensor] = [y0] + [y0] * (len(grid) - 1)
    n_steps = torch.zeros_like(code)
    n_accepted = torch.zeros_like(code)
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
        accept, dt_next, new_control, _ = control.adapt_step_size(t, step, y, result, c_state, stats)
        finite = torch.isfinite(result.y.detach()).all(-1) & torch.isfinite(new_state.prev_vf1.detach()).all(-1)
        accept = accept & finite & running
        dt_next = torch.where(finite, dt_next.detach().to(torch.float64), 0.1 * step)
        y = torch.where(accept.unsqueeze(-1), result.y, y)
        state = method.merge_states(accept, new_state, state)
        c_state = control.merge_states(running, new_control, c_state)
        landed = accept & clipped
        t = torch.where(landed, target, torch.where(accept, t + step, t))
        # A clipped step says nothing against the step that was planned.
        dt = torch.where(running, torch.where(landed, torch.maximum(dt, dt_next), dt_next), dt)
        n_steps, n_accepted = n_steps + running, n_accepted + accept
        growth.update(accept, t, y, state.prev_vf1)
        if turn is not None:
            reach = y.detach().abs().amax(-1)
            grown = accept & (reach > 1e3 * turned)
            if bool(grown.any()):
                y, f = turn(y, state.prev_vf1, grown)
                state = type(state)(state.tableau, f)
                turned = torch.where(grown, reach, turned)
        for i in torch.unique(index[landed]).tolist():
            here = (landed & (index == i)).unsqueeze(-1)
            ys[i] = torch.where(here, y, ys[i])
        index = index + landed
        steep = accept & (growth.rate * (t - origin) > _STEEP)
        code = torch.where(running & steep, BLOWN_UP, code)
        wide = accept & (y.detach().abs().amax(-1) > _RANGE[y.dtype])
        stuck = (n_steps >= max_steps) | (step <= 4e-16 * t.abs()) & ~landed
        spent = running & ~steep & (wide | stuck)
        code = torch.where(spent, OUT_OF_STEPS, code)
        running = running & ~steep & ~spent & (index < len(grid))
        if converged is not None:
            still = converged(y, state.prev_vf1) & running & accept
            code, running = torch.where(still, CONVERGED, code), running & ~still
        if progress is not None:
            progress(float(((t - grid[0]) / (grid[-1] - grid[0]).clamp_min(1e-300)).min()))
    for i in range(1, len(grid)):
        frozen = (index <= i).unsqueeze(-1)
        ys[i] = torch.where(frozen, y, ys[i])
    blow_up, remainder = growth.extrapolate(code == BLOWN_UP)
    return Run(ys, code, t, blow_up, remainder, n_steps, n_accepted, evaluations)


class _Growth:
    """The relative growth rate rho = y . f / |y|^2 at the last two accepted points.

    At a blow-up |y| ~ (t* - t)^{-alpha}, rho = alpha / (t* - t): 1/rho is linear in t and vanishes at t*.
    """

    def __init__(self, t: Tensor, y: Tensor, f: Tensor) -> None:
        self.rate = self._rho(y, f)
        self.before = (t, self.rate)
        self.t = t

    @staticmethod
    def _rho(y: Tensor, f: Tensor) -> Tensor:
        y, f = y.detach().double(), f.detach().double()
        scale = y.abs().amax(-1, keepdim=True).clamp_min(1e-300)
        z = y / scale
        return (z * (f / scale)).sum(-1) / z.square().sum(-1).clamp_min(1e-300)

    def update(self, accept: Tensor, t: Tensor, y: Tensor, f: Tensor) -> None:
        rho = self._rho(y, f)
        self.before = (torch.where(accept, self.t, self.before[0]), torch.where(accept, self.rate, self.before[1]))
        self.t, self.rate = torch.where(accept, t, self.t), torch.where(accept, rho, self.rate)

    def extrapolate(self, which: Tensor) -> tuple[Tensor, Tensor]:
        slope = (1 / self.rate - 1 / self.before[1]) / (self.t - self.before[0]).clamp_min(1e-300)
        good = which & (slope < 0)
        remainder = torch.where(good, -1 / self.rate / torch.where(good, slope, -1.0), 1 / self.rate)
        inf = torch.full_like(self.t, torch.inf)
        return torch.where(which, self.t + remainder, inf), torch.where(which, remainder, 0.0)
