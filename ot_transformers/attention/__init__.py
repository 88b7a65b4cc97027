"""Floor 2: the attention maps, one file a kind."""

from __future__ import annotations

from .affine_block import AffineBlock
from .base import Attention, Field
from .bounds import AttentionBounds
from .l2 import L2Attention
from .linear import LinearAttention
from .masked import MaskedAttention
from .multihead import MultiHeadAttention
from .schedule import Schedule
from .sigmoid import SigmoidAttention
from .sinkhorn import SinkhornAttention
from .softmax import SoftmaxAttention
from .unnormalised import UnnormalisedAttention

__all__ = [
    "AffineBlock",
    "Attention",
    "AttentionBounds",
    "Field",
    "L2Attention",
    "LinearAttention",
    "MaskedAttention",
    "MultiHeadAttention",
    "Schedule",
    "SigmoidAttention",
    "SinkhornAttention",
    "SoftmaxAttention",
    "UnnormalisedAttention",
]
