"""L2 attention: the softmax of minus squared distances."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, ClassVar

import torch
from torch import Tensor

from ..arrays import ArrayLike, ArrayView, broadcast_batch, cast_like, check_positive, common_kind
from ..numerics.streaming import attend, attend_sorted, exponentials
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

    parameters: ClassVar[Mapping[str, int]] = {"Q": 2, "K": 2, "V": 2}

    Q = ArrayView("Query matrix, (..., k, d).")
    K = ArrayView("Key matrix, (..., k, d).")
    V = ArrayView("Value matrix, (..., d, d).")
    A = ArrayView("K^T Q, the bilinear part of half the score, (..., d, d).")

    def __init__(self, Q: ArrayLike, K: ArrayLike, V: ArrayLike) -> None:
        self.Q_t, self.K_t = query_key(Q, K)
        self.V_t, _ = parameter(V, "V")
        self.dim, _ = check_pair(self.K_t, self.V_t, "K")
        self.batch_shape = broadcast_batch(
            [t.shape[:-2] for t in (self.Q_t, self.K_t, self.V_t)], ["Q", "K", "V"]
        )
        self.kind = common_kind(Q, K, V)

    @classmethod
    def from_qkv(cls, Q: ArrayLike, K: ArrayLike, V: ArrayLike, scale: Any = 1.0) -> L2Attention:
        """Build with the score -scale |Qx - Ky|^2 (Q and K are multiplied by sqrt(scale)), scale > 0."""
        root = math.sqrt(check_positive(scale, "scale"))
        q, k = query_key(Q, K)
        self = cls(root * q, root * k, V)
        self.kind = common_kind(Q, K, V)
        return self

    @property
    def A_t(self) -> Tensor:
        """K^T Q as a tensor."""
        return self.K_t.mT @ self.Q_t

    def raw_field(self, points: Tensor, x: Tensor, weights: Tensor) -> Tensor:
        """Streaming, through the fused kernel."""
        query, key, y, centre, V = self._centred(points, x, weights)
        return (attend(query, key, y, weights) + centre) @ V.mT

    def raw_causal(self, x: Tensor, weights: Tensor, s: Tensor | None = None) -> Tensor | None:
        """The fused kernel with a causal mask."""
        query, key, y, centre, V = self._centred(x, x, weights)
        if s is None:
            return (attend(query, key, y, weights, causal=True) + centre) @ V.mT
        mean = attend_sorted(query, key, y, weights, s)
        return None if mean is None else (mean + centre) @ V.mT

    def _centred(self, points: Tensor, x: Tensor, weights: Tensor) -> tuple[Tensor, ...]:
        """-|Qx - Ky|^2 is 2 <Qx - Kc, K(y - c)> - |K(y - c)|^2 up to a function of x; c is the mean."""
        Q, K, V = (cast_like(t, x, n) for t, n in ((self.Q_t, "Q"), (self.K_t, "K"), (self.V_t, "V")))
        centre = (weights.unsqueeze(-1) * x).sum(-2, keepdim=True)
        y = x - centre
        key = y @ K.mT
        query = 2.0 * (points @ Q.mT - centre @ K.mT)
        key = torch.cat([key, -key.square().sum(-1, keepdim=True)], -1)
        query = torch.cat([query, torch.ones_like(query[..., :1])], -1)
        return query, key, y, centre, V

    def raw_rows(self, points: Tensor, x: Tensor, weights: Tensor) -> Tensor:
        """V times the barycentre of each row."""
        query, key, y, centre, V = self._centred(
            points, x, x.new_full((), 1 / x.shape[-2]).expand(x.shape[:-1])
        )
        _, e = exponentials(query @ key.mT, weights)
        return ((e @ y) / e.sum(-1, keepdim=True) + centre) @ V.mT

    def raw_affine(self, mean: Tensor, factor: Tensor) -> tuple[Tensor, Tensor]:
        """(V (m + 2 P K^T (Q - K) m), 2 V P K^T Q)."""
        Q, K, V = (cast_like(t, factor, n) for t, n in ((self.Q_t, "Q"), (self.K_t, "K"), (self.V_t, "V")))
        KL = K @ factor
        r = KL.shape[-1]
        eye = torch.eye(r, dtype=KL.dtype, device=KL.device).expand(*KL.shape[:-2], r, r)
        # P K^T = L (R^T R)^{-1} (KL)^T with R^T R = I + 2 (KL)^T KL, no S^{-1}. R by QR: forming the product
        # squares the condition, and a large covariance then loses the directions without growth.
        R = torch.linalg.qr(torch.cat([eye, math.sqrt(2.0) * KL], -2)).R
        inner = torch.linalg.solve_triangular(R.mT, KL.mT, upper=False)
        PKt = factor @ torch.linalg.solve_triangular(R, inner, upper=True)
        m = mean.unsqueeze(-1)
        b = V @ (m + 2.0 * PKt @ (Q @ m - K @ m))
        return b.squeeze(-1), 2.0 * V @ PKt @ Q

    def bounds(self, radius: float) -> AttentionBounds:
        """|V| R, 2|V||A| R^2 and |V| (1 + 4(|A| + |K|^2) R^2) e^{4|A| R^2 + |K|^2 R^2}, A = K^T Q."""
        a, k, v = spectral_norm(self.A_t, "A"), spectral_norm(self.K_t, "K"), spectral_norm(self.V_t, "V")
        r2 = radius**2
        lip = v * (1 + 4 * (a + k * k) * r2) * math.exp(4 * a * r2 + k * k * r2)
        return AttentionBounds(v * radius, 2 * v * a * r2, lip)
