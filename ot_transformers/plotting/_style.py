"""The look that all figures share: Okabe-Ito colours, thin axes, readable labels."""

from __future__ import annotations

from typing import Any

import numpy as np
from matplotlib.axes import Axes

from ..arrays import ArrayLike, as_tensor

__all__ = ["COLOURS", "MARKERS", "STYLE", "axes_or_new", "time_colours", "to_float64"]

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


def time_colours(count: int, cmap: str = "viridis") -> list[Any]:
    """Return `count` colours from early (dark) to late, without the yellow end that white paper swallows."""
    import matplotlib as mpl

    return list(mpl.colormaps[cmap](np.linspace(0.0, 0.88, max(count, 1))))


def to_float64(value: ArrayLike, name: str) -> np.ndarray[Any, Any]:
    """Return an argument as a NumPy float64 array, detached and on the host."""
    t, _ = as_tensor(value, name)
    return t.detach().cpu().double().numpy()
