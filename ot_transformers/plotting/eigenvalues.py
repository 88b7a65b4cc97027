"""Eigenvalues of the covariance in time."""

from __future__ import annotations

from typing import Any

import numpy as np
from matplotlib.axes import Axes

from ..arrays import ArrayLike, check_count
from ..errors import InvalidInput
from ._flow import flow_of
from ._style import axes_or_new, plain_log, time_colours, to_float64

__all__ = ["eigenvalues_along", "plot_eigenvalues"]


def eigenvalues_along(flow: Any, times: ArrayLike | None = None) -> np.ndarray[Any, Any]:
    """Eigenvalues of the covariances of a flow, (T, d), largest first.

    They are squares of singular values of a covariance factor, so that small ones keep their digits and those
    beyond the rank are 0.
    """
    _, states = flow_of(flow, times)
    rows = []
    for state in states:
        s = np.linalg.svd(state.factor_t.detach().cpu().double().numpy(), compute_uv=False)[: state.dim]
        rows.append(np.pad(s**2, (0, state.dim - len(s))))
    return np.stack(rows)


def plot_eigenvalues(
    flow: Any = None,
    *,
    values: ArrayLike | None = None,
    times: ArrayLike | None = None,
    ax: Axes | None = None,
    n_shown: int = 12,
    log: bool = True,
    label: str | None = None,
    style: str = "-",
) -> list[Any]:
    """Draw the eigenvalues of the covariance in time, the largest dark, the smallest bright.

    Parameters
    ----------
    flow : Trajectory, or a list of measures
        Or give `values` and `times`.
    values : array (T, d), optional
        Eigenvalues, largest first.
    times : array (T,), optional
    ax : matplotlib axes, optional
    n_shown : int
        At most so many are drawn; of more, those spread evenly over the order are.
    log : bool
        Logarithmic axis; eigenvalues that are 0 are then left out.
    label : str, optional
        Name of the flow in the legend.
    style : line style

    Returns
    -------
    list of lines, one a drawn eigenvalue, from the largest.
    """
    check_count(n_shown, "n_shown")
    if values is None:
        t, _ = flow_of(flow, times)
        w = eigenvalues_along(flow, times)
    else:
        w = to_float64(values, "values")
        if w.ndim != 2:
            raise InvalidInput(f"values must be (T, d), got shape {w.shape}")
        t = np.arange(len(w), dtype=float) if times is None else to_float64(times, "times")
    axes = axes_or_new(ax)
    d = w.shape[1]
    chosen = np.unique(np.linspace(0, d - 1, min(d, n_shown)).round().astype(int))
    artists: list[Any] = []
    for colour, k in zip(time_colours(len(chosen), "cividis"), chosen, strict=True):
        shown = np.where(w[:, k] > 0, w[:, k], np.nan) if log else w[:, k]
        artists += axes.plot(t, shown, style, color=colour, label=label if k == 0 else None, lw=1.5)
    if log:
        axes.set_yscale("log")
        plain_log(axes.yaxis)
    few = "" if len(chosen) == d else f" ({len(chosen)} of {d})"
    axes.set(xlabel="time $t$", ylabel=rf"eigenvalues of $\Sigma(t)${few}")
    if label is not None:
        axes.legend()
    return artists
