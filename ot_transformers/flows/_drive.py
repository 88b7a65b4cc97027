"""From a system of measures to a `Trajectory`: pieces between jumps, statuses, blow-up times, energies."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ..arrays import ArrayLike, as_tensor, check_count, check_positive, to_kind
from ..energies import Energy
from ..errors import InvalidInput, NotConverged
from ..measures import Measure
from ._integrate import BLOWN_UP, CONVERGED, OUT_OF_STEPS, RUNNING, Run, integrate
from ._system import System
from .trajectory import Status, Trajectory

__all__ = ["Options", "SystemAt", "drive", "options"]

SystemAt = Callable[[Measure, float, float], System]
"""(measure, start, end) -> the system that moves it between two jumps of its parameters."""

_WORDS = {
    RUNNING: str(Status.COMPLETED),
    CONVERGED: str(Status.CONVERGED),
    BLOWN_UP: str(Status.BLEW_UP),
    OUT_OF_STEPS: str(Status.STEP_LIMIT),
}
_LOOSER = 32.0


class Options:
    """Validated options of a flow."""

    def __init__(
        self,
        t_end: Any,
        rtol: Any,
        atol: Any,
        save_at: ArrayLike | None,
        max_steps: Any,
        stop_when_converged: bool,
        converged_tol: Any,
        progress: Any,
    ) -> None:
        self.t_end = check_positive(t_end, "t_end")
        self.rtol, self.atol = check_positive(rtol, "rtol"), check_positive(atol, "atol")
        self.max_steps = check_count(max_steps, "max_steps")
        self.stop = bool(stop_when_converged)
        self.converged_tol = check_positive(converged_tol, "converged_tol")
        if not (isinstance(progress, bool) or callable(progress)):
            raise InvalidInput(f"progress must be a bool or a callable, got {type(progress).__name__}")
        self.progress = progress
        self.times = _save_times(save_at, self.t_end)
        self.start = 0.0


def options(*args: Any) -> Options:
    """Validate the options of a flow."""
    return Options(*args)


def _save_times(save_at: ArrayLike | None, t_end: float) -> np.ndarray[Any, Any]:
    if save_at is None:
        return np.linspace(0.0, t_end, 65)
    t, _ = as_tensor(save_at, "save_at", ndim=1)
    times = t.detach().cpu().double().numpy()
    if np.any(np.diff(times) <= 0):
        raise InvalidInput("save_at must be strictly increasing")
    if times[0] < 0 or times[-1] > t_end:
        raise InvalidInput(f"save_at must lie in [0, t_end = {t_end:g}], got {times[0]:g} to {times[-1]:g}")
    return times


def drive(
    system_at: SystemAt,
    measure: Measure,
    opts: Options,
    jumps: Sequence[float],
    energies: dict[str, Energy],
) -> Trajectory:
    """Integrate over all pieces and gather the trajectory."""
    with _progress(opts.progress) as report:
        pieces = _Pieces(system_at, measure, opts, jumps, opts.rtol, opts.atol, report)
    code = pieces.code
    blow_up, error = pieces.blow_up, torch.zeros_like(pieces.blow_up)
    if bool((code == BLOWN_UP).any()):
        # The same members at a looser tolerance: the difference bounds the global error of the tighter run.
        loose = _Pieces(
            system_at, measure, opts, jumps, opts.rtol * _LOOSER, opts.atol * _LOOSER, None, code == BLOWN_UP
        )
        gap = torch.where(loose.code == BLOWN_UP, (loose.blow_up - blow_up).abs(), blow_up.abs())
        ulp = 64 * torch.finfo(measure.dtype).eps * blow_up.abs()
        error = torch.where(code == BLOWN_UP, gap + pieces.remainder.abs() + ulp, 0.0)
    shape = pieces.batch_shape
    states = [pieces.system.measure(y) for y in pieces.ys]
    notes = _warn(code)

    def resume(start: Measure, t0: float, t1: float) -> Measure:
        again = Options(opts.t_end, opts.rtol, opts.atol, None, opts.max_steps, False, 1.0, False)
        again.times, again.start = np.array([t0, t1]), t0
        return _last(_Pieces(system_at, start, again, [j for j in jumps if t0 < j < t1], opts.rtol, opts.atol, None))

    return Trajectory(
        times=opts.times,
        states=states,
        status=_shaped(np.array([_WORDS[int(c)] for c in code], dtype=object), shape),
        blow_up_time=_shaped(blow_up.cpu().numpy(), shape),
        blow_up_error=_shaped(error.cpu().numpy(), shape),
        last_times=_shaped(pieces.t_last.cpu().numpy(), shape),
        energies={
            name: np.stack([np.asarray(to_kind(_value(e, s), "numpy")) for s in states])
            for name, e in energies.items()
        },
        stats={
            "n_steps": int(pieces.n_steps.max()),
            "n_accepted": int(pieces.n_accepted.max()),
            "n_evaluations": pieces.n_evaluations,
            "steps": _shaped(pieces.n_steps.cpu().numpy(), shape),
        },
        warnings=notes,
        resume=resume,
    )


def _value(energy: Energy, state: Measure) -> Tensor:
    with torch.no_grad():
        value = energy.value(state)
    return torch.as_tensor(value)


def _last(pieces: _Pieces) -> Measure:
    return pieces.system.measure(pieces.ys[-1])


def _shaped(values: np.ndarray[Any, Any], shape: tuple[int, ...]) -> Any:
    """Arrays of the batch shape; plain Python values where there is no batch."""
    if shape:
        return values.reshape(shape)
    value = values.reshape(-1)[0]
    return value.item() if isinstance(value, np.generic) else value


def _warn(code: Tensor) -> tuple[str, ...]:
    spent = int((code == OUT_OF_STEPS).sum())
    if not spent:
        return ()
    text = f"{spent} of {code.numel()} flows stopped before t_end: step limit or floating range reached"
    warnings.warn(text, NotConverged, stacklevel=4)
    return (text,)


class _Pieces:
    """The run over all pieces between jumps."""

    def __init__(
        self,
        system_at: SystemAt,
        measure: Measure,
        opts: Options,
        jumps: Sequence[float],
        rtol: float,
        atol: float,
        report: Callable[[float], None] | None,
        alive: Tensor | None = None,
    ) -> None:
        times = opts.times
        start = opts.start
        knots = [start, *(j for j in jumps if start < j < times[-1]), float(times[-1])]
        floor = 32 * torch.finfo(measure.dtype).eps
        self.system = system_at(measure, knots[0], knots[1] if len(knots) > 1 else knots[0])
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
        at_rest = self.system.at_rest(opts.converged_tol) if opts.stop else None
        for i, (a, b) in enumerate(zip(knots[:-1], knots[1:], strict=True)):
            if b <= a:
                continue
            if i:
                self.system = system_at(self.system.measure(y), a, b)
            inside = [float(t) for t in times if a < t < b]
            last = i == len(knots) - 2

            def told(fraction: float, a: float = a, b: float = b) -> None:
                if report is not None:
                    report((a + fraction * (b - a) - start) / (float(times[-1]) - start))

            run = integrate(
                self.system.field,
                y,
                [a, *inside, b],
                rtol=max(rtol, floor),
                atol=max(atol, 1e-3 * floor),
                max_steps=opts.max_steps,
                # A layer at rest can be set in motion by the next one: only the last layer may stop a flow.
                converged=at_rest if last else None,
                turn=self.system.turn,
                alive=self.code == RUNNING,
                progress=told if report is not None else None,
            )
            self._absorb(run)
            y = run.ys[-1]
            kept = run.ys[1:] if b in times else run.ys[1:-1]
            self.ys += kept

    def _absorb(self, run: Run) -> None:
        active = self.code == RUNNING
        self.t_last = torch.where(active, run.t_last, self.t_last)
        self.blow_up = torch.where(active, run.blow_up, self.blow_up)
        self.remainder = torch.where(active, run.remainder, self.remainder)
        self.code = torch.where(active, run.code, self.code)
        self.n_steps, self.n_accepted = self.n_steps + run.n_steps, self.n_accepted + run.n_accepted
        self.n_evaluations += run.n_evaluations


@contextmanager
def _progress(progress: Any) -> Any:
    """Yield a reporter of fractions: rich's bar for True, the caller's function, or nothing."""
    if progress is False:
        yield None
    elif progress is True:
        from rich.progress import Progress

        with Progress(transient=True) as bar:
            task = bar.add_task("flow", total=1.0)
            yield lambda fraction: bar.update(task, completed=fraction)
    else:
        yield progress
