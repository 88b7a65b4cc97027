"""The error types: every failure of the library is one of these."""

from __future__ import annotations

__all__ = [
    "InvalidInput",
    "NotAGradientFlow",
    "NotConverged",
    "NotGaussianPreserving",
    "OTTransformersError",
]


class OTTransformersError(Exception):
    """Base class of every error that `ot_transformers` raises on purpose."""


class InvalidInput(OTTransformersError, ValueError):
    """An argument that cannot be used; the message names it, what came and what is expected."""


class NotGaussianPreserving(OTTransformersError, TypeError):
    """The attention does not keep Gaussian laws Gaussian, so it has no affine closure."""


class NotAGradientFlow(OTTransformersError, ValueError):
    """No (energy, metric) pair has this dynamics as its gradient flow.

    Parameters
    ----------
    message : str
        What was tested and how far it is from holding.
    residual : float
        The relative residual that the test found (0 would be a gradient flow).
    """

    def __init__(self, message: str, residual: float = float("nan")) -> None:
        super().__init__(message)
        self.residual = residual


class NotConverged(OTTransformersError, RuntimeWarning):
    """An iteration stopped before its tolerance: a warning class, and an error where no number is usable."""
