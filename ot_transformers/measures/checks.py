"""The checks of measures that public functions share."""

from __future__ import annotations

from typing import Any, TypeAlias

from ..arrays import describe
from ..errors import InvalidInput
from .gaussian import Gaussian
from .particles import Particles

__all__ = ["Measure", "as_gaussian", "as_measure", "as_particles", "check_same_dim"]

Measure: TypeAlias = Gaussian | Particles


def as_measure(value: Any, name: str = "measure") -> Measure:
    """Return the measure; a plain array (..., n, d) is read as an unweighted cloud."""
    if isinstance(value, Gaussian | Particles):
        return value
    if hasattr(value, "shape") and hasattr(value, "dtype"):
        return Particles(value)
    raise InvalidInput(f"{name} must be a Gaussian, Particles or an array (..., n, d), got {describe(value)}")


def as_particles(value: Any, name: str = "particles") -> Particles:
    """Return the cloud, or say that a Gaussian is not one."""
    measure = as_measure(value, name)
    if not isinstance(measure, Particles):
        raise InvalidInput(f"{name} must be Particles (or an array (..., n, d)), got {measure!r}")
    return measure


def as_gaussian(value: Any, name: str = "gaussian") -> Gaussian:
    """Return the Gaussian, or say that it is not one."""
    if not isinstance(value, Gaussian):
        raise InvalidInput(f"{name} must be a Gaussian, got {describe(value)}")
    return value


def check_same_dim(a: Measure, b: Measure, names: tuple[str, str] = ("mu", "nu")) -> None:
    """Reject two measures on spaces of different dimension, or on different devices."""
    if a.dim != b.dim:
        raise InvalidInput(f"{names[0]} has dimension {a.dim}, {names[1]} has dimension {b.dim}")
    if a.device != b.device:
        raise InvalidInput(f"{names[0]} is on device {a.device}, {names[1]} on {b.device}: move one of them")
