"""Token clouds and attention heads of real trained transformers."""

from __future__ import annotations

from .bundled import load_head, load_text, load_token_names, load_tokens
from .extract import bundled_model_path, extract_heads, extract_layers, extract_tokens, read_heads
from .head import Head
from .layer import AttentionLayer

__all__ = [
    "AttentionLayer",
    "Head",
    "bundled_model_path",
    "extract_heads",
    "extract_layers",
    "extract_tokens",
    "load_head",
    "load_text",
    "load_token_names",
    "load_tokens",
    "read_heads",
]
