"""Named parameters (A, V) of an attention, and parameters from a file."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ..arrays import as_matrix, check_choice
from ..errors import InvalidInput
from ..models import Head, load_head
from ._tokens import Cloud, read_array

__all__ = ["PRESETS", "Parameters", "balanced_factors", "load_parameters", "preset"]

Floats = np.ndarray[Any, Any]


@dataclass(frozen=True, eq=False)
class Parameters:
    """Parameters of an attention: A = K^T Q (scale included), V, and the factors Q, K for L2 attention.

    `symmetric` names the preset to use where these are not of gradient type, "" if there is none.
    """

    A: Tensor
    V: Tensor
    Q: Tensor
    K: Tensor
    text: str
    symmetric: str = ""


@dataclass(frozen=True)
class Preset:
    """One named preset: a function of (dimension of the tokens, dimension kept, seed), and what it is."""

    text: str
    build: Callable[[int, int, int], tuple[Floats, Floats]]
    symmetric: str = ""


def _head(index: int) -> Callable[[int, int, int], tuple[Floats, Floats]]:
    def build(full: int, d: int, seed: int) -> tuple[Floats, Floats]:
        head = _bundled(index, full)
        return head.A(), head.V

    return build


def _symmetrised(index: int, sign: float) -> Callable[[int, int, int], tuple[Floats, Floats]]:
    def build(full: int, d: int, seed: int) -> tuple[Floats, Floats]:
        A = _bundled(index, full).A()
        A = 0.5 * (A + A.T)
        return A, sign * A

    return build


def _bundled(index: int, full: int) -> Head:
    head = load_head(index).double()
    if head.dim != full:
        raise InvalidInput(f"preset needs tokens of dimension {head.dim}, the cloud has dimension {full}")
    return head


def _identity(sign: float) -> Callable[[int, int, int], tuple[Floats, Floats]]:
    return lambda full, d, seed: (sign * np.eye(d), np.eye(d))


def _random(symmetric: bool) -> Callable[[int, int, int], tuple[Floats, Floats]]:
    def build(full: int, d: int, seed: int) -> tuple[Floats, Floats]:
        rng = np.random.default_rng(seed)
        A, G = rng.standard_normal((2, d, d)) / math.sqrt(d)
        if not symmetric:
            return A, G
        A = 0.5 * (A + A.T)
        D = 0.5 * np.eye(d) + 0.5 * G @ G.T
        return A, -D @ A

    return build


PRESETS: dict[str, Preset] = {
    "head4-symmetric": Preset(
        "A = (A_4 + A_4^T) / 2 of head 4 (A_4 = K^T Q / sqrt(32)), V = -A: a gradient flow, contracting",
        _symmetrised(4, -1.0),
    ),
    "head0-symmetric": Preset(
        "A = (A_0 + A_0^T) / 2 of head 0 (A_0 = K^T Q / sqrt(32)), V = -A: a gradient flow, contracting",
        _symmetrised(0, -1.0),
    ),
    "head4-symmetric-growing": Preset("as head4-symmetric with V = +A: growing", _symmetrised(4, 1.0)),
    "head0-symmetric-growing": Preset("as head0-symmetric with V = +A: growing", _symmetrised(0, 1.0)),
    "head4": Preset(
        "head 4 of layer 0 as trained: A = K^T Q / sqrt(32), V = W_O W_V; no gradient flow",
        _head(4),
        "head4-symmetric",
    ),
    "head0": Preset(
        "head 0 of layer 0 as trained: A = K^T Q / sqrt(32), V = W_O W_V; no gradient flow",
        _head(0),
        "head0-symmetric",
    ),
    "identity": Preset("A = I, V = I: a gradient flow, growing", _identity(1.0)),
    "repulsive": Preset("A = -I, V = I: a gradient flow, the covariance contracts", _identity(-1.0)),
    "random-symmetric": Preset(
        "A random symmetric, V = -D A with D random positive definite (by seed): a gradient flow",
        _random(True),
    ),
    "random": Preset(
        "A and V random (by seed), entries N(0, 1/d); no gradient flow", _random(False), "random-symmetric"
    ),
}


def preset(name: str) -> Preset:
    """Look a preset up by name."""
    return PRESETS[check_choice(name, "preset", PRESETS)]


def load_parameters(name: str, matrices: str | None, scale: float, cloud: Cloud, seed: int) -> Parameters:
    """Parameters in the coordinates of a cloud: B^T A B, B^T V B with its basis B.

    Parameters
    ----------
    name : preset, used where `matrices` is None
    matrices : .npz with A and V, or with Q, K and V
        On the tokens' own space or on that of the kept components.
    scale : factor of K^T Q (of a file; presets state theirs)

    Raises
    ------
    InvalidInput
        An unknown preset, matrices that are missing or do not fit the tokens.
    """
    full, d = cloud.basis.shape
    if matrices is None:
        found = preset(name)
        A, V = (torch.from_numpy(np.ascontiguousarray(m)) for m in found.build(full, d, seed))
        A, V = _reduced(A, "A", cloud), _reduced(V, "V", cloud)
        return Parameters(A, V, *balanced_factors(A), f"preset {name}: {found.text}", found.symmetric)
    if not matrices.lower().endswith(".npz"):
        raise InvalidInput(f"matrices must be an .npz file, got {matrices}")
    arrays = read_array(matrices, "matrices")
    if "V" not in arrays or not ({"A"} <= set(arrays) or {"Q", "K"} <= set(arrays)):
        held = ", ".join(sorted(arrays))
        raise InvalidInput(f"matrices need A and V, or Q, K and V; the file has {held}: {matrices}")
    V = _reduced(as_matrix(arrays["V"], "V", square=True)[0].double(), "V", cloud)
    if "A" in arrays:
        A = _reduced(as_matrix(arrays["A"], "A", square=True)[0].double(), "A", cloud)
        return Parameters(A, V, *balanced_factors(A), f"A and V of {matrices}")
    Q = _columns(as_matrix(arrays["Q"], "Q")[0].double(), "Q", cloud)
    K = _columns(as_matrix(arrays["K"], "K")[0].double(), "K", cloud)
    if Q.shape != K.shape:
        raise InvalidInput(f"Q and K must have one shape, got {tuple(Q.shape)} and {tuple(K.shape)}")
    root = math.sqrt(abs(scale))
    A = scale * (K.mT @ Q)
    return Parameters(
        A, V, root * Q, math.copysign(root, scale) * K, f"Q, K, V of {matrices}, scale {scale:g}"
    )


def balanced_factors(A: Tensor) -> tuple[Tensor, Tensor]:
    """Q, K (d, d) with A = K^T Q and singular values shared evenly."""
    U, s, Wt = torch.linalg.svd(A)
    root = s.sqrt().unsqueeze(-1)
    return root * Wt, root * U.mT


def _reduced(M: Tensor, name: str, cloud: Cloud) -> Tensor:
    B = cloud.basis
    full, d = B.shape
    if M.ndim != 2 or M.shape[0] not in (full, d):
        raise InvalidInput(
            f"{name} must be {full} x {full} (or {d} x {d} on the kept components), got {tuple(M.shape)}"
        )
    R = M.to(B.device)
    if M.shape[0] == full and full != d:
        C = B.double()
        R = C.mT @ R @ C
    return R.to(B.dtype)


def _columns(M: Tensor, name: str, cloud: Cloud) -> Tensor:
    B = cloud.basis
    full, d = B.shape
    if M.ndim != 2 or M.shape[1] not in (full, d):
        raise InvalidInput(f"{name} must have {full} columns (or {d}), got shape {tuple(M.shape)}")
    R = M.to(B.device)
    return (R @ B.double() if M.shape[1] == full and full != d else R).to(B.dtype)
