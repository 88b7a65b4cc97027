"""How far each head is from a gradient flow, and the ranks of its matrices."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ..arrays import as_tensor
from ..attention import SoftmaxAttention
from ..errors import NotAGradientFlow
from ..flows import gradient_structure
from ..models import AttentionLayer, Head
from ._result import Progress

__all__ = ["FIELDS", "Heads", "chance_level", "measure_head", "measure_heads", "mobility_bounds"]

Floats = np.ndarray[Any, Any]

FIELDS = ("asymmetry", "least", "attained", "strict", "rank_A", "rank_V", "effective_A", "effective_V")


@dataclass(frozen=True, eq=False)
class Heads:
    """What is measured of each head, (L, H) each.

    Attributes
    ----------
    asymmetry : |A - A^T| / (2 |A|), the share of A in Frobenius norm that is skew; in [0, 1]
    least, attained : bounds on the misfit r of V, see `mobility_bounds`; in [0, 1]
    strict : residual of `gradient_structure`: the worst of asymmetry, misfit and indefiniteness of its D
    rank_A, rank_V : numerical ranks
    effective_A, effective_V : (sum s^2)^2 / sum s^4 of the singular values s
    """

    asymmetry: Floats
    least: Floats
    attained: Floats
    strict: Floats
    rank_A: Floats
    rank_V: Floats
    effective_A: Floats
    effective_V: Floats


def measure_heads(layers: Sequence[AttentionLayer], progress: Progress) -> Heads:
    """Measure the heads of all layers (biases left out); `progress` gets fractions of this part."""
    rows = []
    for k, layer in enumerate(layers):
        progress(f"heads of layer {k}", k / len(layers))
        rows.append([measure_head(h) for h in layer.heads])
    table = {name: np.array([[h[name] for h in row] for row in rows]) for name in FIELDS}
    return Heads(**table)


def chance_level(head: Head, seed: int, draws: int = 4) -> dict[str, float]:
    """Means of the same numbers for heads of the same shape with independent normal entries."""
    rng = np.random.default_rng(seed)
    k, d = head.width, head.dim

    def draw() -> Head:
        Q, K, W_V = rng.standard_normal((3, k, d))
        return Head(Q, K, W_V, rng.standard_normal((d, k)))

    found = [measure_head(draw(), strict=False) for _ in range(draws)]
    return {name: float(np.mean([f[name] for f in found])) for name in found[0]}


def measure_head(head: Head, *, strict: bool = True) -> dict[str, float]:
    """All fields of `Heads` for one head; `strict` costs most and may be left out."""
    Q, K, W_V, W_O = (as_tensor(getattr(head, n), n)[0].double() for n in ("Q", "K", "W_V", "W_O"))
    A, V = head.scale * K.mT @ Q, W_O @ W_V
    least, attained = mobility_bounds(Q, K, V)
    size = float(torch.linalg.matrix_norm(A))
    found = {
        "asymmetry": float(torch.linalg.matrix_norm(A - A.mT)) / (2 * size) if size > 0 else 0.0,
        "least": least,
        "attained": attained,
    }
    if strict:
        found["strict"] = _strict(A, V)
    for name, left, right in (("A", K.mT, Q), ("V", W_O, W_V)):
        found[f"rank_{name}"], found[f"effective_{name}"] = _ranks(left, right)
    return found


def _strict(A: Tensor, V: Tensor) -> float:
    try:
        return float(gradient_structure(SoftmaxAttention(A, V)).residual)
    except NotAGradientFlow as err:
        return float(err.residual)


def _ranks(left: Tensor, right: Tensor) -> tuple[int, float]:
    """Numerical and effective rank of left @ right, from the k x k product of triangular factors."""
    s = torch.linalg.svdvals(torch.linalg.qr(left, mode="r").R @ torch.linalg.qr(right.mT, mode="r").R.mT)
    if float(s[0]) == 0:
        return 0, 0.0
    rank = int((s > s[0] * max(left.shape[0], right.shape[1]) * torch.finfo(s.dtype).eps).sum())
    p = (s / s[0]).square()
    return rank, float(p.sum().square() / p.square().sum())


def mobility_bounds(Q: Tensor, K: Tensor, V: Tensor) -> tuple[float, float]:
    r"""Bounds (least, attained) on the smallest misfit of V to a mobility,

        r = inf |V - sigma D B|_F / |V|_F   over sigma = +-1 and D symmetric positive definite,

    with B = (A + A^T) / 2 and A proportional to K^T Q. For a symmetric A, r = 0 is what a gradient flow
    needs. 0 <= least <= r <= attained <= 1.

    `least` drops the sign of D. In the eigenbasis of B = U diag(b) U^T, with W = U^T V U, the pairs (i, j) and
    (j, i) share the unknown D_ij and nothing else, and the least squares solution is

        D_ij = (b_j W_ij + b_i W_ji) / (b_i^2 + b_j^2),
        r^2 |V|^2 = sum over i < j of (b_i W_ij - b_j W_ji)^2 / (b_i^2 + b_j^2)

    plus |V P|^2 with P the projector on ker B, which no D reaches. It stays below 1, for D = 0 is admissible, so
    a small eigenvalue of B does no harm. `attained` is the misfit of the PSD part of that D on the range of B,
    scaled by its best factor >= 0; the blocks of D off the range are free, for a large D on the kernel makes it
    PSD.

    Parameters
    ----------
    Q, K : Tensor (k, d)
    V : Tensor (d, d)
    """
    size = float(torch.linalg.matrix_norm(V))
    if size == 0:
        return 0.0, 0.0  # V = sigma D B with D to 0
    # The range of B lies in that of [K^T Q^T]: at most 2k of the d directions need an eigenbasis.
    basis, _ = torch.linalg.qr(torch.cat([K.mT, Q.mT], 1))
    small = (K @ basis).mT @ (Q @ basis)
    b, R = torch.linalg.eigh(0.5 * (small + small.mT))
    top = float(b.abs().max())
    keep = b.abs() > top * V.shape[-1] * torch.finfo(b.dtype).eps
    U, b = basis @ R[:, keep], b[keep] / (top or 1.0)
    VU = V @ U
    W = U.mT @ VU
    unreachable = max(size**2 - float(VU.square().sum()), 0.0)  # V on the kernel of B
    if not len(b):
        return 1.0, 1.0
    D = (W * b + (W * b).mT) / (b.square() + b.square()[:, None])
    least = float((W - D * b).square().sum())
    attained = float(W.square().sum())
    w, P = torch.linalg.eigh(D)
    for sign in (1.0, -1.0):
        step = (P * (sign * w).clamp_min(0.0)) @ P.mT * b
        along, norm = sign * float((W * step).sum()), float(step.square().sum())
        if norm > 0 and along > 0:
            attained = min(attained, float((W - sign * (along / norm) * step).square().sum()))
    low, high = ((unreachable + part) / size**2 for part in (least, max(attained, least)))
    return min(math.sqrt(low), 1.0), min(math.sqrt(high), 1.0)
