"""Floor 3: the Transformer PDE on particles and Gaussians, gradient flows and JKO steps."""

from __future__ import annotations

from .solve import solve
from .trajectory import Status, Trajectory

__all__ = ["Status", "Trajectory", "solve"]
