"""Token clouds along the layers: rank, spectrum, collapse, clusters, gaussianity, distances between layers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ..analysis import clustering_report, gaussianity
from ..measures import Particles
from ..metrics import BuresWasserstein
from ..numerics.transport import pairs_norm, transport_plan
from ._curves import spectrum
from ._result import Progress

__all__ = ["Clouds", "Distances", "distances", "mean_cosine", "measure_clouds", "principal"]

Floats = np.ndarray[Any, Any]


@dataclass(frozen=True, eq=False)
class Clouds:
    """What is measured of the cloud that enters each layer, and of the one that leaves the last: (T,) each.

    Attributes
    ----------
    eigenvalues : of the covariance, largest first, (T, d)
    rank : numerical rank of the covariance
    effective : participation ratio (sum w)^2 / sum w^2 of its eigenvalues w
    entropy_rank : exp(-sum p log p), p = w / sum w
    cosine : mean of <x_i, x_j> / (|x_i| |x_j|) over pairs i != j
    clusters, scale, diameter : of `clustering_report`: clusters by single linkage, the distance of the cut
    gaussianity, null_mean, null_quantile, p_value : of `gaussianity`, on d principal components
    share : share of the variance in these components
    furthest : number of the token furthest from the mean
    reach : its distance from the mean over the root mean square of these distances
    """

    eigenvalues: Floats
    rank: Floats
    effective: Floats
    entropy_rank: Floats
    cosine: Floats
    clusters: Floats
    scale: Floats
    diameter: Floats
    gaussianity: Floats
    null_mean: Floats
    null_quantile: Floats
    p_value: Floats
    share: Floats
    furthest: Floats
    reach: Floats


def measure_clouds(clouds: Sequence[Particles], d: int, seed: int, progress: Progress) -> Clouds:
    """Measure each cloud; `progress` gets fractions of this part."""
    curve = spectrum(clouds)
    p = curve.eigenvalues.clip(0.0) / curve.eigenvalues.sum(1, keepdims=True)
    entropy = -(p * np.log(np.where(p > 0, p, 1.0))).sum(1)
    radii = [(c.x_t - c.mean_t).norm(dim=-1) for c in clouds]
    reports, tests = [], []
    for k, cloud in enumerate(clouds):
        progress(f"cloud {k} of {len(clouds) - 1}", k / len(clouds))
        reports.append(clustering_report(cloud))
        tests.append(gaussianity(principal(cloud, d), seed=seed))
    return Clouds(
        eigenvalues=curve.eigenvalues,
        rank=curve.rank,
        effective=curve.effective,
        entropy_rank=np.exp(entropy),
        cosine=np.array([mean_cosine(c.x_t) for c in clouds]),
        clusters=np.array([r.n_clusters for r in reports]),
        scale=np.array([r.scale for r in reports]),
        diameter=np.array([r.diameter for r in reports]),
        gaussianity=np.array([t.value for t in tests]),
        null_mean=np.array([t.null_mean for t in tests]),
        null_quantile=np.array([t.null_quantile for t in tests]),
        p_value=np.array([t.p_value for t in tests]),
        share=p[:, :d].sum(1),
        furthest=np.array([int(r.argmax()) for r in radii]),
        reach=np.array([float(r.max() / r.square().mean().sqrt()) for r in radii]),
    )


def mean_cosine(x: Tensor) -> float:
    """Mean cosine of the angle between two different tokens of a cloud (n, d), n >= 2."""
    u = x / x.norm(dim=-1, keepdim=True).clamp_min(torch.finfo(x.dtype).tiny)
    n = len(x)
    # |sum u|^2 is n and the pairs twice: no n x n matrix is needed.
    return float((u.sum(0).square().sum() - u.square().sum()) / (n * (n - 1)))


def principal(cloud: Particles, d: int) -> Particles:
    """The cloud in the coordinates of its first d principal components, centred."""
    U, _, _ = torch.linalg.svd(cloud.factor_t, full_matrices=False)
    return cloud.moved((cloud.x_t - cloud.mean_t) @ U[:, :d])


@dataclass(frozen=True, eq=False)
class Distances:
    """Distances from the cloud that enters each layer to the one that leaves it, (L,) each, not squared.

    Attributes
    ----------
    labelled : (mean_i |x_i' - x_i|^2)^(1/2), each token to its own image
    optimal : W_2 of the clouds, tokens matched at least cost
    gaussian : Bures-Wasserstein distance of the Gaussians of equal moments, means included
    mean_shift : |m' - m|
    own : share of the mass that the optimal matching sends to its own image
    """

    labelled: Floats
    optimal: Floats
    gaussian: Floats
    mean_shift: Floats
    own: Floats

    @property
    def excess(self) -> float:
        """Largest relative violation of gaussian <= optimal <= labelled; negative or 0 where they hold."""
        lower = self.gaussian - self.optimal
        upper = self.optimal - self.labelled
        scale = np.maximum(self.labelled, np.finfo(float).tiny)
        return float((np.maximum(lower, upper) / scale).max())


def distances(clouds: Sequence[Particles]) -> Distances:
    """Measure consecutive clouds, whose tokens correspond by their number.

    The Gaussians of equal moments are at most as far apart as the measures (Gelbrich), and every matching
    bounds W_2 from above: gaussian <= optimal <= labelled.
    """
    rows = []
    for a, b in pairwise(clouds):
        plan = transport_plan(a.x_t, a.weights_t, b.x_t, b.weights_t, 2.0)
        rows.append(
            (
                float((a.weights_t * (b.x_t - a.x_t).square().sum(-1)).sum().sqrt()),
                float(pairs_norm(plan.mass, a.x_t[plan.rows] - b.x_t[plan.cols], 2.0)),
                float(BuresWasserstein().distance(a.to_gaussian(), b.to_gaussian())),
                float((b.mean_t - a.mean_t).norm()),
                min(float(plan.mass[plan.rows == plan.cols].sum()), 1.0),
            )
        )
    columns = np.array(rows).T
    return Distances(*columns)
