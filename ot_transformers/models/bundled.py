"""The token cloud and heads that ship with the package: no download, no further package."""

from __future__ import annotations

from functools import lru_cache
from importlib.resources import files
from typing import Any

import numpy as np

from ..arrays import check_choice, check_count
from ..errors import InvalidInput
from ..measures import Particles
from .head import Head

__all__ = ["NAMES", "load_head", "load_text", "load_token_names", "load_tokens"]

NAMES = ("minilm",)
"""Bundled clouds; see models/data/README.md for where each comes from."""


def load_tokens(name: str = "minilm") -> Particles:
    """Load a bundled token cloud.

    "minilm": the tokens that enter layer 0 of all-MiniLM-L6-v2 (word, position and type embeddings, after the
    embedding LayerNorm) for the opening of Moby-Dick; n = 334, d = 384, float32. There are fewer tokens
    than dimensions, so the covariance is singular.

    Returns
    -------
    Particles
        Uniform weights; one token a row, in the order of the text.

    Raises
    ------
    InvalidInput
        No bundled cloud has this name.

    Examples
    --------
    >>> tokens = load_tokens()
    >>> tokens.dim, tokens.n < tokens.dim
    (384, True)
    """
    return Particles(_data(name)["tokens"])


def load_head(index: int = 0, name: str = "minilm") -> Head:
    """Load a head of the layer that the bundled cloud enters.

    "minilm" has heads 0 and 4 of layer 0 (k = 32); head 4 is the one whose A is closest to symmetric.

    Parameters
    ----------
    index : int
        Number of the head in its layer.
    name : str
        Name of the bundled cloud.

    Raises
    ------
    InvalidInput
        No bundled cloud has this name, or it does not carry this head.

    Examples
    --------
    >>> head = load_head(0)
    >>> head.A().shape, head.width
    ((384, 384), 32)
    """
    data = _data(name)
    heads = [int(h) for h in data["heads"]]
    check_count(index, "index", 0)
    if index not in heads:
        raise InvalidInput(f"index must be a bundled head ({', '.join(map(str, heads))}), got {index}")
    Q, K, W_V, W_O = (data[f"{key}_{index}"].copy() for key in ("Q", "K", "W_V", "W_O"))
    return Head(Q, K, W_V, W_O, layer=int(data["layer"].item()), index=index)


def load_text(name: str = "minilm") -> str:
    """Return the text that the bundled cloud was made from."""
    return str(_data(name)["text"].item())


def load_token_names(name: str = "minilm") -> list[str]:
    """Return the n sub-word tokens of the bundled cloud as strings, in order."""
    return [str(t) for t in _data(name)["token_names"]]


def _data(name: str) -> dict[str, np.ndarray[Any, Any]]:
    return _read(check_choice(name, "name", NAMES))


@lru_cache(maxsize=4)
def _read(name: str) -> dict[str, np.ndarray[Any, Any]]:
    resource = files(__package__).joinpath("data").joinpath(f"{name}_tokens.npz")
    with resource.open("rb") as stream, np.load(stream, allow_pickle=False) as archive:
        return {key: archive[key] for key in archive.files}
