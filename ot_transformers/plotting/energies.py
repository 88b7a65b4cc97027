"""Energies, gaps and other curves in time."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
from matplotlib.axes import Axes

from ..arrays import ArrayLike
from ..errors import InvalidInput
from ._style import COLOURS, axes_or_new, to_float64

__all__ = ["plot_energy"]


def plot_energy(
    curves: Mapping[str, tuple[ArrayLike, ArrayLike]],
    *,
    ax: Axes | None = None,
    ylabel: str = "energy $F$",
    log: bool = False,
    steps: tuple[str, ...] = (),
) -> list[Any]:
    """Draw energies (or any curves) in time, each in its own colour.

    Parameters
    ----------
    curves : mapping from a name to (times (T,), values (T,))
        Infinite values are left out.
    ax : matplotlib axes, optional
    ylabel : str
    log : bool
        Logarithmic axis.
    steps : names of curves that exist at their times only (JKO steps), drawn as marks

    Returns
    -------
    list of lines, in the order of `curves`.
    """
    axes = axes_or_new(ax)
    artists: list[Any] = []
    marks = iter("osD^v" * 10)
    for k, (name, (times, values)) in enumerate(curves.items()):
        t, y = to_float64(times, "times"), _with_infinities(values)
        if t.shape != y.shape or t.ndim != 1:
            raise InvalidInput(
                f"curves[{name!r}] must be two arrays (T,), got shapes {t.shape} and {y.shape}"
            )
        y = np.where(np.isfinite(y), y, np.nan)
        # Curves that agree lie on top of one another: later ones are thinner and dashed, so that both show.
        options: dict[str, Any] = {"color": COLOURS[k % len(COLOURS)], "label": name}
        if name in steps:
            options |= {"ls": "none", "marker": next(marks), "ms": 4.5, "mfc": "white", "mew": 1.2}
        else:
            options |= {"lw": 3.2 if k == 0 else 1.6, "ls": "-" if k == 0 else (0, (4, 2 + k))}
            options |= {"alpha": 0.55} if k == 0 else {}
        artists += axes.plot(t, y, **options)
    if log:
        axes.set_yscale("log")
    axes.set(xlabel="time $t$", ylabel=ylabel)
    if len(curves) > 1:
        axes.legend()
    return artists


def _with_infinities(values: ArrayLike) -> np.ndarray[Any, Any]:
    # Energies may be infinite, which `as_tensor` rejects.
    detach = getattr(values, "detach", None)
    return np.asarray(detach().cpu() if detach is not None else values, dtype=float)
