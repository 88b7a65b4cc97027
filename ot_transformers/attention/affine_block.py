"""Affine residual block: the linear part of a feed-forward layer."""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar

from torch import Tensor

from ..arrays import ArrayLike, ArrayView, as_tensor, broadcast_batch, cast_like, common_kind
from ..errors import InvalidInput
from .base import Attention, parameter, spectral_norm
from .bounds import AttentionBounds

__all__ = ["AffineBlock"]


class AffineBlock(Attention):
    r"""Gamma(x) = W x + c, the same for every measure.

    Parameters
    ----------
    W : array (..., d, d)
    c : array (..., d), optional
        Default 0.

    Raises
    ------
    InvalidInput
        W not square, c of another dimension, NaN or infinity.

    Notes
    -----
    On N(m, S): M = W, b = W m + c (arXiv 2606.07600).
    """

    parameters: ClassVar[Mapping[str, int]] = {"W": 2, "c": 1}

    W = ArrayView("Linear part, (..., d, d).")
    c = ArrayView("Constant part, (..., d).")

    def __init__(self, W: ArrayLike, c: ArrayLike | None = None) -> None:
        self.W_t, _ = parameter(W, "W")
        self.dim = int(self.W_t.shape[-1])
        shift = self.W_t.new_zeros(self.dim) if c is None else as_tensor(c, "c", keep=True)[0]
        self.c_t = shift.reshape(1) if shift.ndim == 0 else shift
        if self.c_t.shape[-1] != self.dim:
            raise InvalidInput(f"c has dimension {self.c_t.shape[-1]}, W acts on dimension {self.dim}")
        self.batch_shape = broadcast_batch([self.W_t.shape[:-2], self.c_t.shape[:-1]], ["W", "c"])
        self.kind = common_kind(W, c)

    def raw_rows(self, points: Tensor, x: Tensor, weights: Tensor) -> Tensor:
        """W x + c."""
        W, c = cast_like(self.W_t, x, "W"), cast_like(self.c_t, x, "c")
        return points @ W.mT + c.unsqueeze(-2)

    def raw_field(self, points: Tensor, x: Tensor, weights: Tensor) -> Tensor:
        """W x + c, no pairs to form."""
        return self.raw_rows(points, x, weights)

    def raw_affine(self, mean: Tensor, factor: Tensor) -> tuple[Tensor, Tensor]:
        """(W m + c, W)."""
        W, c = cast_like(self.W_t, factor, "W"), cast_like(self.c_t, factor, "c")
        b = (W @ mean.unsqueeze(-1)).squeeze(-1) + c
        return b, W.expand(*b.shape[:-1], *W.shape[-2:])

    def bounds(self, radius: float) -> AttentionBounds:
        """|W| R + |c|, |W| and 0."""
        w = spectral_norm(self.W_t, "W")
        return AttentionBounds(w * radius + float(self.c_t.detach().norm()), w, 0.0)
