"""Floor 3: the Transformer PDE on particles and Gaussians, gradient flows and JKO steps."""

from __future__ import annotations

from .gradient import gradient_flow
from .grid_jko import GridFlow, grid_jko
from .jko import jko, jko_step
from .solve import solve
from .structure import GradientStructure, gradient_structure
from .trajectory import Status, Trajectory

__all__ = [
    "GradientStructure",
    "GridFlow",
    "Status",
    "Trajectory",
    "gradient_flow",
    "gradient_structure",
    "grid_jko",
    "jko",
    "jko_step",
    "solve",
]
