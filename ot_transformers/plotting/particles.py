"""Token clouds along a flow, with trails."""

from __future__ import annotations

from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.collections import LineCollection

from ..arrays import ArrayLike, check_count
from ..errors import InvalidInput
from ..measures import as_particles
from ._flow import Plane, flow_of, principal_plane
from ._style import COLOURS, axes_or_new, to_float64

__all__ = ["plot_particles"]


def plot_particles(
    flow: Any,
    *,
    times: ArrayLike | None = None,
    ax: Axes | None = None,
    trails: bool = True,
    n_trails: int = 400,
    plane: Plane | None = None,
    colour: str = COLOURS[0],
) -> list[Any]:
    """Draw a token cloud along a flow: where it starts (hollow), its trails, where it is at the end (filled).

    For d > 2 the tokens are projected onto a plane, by default that of the two principal components at the
    start. The area of a mark is proportional to the weight of its token.

    Parameters
    ----------
    flow : Trajectory, or a list of Particles
    times : array (T,), optional
    ax : matplotlib axes, optional
    trails : bool
        Draw the paths.
    n_trails : int
        At most so many paths, spread evenly over the tokens.
    plane : Plane, optional
    colour : colour of the end points

    Returns
    -------
    list of artists: the trails (a LineCollection, if drawn), the start points, the end points.
    """
    _, states = flow_of(flow, times)
    check_count(n_trails, "n_trails")
    clouds = [as_particles(state, "flow") for state in states]
    if len({c.n for c in clouds}) > 1:
        raise InvalidInput("flow must keep the number of tokens")
    axes = axes_or_new(ax)
    view = principal_plane(clouds[0]) if plane is None else plane
    paths = np.stack([view.project(to_float64(c.x, "x")) for c in clouds])  # (T, n, 2)
    n = paths.shape[1]
    w = to_float64(clouds[0].weights, "weights")
    size = np.clip(14.0 * w / w.max(), 3.0, None) if n > 50 else np.clip(36.0 * w / w.max(), 6.0, None)
    artists: list[Any] = []
    if trails and len(paths) > 1:
        chosen = np.unique(np.linspace(0, n - 1, min(n, n_trails)).astype(int))
        segments = [paths[:, k] for k in chosen]
        lines = LineCollection(segments, colors="0.55", linewidths=0.6, alpha=0.6, zorder=1)
        lines.set_label("trails")
        axes.add_collection(lines)
        artists.append(lines)
    start = axes.scatter(
        paths[0, :, 0],
        paths[0, :, 1],
        s=size,
        facecolors="none",
        edgecolors="0.45",
        linewidths=0.7,
        zorder=2,
        label="start",
    )
    end = axes.scatter(
        paths[-1, :, 0],
        paths[-1, :, 1],
        s=size,
        color=colour,
        linewidths=0,
        alpha=0.85,
        zorder=3,
        label="end",
    )
    artists += [start, end]
    x, y = view.labels()
    axes.set(xlabel=x, ylabel=y)
    axes.set_aspect("equal", adjustable="datalim")
    axes.autoscale_view()
    axes.legend(loc="best", markerscale=1.4)
    return artists
