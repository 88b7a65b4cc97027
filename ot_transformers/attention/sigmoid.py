"""Sigmoid attention."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from ..arrays import ArrayLike, ArrayView, as_scalar, cast_like, common_kind
from .base import Attention, check_pair, parameter, score_matrix, spectral_norm
from .bounds import AttentionBounds

__all__ = ["SigmoidAttention"]


class SigmoidAttention(Attention):
    r"""Gamma_mu(x) = V E[y / (1 + e^{-(y^T A x + b)})], y ~ mu.

    Parameters
    ----------
    A : array (..., d, d)
        Score matrix K^T Q. A scalar stands for d = 1.
    V : array (..., d, d)
        Value matrix.
    bias : float
        The bias b; with n tokens, b = -log n gives the usual normalisation.

    Raises
    ------
    InvalidInput
        Not square, dimensions or batches that do not match, NaN or infinity.

    Notes
    -----
    Gaussian laws do not stay Gaussian. Memory is O(n d).

    References
    ----------
    Castin, Ablin, Carrillo, Peyré, arXiv 2501.18322, section 2; Ramapuram et al., arXiv 2409.04431.
    """

    A = ArrayView("Score matrix, (..., d, d).")
    V = ArrayView("Value matrix, (..., d, d).")

    def __init__(self, A: ArrayLike, V: ArrayLike, bias: float = 0.0) -> None:
        self.A_t, _ = parameter(A, "A")
        self.V_t, _ = parameter(V, "V")
        self.bias = as_scalar(bias, "bias")
        self.dim, self.batch_shape = check_pair(self.A_t, self.V_t)
        self.kind = common_kind(A, V)

    @classmethod
    def from_qkv(
        cls, Q: ArrayLike, K: ArrayLike, V: ArrayLike, scale: Any = 1.0, *, bias: float = 0.0
    ) -> SigmoidAttention:
        """Build from query, key (..., k, d) and value matrices: A = scale K^T Q."""
        self = cls(score_matrix(Q, K, scale), V, bias)
        self.kind = common_kind(Q, K, V)
        return self

    def raw_rows(self, points: Tensor, x: Tensor, weights: Tensor) -> Tensor:
        """V sum_j w_ij sigmoid(y_j^T A x_i + b) y_j."""
        A, V = cast_like(self.A_t, x, "A"), cast_like(self.V_t, x, "V")
        gates = torch.sigmoid(points @ A.mT @ x.mT + self.bias)
        return (weights * gates) @ x @ V.mT

    def bounds(self, radius: float) -> AttentionBounds:
        """|V| s R, |V||A| R^2 / 4 and |V| (s + |A| R^2 / 4), s = sigmoid(|A| R^2 + b)."""
        u, v = spectral_norm(self.A_t, "A") * radius**2, spectral_norm(self.V_t, "V")
        top = 1.0 / (1.0 + math.exp(min(700.0, -(u + self.bias))))
        return AttentionBounds(v * top * radius, v * u / 4, v * (top + u / 4))
