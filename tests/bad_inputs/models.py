"""Bad inputs of `ot_transformers.models`."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from ot_transformers.models import (
    Head,
    extract_heads,
    extract_layers,
    extract_tokens,
    load_head,
    load_tokens,
    read_heads,
)

Z = np.zeros((2, 5))
ROWS: list[tuple[str, Callable[[], object], str]] = [
    ("unknown cloud", lambda: load_tokens("gpt"), "name must be one of minilm"),
    ("head not bundled", lambda: load_head(3), "index must be a bundled head"),
    ("head negative", lambda: load_head(-1), "index must be at least 0"),
    ("K of another shape", lambda: Head(Z, Z.T, Z, Z.T), "K must have shape"),
    ("W_O not transposed", lambda: Head(Z, Z, Z, Z), "W_O must have shape"),
    ("bias of another head", lambda: Head(Z, Z, Z, Z.T, b_Q=np.zeros(3)), "b_Q must have shape"),
    ("bias with NaN", lambda: Head(Z, Z, Z, Z.T, b_V=np.full(2, np.nan)), "b_V has 2 NaN"),
    ("layers of an empty text", lambda: extract_layers(""), "text must be a non-empty string"),
    ("layers of no model", lambda: extract_layers("a", "/nonexistent"), "model must be a folder"),
    ("Q with NaN", lambda: Head(Z * np.nan, Z, Z, Z.T), "Q has 10 NaN"),
    ("negative scale", lambda: Head(Z, Z, Z, Z.T).A(scale=-1.0), "scale must be >= 0"),
    ("empty text", lambda: extract_tokens("  "), "text must be a non-empty string"),
    ("no model there", lambda: extract_tokens("a", "/nonexistent"), "model must be a folder"),
    ("no weights there", lambda: read_heads("/nonexistent.safetensors", 0, 1), "file does not exist"),
    ("not a model", lambda: extract_heads("bert", 0), "network must be a Hugging Face model"),
]
