"""Covariance ellipses along a flow."""

from __future__ import annotations

from typing import Any

import numpy as np
from matplotlib.axes import Axes

from ..arrays import ArrayLike, check_count, check_positive
from ..measures import as_gaussian
from ._flow import Plane, flow_of, principal_plane
from ._style import axes_or_new, time_colours, to_float64

__all__ = ["plot_ellipses"]


def plot_ellipses(
    flow: Any,
    *,
    times: ArrayLike | None = None,
    ax: Axes | None = None,
    n_std: float = 2.0,
    n_ellipses: int = 7,
    plane: Plane | None = None,
    colourbar: bool = True,
) -> list[Any]:
    """Draw the ellipses m + n_std S^(1/2) (unit circle) of a Gaussian flow, early dark, late bright.

    For d > 2 the Gaussians are projected onto a plane, by default that of the two principal components of the
    first one; a projected Gaussian is Gaussian, so its ellipse is exact.

    Parameters
    ----------
    flow : Trajectory, or a list of Gaussian
    times : array (T,), optional
        Needed for a list; default 0, 1, 2, ...
    ax : matplotlib axes, optional
    n_std : float
        Standard deviations that the ellipse stands for.
    n_ellipses : int
        Number drawn, spread evenly over the states; the first and the last are among them.
    plane : Plane, optional
        Plane of the picture (`principal_plane`).
    colourbar : bool
        Add a colour bar of time.

    Returns
    -------
    list of artists: one line an ellipse, then the path of the mean, then the colour bar if there is one.
    """
    t, states = flow_of(flow, times)
    gaussians = [as_gaussian(state, "flow") for state in states]
    check_positive(n_std, "n_std")
    check_count(n_ellipses, "n_ellipses")
    axes = axes_or_new(ax)
    view = principal_plane(gaussians[0]) if plane is None else plane
    # The states nearest to evenly spaced times: grids are often denser at their ends.
    wanted = np.linspace(t[0], t[-1], min(n_ellipses, len(t)))
    chosen = np.unique(np.abs(t[:, None] - wanted).argmin(0))
    colours = time_colours(len(chosen))
    angle = np.linspace(0, 2 * np.pi, 181)
    circle = np.stack([np.cos(angle), np.sin(angle)], -1)
    artists: list[Any] = []
    for colour, k in zip(colours, chosen, strict=True):
        m = view.project(to_float64(gaussians[k].mean, "mean"))
        w, U = np.linalg.eigh(view.project_cov(to_float64(gaussians[k].cov, "cov")))
        curve = m + n_std * circle @ (U * np.sqrt(np.clip(w, 0, None))).T
        label = f"t = {t[k]:.3g}"
        artists += axes.plot(curve[:, 0], curve[:, 1], color=colour, lw=1.6, label=label)
    path = np.stack([view.project(to_float64(g.mean, "mean")) for g in gaussians])
    artists += axes.plot(path[:, 0], path[:, 1], color="0.25", lw=1.1, ls=":", label="mean")
    x, y = view.labels()
    axes.set(xlabel=x, ylabel=y)
    axes.set_aspect("equal", adjustable="datalim")
    if colourbar and len(chosen) > 1:
        artists.append(time_bar(axes, float(t[0]), float(t[-1])))
    return artists


def time_bar(ax: Axes, start: float, end: float) -> Any:
    """Add a colour bar of time that matches `time_colours`."""
    from matplotlib.cm import ScalarMappable
    from matplotlib.colors import ListedColormap, Normalize

    assert ax.figure is not None
    mappable = ScalarMappable(Normalize(start, end), ListedColormap(time_colours(256)))
    bar = ax.figure.colorbar(mappable, ax=ax, label="time $t$", fraction=0.05, pad=0.02)
    bar.outline.set_visible(False)
    return bar
