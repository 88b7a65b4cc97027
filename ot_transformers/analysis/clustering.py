"""Clusters of a token cloud: how many at which scale, their leaders, the rank and the diameter."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from scipy.cluster.hierarchy import fcluster, linkage
from scipy.spatial.distance import pdist, squareform

from ..arrays import ArrayLike, check_positive
from ..errors import InvalidInput
from ..measures import Particles, as_particles
from .rank import numerical_rank

COINCIDENT = 1e-12
"""Relative to the diameter: tokens nearer than this are in one place."""

__all__ = ["ClusteringReport", "clustering_report"]


@dataclass(frozen=True, eq=False)
class ClusteringReport:
    """Result of `clustering_report`.

    Attributes
    ----------
    n_clusters : int
        Number of clusters at `scale`.
    scale : float
        Tokens nearer than this (through a chain of tokens) are in one cluster.
    gap : float
        Ratio of the smallest distance between clusters to the largest link within one; near 1 means that
        the cloud has no cluster structure at any scale, inf that clusters are single points.
    labels : (n,) integers from 0, in order of decreasing mass; -1 for a token of weight 0
    masses : (n_clusters,) total weight of each
    leaders : (n_clusters,) index of the medoid of each: the token nearest, on weighted average, to its cluster
    diameter : float
        Largest distance between two tokens.
    rank : int
        Numerical rank of the cloud's covariance (at rounding level).
    """

    n_clusters: int
    scale: float
    gap: float
    labels: np.ndarray[Any, Any]
    masses: np.ndarray[Any, Any]
    leaders: np.ndarray[Any, Any]
    diameter: float
    rank: int


def clustering_report(
    cloud: Particles | ArrayLike, *, scale: float | None = None, min_gap: float = 2.0
) -> ClusteringReport:
    """Single-linkage clusters of a cloud, at a given scale or at the widest gap of scales.

    Single linkage merges tokens in order of distance; the merge heights are the edges of the minimum
    spanning tree. Without `scale` the cut is made in the widest gap of consecutive heights (largest ratio),
    if that ratio is at least `min_gap`; otherwise the whole cloud is one cluster. Merges below
    1e-12 * diameter are coincidence at rounding level: such tokens count as one place. Where no other gap is
    wide enough and at least half of the tokens share their place with another one, the places are the
    clusters. Tokens of weight 0 are no part of the measure: they have label -1.

    Parameters
    ----------
    cloud : Particles or array (n, d)
    scale : float > 0, optional
        Distance below which tokens are linked.
    min_gap : float > 1
        Smallest ratio of heights that counts as separation.

    Raises
    ------
    InvalidInput
        Batch dimensions, scale <= 0, min_gap <= 1.
    """
    p = as_particles(cloud, "cloud")
    if p.batch_shape:
        raise InvalidInput(f"cloud must be a single cloud, got batch dimensions {p.batch_shape}")
    if scale is not None:
        check_positive(scale, "scale")
    if check_positive(min_gap, "min_gap") <= 1:
        raise InvalidInput(f"min_gap must be > 1, got {min_gap:g}")
    x_all = p.x_t.detach().cpu().double().numpy()
    w_all = p.weights_t.detach().cpu().double().numpy()
    kept = np.flatnonzero(w_all > 0)
    x, w = x_all[kept], w_all[kept]
    rank = int(numerical_rank(p))
    labels = np.full(p.n, -1)
    if len(kept) == 1:
        labels[kept] = 0
        return ClusteringReport(1, scale or 0.0, np.inf, labels, np.ones(1), kept, 0.0, rank)
    pairs = pdist(x)
    if not np.all(np.isfinite(pairs)):
        raise InvalidInput(f"cloud is too large for distances: entries up to {np.abs(x).max():.3g}")
    diameter = float(pairs.max())
    tree = linkage(pairs, "single")
    cut = _widest_gap(tree, diameter, min_gap) if scale is None else float(scale)
    raw = fcluster(tree, cut, "distance") - 1
    mass = np.bincount(raw, weights=w)
    order = np.argsort(-mass, kind="stable")
    found = np.argsort(order)[raw]
    labels[kept] = found
    masses = mass[order]
    D = squareform(pairs)
    leaders = np.empty(len(masses), int)
    for k in range(len(masses)):
        members = np.flatnonzero(found == k)
        leaders[k] = kept[members[np.argmin(D[np.ix_(members, members)] @ w[members])]]
    within = tree[tree[:, 2] <= cut, 2]
    between = tree[tree[:, 2] > cut, 2]
    inner = float(within.max()) if within.size else 0.0
    outer = float(between.min()) if between.size else diameter
    # Below rounding level a link has no length: the clusters are points.
    gap = outer / inner if inner > COINCIDENT * diameter else np.inf
    return ClusteringReport(len(masses), cut, gap, labels, masses, leaders, diameter, rank)


def _widest_gap(tree: np.ndarray[Any, Any], diameter: float, min_gap: float) -> float:
    """A cut in the widest (relative) gap between merge heights; above all of them where none is wide."""
    floor = COINCIDENT * diameter
    h = np.sort(tree[:, 2])
    h = h[h > floor]
    if h.size == 0:
        return 2.0 * diameter if diameter > 0 else 1.0
    ratios = h[1:] / h[:-1]
    if ratios.size and ratios.max() >= min_gap:
        k = int(np.argmax(ratios))
        return float(np.sqrt(h[k]) * np.sqrt(h[k + 1]))
    place = fcluster(tree, floor, "distance")
    shared = np.bincount(place)[place] > 1
    if shared.mean() >= 0.5:
        return float(np.sqrt(floor) * np.sqrt(h[0]))
    return float(2.0 * h[-1])
