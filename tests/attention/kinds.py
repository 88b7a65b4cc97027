"""Every kind of attention as the paper writes it: plain sums over pairs, in NumPy, without any care."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from ot_transformers import (
    AffineBlock,
    L2Attention,
    LinearAttention,
    MultiHeadAttention,
    SigmoidAttention,
    SoftmaxAttention,
    UnnormalisedAttention,
)
from ot_transformers.attention import Attention

P = dict[str, Any]
BIAS = -0.4


def problem(n: int, d: int, seed: int = 0) -> tuple[Any, Any, P]:
    """Tokens, weights and parameters of moderate size."""
    rng = np.random.default_rng(seed)
    names = ("A", "V", "Q", "K", "W", "U")
    p: P = {k: rng.normal(size=(d, d)) / np.sqrt(d) for k in names}
    p["c"] = rng.normal(size=d)
    return rng.normal(size=(n, d)), rng.dirichlet(np.ones(n)), p


def stacked(n: int, d: int, count: int) -> tuple[Any, Any, P]:
    """A batch of problems."""
    parts = [problem(n, d, seed) for seed in range(count)]
    p = {k: np.stack([part[2][k] for part in parts]) for k in parts[0][2]}
    return np.stack([part[0] for part in parts]), np.stack([part[1] for part in parts]), p


BUILD: dict[str, Callable[[P], Attention]] = {
    "softmax": lambda p: SoftmaxAttention(p["A"], p["V"]),
    "l2": lambda p: L2Attention(p["Q"], p["K"], p["V"]),
    "linear": lambda p: LinearAttention(p["A"], p["V"]),
    "unnormalised": lambda p: UnnormalisedAttention(p["A"], p["V"]),
    "sigmoid": lambda p: SigmoidAttention(p["A"], p["V"], BIAS),
    "affine": lambda p: AffineBlock(p["W"], p["c"]),
    "multihead": lambda p: MultiHeadAttention(
        [
            SoftmaxAttention(p["A"], p["V"]),
            L2Attention(p["Q"], p["K"], p["V"]),
            SigmoidAttention(p["A"], p["W"]),
        ],
        [p["W"], p["U"], p["V"]],
    ),
}
KINDS = list(BUILD)
PAIRWISE = [k for k in KINDS if k != "affine"]
CLOSED = ["softmax", "l2", "linear", "affine"]


def plain(kind: str, p: P, x: Any, w: Any, points: Any = None, seen: Any = None) -> Any:
    """Gamma at points; `seen` (k, n) restricts the measure of each row."""
    z = x if points is None else points
    W = np.broadcast_to(w, (len(z), len(w))) * (1.0 if seen is None else seen)
    scores = z @ p["A"].T @ x.T
    if kind == "softmax":
        e = W * np.exp(scores)
        return (e / e.sum(1, keepdims=True)) @ x @ p["V"].T
    if kind == "l2":
        gap = (z @ p["Q"].T)[:, None] - (x @ p["K"].T)[None]
        e = W * np.exp(-(gap**2).sum(-1))
        return (e / e.sum(1, keepdims=True)) @ x @ p["V"].T
    if kind == "linear":
        return (W * scores) @ x @ p["V"].T
    if kind == "unnormalised":
        return (W * np.exp(scores)) @ x @ p["V"].T
    if kind == "sigmoid":
        return (W / (1 + np.exp(-scores - p.get("bias", BIAS)))) @ x @ p["V"].T
    if kind == "affine":
        return z @ p["W"].T + p["c"]
    heads = [plain(k, p, x, w, z, seen) for k in ("softmax", "l2")]
    heads.append(plain("sigmoid", {**p, "V": p["W"], "bias": 0.0}, x, w, z, seen))
    return sum(h @ p[o].T for h, o in zip(heads, ("W", "U", "V"), strict=True))


def turned(p: P, R: Any) -> P:
    """The parameters in rotated coordinates."""
    return {k: (R @ v if k == "c" else R @ v @ R.T) for k, v in p.items()}
