"""The full twisted distance of Gaussians in d = 1 and 2, through Gauss-Hermite particles."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor

from ..measures import Gaussian, Particles
from .base import Geodesic

__all__ = ["hermite_nodes", "quadrature_geodesic"]


def hermite_nodes(n: int, d: int) -> tuple[Tensor, Tensor]:
    """Nodes and weights for the standard normal law of R^d."""
    x, w = np.polynomial.hermite_e.hermegauss(n)
    w = w / w.sum()
    if d == 1:
        return torch.from_numpy(x[:, None].copy()), torch.from_numpy(w)
    grid = np.stack(np.meshgrid(x, x, indexing="ij"), -1).reshape(-1, 2)
    return torch.from_numpy(grid), torch.from_numpy(np.outer(w, w).reshape(-1))


def quadrature_geodesic(
    geodesic: Callable[..., Geodesic], a: Gaussian, b: Gaussian, nodes: tuple[int, ...]
) -> Geodesic:
    """Geodesics of Gauss-Hermite clouds for growing node counts, and the difference of the last two."""
    restricted = geodesic(a, b).details
    L0, L1 = (torch.as_tensor(restricted[name][1]) for name in ("start", "end"))
    found = []
    for n in nodes:
        z, w = hermite_nodes(n, a.dim)
        start = Particles.unchecked(a.mean_t.detach().double() + z @ L0.mT, w, a.kind)
        end = Particles.unchecked(b.mean_t.detach().double() + z @ L1.mT, w, b.kind)
        found.append(geodesic(start, end, matching="identity"))
    lengths = [float(g.length) for g in found]
    last = found[-1]
    error = abs(lengths[-1] - lengths[-2]) + last.error
    details = {**last.details, "lengths": lengths, "nodes": tuple(nodes)}
    return Geodesic(last.length, error, last.converged, last.at, details)
