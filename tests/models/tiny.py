"""A small random BERT in a folder, with biases and scores large enough to matter."""

from __future__ import annotations

from pathlib import Path

import torch
import transformers

WORDS = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "call", "me", "is", "##hma", "##el", "."]
TEXT = "Call me Ishmael. Me is call. Is me."


def make_model(path: Path, *, spread: float | None = None, **options: object) -> Path:
    """Write model and tokenizer; `spread` draws all weights and biases of the attention N(0, spread^2)."""
    torch.manual_seed(0)
    settings = {
        "vocab_size": len(WORDS),
        "hidden_size": 12,
        "num_hidden_layers": 2,
        "num_attention_heads": 3,
        "intermediate_size": 24,
        "max_position_embeddings": 16,
        "attn_implementation": "eager",
        **options,
    }
    network = transformers.BertModel(transformers.BertConfig(**settings))
    if spread is not None:
        with torch.no_grad():
            for name, value in network.named_parameters():
                if ".attention." in name and "LayerNorm" not in name:
                    value.normal_(0.0, spread)
    network.save_pretrained(path)
    (path / "vocab.txt").write_text("\n".join(WORDS))
    transformers.BertTokenizer(str(path / "vocab.txt")).save_pretrained(path)
    return path
