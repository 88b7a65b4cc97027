"""The look that all figures share: Okabe-Ito colours, thin axes, readable labels."""

from __future__ import annotations

from typing import Any

import numpy as np
from matplotlib.axes import Axes

from ..arrays import ArrayLike, as_tensor

__all__ = ["COLOURS", "MARKERS", "STYLE", "axes_or_new", "plain_log", "time_colours", "to_float64"]

COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#332288", "#555555")
"""Okabe and Ito's colours (distinct to colour-blind readers), strongest contrast first."""

MARKERS = ("o", "s", "^", "D", "v", "P", "X", "*")

STYLE: dict[Any, Any] = {
    "font.size": 10,
    "axes.titlesize": 10.5,
    "axes.titlelocation": "left",
    "axes.labelsize": 10,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.linewidth": 0.8,
    "axes.edgecolor": "0.3",
    "axes.grid": True,
    "axes.axisbelow": True,
    "grid.color": "0.92",
    "grid.linewidth": 0.8,
    "legend.frameon": False,
    "legend.fontsize": 9,
    "lines.linewidth": 1.7,
    "xtick.labelsize": 9,
    "ytick.labelsize": 9,
    "mathtext.fontset": "dejavusans",
}
"""Matplotlib settings for `matplotlib.rc_context(STYLE)`; nothing here changes the global state."""


def axes_or_new(ax: Axes | None) -> Axes:
    """Return the axes given, or a new one of the current pyplot figure."""
    if ax is not None:
        return ax
    import matplotlib as mpl
    import matplotlib.pyplot as plt

    with mpl.rc_context(STYLE):
        return plt.subplots(layout="constrained")[1]


def plain_log(axis: Any, at: Any = None) -> None:
    """Label a logarithmic axis with plain numbers: at given values, or at 1, 2, 5 where it spans little.

    Over more than two decades powers of ten read better, and the default stays.
    """
    from matplotlib.ticker import FixedLocator, FuncFormatter, LogLocator, NullLocator

    low, high = axis.get_view_interval()
    if at is None and not 0 < low < high <= 150 * low:
        return
    if at is not None:
        axis.set_major_locator(FixedLocator(list(at)))
    else:
        subs = (1.0, 2.0, 5.0) if high > 6 * low else (1.0, 1.5, 2.0, 3.0, 4.0, 5.0, 6.0, 8.0)
        axis.set_major_locator(LogLocator(subs=subs))
    axis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:.3g}"))
    axis.set_minor_locator(NullLocator())


def time_colours(count: int, cmap: str = "viridis") -> list[Any]:
    """Return `count` colours from early (dark) to late, without the yellow end that white paper swallows."""
    import matplotlib as mpl

    return list(mpl.colormaps[cmap](np.linspace(0.0, 0.88, max(count, 1))))


def to_float64(value: ArrayLike, name: str) -> np.ndarray[Any, Any]:
    """Return an argument as a NumPy float64 array, detached and on the host."""
    t, _ = as_tensor(value, name)
    return t.detach().cpu().double().numpy()
