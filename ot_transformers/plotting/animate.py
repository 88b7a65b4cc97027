"""Animations of particles and of covariance ellipses along a flow, and how they are written."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from ..arrays import ArrayLike, check_count, check_positive
from ..errors import InvalidInput
from ..measures import as_gaussian, as_particles
from ._flow import Floats, Plane, flow_of, principal_plane
from ._style import COLOURS, STYLE, to_float64

if TYPE_CHECKING:
    from matplotlib.animation import FuncAnimation

__all__ = ["animate_ellipses", "animate_particles", "save_animation"]

ANGLE = np.linspace(0, 2 * np.pi, 121)
CIRCLE = np.stack([np.cos(ANGLE), np.sin(ANGLE)], -1)


def animate_particles(
    flow: Any,
    *,
    gaussians: Any = None,
    times: ArrayLike | None = None,
    trail: int = 8,
    n_frames: int = 60,
    n_std: float = 2.0,
    plane: Plane | None = None,
) -> FuncAnimation:
    """Animate a token cloud with short trails, over the ellipses of a Gaussian flow if one is given.

    The view keeps its shape and follows the size of the picture: near a blow-up, or when the cloud shrinks
    to a point, it stays readable, and the axes tell the scale.

    Parameters
    ----------
    flow : Trajectory, or a list of Particles
    gaussians : Trajectory, or a list of Gaussian, optional
        One state for each state of `flow`.
    times : array (T,), optional
    trail : int
        Number of past frames that a trail shows.
    n_frames : int
        At most so many frames, at the states nearest to evenly spaced times.
    n_std : float
    plane : Plane, optional
        Default: the principal components at the start (d > 2).

    Returns
    -------
    matplotlib FuncAnimation; write it with `save_animation`.

    Raises
    ------
    InvalidInput
        A batch, a changing number of tokens, or another number of Gaussians than of clouds.
    """
    t, states = flow_of(flow, times)
    check_count(trail, "trail")
    clouds = [as_particles(s, "flow") for s in states]
    if len({c.n for c in clouds}) > 1:
        raise InvalidInput("flow must keep the number of tokens")
    view = principal_plane(clouds[0]) if plane is None else plane
    paths = np.stack([view.project(to_float64(c.x, "x")) for c in clouds])
    curves = None
    if gaussians is not None:
        _, normal = flow_of(gaussians)
        if len(normal) != len(clouds):
            raise InvalidInput(f"gaussians must have {len(clouds)} states, as flow, got {len(normal)}")
        if as_gaussian(normal[0], "gaussians").dim != clouds[0].dim:
            raise InvalidInput(f"gaussians must have dimension {clouds[0].dim}, as flow")
        curves = _ellipses(normal, view, n_std)
    return _animate(t, view, paths, curves, trail, n_frames)


def animate_ellipses(
    flow: Any,
    *,
    times: ArrayLike | None = None,
    n_frames: int = 60,
    n_std: float = 2.0,
    plane: Plane | None = None,
) -> FuncAnimation:
    """Animate the ellipses m + n_std S^(1/2) (unit circle) of a Gaussian flow; see `animate_particles`."""
    t, states = flow_of(flow, times)
    view = principal_plane(as_gaussian(states[0], "flow")) if plane is None else plane
    return _animate(t, view, None, _ellipses(states, view, n_std), 1, n_frames)


def save_animation(animation: FuncAnimation, path: str | Path, *, fps: int = 15) -> Path:
    """Write a .gif (Pillow) or a .mp4 (ffmpeg), beside its place and then renamed into it.

    Raises
    ------
    InvalidInput
        Another suffix, or a .mp4 where ffmpeg is missing.
    """
    from matplotlib.animation import FFMpegWriter, PillowWriter

    check_count(fps, "fps")
    target = Path(path)
    suffix = target.suffix.lower()
    if suffix not in (".gif", ".mp4"):
        raise InvalidInput(f"path must end in .gif or .mp4, got {target.name}")
    if suffix == ".mp4" and not FFMpegWriter.isAvailable():
        raise InvalidInput("path ends in .mp4 but ffmpeg is missing; write a .gif or install ffmpeg")
    writer = PillowWriter(fps=fps) if suffix == ".gif" else FFMpegWriter(fps=fps)
    target.parent.mkdir(parents=True, exist_ok=True)
    temporary = target.with_name(f".{target.stem}.{os.getpid()}{suffix}")
    try:
        animation.save(str(temporary), writer=writer)
        temporary.replace(target)
    finally:
        temporary.unlink(missing_ok=True)
    return target


def _ellipses(states: list[Any], view: Plane, n_std: float) -> Floats:
    check_positive(n_std, "n_std")
    curves = []
    for state in states:
        g = as_gaussian(state, "flow")
        w, U = np.linalg.eigh(view.project_cov(to_float64(g.cov, "cov")))
        root = U * np.sqrt(np.clip(w, 0, None))
        curves.append(view.project(to_float64(g.mean, "mean")) + n_std * CIRCLE @ root.T)
    return np.stack(curves)


def _animate(
    t: Floats, view: Plane, paths: Floats | None, curves: Floats | None, trail: int, n_frames: int
) -> FuncAnimation:
    import matplotlib as mpl
    from matplotlib.animation import FuncAnimation
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.collections import LineCollection
    from matplotlib.figure import Figure

    check_count(n_frames, "n_frames")
    wanted = np.linspace(t[0], t[-1], min(n_frames, len(t)))
    frames = np.unique(np.abs(t[:, None] - wanted).argmin(0))
    drawn = [a for a in (paths, curves) if a is not None]
    points = np.concatenate(drawn, 1)[frames]
    low, high = points.min(1), points.max(1)
    centre, half = (low + high) / 2, (high - low).max(-1) / 2
    floor = np.finfo(float).tiny + 1e-9 * np.abs(points).max((1, 2))
    half = 1.15 * np.maximum(half, floor)
    with mpl.rc_context(STYLE):
        figure = Figure(figsize=(5.0, 4.8), layout="constrained", facecolor="white")
        FigureCanvasAgg(figure)
        axes = figure.subplots()
        x, y = view.labels()
        axes.set(xlabel=x, ylabel=y, aspect="equal")
    trails = LineCollection([], colors="0.55", linewidths=0.7, alpha=0.6)
    axes.add_collection(trails)
    (dots,) = axes.plot([], [], ls="", marker="o", ms=4, mew=0, alpha=0.85, color=COLOURS[0])
    (ring,) = axes.plot([], [], color=COLOURS[1], lw=1.8)

    def draw(k: int) -> list[Any]:
        i = int(frames[k])
        if paths is not None:
            dots.set_data(paths[i, :, 0], paths[i, :, 1])
            past = frames[max(0, k - trail) : k + 1]
            trails.set_segments(list(paths[past].swapaxes(0, 1)) if len(past) > 1 else [])
        if curves is not None:
            ring.set_data(curves[i, :, 0], curves[i, :, 1])
        axes.set_xlim(centre[k, 0] - half[k], centre[k, 0] + half[k])
        axes.set_ylim(centre[k, 1] - half[k], centre[k, 1] + half[k])
        axes.set_title(f"t = {t[i]:.3g}")
        return [trails, dots, ring]

    return FuncAnimation(figure, draw, frames=len(frames), init_func=lambda: [], blit=False)
