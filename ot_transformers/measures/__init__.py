"""Floor 1: the measures that everything else acts on. Frozen, validated once, batch-first."""

from __future__ import annotations

from .checks import Measure, as_gaussian, as_measure, as_particles, check_same_dim
from .gaussian import Gaussian
from .grid import GridMeasure
from .particles import Particles
from .positioned import PositionedParticles
from .velocity import AffineVelocity

__all__ = [
    "AffineVelocity",
    "Gaussian",
    "GridMeasure",
    "Measure",
    "Particles",
    "PositionedParticles",
    "as_gaussian",
    "as_measure",
    "as_particles",
    "check_same_dim",
]
