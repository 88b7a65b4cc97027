"""2 x 2 covariances as points of a cone, and their shapes as points of the unit disc."""

from __future__ import annotations

from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.collections import LineCollection

from ..arrays import ArrayLike, as_matrix, check_choice
from ..errors import InvalidInput
from ._style import axes_or_new

__all__ = ["cone_coordinates", "disc_coordinates", "plot_cone", "plot_disc"]


def cone_coordinates(cov: ArrayLike) -> np.ndarray[Any, Any]:
    """S = [[a, c], [c, b]] as (a - b, 2c, a + b), (..., 3): PSD is the cone z >= sqrt(x^2 + y^2).

    Its axis holds the multiples of I, its boundary the matrices of rank 1.

    Raises
    ------
    InvalidInput
        Not 2 x 2.
    """
    S, _ = as_matrix(cov, "cov", square=True)
    if S.shape[-1] != 2:
        raise InvalidInput(f"cov must be (..., 2, 2), got shape {tuple(S.shape)}")
    s = S.detach().cpu().double().numpy()
    a, b, c = s[..., 0, 0], s[..., 1, 1], s[..., 0, 1]
    return np.stack([a - b, 2 * c, a + b], -1)


def disc_coordinates(cov: ArrayLike) -> np.ndarray[Any, Any]:
    """Trace-normalised coordinates (a - b, 2c) / (a + b), (..., 2): the unit disc, rank 1 on the circle.

    Raises
    ------
    InvalidInput
        Not 2 x 2, or a trace that is not positive: the zero matrix has no shape.
    """
    xyz = cone_coordinates(cov)
    if (xyz[..., 2] <= 0).any():
        raise InvalidInput("cov must have a positive trace, got a zero or negative one")
    return xyz[..., :2] / xyz[..., 2:]


def plot_cone(covs: ArrayLike, *, ax: Any = None, view: str = "3d", cmap: str = "viridis") -> list[Any]:
    """Draw covariance trajectories (T, B, 2, 2) in the cone, coloured from start (dark) to end (bright).

    Parameters
    ----------
    covs : array (T, B, 2, 2)
    ax : axes with projection="3d" for view "3d"; plain axes for "side" (sqrt(x^2 + y^2) against z), optional
    view : "3d" or "side"

    Returns
    -------
    list of artists: the wire of the cone first, then one a trajectory, then the end points.

    Raises
    ------
    InvalidInput
        covs of another shape, or plain axes for the view "3d".
    """
    check_choice(view, "view", ("3d", "side"))
    xyz = cone_coordinates(covs)
    if xyz.ndim != 3:
        raise InvalidInput(f"covs must be (T, B, 2, 2), got shape {(*xyz.shape[:-1], 2, 2)}")
    if view == "3d" and ax is not None and not hasattr(ax, "plot_wireframe"):
        raise InvalidInput('ax must have projection="3d" for the view "3d"')
    if ax is None:
        ax = _new_axes_3d() if view == "3d" else axes_or_new(None)
    top = float(np.nanmax(xyz[..., 2]))
    artists: list[Any] = []
    if view == "side":
        radius = np.hypot(xyz[..., 0], xyz[..., 1])
        artists += ax.plot([0, top], [0, top], color="0.6", lw=1)
        artists += [_coloured(ax, radius[:, k], xyz[:, k, 2], cmap) for k in range(xyz.shape[1])]
        artists.append(ax.scatter(radius[-1], xyz[-1, :, 2], s=14, color="tab:red", zorder=3))
        ax.set(xlabel=r"$\sqrt{(a-b)^2 + 4c^2}$", ylabel="$a + b$")
        ax.autoscale_view()
        return artists
    angle, height = np.meshgrid(np.linspace(0, 2 * np.pi, 41), np.linspace(0, top, 6))
    artists.append(
        ax.plot_wireframe(
            height * np.cos(angle), height * np.sin(angle), height, color="0.75", lw=0.5, rcount=6, ccount=12
        )
    )
    from mpl_toolkits.mplot3d.art3d import Line3DCollection

    for k in range(xyz.shape[1]):
        path = xyz[:, k]
        segments = np.stack([path[:-1], path[1:]], 1)
        lines = Line3DCollection(segments, cmap=cmap, array=np.linspace(0, 1, len(segments)), lw=1.6)
        artists.append(ax.add_collection3d(lines))
    artists.append(ax.scatter(*xyz[-1].T, s=12, color="tab:red", depthshade=False))
    ax.set(xlabel="$a-b$", ylabel="$2c$", zlabel="$a+b$")
    ax.set(xlim=(-top, top), ylim=(-top, top), zlim=(0, top))
    return artists


def plot_disc(covs: ArrayLike, *, ax: Axes | None = None, cmap: str = "viridis") -> list[Any]:
    """Draw the shapes of covariance trajectories (T, B, 2, 2) on the unit disc.

    Returns
    -------
    list of artists: the circle, one line collection a trajectory, the end points.

    Raises
    ------
    InvalidInput
        covs of another shape, or with a trace that is not positive.
    """
    xy = disc_coordinates(covs)
    if xy.ndim != 3:
        raise InvalidInput(f"covs must be (T, B, 2, 2), got shape {(*xy.shape[:-1], 2, 2)}")
    ax = axes_or_new(ax)
    angle = np.linspace(0, 2 * np.pi, 200)
    artists: list[Any] = list(ax.plot(np.cos(angle), np.sin(angle), color="0.6", lw=1))
    artists += [_coloured(ax, xy[:, k, 0], xy[:, k, 1], cmap) for k in range(xy.shape[1])]
    artists.append(ax.scatter(xy[-1, :, 0], xy[-1, :, 1], s=14, color="tab:red", zorder=3))
    ax.set(
        xlabel="$(a-b)/(a+b)$", ylabel="$2c/(a+b)$", aspect="equal", xlim=(-1.08, 1.08), ylim=(-1.08, 1.08)
    )
    return artists


def _new_axes_3d() -> Any:
    from matplotlib import pyplot as plt

    return plt.figure(layout="constrained").add_subplot(projection="3d")


def _coloured(ax: Axes, x: np.ndarray[Any, Any], y: np.ndarray[Any, Any], cmap: str) -> LineCollection:
    points = np.stack([x, y], -1)
    segments = np.stack([points[:-1], points[1:]], 1)
    lines = LineCollection(list(segments), cmap=cmap, array=np.linspace(0, 1, len(segments)), linewidths=1.5)
    ax.add_collection(lines)
    return lines
