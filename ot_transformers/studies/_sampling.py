"""How far attention on n tokens is from its Gaussian closure, as a function of n."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from scipy import stats
from torch import Tensor

from ..arrays import make_generator
from ..attention import Attention
from ..flows import solve
from ..measures import Gaussian, Particles
from ._curves import as_gaussians, gap
from ._result import Progress, silent

__all__ = [
    "Rate",
    "gaussian_cloud",
    "matched_clouds",
    "null_gap",
    "sampling_rate",
    "slope_with_interval",
    "subset_rate",
]

Floats = np.ndarray[Any, Any]


@dataclass(frozen=True, eq=False)
class Rate:
    """Gaps at the final time, for several sizes and repeats, and the power of n that they follow.

    Attributes
    ----------
    sizes : (N,)
    gaps : (N, R)
    slope : mean over the repeats of the slope of log gap against log n
    half_width : half width of its 95% confidence interval (Student)
    rtol : relative tolerance of the flows
    """

    sizes: Floats
    gaps: Floats
    slope: float
    half_width: float
    rtol: float

    @property
    def mean(self) -> Floats:
        """Mean gap a size."""
        return self.gaps.mean(1)

    @property
    def standard_error(self) -> Floats:
        """Standard error of the mean gap a size."""
        return self.gaps.std(1, ddof=1) / np.sqrt(self.gaps.shape[1])


def sampling_rate(
    attention: Attention,
    law: Gaussian,
    end: Gaussian,
    t_end: float,
    sizes: Sequence[int],
    repeats: int,
    seed: int,
    *,
    rtol: float,
    progress: Progress = silent,
) -> Rate:
    """Clouds of n tokens drawn from a Gaussian, run to t_end, against the closure there.

    Every size has its own independent clouds.
    """
    generator = make_generator(seed)
    gaps = np.empty((len(sizes), repeats))
    for k, n in enumerate(sizes):
        clouds = torch.stack([gaussian_cloud(law, n, generator) for _ in range(repeats)])
        gaps[k] = final_gaps(attention, Particles.unchecked(clouds), end, t_end, rtol)
        progress(f"Gaussian clouds of {n} tokens", (k + 1) / len(sizes))
    slope, half = slope_with_interval(np.asarray(sizes, dtype=float), gaps)
    return Rate(np.asarray(sizes), gaps, slope, half, rtol)


def final_gaps(attention: Attention, clouds: Particles, end: Gaussian, t_end: float, rtol: float) -> Floats:
    """Run a batch of clouds and return the distances of their final moments to one Gaussian."""
    flow = solve(attention, clouds, t_end, rtol=rtol, atol=0.01 * rtol, save_at=[0.0, t_end])
    last = flow.states[-1]
    assert isinstance(last, Particles)
    members = [last[k].to_gaussian() for k in range(last.batch_shape[0])]
    return gap(members, [end] * len(members))


def null_gap(
    attention: Attention,
    cloud: Particles,
    t: Floats,
    closure: Sequence[Gaussian],
    repeats: int,
    seed: int,
    *,
    rtol: float,
) -> Floats:
    """Gaps (T, R) of Gaussian clouds with the very mean, covariance and number of tokens of a cloud.

    What the gap of the cloud itself must be compared with: it is what finitely many tokens cost.
    """
    clouds = matched_clouds(cloud, repeats, seed)
    flow = solve(attention, clouds, float(t[-1]), rtol=rtol, atol=0.01 * rtol, save_at=t)
    columns = []
    for k in range(repeats):
        members = as_gaussians([state[k] for state in flow.states])
        columns.append(gap(members, closure))
    return np.stack(columns, 1)


def subset_rate(
    attention: Attention,
    cloud: Particles,
    end: Gaussian,
    t_end: float,
    sizes: Sequence[int],
    repeats: int,
    seed: int,
    *,
    rtol: float,
) -> Rate | None:
    """Random subsets of a cloud, run to t_end, against the closure of the whole cloud.

    None where fewer than two sizes are below three quarters of the cloud, or its weights differ.
    """
    usable = [n for n in sizes if n <= 0.75 * cloud.n]
    if len(usable) < 2 or not cloud.uniform:
        return None
    generator = make_generator(seed)
    gaps = np.empty((len(usable), repeats))
    for k, n in enumerate(usable):
        chosen = torch.stack([torch.randperm(cloud.n, generator=generator)[:n] for _ in range(repeats)])
        clouds = Particles.unchecked(cloud.x_t[chosen.to(cloud.device)])
        gaps[k] = final_gaps(attention, clouds, end, t_end, rtol)
    slope, half = slope_with_interval(np.asarray(usable, dtype=float), gaps)
    return Rate(np.asarray(usable), gaps, slope, half, rtol)


def gaussian_cloud(law: Gaussian, n: int, generator: torch.Generator) -> Tensor:
    """Draw n tokens m + L z of a Gaussian, (n, d)."""
    L = law.factor_t
    z = torch.randn(n, L.shape[-1], generator=generator, dtype=torch.float64)
    return law.mean_t + z.to(L) @ L.mT


def matched_clouds(cloud: Particles, repeats: int, seed: int) -> Particles:
    """Gaussian clouds (repeats, n, d) whose sample mean and covariance are exactly those of a cloud."""
    generator = make_generator(seed)
    law = cloud.to_gaussian()
    U, s, _ = torch.linalg.svd(law.factor_t.double(), full_matrices=False)
    keep = s > s.max() * max(law.factor_t.shape) * torch.finfo(law.dtype).eps
    L = (U * s)[:, keep]
    z = torch.randn(repeats, cloud.n, L.shape[1], generator=generator, dtype=torch.float64).to(L.device)
    z = z - z.mean(-2, keepdim=True)
    # The polar factor: the orthonormal columns nearest to z, so that the law stays rotation invariant.
    W, _, Yt = torch.linalg.svd(z, full_matrices=False)
    x = law.mean_t.double() + (cloud.n**0.5 * W @ Yt) @ L.mT
    return Particles.unchecked(x.to(cloud.dtype))


def slope_with_interval(sizes: Floats, gaps: Floats) -> tuple[float, float]:
    """Mean slope of log gap against log size over repeats (columns), and its 95% half width."""
    x = np.log(sizes) - np.log(sizes).mean()
    slopes = x @ np.log(np.maximum(gaps, np.finfo(float).tiny)) / (x @ x)
    repeats = len(slopes)
    spread = slopes.std(ddof=1) / np.sqrt(repeats) if repeats > 1 else np.nan
    return float(slopes.mean()), float(stats.t.ppf(0.975, repeats - 1) * spread) if repeats > 1 else np.nan
