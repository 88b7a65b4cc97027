"""Floor 2: the attention maps, one file a kind."""

from __future__ import annotations

from .sinkhorn import SinkhornAttention

__all__ = [
    "SinkhornAttention",
]
