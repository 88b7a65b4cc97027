"""Floor 2: the metrics on measures, one file a kind."""

from __future__ import annotations

from .base import EnergyLike, Geodesic, Metric, ProximalResult
from .conditional import ConditionalWasserstein
from .coupling import sinkhorn_coupling
from .wasserstein import Wasserstein

__all__ = [
    "ConditionalWasserstein",
    "EnergyLike",
    "Geodesic",
    "Metric",
    "ProximalResult",
    "Wasserstein",
    "sinkhorn_coupling",
]
