"""What of the theory holds for the tokens and weights of a real transformer, layer by layer."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from ..arrays import check_count
from ..errors import InvalidInput
from ..models import AttentionLayer, extract_layers, load_text
from ._result import (
    Finding,
    Progress,
    StudyResult,
    Table,
    checked,
    format_number,
    options_of,
    silent,
)
from ._trace_closure import Closures, measure_closures
from ._trace_clouds import Clouds, Distances, distances, measure_clouds
from ._trace_figures import closure_figure, cloud_figure, distance_figure, head_figure, span
from ._trace_heads import FIELDS, Heads, chance_level, measure_heads

__all__ = ["TraceConfig", "run"]

Floats = np.ndarray[Any, Any]
MODEL_TOLERANCE = 1e-10
ORDER_TOLERANCE = 1e-9
FEWEST = 4
"""Tokens that a text needs: two that the tokenizer adds, and two."""


@dataclass(frozen=True)
class TraceConfig:
    """Options of `trace`.

    Attributes
    ----------
    text : UTF-8 text file; default the text of the bundled cloud
    model : folder of a Hugging Face model with BERT's layers; default all-MiniLM-L6-v2
    d : principal components in which gaussianity is tested; default 16, or a quarter of the tokens if less
    draws : clouds of Gaussian tokens a layer, to which the gap of the closure is compared
    seed : int
    """

    text: str | None = None
    model: str | None = None
    d: int | None = None
    draws: int = 4
    seed: int = 0


@dataclass(frozen=True, eq=False)
class _Measured:
    """All that was measured."""

    names: list[str]
    clouds: Clouds
    steps: Distances
    whole: Distances
    heads: Heads
    chance: dict[str, float]
    closures: Closures
    components: int


def run(config: TraceConfig, progress: Progress = silent) -> StudyResult:
    """Run the model on the text in float64 and measure every layer.

    Raises
    ------
    InvalidInput
        The extra `models` is not installed, or an option that cannot be used.
    """
    check_count(config.draws, "draws")
    check_count(config.seed, "seed", 0)
    if config.d is not None:
        check_count(config.d, "d")
    text = load_text() if config.text is None else _read_text(config.text)
    progress("running the model", 0.0)
    layers, names = extract_layers(text, config.model)
    n, dim = layers[0].tokens.n, layers[0].tokens.dim
    m = _measure(config, layers, names, progress)
    progress("drawing", 0.92)
    source = "the bundled text" if config.text is None else Path(config.text).name
    model = "all-MiniLM-L6-v2" if config.model is None else Path(config.model).name
    return StudyResult(
        study="trace",
        title=f"The theory along the layers of {model}",
        summary=f"{n} tokens of {source} in dimension {dim}, {len(layers)} layers of {len(layers[0].heads)} heads of "
        f"width {layers[0].heads[0].width}; the model runs in float64.",
        config=options_of(config),
        findings=_findings(m, n),
        tables=_tables(m),
        figures=[
            cloud_figure(m.clouds),
            distance_figure(m.steps, m.clouds, m.components),
            head_figure(m.heads, m.chance),
            closure_figure(m.closures, n),
        ],
        arrays=_arrays(m),
        notes=_notes(m, n, dim),
    )


def _read_text(path: str) -> str:
    try:
        text = Path(path).expanduser().read_text(encoding="utf-8")
    except OSError as err:
        raise InvalidInput(f"text file cannot be read: {path} ({err.strerror})") from err
    except UnicodeDecodeError as err:
        raise InvalidInput(f"text file is not UTF-8: {path} (byte {err.start})") from err
    if not text.strip():
        raise InvalidInput(f"text file is empty: {path}")
    return text


def _measure(
    config: TraceConfig, layers: list[AttentionLayer], names: list[str], progress: Progress
) -> _Measured:
    n, dim = layers[0].tokens.n, layers[0].tokens.dim
    if n < FEWEST:
        raise InvalidInput(f"text must give at least {FEWEST} tokens, got {n}")
    most = min(dim, n - 2)
    if config.d is not None and config.d > most:
        raise InvalidInput(f"d must be at most {most} for {n} tokens in dimension {dim}, got {config.d}")
    components = min(16, max(n // 4, 1), most) if config.d is None else config.d
    clouds = [layer.tokens for layer in layers] + [layers[-1].result]

    def part(begin: float, end: float) -> Progress:
        return lambda stage, fraction: progress(stage, begin + (end - begin) * fraction)

    cloud = measure_clouds(clouds, components, config.seed, part(0.3, 0.5))
    progress("distances", 0.5)
    steps, whole = distances(clouds), distances([clouds[0], clouds[-1]])
    heads = measure_heads(layers, part(0.55, 0.65))
    chance = chance_level(layers[0].heads[0], config.seed)
    closures = measure_closures(layers, config.draws, config.seed, part(0.65, 0.92))
    return _Measured(names, cloud, steps, whole, heads, chance, closures, components)


def _findings(m: _Measured, n: int) -> list[Finding]:
    c, h, g = m.clouds, m.heads, m.closures
    model = float(g.model.max())
    excess = max(m.steps.excess, m.whole.excess)
    best = np.unravel_index(int(h.attained.argmin()), h.attained.shape)
    even = np.unravel_index(int(h.asymmetry.argmin()), h.asymmetry.shape)
    far = int((c.gaussianity > c.null_quantile).sum())
    own = float(m.steps.own.min())
    closer = int((g.gap < g.constant).sum())
    return [
        checked(
            "Attention of the library equals the model's",
            "Multi-head softmax attention on (x, 1), biases included, against the self-attention output that the "
            f"model computed: largest relative difference over the layers {model:.1e}.",
            model,
            MODEL_TOLERANCE,
        ),
        checked(
            "Distances are ordered",
            "Bures-Wasserstein <= W2 <= labelled displacement, in every layer and over the whole model; largest "
            f"violation relative to the displacement {max(excess, 0.0):.1e}.",
            max(excess, 0.0),
            ORDER_TOLERANCE,
        ),
        Finding(
            "Rank collapse",
            f"The mean cosine between tokens goes from {c.cosine[0]:.3f} to {c.cosine[-1]:.3f} (largest "
            f"{c.cosine.max():.3f}), the effective rank from {c.effective[0]:.3g} to {c.effective[-1]:.3g}; the "
            f"numerical rank is {span(c.rank)}, of at most {n - 1} for {n} tokens.",
            float(c.cosine[-1]),
        ),
        Finding(
            "Clusters",
            f"Single linkage finds {int(c.clusters[0])} cluster(s) in the first cloud and {int(c.clusters[-1])} in "
            f"the last; diameter from {format_number(c.diameter[0])} to {format_number(c.diameter[-1])}.",
            float(c.clusters[-1]),
        ),
        Finding(
            "Gaussianity",
            f"In {m.components} principal components {far} of {len(c.rank)} clouds are further from their Gaussian "
            f"than 95% of Gaussian samples are; distance {c.gaussianity[0]:.3g} at first, {c.gaussianity[-1]:.3g} at "
            f"last, Gaussian samples {c.null_mean[-1]:.3g}. The token furthest from the mean is {c.reach[0]:.2f} root "
            f"mean squares from it at first, {c.reach[-1]:.2f} at last ({m.names[c.furthest[-1]]!r}).",
            float(c.gaussianity[-1]),
        ),
        Finding(
            "Layers as transport maps",
            f"The optimal matching sends at least {100 * own:.4g}% of the tokens of a layer to their own images "
            f"({100 * m.whole.own[0]:.4g}% over the whole model). The moments account for "
            f"{100 * (m.steps.gaussian / m.steps.optimal).min():.3g}% to "
            f"{100 * (m.steps.gaussian / m.steps.optimal).max():.3g}% of W2.",
            own,
        ),
        Finding(
            "Gradient structure",
            f"No head is a gradient flow: asymmetry of A {h.asymmetry.min():.2f} (head {even[1]} of layer {even[0]}) "
            f"to {h.asymmetry.max():.2f}, median {np.median(h.asymmetry):.2f}, random matrices "
            f"{m.chance['asymmetry']:.2f}; misfit of V {h.attained.min():.2f} (head {best[1]} of layer {best[0]}) to "
            f"{h.attained.max():.2f}, random matrices {m.chance['attained']:.2f}."
            if min(h.asymmetry.min(), h.attained.min()) > 1e-6
            else f"Smallest asymmetry of A {h.asymmetry.min():.1e}, smallest misfit of V {h.attained.min():.1e}.",
            float(h.attained.min()),
        ),
        Finding(
            "Gaussian closure",
            f"The closure misses {_range(g.gap)} of E|Gamma|^2. As many tokens drawn from the Gaussian miss "
            f"{_range(g.gaussian)}: that much comes with a finite number of tokens, whatever their shape (scores have "
            f"standard deviation {g.spread.min():.2g} to {g.spread.max():.2g}).",
            float(np.median(g.gap)),
        ),
        Finding(
            "Affine attention",
            f"An affine map that predicts left-out tokens misses {_range(g.affine)} of E|Gamma|^2, the best constant "
            f"{_range(g.constant)}; the closure is closer than the best constant in {closer} of {len(g.gap)} layers.",
            float(np.median(g.affine)),
        ),
    ]


def _range(values: Floats) -> str:
    return f"{100 * float(values.min()):.3g}% to {100 * float(values.max()):.3g}%"


def _tables(m: _Measured) -> list[Table]:
    c, g = m.clouds, m.closures
    layer = list(range(len(g.gap)))
    clouds = {
        "cloud": list(range(len(c.rank))),
        "rank": c.rank,
        "effective rank": c.effective,
        "entropy rank": c.entropy_rank,
        "largest eigenvalue": c.eigenvalues[:, 0],
        "trace": c.eigenvalues.sum(1),
        "mean cosine": c.cosine,
        "clusters": c.clusters,
        "scale": c.scale,
        "diameter": c.diameter,
        "gaussianity": c.gaussianity,
        "Gaussian samples": c.null_mean,
        "p value": c.p_value,
        "variance tested": c.share,
        "furthest token": [m.names[k] for k in c.furthest],
        "its distance / rms": c.reach,
    }
    steps = [
        [name, *values]
        for d, labels in ((m.steps, [f"layer {k}" for k in layer]), (m.whole, ["whole model"]))
        for name, *values in zip(labels, d.labelled, d.optimal, d.gaussian, d.mean_shift, d.own, strict=True)
    ]
    closure = {
        "layer": layer,
        "closure": g.gap,
        "Gaussian tokens": g.gaussian,
        "+-": g.gaussian_spread,
        "best constant": g.constant,
        "affine, left out": g.affine,
        "cosine": g.cosine,
        "dm/dt": g.mean_gap,
        "dS/dt": g.cov_gap,
        "sd of scores": g.spread,
        "|Gamma| / |x|": g.relative_size,
        "against the model": g.model,
    }
    heads = [
        [k, j, *(getattr(m.heads, name)[k, j] for name in FIELDS)]
        for k, j in np.ndindex(*m.heads.asymmetry.shape)
    ]
    return [
        _columns(
            "clouds",
            "Token clouds",
            clouds,
            "Clusters by single linkage at the distance `scale`. Gaussianity on principal components with the "
            "share of variance that is tested.",
        ),
        Table(
            "distances",
            "Distance from the tokens before to the tokens after",
            ["step", "labelled", "W2", "Bures-Wasserstein", "mean shift", "matched to own image"],
            steps,
        ),
        _columns(
            "closure",
            "Gaussian closure of the self-attention",
            closure,
            "First columns: share of E|Gamma|^2 that is missed. dm/dt, dS/dt: relative differences.",
        ),
        Table(
            "heads",
            "Heads",
            [
                "layer",
                "head",
                "asymmetry of A",
                "misfit of V, at least",
                "misfit of V, at most",
                "strict residual",
                "rank of A",
                "rank of V",
                "effective rank of A",
                "effective rank of V",
            ],
            heads,
            "Misfit: smallest |V - sigma D (A + A^T) / 2| / |V| over symmetric positive D, sigma = 1 or -1. Strict "
            "residual: the one that `gradient_structure` reports, not bounded by 1.",
        ),
    ]


def _columns(name: str, title: str, columns: dict[str, Any], note: str) -> Table:
    return Table(name, title, list(columns), list(zip(*columns.values(), strict=True)), note)


def _arrays(m: _Measured) -> dict[str, Floats]:
    parts = {"": m.clouds, "step_": m.steps, "whole_": m.whole, "head_": m.heads, "closure_": m.closures}
    arrays = {f"{prefix}{key}": value for prefix, part in parts.items() for key, value in vars(part).items()}
    return {**arrays, "token_names": np.array(m.names)}


def _notes(m: _Measured, n: int, dim: int) -> list[str]:
    notes = [
        "Cloud l enters layer l; the last cloud leaves the model. Attention is measured before the residual "
        "connection, LayerNorm and the feed-forward block; distances are over the whole layer.",
        "Biases of queries, keys and values are exact in homogeneous coordinates (x, 1): A~ = K~^T Q~ / sqrt(k) with "
        "Q~ = [Q b_Q], K~ = [K b_K]; the covariance of (x, 1) is singular in the last direction. Measures of heads "
        "(asymmetry, misfit, ranks) leave the biases out.",
        "The closure replaces the tokens by N(m, S): Gamma(x) = b + M (x - m). It is exact to first order in A for "
        "any tokens; a tilt of n tokens by scores of standard deviation s has the mean of the tilted Gaussian only "
        "if n is well above exp(s^2).",
    ]
    if n <= dim + 1:
        notes.append(
            f"With {n} tokens in dimension {dim} an affine map fits any velocity at the tokens exactly, so the affine "
            "share is that of left-out tokens (ridge regression, best ridge parameter); it depends on how many tokens "
            f"there are to learn from. For the same reason gaussianity is tested in {m.components} principal "
            "components: whitened in all of its dimensions any cloud of so few tokens is a regular simplex."
        )
    return notes
