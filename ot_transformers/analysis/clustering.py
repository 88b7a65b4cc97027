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
    labels : (n,) integers from 0, in order of decreasing mass
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
    1e-12 * diameter are coincidence at rounding level and never a gap.

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
    x = p.x_t.detach().cpu().double().numpy()
    w = p.weights_t.detach().cpu().double().numpy()
    rank = int(p.to_gaussian().rank())
    if p.n == 1:
        return ClusteringReport(
            1, scale or 0.0, np.inf, np.zeros(1, int), np.ones(1), np.zeros(1, int), 0.0, 0
        )
    pairs = pdist(x)
    diameter = float(pairs.max())
    tree = linkage(pairs, "single")
    cut = _widest_gap(tree[:, 2], diameter, min_gap) if scale is None else float(scale)
    raw = fcluster(tree, cut, "distance") - 1
    mass = np.bincount(raw, weights=w)
    order = np.argsort(-mass, kind="stable")
    labels = np.argsort(order)[raw]
    masses = mass[order]
    D = squareform(pairs)
    leaders = np.empty(len(masses), int)
    for k in range(len(masses)):
        members = np.flatnonzero(labels == k)
        leaders[k] = members[np.argmin(D[np.ix_(members, members)] @ w[members])]
    within = tree[tree[:, 2] <= cut, 2]
    between = tree[tree[:, 2] > cut, 2]
    inner = float(within.max()) if within.size else 0.0
    outer = float(between.min()) if between.size else diameter
    gap = outer / inner if inner > 0 else np.inf
    return ClusteringReport(len(masses), cut, gap, labels, masses, leaders, diameter, rank)


def _widest_gap(heights: np.ndarray[Any, Any], diameter: float, min_gap: float) -> float:
    """A cut in the widest (relative) gap between merge heights; above all of them where none is wide."""
    floor = 1e-12 * diameter
    h = np.concatenate([[floor], np.maximum(np.sort(heights), floor)])
    if diameter == 0:
        return 1.0
    # The gap from rounding level to the first real merge counts only if some tokens do coincide.
    start = 0 if heights.min() <= floor else 1
    ratios = h[start + 1 :] / h[start:-1]
    if ratios.size == 0 or ratios.max() < min_gap:
        return float(2.0 * h[-1])
    k = int(np.argmax(ratios)) + start
    return float(np.sqrt(h[k] * h[k + 1]))
