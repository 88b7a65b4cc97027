"""Unnormalised attention: the softmax without its denominator."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from ..arrays import ArrayLike, ArrayView, cast_like, common_kind
from ..numerics.streaming import exponentials
from .base import Attention, check_pair, parameter, score_matrix, spectral_norm
from .bounds import AttentionBounds

__all__ = ["UnnormalisedAttention"]


class UnnormalisedAttention(Attention):
    r"""Gamma_mu(x) = V E[y e^{y^T A x}], y ~ mu.

    Parameters
    ----------
    A : array (..., d, d)
        Score matrix K^T Q. A scalar stands for d = 1.
    V : array (..., d, d)
        Value matrix.

    Raises
    ------
    InvalidInput
        Not square, dimensions or batches that do not match, NaN or infinity.

    Notes
    -----
    Computed in the log domain: an entry is infinite only where the number itself leaves the floating range
    (no error is raised; mathematics grows that fast). Gaussian laws do not stay Gaussian. For V = sigma D A
    it is the Wasserstein gradient flow (inner product D^{-1}) of -sigma E_A.

    References
    ----------
    Castin, Ablin, Carrillo, Peyré, arXiv 2501.18322, sections 2 and 3.
    """

    A = ArrayView("Score matrix, (..., d, d).")
    V = ArrayView("Value matrix, (..., d, d).")

    def __init__(self, A: ArrayLike, V: ArrayLike) -> None:
        self.A_t, _ = parameter(A, "A")
        self.V_t, _ = parameter(V, "V")
        self.dim, self.batch_shape = check_pair(self.A_t, self.V_t)
        self.kind = common_kind(A, V)

    @classmethod
    def from_qkv(cls, Q: ArrayLike, K: ArrayLike, V: ArrayLike, scale: Any = 1.0) -> UnnormalisedAttention:
        """Build from query, key (..., k, d) and value matrices: A = scale K^T Q."""
        self = cls(score_matrix(Q, K, scale), V)
        self.kind = common_kind(Q, K, V)
        return self

    def raw_rows(self, points: Tensor, x: Tensor, weights: Tensor) -> Tensor:
        """V sum_j w_ij y_j e^{y_j^T A x_i}."""
        A, V = cast_like(self.A_t, x, "A"), cast_like(self.V_t, x, "V")
        shift, e = exponentials(points @ A.mT @ x.mT, weights)
        value = e @ x @ V.mT
        # e^c in two halves: e^c alone overflows before the product does. And a 0 stays 0, not inf * 0.
        half = torch.exp(0.5 * shift)
        return torch.where(value == 0, value, half * value * half)

    def bounds(self, radius: float) -> AttentionBounds:
        """|V| R e^{|A| R^2}, |V||A| R^2 e^{|A| R^2} and |V| (1 + |A| R^2) e^{|A| R^2}."""
        u, v = spectral_norm(self.A_t, "A") * radius**2, spectral_norm(self.V_t, "V")
        e = math.exp(u)
        return AttentionBounds(v * radius * e, v * u * e, v * (1 + u) * e)
