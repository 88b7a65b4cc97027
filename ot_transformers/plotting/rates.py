"""Convergence on log-log axes, with the slope that theory gives."""

from __future__ import annotations

from typing import Any

import numpy as np
from matplotlib.axes import Axes

from ..arrays import ArrayLike
from ..errors import InvalidInput
from ._style import COLOURS, axes_or_new, plain_log, to_float64

__all__ = ["plot_rate"]


def plot_rate(
    x: ArrayLike,
    y: ArrayLike,
    *,
    ax: Axes | None = None,
    errors: ArrayLike | None = None,
    slope: float | None = None,
    xlabel: str = "$n$",
    ylabel: str = "error",
    label: str = "measured",
    colour: str = COLOURS[0],
) -> list[Any]:
    """Draw y against x on log-log axes, with error bars and a reference line of a given slope.

    Parameters
    ----------
    x, y : arrays (N,), positive
    ax : matplotlib axes, optional
    errors : array (N,), optional
        Standard errors of y.
    slope : float, optional
        Slope of the reference line, which goes through the last point.
    xlabel, ylabel, label : str
    colour : colour of the points

    Returns
    -------
    list of artists: the error-bar container, then the reference line if there is one.
    """
    a, b = to_float64(x, "x"), to_float64(y, "y")
    if a.ndim != 1 or a.shape != b.shape:
        raise InvalidInput(f"x and y must be arrays (N,) of one length, got shapes {a.shape} and {b.shape}")
    if (a <= 0).any() or (b <= 0).any():
        raise InvalidInput("x and y must be positive for logarithmic axes")
    axes = axes_or_new(ax)
    bars = None if errors is None else to_float64(errors, "errors")
    artists: list[Any] = [
        axes.errorbar(a, b, bars, fmt="o", ms=5, mfc="white", mew=1.4, capsize=3, color=colour, label=label)
    ]
    if slope is not None:
        line = b[-1] * (np.sort(a) / a[-1]) ** slope
        artists += axes.plot(np.sort(a), line, color="0.4", lw=1.2, ls="--", label=f"slope {slope:g}")
    axes.set(xscale="log", yscale="log", xlabel=xlabel, ylabel=ylabel)
    plain_log(axes.xaxis, np.sort(a) if len(a) <= 6 else None)
    plain_log(axes.yaxis)
    axes.legend()
    return artists
