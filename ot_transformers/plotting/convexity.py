"""Figures of convexity: an energy along a curve against its chord, and the moduli of many curves."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from matplotlib.axes import Axes

from ..arrays import ArrayLike, check_count
from ..convexity import Curve, probe_convexity
from ..convexity.probe import ConvexityProbe
from ..energies import Energy
from ..errors import InvalidInput
from ._style import COLOURS, axes_or_new, to_float64

__all__ = ["plot_chord", "plot_moduli", "plot_second_derivative"]


def plot_chord(
    energy: Energy, curve: Curve, *, ax: Axes | None = None, n_points: int = 65, colour: str = COLOURS[0]
) -> list[Any]:
    """Draw the energy along a curve and the chord between its ends.

    A convex energy stays below its chord; where it rises above, the area between is filled.

    Parameters
    ----------
    energy : Energy
    curve : one curve, no batch dimensions
    ax : matplotlib axes, optional
    n_points : int
    colour : str

    Returns
    -------
    list of artists: the curve, the chord, the filled area above it

    Raises
    ------
    InvalidInput
        A batch of curves, an energy that is not finite along it.
    """
    probe = _single(probe_convexity(energy, curve, n_points=check_count(n_points, "n_points", 3)))
    t, f = to_float64(probe.t, "t"), to_float64(probe.values, "values")
    chord = f[0] + (f[-1] - f[0]) * (t - t[0]) / (t[-1] - t[0])
    axes = axes_or_new(ax)
    (line,) = axes.plot(t, f, color=colour, label="energy along the curve")
    (straight,) = axes.plot([t[0], t[-1]], [f[0], f[-1]], color="0.35", lw=1.2, ls=(0, (4, 3)), label="chord")
    area = axes.fill_between(
        t,
        chord,
        f,
        where=list(f >= chord),
        color=COLOURS[1],
        alpha=0.25,
        lw=0,
        interpolate=True,
        label="above its chord",
    )
    axes.set_xlabel("$t$")
    axes.set_ylabel(r"$F(\mu_t)$")
    axes.set_xlim(t[0], t[-1])
    return [line, straight, area]


def plot_second_derivative(
    probe: ConvexityProbe, *, ax: Axes | None = None, colour: str = COLOURS[0], label: str | None = None
) -> list[Any]:
    """Draw F'' / |speed|^2 along a curve with its error, and 0.

    Parameters
    ----------
    probe : ConvexityProbe of one curve
    ax : matplotlib axes, optional
    colour : str
    label : str, optional

    Returns
    -------
    list of artists: the line, the band of the error
    """
    _single(probe)
    t, square = to_float64(probe.t, "t"), to_float64(probe.speed_squared, "speed_squared")
    ratio = to_float64(probe.second_derivatives, "second_derivatives") / square
    error = to_float64(probe.errors, "errors") / square
    axes = axes_or_new(ax)
    axes.axhline(0.0, color="0.4", lw=0.9)
    (line,) = axes.plot(t, ratio, color=colour, label=label)
    band = axes.fill_between(t, ratio - error, ratio + error, color=colour, alpha=0.25, lw=0)
    axes.set_xlabel("$t$")
    axes.set_ylabel(r"$F''(t)\,/\,|\dot\mu|^2$")
    axes.set_xlim(t[0], t[-1])
    return [line, band]


def plot_moduli(groups: Mapping[str, Sequence[float] | ArrayLike], *, ax: Axes | None = None) -> list[Any]:
    """Draw the moduli of many curves, one row a group; negative ones (not convex) in another colour.

    Parameters
    ----------
    groups : mapping from a name to moduli (k,)
    ax : matplotlib axes, optional

    Returns
    -------
    list of artists, one collection a group and sign

    Raises
    ------
    InvalidInput
        No group, an empty one, NaN.
    """
    if not groups:
        raise InvalidInput("groups must hold at least one group of moduli")
    axes = axes_or_new(ax)
    axes.axvline(0.0, color="0.4", lw=0.9)
    artists: list[Any] = []
    values = {name: to_float64(v, "groups").reshape(-1) for name, v in groups.items()}
    for row, v in enumerate(values.values()):
        shift = 0.12 * np.linspace(-1.0, 1.0, len(v)) if len(v) > 1 else np.zeros(1)
        for keep, colour in ((v < 0, COLOURS[1]), (v >= 0, COLOURS[0])):
            if keep.any():
                at = row + shift[keep]
                artists.append(axes.scatter(v[keep], at, s=22, color=colour, alpha=0.75, lw=0, zorder=3))
    size = np.concatenate(list(values.values()))
    median = float(np.median(np.abs(size[size != 0]))) if (size != 0).any() else 1.0
    if np.abs(size).max() > 30 * median:
        # Linear up to a power of ten: ticks there and beyond, none that crowd around 0.
        axes.set_xscale("symlog", linthresh=10.0 ** math.floor(math.log10(median)), linscale=0.8)
    axes.set_yticks(range(len(values)), list(values))
    axes.invert_yaxis()
    axes.set_xlabel(r"modulus $\min_t\, F''(t)\,/\,|\dot\mu|^2$")
    axes.grid(axis="y", visible=False)
    return artists


def _single(probe: ConvexityProbe) -> ConvexityProbe:
    if np.ndim(probe.modulus) != 0:
        raise InvalidInput(f"curve must be one curve, got a batch of shape {tuple(np.shape(probe.modulus))}")
    return probe
