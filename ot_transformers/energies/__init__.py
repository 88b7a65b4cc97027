"""Floor 2: the energies, one file a kind."""

from __future__ import annotations

from .base import Energy, ScaledEnergy, SumEnergy
from .gaussian_functional import GaussianFunctional
from .interaction import InteractionEnergy
from .kl import Entropy, KLDivergence
from .potential import PotentialEnergy
from .self_transport import SelfTransportEnergy
from .sinkhorn_divergence import SinkhornDivergence
from .squared_wasserstein import SquaredWasserstein

__all__ = [
    "Energy",
    "Entropy",
    "GaussianFunctional",
    "InteractionEnergy",
    "KLDivergence",
    "PotentialEnergy",
    "ScaledEnergy",
    "SelfTransportEnergy",
    "SinkhornDivergence",
    "SquaredWasserstein",
    "SumEnergy",
]
