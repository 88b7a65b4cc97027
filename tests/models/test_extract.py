"""Extraction from a BERT-like model: a small random one, against its own attention block and LayerNorm."""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from safetensors.torch import save_file

from ot_transformers.errors import InvalidInput
from ot_transformers.models import (
    AttentionLayer,
    Head,
    extract_heads,
    extract_layers,
    extract_tokens,
    read_heads,
)
from tests.models.tiny import TEXT, WORDS, make_model


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def biased(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model(tmp_path_factory.mktemp("biased"), spread=0.5)


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


def test_layers_with_biases_are_the_attention_of_the_model(biased: Path) -> None:
    layers, names = extract_layers(TEXT, biased)
    assert len(names) == layers[0].tokens.n == 15
    for layer in layers:
        v = layer.attention().velocity(layer.homogeneous_tokens())
        np.testing.assert_allclose(
            v[:, :-1], layer.output, rtol=0, atol=1e-12 * float(layer.output.abs().max())
        )
        assert float(v[:, -1].abs().max()) == 0.0
        # Each bias that does not cancel is large enough to be missed.
        for name in ("b_Q", "b_V"):
            heads = tuple(replace(h, **{name: None}) for h in layer.heads)
            w = replace(layer, heads=heads).attention().velocity(layer.homogeneous_tokens())
            assert float((w - v).norm() / v.norm()) > 0.01
        assert (
            float((replace(layer, bias=None).attention().velocity(layer.homogeneous_tokens()) - v).norm())
            > 0.1
        )
    np.testing.assert_array_equal(layers[0].result.x, layers[1].tokens.x)


def test_layers_agree_with_the_clouds_in_single_precision(biased: Path) -> None:
    layers, names = extract_layers(TEXT, biased)
    clouds, same = extract_tokens(TEXT, biased)
    assert names == same
    for layer, before, after in zip(layers, clouds[:-1], clouds[1:], strict=True):
        np.testing.assert_allclose(layer.tokens.x, before.x, rtol=1e-4, atol=1e-5)
        np.testing.assert_allclose(layer.result.x, after.x, rtol=1e-4, atol=1e-5)


def test_a_head_in_homogeneous_coordinates_keeps_its_biases() -> None:
    rng = np.random.default_rng(0)
    Q, K, W_V = rng.standard_normal((3, 2, 5))
    b_Q, b_K, b_V = rng.standard_normal((3, 2))
    head = Head(Q, K, W_V, rng.standard_normal((5, 2)), b_Q=b_Q, b_K=b_K, b_V=b_V)
    full = head.homogeneous()
    x, y = rng.standard_normal((2, 5))
    X, Y = np.append(x, 1.0), np.append(y, 1.0)
    score = (Q @ x + b_Q) @ (K @ y + b_K) / np.sqrt(2)
    assert Y @ full.A() @ X == pytest.approx(score, rel=1e-13)
    np.testing.assert_allclose(full.V @ Y, np.append(head.W_O @ (W_V @ y + b_V), 0.0), rtol=1e-13)
    single = replace(head, Q=Q.astype(np.float32), b_Q=b_Q.astype(np.float32)).double()
    assert single.b_Q is not None
    assert single.b_Q.dtype == single.Q.dtype == np.float64
    np.testing.assert_array_equal(single.b_Q, b_Q.astype(np.float32))


def test_weight_file_gives_the_same_biases_as_the_model(biased: Path) -> None:
    network = transformers.AutoModel.from_pretrained(biased)
    for a, b in zip(read_heads(biased / "model.safetensors", 1, 3), extract_heads(network, 1), strict=True):
        for name in ("b_Q", "b_K", "b_V"):
            np.testing.assert_array_equal(getattr(a, name), getattr(b, name))
            assert float(abs(getattr(a, name)).max()) > 0


def test_a_causal_model_is_refused(tmp_path: Path) -> None:
    make_model(tmp_path, is_decoder=True)
    with pytest.raises(InvalidInput, match="this one is causal"):
        extract_layers(TEXT, tmp_path)


def test_a_broken_model_is_one_clear_error(tmp_path: Path) -> None:
    make_model(tmp_path)
    save_file(
        {"encoder.layer.0.attention.self.query.weight": torch.zeros(12, 12)}, tmp_path / "model.safetensors"
    )
    with pytest.raises(InvalidInput, match="model has no weights for embeddings"):
        extract_layers(TEXT, tmp_path)
    (tmp_path / "model.safetensors").write_bytes(b"broken")
    with pytest.raises(InvalidInput, match="model cannot be loaded"):
        extract_layers(TEXT, tmp_path)


def test_a_layer_refuses_heads_and_outputs_of_another_shape(biased: Path) -> None:
    layer = extract_layers(TEXT, biased)[0][0]
    rest = {"tokens": layer.tokens, "result": layer.result}
    with pytest.raises(InvalidInput, match=r"heads must act on the dimension 12 of tokens, got \[13\]"):
        AttentionLayer(heads=(layer.heads[0].homogeneous(),), output=layer.output, **rest)
    with pytest.raises(InvalidInput, match=r"output must have the shape \(15, 12\)"):
        AttentionLayer(heads=layer.heads, output=layer.output[:3], **rest)


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
