"""Softmax attention."""

from __future__ import annotations

import math
from typing import Any

from torch import Tensor

from ..arrays import ArrayLike, ArrayView, cast_like, common_kind
from ..numerics.streaming import attend, attend_sorted, exponentials
from .base import Attention, check_pair, parameter, score_matrix, spectral_norm
from .bounds import AttentionBounds

__all__ = ["SoftmaxAttention"]


class SoftmaxAttention(Attention):
    r"""Gamma_mu(x) = V E[y e^{y^T A x}] / E[e^{y^T A x}], y ~ mu.

    Parameters
    ----------
    A : array (..., d, d)
        Score matrix K^T Q: the score of a pair is <Qx, Ky> = y^T A x, with no hidden 1/sqrt(k).
        A scalar stands for d = 1.
    V : array (..., d, d)
        Value matrix.

    Raises
    ------
    InvalidInput
        Not square, dimensions or batches that do not match, NaN or infinity.

    Notes
    -----
    On N(m, S): M = V S A and b = V (I + S A) m; exact for singular S and A. Memory is O(n d).
    For V = I, S(t) = S0^{1/2} (I - t S0^{1/2} (A + A^T) S0^{1/2})^{-1} S0^{1/2}, which blows up at
    t* = 1 / lambda_max(S0^{1/2} (A + A^T) S0^{1/2}) where that is positive.

    References
    ----------
    Castin, Ablin, Carrillo, Peyré, arXiv 2501.18322, sections 2 and 4.

    Examples
    --------
    >>> import numpy as np
    >>> attention = SoftmaxAttention(A=2.0, V=1.0)
    >>> attention.velocity(np.array([[-1.0], [1.0]])).round(6).ravel().tolist()
    [-0.964028, 0.964028]
    """

    A = ArrayView("Score matrix, (..., d, d).")
    V = ArrayView("Value matrix, (..., d, d).")

    def __init__(self, A: ArrayLike, V: ArrayLike) -> None:
        self.A_t, _ = parameter(A, "A")
        self.V_t, _ = parameter(V, "V")
        self.dim, self.batch_shape = check_pair(self.A_t, self.V_t)
        self.kind = common_kind(A, V)

    @classmethod
    def from_qkv(cls, Q: ArrayLike, K: ArrayLike, V: ArrayLike, scale: Any = 1.0) -> SoftmaxAttention:
        """Build from query, key (..., k, d) and value matrices: A = scale K^T Q."""
        self = cls(score_matrix(Q, K, scale), V)
        self.kind = common_kind(Q, K, V)
        return self

    def raw_field(self, points: Tensor, x: Tensor, weights: Tensor) -> Tensor:
        """Streaming, through the fused kernel."""
        query, y, centre, V = self._centred(points, x, weights)
        return (attend(query, y, y, weights) + centre) @ V.mT

    def raw_causal(self, x: Tensor, weights: Tensor, s: Tensor | None = None) -> Tensor | None:
        """The fused kernel with a causal mask."""
        query, y, centre, V = self._centred(x, x, weights)
        if s is None:
            return (attend(query, y, y, weights, causal=True) + centre) @ V.mT
        mean = attend_sorted(query, y, y, weights, s)
        return None if mean is None else (mean + centre) @ V.mT

    def raw_rows(self, points: Tensor, x: Tensor, weights: Tensor) -> Tensor:
        """V times the softmax barycentre of each row."""
        query, y, centre, V = self._centred(points, x, x.new_full((), 1 / x.shape[-2]).expand(x.shape[:-1]))
        _, e = exponentials(query @ y.mT, weights)
        return ((e @ y) / e.sum(-1, keepdim=True) + centre) @ V.mT

    def _centred(self, points: Tensor, x: Tensor, weights: Tensor) -> tuple[Tensor, ...]:
        """Centred keys: their scores are small, and differ by a function of the query alone."""
        A, V = cast_like(self.A_t, x, "A"), cast_like(self.V_t, x, "V")
        centre = (weights.unsqueeze(-1) * x).sum(-2, keepdim=True)
        return points @ A.mT, x - centre, centre, V

    def raw_affine(self, mean: Tensor, factor: Tensor) -> tuple[Tensor, Tensor]:
        """(V (m + S A m), V S A)."""
        A, V = cast_like(self.A_t, factor, "A"), cast_like(self.V_t, factor, "V")
        SA = factor @ (factor.mT @ A)
        m = mean.unsqueeze(-1)
        return (V @ (m + SA @ m)).squeeze(-1), V @ SA

    def bounds(self, radius: float) -> AttentionBounds:
        """|V| R, |V||A| R^2 and |V| (1 + 2|A| R^2) e^{2|A| R^2}."""
        a, v = spectral_norm(self.A_t, "A"), spectral_norm(self.V_t, "V")
        u = a * radius**2
        return AttentionBounds(v * radius, v * u, v * (1 + 2 * u) * math.exp(2 * u))
