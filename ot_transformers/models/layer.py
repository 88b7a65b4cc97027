"""One layer of a trained transformer as an attention of this library, with what the model itself computed."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from ..arrays import Array, as_tensor, to_kind
from ..attention import AffineBlock, Attention, MultiHeadAttention, SoftmaxAttention
from ..errors import InvalidInput
from ..measures import Particles
from .head import Head

__all__ = ["AttentionLayer"]


@dataclass(frozen=True, eq=False)
class AttentionLayer:
    """Tokens that enter a layer, its heads, the attention that the model computed, tokens that leave it.

    Attributes
    ----------
    tokens : Particles (n, d)
        The cloud that enters.
    heads : tuple of Head
    output : array (n, d)
        The output of the self-attention as the model computed it, before the residual connection and LayerNorm.
    result : Particles (n, d)
        The cloud that leaves the layer, after attention, feed-forward block and both LayerNorms.
    bias : array (d,), optional
        Bias of the output map.
    """

    tokens: Particles
    heads: tuple[Head, ...]
    output: Array
    result: Particles
    bias: Array | None = None

    def __post_init__(self) -> None:
        if not self.heads or any(h.dim != self.tokens.dim for h in self.heads):
            dims = sorted({h.dim for h in self.heads})
            raise InvalidInput(f"heads must act on the dimension {self.tokens.dim} of tokens, got {dims}")
        want = (self.tokens.n, self.tokens.dim)
        got = tuple(as_tensor(self.output, "output")[0].shape)
        if got != want:
            raise InvalidInput(f"output must have the shape {want} of tokens, got {got}")

    def attention(self) -> MultiHeadAttention:
        r"""Return the attention on homogeneous coordinates x~ = (x, 1), biases included; dimension d + 1.

        With Q~ = [Q b_Q] and so on (`Head.homogeneous`), A~ = K~^T Q~ / sqrt(k) and V~ = W_O~ W_V~,

            Gamma(x~) = sum_h V~_h E[y~ e^{y~^T A~_h x~}] / E[e^{y~^T A~_h x~}] + (b_O, 0),

        whose first d coordinates are the self-attention of the model and whose last one is 0. The biases
        tilt the measure by e^{y^T K^T b_Q / sqrt(k)}; terms of the score that are constant in y cancel.
        """
        parts: list[Attention] = []
        for head in self.heads:
            full = head.homogeneous()
            parts.append(SoftmaxAttention(full.A(), full.V))
        if self.bias is not None:
            b, kind = as_tensor(self.bias, "bias")
            W, c = b.new_zeros(len(b) + 1, len(b) + 1), torch.cat([b, b.new_zeros(1)])
            parts.append(AffineBlock(to_kind(W, kind), to_kind(c, kind)))
        return MultiHeadAttention(parts)

    def homogeneous_tokens(self) -> Particles:
        """Return the tokens as (x, 1), (n, d + 1): their covariance is singular in the last direction."""
        x = self.tokens.x_t
        return self.tokens.moved(torch.cat([x, x.new_ones(*x.shape[:-1], 1)], -1))
