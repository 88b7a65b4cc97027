"""Floor 2: the metrics on measures, one file a kind."""

from __future__ import annotations

from .coupling import sinkhorn_coupling

__all__ = [
    "sinkhorn_coupling",
]
