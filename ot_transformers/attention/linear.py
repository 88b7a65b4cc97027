"""Linear attention: no softmax at all."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ..arrays import ArrayLike, ArrayView, cast_like, common_kind
from .base import Attention, check_pair, parameter, score_matrix, spectral_norm
from .bounds import AttentionBounds

__all__ = ["LinearAttention"]

_CHUNK = 128


class LinearAttention(Attention):
    r"""Gamma_mu(x) = V E[y y^T] A x, y ~ mu.

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
    On N(m, S): M = V (S + m m^T) A and b = M m. Particles and Gaussians of equal moments move alike; both
    can blow up in finite time.

    References
    ----------
    Castin, Ablin, Carrillo, Peyré, arXiv 2501.18322, section 2.
    """

    A = ArrayView("Score matrix, (..., d, d).")
    V = ArrayView("Value matrix, (..., d, d).")

    def __init__(self, A: ArrayLike, V: ArrayLike) -> None:
        self.A_t, _ = parameter(A, "A")
        self.V_t, _ = parameter(V, "V")
        self.dim, self.batch_shape = check_pair(self.A_t, self.V_t)
        self.kind = common_kind(A, V)

    @classmethod
    def from_qkv(cls, Q: ArrayLike, K: ArrayLike, V: ArrayLike, scale: Any = 1.0) -> LinearAttention:
        """Build from query, key (..., k, d) and value matrices: A = scale K^T Q."""
        self = cls(score_matrix(Q, K, scale), V)
        self.kind = common_kind(Q, K, V)
        return self

    def raw_field(self, points: Tensor, x: Tensor, weights: Tensor) -> Tensor:
        """Through the second moment, O(n d^2) operations."""
        A, V = cast_like(self.A_t, x, "A"), cast_like(self.V_t, x, "V")
        moment = (weights.unsqueeze(-1) * x).mT @ x
        return points @ (V @ moment @ A).mT

    def raw_causal(self, x: Tensor, weights: Tensor, s: Tensor | None = None) -> Tensor | None:
        """Blocks of tokens: the second moment of what came before, and the pairs within the block."""
        if s is not None:
            return None
        A, V = cast_like(self.A_t, x, "A"), cast_like(self.V_t, x, "V")
        query = x @ A.mT
        moment = x.new_zeros(x.shape[-1], x.shape[-1])
        parts = []
        for i in range(0, x.shape[-2], _CHUNK):
            q, y = query[..., i : i + _CHUNK, :], x[..., i : i + _CHUNK, :]
            wy = weights[..., i : i + _CHUNK].unsqueeze(-1) * y
            parts.append(q @ moment + (q @ y.mT).tril() @ wy)
            moment = moment + y.mT @ wy
        return torch.cat(parts, -2) @ V.mT

    def raw_rows(self, points: Tensor, x: Tensor, weights: Tensor) -> Tensor:
        """V sum_j w_ij y_j (y_j^T A x_i)."""
        A, V = cast_like(self.A_t, x, "A"), cast_like(self.V_t, x, "V")
        return (weights * (points @ A.mT @ x.mT)) @ x @ V.mT

    def raw_affine(self, mean: Tensor, factor: Tensor) -> tuple[Tensor, Tensor]:
        """(M m, M) with M = V (S + m m^T) A."""
        A, V = cast_like(self.A_t, factor, "A"), cast_like(self.V_t, factor, "V")
        m = mean.unsqueeze(-1)
        M = V @ (factor @ (factor.mT @ A) + m @ (m.mT @ A))
        return (M @ m).squeeze(-1), M

    def bounds(self, radius: float) -> AttentionBounds:
        """|V||A| R^3, |V||A| R^2 and 2|V||A| R^2."""
        c = spectral_norm(self.A_t, "A") * spectral_norm(self.V_t, "V") * radius**2
        return AttentionBounds(c * radius, c, 2 * c)
