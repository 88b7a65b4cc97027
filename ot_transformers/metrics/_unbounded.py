"""Steps whose objective falls without bound: where to give up, and how to say so."""

from __future__ import annotations

import warnings

from torch import Tensor

from ..errors import NotConverged

__all__ = ["bottomless", "limit", "warn_unbounded"]

_FAR = 1e4
"""Coordinates beyond this many times 1 + those of the measure count as on their way to infinity."""

_DEEP = 1e12
"""A step that did not converge and lowered F by this many times 1 + |F| counts as one without a minimiser."""


def bottomless(before: float, after: float) -> bool:
    """Whether a step that did not converge looks as if F had no lower bound."""
    return before - after > _DEEP * (1.0 + abs(before))


def limit(x: Tensor) -> float:
    """The largest coordinate up to which a step from tokens x is followed."""
    return _FAR * (1.0 + float(x.abs().max()))


def warn_unbounded(metric: str, *, stacklevel: int) -> None:
    """Say that a step was given up."""
    warnings.warn(
        f"{metric} JKO step: F + d^2 / (2 tau) seems to be unbounded below, the tokens run off to infinity; a "
        "smaller tau may have a minimiser",
        NotConverged,
        stacklevel=stacklevel + 1,
    )
