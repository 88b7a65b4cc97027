"""Extraction from a BERT-like model: a small random one, against its own attention block and LayerNorm."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from safetensors.torch import save_file

from ot_transformers.errors import InvalidInput
from ot_transformers.models import extract_heads, extract_tokens, read_heads

WORDS = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "call", "me", "is", "##hma", "##el", "."]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("model")
    torch.manual_seed(0)
    config = transformers.BertConfig(
        vocab_size=len(WORDS),
        hidden_size=12,
        num_hidden_layers=2,
        num_attention_heads=3,
        intermediate_size=24,
        max_position_embeddings=16,
        attn_implementation="eager",
    )
    transformers.BertModel(config).save_pretrained(path)
    (path / "vocab.txt").write_text("\n".join(WORDS))
    transformers.BertTokenizer(str(path / "vocab.txt")).save_pretrained(path)
    return path


@pytest.fixture(scope="module")
def network(folder: Path) -> Any:
    return transformers.AutoModel.from_pretrained(folder, attn_implementation="eager").eval()


def test_layer_zero_is_the_normalised_sum_of_embeddings(folder: Path, network: Any) -> None:
    clouds, names = extract_tokens("Call me Ishmael.", folder)
    assert names == ["[CLS]", "call", "me", "is", "##hma", "##el", ".", "[SEP]"]
    assert len(clouds) == 3
    w = {k: v.double().numpy() for k, v in network.state_dict().items()}
    ids = [WORDS.index(t) for t in names]
    raw = w["embeddings.word_embeddings.weight"][ids] + w["embeddings.position_embeddings.weight"][: len(ids)]
    raw = raw + w["embeddings.token_type_embeddings.weight"][0]
    centred = raw - raw.mean(1, keepdims=True)
    expected = centred / np.sqrt((centred**2).mean(1, keepdims=True) + network.config.layer_norm_eps)
    np.testing.assert_allclose(clouds[0].x, expected, rtol=1e-5, atol=1e-5)


def test_heads_rebuild_the_attention_block(network: Any) -> None:
    """Sum over heads of W_O softmax(Q x . K y / sqrt(k)) W_V y is the block, its biases set to 0."""
    x = torch.randn(7, 12, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    block = network.encoder.layer[1].attention.double()
    for module in (block.self.query, block.self.key, block.self.value, block.output.dense):
        torch.nn.init.zeros_(module.bias)
    with torch.no_grad():
        inner = block.self(x[None])[0]
        expected = block.output.dense(inner)[0]
    total = torch.zeros_like(x)
    for head in extract_heads(network, 1):
        scores = (x @ head.Q.double().T) @ (x @ head.K.double().T).T * head.scale
        np.testing.assert_allclose(scores, (x @ head.A().double().T) @ x.T, rtol=1e-5, atol=1e-7)
        total += torch.softmax(scores, -1) @ x @ head.V.double().T
    network.float()
    np.testing.assert_allclose(total, expected, rtol=1e-4, atol=1e-6)


def test_weight_file_gives_the_same_heads_as_the_model(folder: Path, network: Any) -> None:
    for a, b in zip(read_heads(folder / "model.safetensors", 0, 3), extract_heads(network, 0), strict=True):
        for name in ("Q", "K", "W_V", "W_O"):
            np.testing.assert_array_equal(getattr(a, name), getattr(b, name))
        assert (a.layer, a.index) == (b.layer, b.index)


def test_a_missing_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "transformers", None)
    with pytest.raises(InvalidInput, match=r"extra `models` \(transformers is missing\)"):
        extract_tokens("Call me Ishmael.")


def test_a_text_that_is_too_long_is_not_truncated(folder: Path) -> None:
    with pytest.raises(InvalidInput, match=r"text has 26 tokens, the model has room for 16"):
        extract_tokens("call " * 24, folder)


def test_a_file_of_another_model_is_refused(tmp_path: Path) -> None:
    save_file({"h.0.attn.c_attn.weight": torch.zeros(3, 3)}, tmp_path / "gpt.safetensors")
    with pytest.raises(InvalidInput, match="layer 0 was not found"):
        read_heads(tmp_path / "gpt.safetensors", 0, 1)
    (tmp_path / "broken.safetensors").write_bytes(json.dumps({}).encode())
    with pytest.raises(InvalidInput, match="not in the safetensors format"):
        read_heads(tmp_path / "broken.safetensors", 0, 1)
