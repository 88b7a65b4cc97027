"""Pair interactions 1/2 E E phi(x^T A y) other than the exponential: the energies of linear and sigmoid attention."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping
from typing import ClassVar

import torch
from torch import Tensor

from ..arrays import ArrayLike, ArrayView, as_matrix, as_scalar, cast_like, common_kind
from ..numerics.streaming import blockwise
from ..spd import symmetrise, transfer
from .base import Energy

__all__ = ["PairInteraction", "QuadraticInteraction", "SoftplusInteraction"]


class PairInteraction(Energy):
    r"""E(mu) = 1/2 \iint phi(x^T A y) dmu(x) dmu(y), streaming over pairs.

    A new one is a class with `phi`. Gradients come from autograd, with blocks recomputed in backward mode.

    Parameters
    ----------
    A : array (..., d, d)
        The interaction matrix, any square one.
    """

    A = ArrayView("The interaction matrix, (..., d, d).")
    parameters: ClassVar[Mapping[str, int]] = {"A_t": 2}

    def __init__(self, A: ArrayLike) -> None:
        self.A_t, self.kind = as_matrix(A, "A", square=True, keep=True)
        self.dim, self.batch_shape = int(self.A_t.shape[-1]), tuple(self.A_t.shape[:-2])

    @abstractmethod
    def phi(self, s: Tensor) -> Tensor:
        """The pair function, elementwise."""

    def raw_particles(self, x: Tensor, weights: Tensor) -> Tensor:
        """1/2 sum_ij w_i w_j phi(x_i^T A x_j)."""
        z = x @ cast_like(self.A_t, x, "A")

        def rows(block: Tensor, y: Tensor, w: Tensor) -> Tensor:
            return self.phi(block @ y.mT) @ w

        inner = blockwise(rows, (z,), (x, weights.unsqueeze(-1)))
        return 0.5 * (weights * inner[..., 0]).sum(-1)


class QuadraticInteraction(PairInteraction):
    r"""E(mu) = 1/4 E E (x^T A y)^2 = 1/4 tr(A^T M A M), M = E[x x^T]: phi(s) = s^2 / 2.

    For symmetric A, linear attention with V = sigma D A is the Wasserstein gradient flow (inner product
    D^{-1}) of -sigma E: the first variation is 1/2 E_y (x^T A y)^2, of gradient A M A x.
    """

    def phi(self, s: Tensor) -> Tensor:
        """s^2 / 2."""
        return 0.5 * s.square()

    def raw_particles(self, x: Tensor, weights: Tensor) -> Tensor:
        """Through the second moment, O(n d^2) operations."""
        return self._of_moment(symmetrise((weights.unsqueeze(-1) * x).mT @ x))

    def raw_gaussian(self, mean: Tensor, cov: Tensor) -> Tensor:
        """1/4 tr(A^T M A M), M = S + m m^T."""
        return self._of_moment(cov + mean.unsqueeze(-1) * mean.unsqueeze(-2))

    def _of_moment(self, M: Tensor) -> Tensor:
        A = cast_like(self.A_t, M, "A")
        return 0.25 * (transfer(A.mT, M) * M).sum((-2, -1))


class SoftplusInteraction(PairInteraction):
    r"""E(mu) = 1/2 E E log(1 + e^{x^T A y + b}): phi is the softplus.

    For symmetric A, sigmoid attention with V = sigma D A is the Wasserstein gradient flow (inner product
    D^{-1}) of -sigma E.
    """

    def __init__(self, A: ArrayLike, bias: float = 0.0) -> None:
        super().__init__(A)
        self.bias = as_scalar(bias, "bias")
        self.kind = common_kind(A)

    def phi(self, s: Tensor) -> Tensor:
        """log(1 + e^{s + b}), without overflow."""
        return torch.nn.functional.softplus(s + self.bias)
