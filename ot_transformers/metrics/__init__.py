"""Floor 2: the metrics on measures, one file a kind."""

from __future__ import annotations

from .barycenter import Barycenter, bures_barycenter, bures_barycenter_result
from .base import EnergyLike, Geodesic, Metric, ProximalResult
from .bures import (
    bures_distance,
    bures_exp,
    bures_geodesic,
    bures_inner,
    bures_log,
    bures_map,
    bures_transport,
)
from .bures_wasserstein import BuresWasserstein
from .conditional import ConditionalWasserstein
from .coupling import sinkhorn_coupling
from .twisted import TwistedWasserstein
from .wasserstein import Wasserstein

__all__ = [
    "Barycenter",
    "BuresWasserstein",
    "ConditionalWasserstein",
    "EnergyLike",
    "Geodesic",
    "Metric",
    "ProximalResult",
    "TwistedWasserstein",
    "Wasserstein",
    "bures_barycenter",
    "bures_barycenter_result",
    "bures_distance",
    "bures_exp",
    "bures_geodesic",
    "bures_inner",
    "bures_log",
    "bures_map",
    "bures_transport",
    "sinkhorn_coupling",
]
