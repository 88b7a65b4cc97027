"""Heat maps of phase diagrams, and histograms of ranks."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.colors import BoundaryNorm, ListedColormap, LogNorm
from matplotlib.patches import Patch

from ..analysis import CLASSES, PhaseDiagram
from ..arrays import check_choice, check_count, describe
from ..errors import InvalidInput
from ._style import axes_or_new

__all__ = ["CLASS_COLOURS", "plot_phase", "plot_rank_histogram"]

CLASS_COLOURS = ("#bbbbbb", "#332288", "#44aa99", "#ddcc77", "#cc6677", "#882255")
"""One colour a class of `CLASSES` (Tol's muted scheme, safe for colour-blind readers)."""


def plot_phase(diagram: PhaseDiagram, *, ax: Axes | None = None, show: str = "class") -> list[Any]:
    """Draw a phase diagram: most frequent class, mean rank of the limit, or median blow-up time.

    One axis is drawn as stacked shares of the classes (or a curve); two axes as a heat map.

    Parameters
    ----------
    diagram : PhaseDiagram
    ax : matplotlib axes, optional
    show : "class", "rank" or "blow-up time"

    Returns
    -------
    list of artists

    Raises
    ------
    InvalidInput
        No PhaseDiagram, or another `show`.
    """
    if not isinstance(diagram, PhaseDiagram):
        raise InvalidInput(f"diagram must be a PhaseDiagram, got {describe(diagram)}")
    check_choice(show, "show", ("class", "rank", "blow-up time"))
    ax = axes_or_new(ax)
    names = list(diagram.axes)
    if len(names) == 1:
        return _one_axis(diagram, ax, show, names[0])
    x, y = diagram.axes[names[1]], diagram.axes[names[0]]
    ax.set(xlabel=names[1], ylabel=names[0])
    if show == "class":
        counts = np.stack([(diagram.code == k).sum(-1) for k in range(len(CLASSES))], -1)
        norm = BoundaryNorm(np.arange(len(CLASSES) + 1) - 0.5, len(CLASSES))
        mesh = ax.pcolormesh(x, y, counts.argmax(-1), cmap=ListedColormap(CLASS_COLOURS), norm=norm)
        shown = np.flatnonzero(counts.sum((0, 1)))
        handles = [Patch(color=CLASS_COLOURS[k], label=CLASSES[k]) for k in shown]
        legend = ax.legend(
            handles=handles,
            fontsize="small",
            loc="upper center",
            bbox_to_anchor=(0.5, -0.16),
            ncols=2,
            frameon=False,
        )
        return [mesh, legend]
    values, label, norm_or_none = _values(diagram, show)
    mesh = ax.pcolormesh(x, y, values, cmap="viridis", norm=norm_or_none)
    assert ax.figure is not None
    bar = ax.figure.colorbar(mesh, ax=ax, label=label)
    return [mesh, bar]


def _values(diagram: PhaseDiagram, show: str) -> tuple[np.ndarray[Any, Any], str, Any]:
    if show == "rank":
        rank = np.ma.masked_less(diagram.rank, 0)
        return rank.mean(-1), "mean rank of the limit (where it converges)", None
    time = np.ma.masked_invalid(diagram.blow_up_time)
    middle: Any = np.ma.median(time, axis=-1)  # type: ignore[no-untyped-call]
    norm = LogNorm() if middle.count() and middle.max() > middle.min() else None
    return middle, "median blow-up time (where there is one)", norm


def _one_axis(diagram: PhaseDiagram, ax: Axes, show: str, name: str) -> list[Any]:
    x = diagram.axes[name]
    if show == "class":
        shares = [diagram.fraction(label) for label in CLASSES]
        used = [k for k, share in enumerate(shares) if share.any()]
        artists = ax.stackplot(
            x,
            [shares[k] for k in used],
            labels=[CLASSES[k] for k in used],
            colors=[CLASS_COLOURS[k] for k in used],
        )
        ax.set(xlabel=name, ylabel="share of trajectories", ylim=(0, 1), xlim=(x.min(), x.max()))
        return [
            *artists,
            ax.legend(fontsize="small", loc="upper center", bbox_to_anchor=(0.5, -0.16), ncols=2),
        ]
    values, label, _ = _values(diagram, show)
    ax.set(xlabel=name, ylabel=label)
    return list(ax.plot(x, values, marker="o"))


def plot_rank_histogram(
    ranks: Sequence[Any],
    labels: Sequence[str],
    *,
    dim: int,
    ax: Axes | None = None,
    expected: int | None = None,
) -> list[Any]:
    """Draw histograms of integer ranks 0..dim side by side, -1 (no limit) as its own bar.

    Parameters
    ----------
    ranks : list of integer arrays
    labels : their names
    dim : largest possible rank
    ax : matplotlib axes, optional
    expected : rank that theory gives, drawn as a band

    Returns
    -------
    list of bar containers

    Raises
    ------
    InvalidInput
        Not one label for each array, or a rank outside -1..dim.
    """
    check_count(dim, "dim")
    if not ranks or len(ranks) != len(labels):
        raise InvalidInput(f"labels must name each of the ranks, got {len(labels)} labels for {len(ranks)}")
    if any(((np.asarray(r) < -1) | (np.asarray(r) > dim)).any() for r in ranks):
        raise InvalidInput(f"ranks must lie in -1..{dim}")
    ax = axes_or_new(ax)
    bins = np.arange(-1, dim + 1)
    width = 0.8 / len(ranks)
    if expected is not None:
        ax.axvspan(expected - 0.5, expected + 0.5, color="0.9", zorder=0)
    artists: list[Any] = []
    for k, (rank, label) in enumerate(zip(ranks, labels, strict=True)):
        counts = [(np.asarray(rank) == b).sum() for b in bins]
        artists.append(ax.bar(bins + (k - (len(ranks) - 1) / 2) * width, counts, width, label=label))
    ax.set(
        xticks=bins,
        xticklabels=["none", *map(str, range(dim + 1))],
        xlabel="rank of the limit",
        ylabel="count",
    )
    ax.legend(fontsize="small", frameon=False)
    return artists
