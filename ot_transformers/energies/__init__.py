"""Floor 2: the energies, one file a kind."""

from __future__ import annotations

from .base import Energy, ScaledEnergy, SumEnergy
from .gaussian_functional import GaussianFunctional
from .interaction import InteractionEnergy
from .kl import Entropy, KLDivergence
from .pair_interaction import PairInteraction, QuadraticInteraction, SoftplusInteraction
from .potential import PotentialEnergy
from .quadratic_potential import QuadraticPotential
from .self_transport import SelfTransportEnergy
from .sinkhorn_divergence import SinkhornDivergence
from .squared_wasserstein import SquaredWasserstein

__all__ = [
    "Energy",
    "Entropy",
    "GaussianFunctional",
    "InteractionEnergy",
    "KLDivergence",
    "PairInteraction",
    "PotentialEnergy",
    "QuadraticInteraction",
    "QuadraticPotential",
    "ScaledEnergy",
    "SelfTransportEnergy",
    "SinkhornDivergence",
    "SoftplusInteraction",
    "SquaredWasserstein",
    "SumEnergy",
]
