"""Figures: each function takes `ax=` and returns the artists that it drew."""

from __future__ import annotations

from ._flow import Plane, motion_plane, principal_plane
from ._style import COLOURS, MARKERS, STYLE
from .animate import animate_ellipses, animate_particles, save_animation
from .cone import cone_coordinates, disc_coordinates, plot_cone, plot_disc
from .convexity import plot_chord, plot_moduli, plot_second_derivative
from .eigenvalues import eigenvalues_along, plot_eigenvalues
from .ellipses import plot_ellipses
from .energies import plot_energy
from .particles import plot_particles
from .phase import plot_phase, plot_rank_histogram
from .rates import plot_rate

__all__ = [
    "COLOURS",
    "MARKERS",
    "STYLE",
    "Plane",
    "animate_ellipses",
    "animate_particles",
    "cone_coordinates",
    "disc_coordinates",
    "motion_plane",
    "eigenvalues_along",
    "plot_chord",
    "plot_cone",
    "plot_disc",
    "plot_eigenvalues",
    "plot_ellipses",
    "plot_energy",
    "plot_moduli",
    "plot_particles",
    "plot_phase",
    "plot_rank_histogram",
    "plot_rate",
    "plot_second_derivative",
    "principal_plane",
    "save_animation",
]
