"""The figures of the study `trace`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import matplotlib as mpl
import numpy as np
from matplotlib.ticker import MaxNLocator

from ..plotting import COLOURS, MARKERS, STYLE
from ..plotting._style import plain_log, time_colours
from ._result import StudyFigure, new_figure
from ._trace_closure import Closures
from ._trace_clouds import Clouds, Distances
from ._trace_heads import Heads

__all__ = ["closure_figure", "cloud_figure", "distance_figure", "head_figure", "span"]

Floats = np.ndarray[Any, Any]
CLOUD_AXIS = "cloud (0 enters the first layer)"


def _line(ax: Any, values: Floats, k: int, label: str, **style: Any) -> None:
    options = {"color": COLOURS[k], "marker": MARKERS[k], "ms": 5, "label": label, **style}
    ax.plot(np.arange(len(values)), values, **options)


def _layers(ax: Any, label: str) -> None:
    ax.set_xlabel(label)
    ax.xaxis.set_major_locator(MaxNLocator(integer=True))


def cloud_figure(c: Clouds) -> StudyFigure:
    """Spectra, effective ranks and mean cosine along the layers."""
    figure, axes = new_figure(1, 3, width=4.4, height=3.9)
    with mpl.rc_context(STYLE):
        left, middle, right = axes[0]
        colours = time_colours(len(c.rank))
        for k, (w, colour) in enumerate(zip(c.eigenvalues, colours, strict=True)):
            shown = w[: int(c.rank[k])] / w.sum()
            label = {0: "enters the first layer", len(colours) - 1: "leaves the last layer"}.get(k)
            left.loglog(np.arange(1, len(shown) + 1), shown, color=colour, lw=1.4, label=label)
        left.set(xlabel="number of the eigenvalue", ylabel="share of the variance")
        left.set_title("Eigenvalues of the covariance")
        left.legend(loc="lower left")
        _line(middle, c.entropy_rank, 1, "exp of the spectral entropy")
        _line(middle, c.effective, 0, r"$(\sum w)^2 / \sum w^2$")
        middle.set(ylabel="effective rank", ylim=(0, None))
        middle.set_title(f"Effective rank (numerical rank: {span(c.rank)})")
        middle.legend(loc="lower left")
        _line(right, c.cosine, 0, "mean cosine")
        right.set(ylabel=r"mean of $\cos(x_i, x_j)$, $i \neq j$", ylim=(min(0.0, 1.1 * c.cosine.min()), None))
        right.set_title("Similarity of tokens (1: collapse)")
        for ax in (middle, right):
            _layers(ax, CLOUD_AXIS)
    return StudyFigure(
        "clouds",
        figure,
        "Left: eigenvalues of the covariance of the token cloud, as shares of its variance, from the cloud that "
        "enters the first layer (dark) to the one that leaves the last (bright). Middle: two effective ranks. "
        "Right: mean cosine of the angle between two tokens; a collapse to rank one would drive it to 1.",
    )


def distance_figure(d: Distances, c: Clouds, components: int) -> StudyFigure:
    """How far each layer moves the cloud, and how Gaussian the clouds are."""
    figure, axes = new_figure(1, 2, width=5.4, height=3.9)
    with mpl.rc_context(STYLE):
        left, right = axes[0]
        _line(left, d.labelled, 0, "labelled", ms=9, mfc="white", mew=1.4)
        _line(left, d.optimal, 1, "$W_2$", ms=4, ls="--")
        _line(left, d.gaussian, 2, "Bures-Wasserstein")
        _line(left, d.mean_shift, 3, "shift of the mean")
        top = 1.32 * float(d.labelled.max())
        left.set(ylabel="distance", ylim=(0, top if top > 0 else 1.0))
        left.set_title("Distance from the cloud before a layer to that after")
        left.legend(loc="upper left", ncols=2)
        _layers(left, "layer")
        _line(right, c.gaussianity, 0, "the tokens")
        null = {"color": COLOURS[1], "lw": 1.4}
        right.plot(c.null_mean, ls="--", label="Gaussian tokens, mean", **null)
        right.plot(c.null_quantile, ls=":", label="Gaussian tokens, 95% quantile", **null)
        right.set(ylabel="sliced, standardised $W_2$ to a Gaussian", ylim=(0, None))
        right.set_title(f"Gaussianity in {components} principal components")
        right.legend(loc="upper left")
        _layers(right, CLOUD_AXIS)
    return StudyFigure(
        "distances",
        figure,
        "Left: how far each layer moves its cloud, by three distances that are ordered (Bures-Wasserstein <= "
        "W2 <= labelled), and the part that is the mean. Right: distance of each cloud to the Gaussian of its "
        f"moments in {components} principal components, with the level that a sample of a Gaussian of that many "
        "tokens has.",
    )


def head_figure(h: Heads, chance: Mapping[str, float]) -> StudyFigure:
    """Heat maps over layers and heads: asymmetry of A and misfit of V."""
    L, H = h.asymmetry.shape
    figure, axes = new_figure(1, 2, width=max(4.2, 1.6 + 0.42 * H), height=max(3.0, 1.3 + 0.4 * L))
    panels = (
        (h.asymmetry, chance["asymmetry"], r"Asymmetry $|A - A^T|\,/\,(2\,|A|)$"),
        (h.attained, chance["attained"], r"Misfit $|V - \sigma D A_s|\,/\,|V|$, best $D$"),
    )
    with mpl.rc_context(STYLE):
        for ax, (values, level, title) in zip(axes[0], panels, strict=True):
            low, high = float(values.min()), max(float(values.max()), level)
            image = ax.imshow(values, cmap="viridis", vmin=low, vmax=high, aspect="auto")
            ax.grid(visible=False)
            ax.set(xlabel="head", ylabel="layer", xticks=range(H), yticks=range(L))
            ax.set_title(f"{title}\n(random matrices: {level:.2f})")
            bar = figure.colorbar(image, ax=ax, pad=0.02)
            bar.ax.axhline(level, color="white", lw=2)
            bar.outline.set_visible(False)
            if L * H <= 200:
                for (i, j), v in np.ndenumerate(values):
                    dark = v < low + 0.6 * (high - low)
                    colour = "white" if dark else "black"
                    ax.text(
                        j, i, f"{v:.2f}".lstrip("0"), ha="center", va="center", color=colour, fontsize=7.5
                    )
    return StudyFigure(
        "heads",
        figure,
        "How far each head is from a gradient flow, which needs 0 in both: left, the share of A = K^T Q / sqrt(k) "
        "that is skew; right, the misfit of V to sigma D (A + A^T) / 2 with the best symmetric positive D found. "
        "White marks on the scales: random matrices of the same shapes.",
    )


def closure_figure(c: Closures, n: int) -> StudyFigure:
    """What the Gaussian closure misses in each layer, and what explains it."""
    figure, axes = new_figure(1, 3, width=4.5, height=4.0)
    layers = np.arange(len(c.gap))
    with mpl.rc_context(STYLE):
        left, middle, right = axes[0]
        _line(left, c.gap, 1, "Gaussian closure, the tokens")
        _line(left, c.gaussian, 0, "Gaussian closure, Gaussian tokens")
        left.errorbar(layers, c.gaussian, c.gaussian_spread, color=COLOURS[0], fmt="none", capsize=3)
        _line(left, c.constant, 7, "best constant", ls=":", lw=1.3, marker="D", ms=3.5)
        _line(left, c.affine, 2, "best affine map, tokens left out", ls="--")
        left.set_yscale("log")
        low = min(float(v.min()) for v in (c.gap, c.gaussian, c.constant, c.affine))
        top = max(float(v.max()) for v in (c.gap, c.gaussian))
        if 0 < low < top:
            left.set_ylim(low / (top / low) ** 0.08, top * (top / low) ** 0.55)
            plain_log(left.yaxis)
        left.set_ylabel(r"$E|\Gamma - \mathrm{approximation}|^2\,/\,E|\Gamma|^2$")
        left.set_title("Share of the attention that is missed")
        left.legend(loc="upper right", fontsize=8.5)
        _line(middle, c.mean_gap, 0, "$dm/dt$")
        _line(middle, c.cov_gap, 1, "$dS/dt$")
        middle.set(ylabel="relative difference", ylim=(0, None))
        middle.set_title("Moments: closure against tokens")
        middle.legend(loc="upper right")
        _line(right, c.spread, 0, "scores of a token")
        right.axhline(np.sqrt(2 * np.log(n)), color=COLOURS[1], ls="--", lw=1.3, label=r"$\sqrt{2\,\log n}$")
        right.set(ylabel="standard deviation", ylim=(0, None))
        right.set_title("Width of the scores")
        right.legend(loc="upper right")
        for ax in (left, middle, right):
            _layers(ax, "layer")
    return StudyFigure(
        "closure",
        figure,
        "Left: mean square error of approximations of the self-attention at the tokens, relative to its mean "
        "square: the Gaussian closure of the tokens; the same closure where as many tokens are drawn from the "
        "Gaussian (mean and standard deviation over draws); the best constant; the best affine map, each token "
        "predicted from the others. Middle: relative error of the closure in the rates of mean and covariance. "
        "Right: standard deviation of the scores of a token; above sqrt(2 log n) a softmax over n tokens is ruled "
        "by the few largest, and no sample of n tokens stands for its Gaussian.",
    )


def span(values: Floats) -> str:
    """A range of whole numbers in words."""
    low, high = int(values.min()), int(values.max())
    return f"{low}" if low == high else f"{low} to {high}"
