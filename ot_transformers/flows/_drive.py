"""From a system of measures to a `Trajectory`: pieces between jumps, statuses, blow-up times, energies."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ..energies import Energy
from ..errors import NotConverged
from ..measures import Gaussian, Measure
from ..numerics.threads import few_threads
from ._integrate import BLOWN_UP, CONVERGED, OUT_OF_STEPS, RUNNING, Run, integrate
from ._options import Interval, Options, plain, progress_bar
from ._stiff import SWITCH_AFTER, finish_stiff
from ._system import System
from .trajectory import Status, Trajectory

__all__ = ["SystemAt", "drive"]

SystemAt = Callable[[Measure, float, float], System]
"""(measure, start, end) -> the system that moves it between two jumps of its parameters."""

_WORDS = {
    RUNNING: str(Status.COMPLETED),
    CONVERGED: str(Status.CONVERGED),
    BLOWN_UP: str(Status.BLEW_UP),
    OUT_OF_STEPS: str(Status.STEP_LIMIT),
}
_TIGHTER, _TIGHTEST = 32.0, 1e-9
_MORE_STEPS = 20
"""Allowed to the tighter run: a method of order 5 needs 32^(1/5) = 2 times the steps, more from a loose rtol."""


def drive(
    system_at: SystemAt,
    measure: Measure,
    opts: Options,
    jumps: Sequence[float],
    energies: dict[str, Energy],
) -> Trajectory:
    """Integrate over all pieces and gather the trajectory."""
    with few_threads(_work(measure)):
        return _drive(system_at, measure, opts, jumps, energies)


def _work(measure: Measure) -> float:
    """Operations of one evaluation of the velocity, roughly: those of one member where LAPACK takes one at a time."""
    if isinstance(measure, Gaussian):
        return 8.0 * measure.dim**2 * measure.factor_t.shape[-1]
    return 4.0 * float(np.prod(measure.batch_shape, dtype=float)) * measure.x_t.shape[-2] ** 2 * measure.dim


def _drive(
    system_at: SystemAt,
    measure: Measure,
    opts: Options,
    jumps: Sequence[float],
    energies: dict[str, Energy],
) -> Trajectory:
    with progress_bar(opts.progress) as report:
        pieces = _Pieces(system_at, measure, opts, opts.interval, jumps, report=report)
    code = pieces.code
    blow_up, error = _refined(pieces, system_at, measure, opts, jumps)
    shape = pieces.batch_shape
    states = [pieces.system.measure(y) for y in pieces.ys]
    notes = _warn(code)
    last = pieces.t_last

    def resume(start: Measure, t0: float, t1: float) -> Measure:
        moving = (last > t0) | (code == RUNNING)
        between = [j for j in jumps if t0 < j < t1]
        again = _Pieces(
            system_at, start, opts, Interval(t0, t1, np.array([t1])), between, alive=moving, stop=False
        )
        return again.system.measure(again.ys[-1])

    values, rates = _record(energies, states, opts.times, system_at)
    return Trajectory(
        times=opts.times,
        states=states,
        status=_shaped(np.array([_WORDS[int(c)] for c in plain(code)], dtype=object), shape),
        blow_up_time=_shaped(plain(blow_up), shape),
        blow_up_error=_shaped(plain(error), shape),
        last_times=_shaped(plain(last), shape),
        energies=values,
        energy_rates=rates,
        stats={
            "n_steps": int(pieces.n_steps.max()),
            "n_accepted": int(pieces.n_accepted.max()),
            "n_evaluations": pieces.n_evaluations,
            "steps": _shaped(plain(pieces.n_steps), shape),
        },
        warnings=notes,
        resume=resume,
        initial=measure,
    )


def _refined(
    pieces: _Pieces, system_at: SystemAt, measure: Measure, opts: Options, jumps: Sequence[float]
) -> tuple[Tensor, Tensor]:
    """Blow-up times at rtol at least 32 times tighter (and <= 1e-9); their distance to those of the flow.

    For errors proportional to the tolerance the distance is 31 times the error of the refined number.
    """
    blown = pieces.code == BLOWN_UP
    first = pieces.blow_up
    if not bool(blown.any()):
        return first, torch.zeros_like(first)
    limit = _MORE_STEPS * opts.max_steps
    with torch.no_grad():
        tight = _Pieces(
            system_at,
            measure,
            opts,
            Interval(0.0, opts.t_end, opts.times[:0]),
            jumps,
            factor=min(1 / _TIGHTER, _TIGHTEST / opts.rtol),
            alive=blown,
            stop=False,
            max_steps=limit,
        )
    again = tight.code == BLOWN_UP
    best = torch.where(again, tight.blow_up, first)
    ulp = 64 * torch.finfo(measure.dtype).eps * first.abs()
    gap = torch.where(again, (first - best).abs() + tight.remainder, first.abs())
    return best, torch.where(blown, gap + ulp, 0.0)


def _record(
    energies: dict[str, Energy], states: Sequence[Measure], times: np.ndarray[Any, Any], system_at: SystemAt
) -> tuple[dict[str, np.ndarray[Any, Any]], dict[str, np.ndarray[Any, Any]]]:
    """Energies and dE/dt = <grad E, velocity> at the save times."""
    if not energies:
        return {}, {}
    values: dict[str, list[Any]] = {name: [] for name in energies}
    rates: dict[str, list[Any]] = {name: [] for name in energies}
    with torch.no_grad():
        for t, state in zip(times.tolist(), states, strict=True):
            system = system_at(state, t, t)
            velocity = system.velocity(t)
            for name, energy in energies.items():
                values[name].append(plain(torch.as_tensor(energy.value(state))))
                rates[name].append(plain(_rate(energy, state, velocity)))
    return {n: np.stack(v) for n, v in values.items()}, {n: np.stack(v) for n, v in rates.items()}


def _rate(energy: Energy, state: Measure, velocity: Tensor) -> Tensor:
    if isinstance(state, Gaussian):
        g, H = energy.raw_gaussian_gradient(state.mean_t, state.cov_t)
        dm, dL = velocity[..., 0], velocity[..., 1:]
        return (g * dm).sum(-1) + 2.0 * ((H @ state.factor_t) * dL).sum((-2, -1))
    g = energy.raw_particles_gradient(state.x_t, state.weights_t)
    return (state.weights_t * (g * velocity).sum(-1)).sum(-1)


def _shaped(values: np.ndarray[Any, Any], shape: tuple[int, ...]) -> Any:
    """Arrays of the batch shape; plain Python values where there is no batch."""
    if shape:
        # Members that share their steps (parameters given by a callable) share one status.
        return values.reshape(shape) if values.size > 1 else np.broadcast_to(values.reshape(()), shape).copy()
    value = values.reshape(-1)[0]
    return value.item() if isinstance(value, np.generic) else value


def _warn(code: Tensor) -> tuple[str, ...]:
    spent = int((code == OUT_OF_STEPS).sum())
    if not spent:
        return ()
    where = "at the step limit, the floating range or the edge of the energy's domain"
    text = f"{spent} of {code.numel()} flows stopped before t_end: {where}"
    warnings.warn(text, NotConverged, stacklevel=4)
    return (text,)


class _Pieces:
    """The run over all pieces between jumps."""

    def __init__(
        self,
        system_at: SystemAt,
        measure: Measure,
        opts: Options,
        interval: Interval,
        jumps: Sequence[float],
        *,
        factor: float = 1.0,
        report: Callable[[float], None] | None = None,
        alive: Tensor | None = None,
        stop: bool = True,
        max_steps: int | None = None,
    ) -> None:
        times, start, end = interval.times, interval.start, interval.end
        knots = [start, *(j for j in jumps if start < j < end), end]
        floor = 32 * torch.finfo(measure.dtype).eps
        self.system = system_at(measure, knots[0], knots[1])
        self.batch_shape = self.system.batch_shape
        y = self.system.y0
        B = y.shape[0]
        self.code = torch.zeros(B, dtype=torch.long, device=y.device)
        if alive is not None:
            self.code = torch.where(alive, self.code, OUT_OF_STEPS)
        self.t_last = torch.full((B,), start, dtype=torch.float64, device=y.device)
        self.blow_up = torch.full((B,), torch.inf, dtype=torch.float64, device=y.device)
        self.remainder, self.n_steps = torch.zeros_like(self.blow_up), torch.zeros_like(self.code)
        self.n_accepted, self.n_evaluations = torch.zeros_like(self.code), 0
        self.ys: list[Tensor] = [y for t in times if t <= start]
        at_rest = self.system.at_rest(opts.converged_tol) if opts.stop and stop else None
        for i, (a, b) in enumerate(pairwise(knots)):
            if i:
                self.system = system_at(self.system.measure(y), a, b)
            inside = [float(t) for t in times if a < t < b]

            def told(fraction: float, a: float = a, b: float = b) -> None:
                if report is not None:
                    report((a + fraction * (b - a) - start) / (end - start))

            limit = opts.max_steps if max_steps is None else max_steps
            member = self.system.member if opts.method == "auto" and limit > SWITCH_AFTER else None
            save = [a, *inside, b]
            rtol, atol = max(opts.rtol * factor, floor), max(opts.atol * factor, 1e-3 * floor)
            # A layer at rest can be set in motion by the next one: only the last layer may stop a flow.
            rest = at_rest if i == len(knots) - 2 else None
            run = integrate(
                self.system.field,
                y,
                save,
                rtol=rtol,
                atol=atol,
                max_steps=limit if member is None else SWITCH_AFTER,
                blocks=self.system.blocks(),
                scale=self.system.scale,
                converged=rest,
                alive=self.code == RUNNING,
                origin=opts.interval.start,
                progress=told if report is not None else None,
            )
            if member is not None:
                run = finish_stiff(run, member, save, rtol=rtol, atol=atol, max_steps=limit, at_rest=rest)
            self._absorb(run)
            y = run.ys[-1]
            self.ys += run.ys[1:] if b in times else run.ys[1:-1]

    def _absorb(self, run: Run) -> None:
        active = self.code == RUNNING
        self.t_last = torch.where(active, run.t_last, self.t_last)
        self.blow_up = torch.where(active, run.blow_up, self.blow_up)
        self.remainder = torch.where(active, run.remainder, self.remainder)
        self.code = torch.where(active, run.code, self.code)
        self.n_steps, self.n_accepted = self.n_steps + run.n_steps, self.n_accepted + run.n_accepted
        self.n_evaluations += run.n_evaluations
