"""Any differentiable function of mean and covariance, as an energy on Gaussians."""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor

from ..arrays import describe
from ..errors import InvalidInput
from ..spd import symmetrise
from .base import Energy

__all__ = ["GaussianFunctional"]


class GaussianFunctional(Energy):
    """F(N(m, S)) = f(m, S) for a differentiable f; its Wasserstein gradient is x -> f_m + 2 f_S (x - m).

    Parameters
    ----------
    f : callable
        Takes torch tensors mean (..., d) and cov (..., d, d) to (...), differentiable by autograd.

    Raises
    ------
    InvalidInput
        f is not callable or gives a wrong shape; a measure that is not a Gaussian.

    Examples
    --------
    >>> import numpy as np
    >>> from ot_transformers import Gaussian
    >>> trace = GaussianFunctional(lambda m, S: S.diagonal(dim1=-2, dim2=-1).sum(-1))
    >>> trace.wasserstein_gradient(Gaussian(np.zeros(2), np.eye(2))).M
    array([[2., 0.],
           [0., 2.]])
    """

    def __init__(self, f: Callable[[Tensor, Tensor], Tensor]) -> None:
        if not callable(f):
            raise InvalidInput(f"f must be callable, (mean, cov) -> (...), got {describe(f)}")
        self.f = f

    def raw_gaussian(self, mean: Tensor, cov: Tensor) -> Tensor:
        """f(m, S), (...)."""
        value = self.f(mean, symmetrise(cov))
        if not isinstance(value, Tensor) or value.shape != mean.shape[:-1]:
            raise InvalidInput(
                f"f must give a tensor of shape {tuple(mean.shape[:-1])} for mean {tuple(mean.shape)} and "
                f"cov {tuple(cov.shape)}, it gave {describe(value)}"
            )
        return value
