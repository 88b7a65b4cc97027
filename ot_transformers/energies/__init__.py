"""Floor 2: the energies, one file a kind."""

from __future__ import annotations

from .self_transport import SelfTransportEnergy
from .sinkhorn_divergence import SinkhornDivergence

__all__ = [
    "SelfTransportEnergy",
    "SinkhornDivergence",
]
