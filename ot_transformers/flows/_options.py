"""Options that the flows share, and their progress bars."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ..arrays import ArrayLike, as_tensor, check_choice, check_count, check_positive, describe, layers
from ..errors import InvalidInput

__all__ = ["Interval", "Options", "check_progress", "plain", "progress_bar"]


class Options:
    """Validated options of a flow."""

    def __init__(
        self,
        t_end: Any,
        rtol: Any,
        atol: Any,
        save_at: ArrayLike | None,
        max_steps: Any,
        stop_when_converged: Any,
        converged_tol: Any,
        progress: Any,
        method: Any = "explicit",
    ) -> None:
        self.t_end = check_positive(t_end, "t_end")
        self.rtol, self.atol = check_positive(rtol, "rtol"), check_positive(atol, "atol")
        self.max_steps = check_count(max_steps, "max_steps")
        if not isinstance(stop_when_converged, bool | np.bool_):
            raise InvalidInput(f"stop_when_converged must be a bool, got {describe(stop_when_converged)}")
        self.stop = bool(stop_when_converged)
        self.converged_tol = check_positive(converged_tol, "converged_tol")
        self.method = check_choice(method, "method", ("explicit", "auto"))
        check_progress(progress)
        self.progress = progress
        self.times = _save_times(save_at, self.t_end)

    @property
    def interval(self) -> Interval:
        """From 0 through the save times; the flow runs to t_end even if that is not saved."""
        return Interval(0.0, self.t_end, self.times)


class Interval:
    """A start, an end, and the times between (both included) at which states are wanted."""

    def __init__(self, start: float, end: float, times: np.ndarray[Any, Any]) -> None:
        self.start, self.end, self.times = start, end, times


def _save_times(save_at: ArrayLike | None, t_end: float) -> np.ndarray[Any, Any]:
    if save_at is None:
        return np.linspace(0.0, t_end, 65)
    t, _ = as_tensor(save_at, "save_at", ndim=1)
    times = plain(t.double())
    if np.any(np.diff(times) <= 0):
        raise InvalidInput("save_at must be strictly increasing")
    if times[0] < 0 or times[-1] > t_end:
        raise InvalidInput(f"save_at must lie in [0, t_end = {t_end:g}], got {times[0]:g} to {times[-1]:g}")
    return times


def plain(t: Tensor) -> np.ndarray[Any, Any]:
    """The values of a tensor, also inside `torch.func` transforms (their tensors have no storage)."""
    *_, t = layers(t)
    with torch._C._DisableFuncTorch():
        return t.detach().cpu().numpy()


def check_progress(progress: Any) -> None:
    """Reject what is neither a bool nor a callable."""
    if not (isinstance(progress, bool) or callable(progress)):
        raise InvalidInput(f"progress must be a bool or a callable, got {describe(progress)}")


@contextmanager
def progress_bar(progress: bool | Callable[[float], None]) -> Iterator[Callable[[float], None] | None]:
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
