"""L2 attention: the softmax of minus squared distances."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from ..arrays import ArrayLike, cast_like, check_positive, common_kind
from ..numerics.streaming import attend
from .base import Attention, check_pair, parameter, query_key, spectral_norm
from .bounds import AttentionBounds

__all__ = ["L2Attention"]


class L2Attention(Attention):
    r"""Gamma_mu(x) = V E[y e^{-|Qx - Ky|^2}] / E[e^{-|Qx - Ky|^2}], y ~ mu.

    Parameters
    ----------
    Q, K : array (..., k, d)
        Query and key matrices. Scalars stand for k = d = 1.
    V : array (..., d, d)
        Value matrix.

    Raises
    ------
    InvalidInput
        Shapes or batches that do not match, NaN or infinity.

    Notes
    -----
    On N(m, S): with P = S (I + 2 K^T K S)^{-1}, M = 2 V P K^T Q and
    b = V (I + 2 S K^T K)^{-1} (m + 2 S K^T Q m). The covariance grows at most exponentially: no blow-up.
    Through a factor S = L L^T, P = L (I + 2 (KL)^T (KL))^{-1} L^T: symmetric, and exact for singular S.

    References
    ----------
    Castin, Ablin, Carrillo, Peyré, arXiv 2501.18322, sections 2 and 4; Kim, Papamakarios, Mnih, ICML 2021.
    """

    def __init__(self, Q: ArrayLike, K: ArrayLike, V: ArrayLike) -> None:
        self.Q, self.K = query_key(Q, K)
        self.V, _ = parameter(V, "V")
        self.dim, self.kind = check_pair(self.K, self.V, "K"), common_kind(Q, K, V)

    @classmethod
    def from_qkv(cls, Q: ArrayLike, K: ArrayLike, V: ArrayLike, scale: Any = 1.0) -> L2Attention:
        """Build with the score -scale |Qx - Ky|^2 (Q and K are multiplied by sqrt(scale)), scale > 0."""
        root = math.sqrt(check_positive(scale, "scale"))
        q, k = query_key(Q, K)
        self = cls(root * q, root * k, V)
        self.kind = common_kind(Q, K, V)
        return self

    @property
    def A(self) -> Tensor:
        """K^T Q, the bilinear part of half the score."""
        return self.K.mT @ self.Q

    def raw_field(self, points: Tensor, x: Tensor, weights: Tensor) -> Tensor:
        """Streaming: -|Qx - Ky|^2 is 2 <Qx - Kc, K(y - c)> - |K(y - c)|^2 up to a function of x."""
        Q, K, V = (cast_like(t, x, n) for t, n in ((self.Q, "Q"), (self.K, "K"), (self.V, "V")))
        centre = (weights.unsqueeze(-1) * x).sum(-2, keepdim=True)
        y = x - centre
        key = y @ K.mT
        query = 2.0 * (points @ Q.mT - centre @ K.mT)
        key = torch.cat([key, -key.square().sum(-1, keepdim=True)], -1)
        query = torch.cat([query, torch.ones_like(query[..., :1])], -1)
        equal = weights.shape[-1] == 1 or weights.stride(-1) == 0
        return (attend(query, key, y, None if equal else weights) + centre) @ V.mT

    def raw_rows(self, points: Tensor, x: Tensor, log_weights: Tensor) -> Tensor:
        """V times the barycentre of each row."""
        Q, K, V = (cast_like(t, x, n) for t, n in ((self.Q, "Q"), (self.K, "K"), (self.V, "V")))
        key = x @ K.mT
        scores = 2.0 * (points @ Q.mT) @ key.mT - key.square().sum(-1).unsqueeze(-2)
        return torch.softmax(scores + log_weights, -1) @ x @ V.mT

    def raw_affine(self, mean: Tensor, factor: Tensor) -> tuple[Tensor, Tensor]:
        """(V (m + 2 P K^T (Q - K) m), 2 V P K^T Q)."""
        Q, K, V = (cast_like(t, factor, n) for t, n in ((self.Q, "Q"), (self.K, "K"), (self.V, "V")))
        KL = K @ factor
        gram = KL.mT @ KL
        eye = torch.eye(gram.shape[-1], dtype=gram.dtype, device=gram.device)
        # P K^T = L (I + 2 (KL)^T KL)^{-1} (KL)^T, no S^{-1}; Cholesky keeps its digits where L has graded columns.
        PKt = factor @ torch.cholesky_solve(KL.mT, torch.linalg.cholesky(eye + 2.0 * gram))
        m = mean.unsqueeze(-1)
        b = V @ (m + 2.0 * PKt @ (Q @ m - K @ m))
        return b.squeeze(-1), 2.0 * V @ PKt @ Q

    def bounds(self, radius: float) -> AttentionBounds:
        """|V| R, 2|V||A| R^2 and |V| (1 + 4(|A| + |K|^2) R^2) e^{4|A| R^2 + |K|^2 R^2}, A = K^T Q."""
        a, k, v = spectral_norm(self.A, "A"), spectral_norm(self.K, "K"), spectral_norm(self.V, "V")
        r2 = radius**2
        lip = v * (1 + 4 * (a + k * k) * r2) * math.exp(4 * a * r2 + k * k * r2)
        return AttentionBounds(v * radius, 2 * v * a * r2, lip)
