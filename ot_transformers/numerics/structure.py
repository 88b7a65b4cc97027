"""Which mobility D makes an attention a gradient flow: V = sign D A with D symmetric positive definite."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from ..spd import symmetrise

__all__ = ["Mobility", "find_mobility"]


class Mobility(NamedTuple):
    """Result of `find_mobility`.

    Attributes
    ----------
    D : Tensor (d, d), symmetric positive definite (meaningless where `residual` is large)
    sign : +1 or -1
    residual : float
        max of |A - A^T| / |A|, |V - sign D A| / |V| and the relative distance of D to the positive definite
        matrices; at rounding level iff the structure exists.
    reason : str
        What the largest part of the residual speaks of.
    """

    D: Tensor
    sign: int
    residual: float
    reason: str


def find_mobility(A: Tensor, V: Tensor) -> Mobility:
    """Find D and the sign with V = sign D A, for regular and singular symmetric A.

    With A = U diag(a) U^T of rank r, the equation determines D on the range of A: D U_r = sign V U_r / a_r.
    In the basis (range, kernel) this is W = (W11, W21), and D = [[W11, W21^T], [W21, X]] is positive definite
    for X = W21 W11^{-1} W21^T + c I iff W11 is; c is the mean eigenvalue of W11. V must vanish on ker A.
    """
    d = A.shape[-1]
    a_size, v_size = torch.linalg.matrix_norm(A), torch.linalg.matrix_norm(V)
    if float(a_size) == 0 or float(v_size) == 0:
        same = float(a_size) == float(v_size)
        return Mobility(
            torch.eye(d, dtype=A.dtype, device=A.device),
            1,
            0.0 if same else 1.0,
            "A or V is 0, the other is not",
        )
    asymmetry = float(torch.linalg.matrix_norm(A - A.mT) / a_size)
    asymmetric = f"A is not symmetric: |A - A^T| / |A| = {asymmetry:.3g}"
    if bool((-A.mT == A).all()):
        return Mobility(torch.eye(d, dtype=A.dtype, device=A.device), 1, asymmetry, asymmetric)
    a, U = torch.linalg.eigh(symmetrise(A))
    keep = a.abs() > a.abs().max() * d * torch.finfo(a.dtype).eps
    Ur, Uk = U[:, keep], U[:, ~keep]
    W = (V @ Ur) / a[keep]
    W11, W21 = Ur.mT @ W, Uk.mT @ W
    sign = 1 if float(W11.diagonal().sum()) >= 0 else -1
    W11, W21 = sign * W11, sign * W21
    skew = float(torch.linalg.matrix_norm(W11 - W11.mT) / torch.linalg.matrix_norm(W11).clamp_min(1e-300))
    w, R = torch.linalg.eigh(symmetrise(W11))
    indefinite = float((-w[0]).clamp_min(0.0) / w.abs().max().clamp_min(1e-300))
    if float(w[0]) <= 1e-13 * float(w.abs().max()):
        indefinite = max(indefinite, 1e-3)  # not definite: D^{-1} would not be an inner product
    floor = w.abs().max().clamp_min(1e-300) * 1e-13
    w = torch.maximum(w, floor)
    D11 = symmetrise((R * w) @ R.mT)
    c = w.mean()
    corner = W21 @ ((R / w) @ R.mT) @ W21.mT + c * torch.eye(Uk.shape[-1], dtype=A.dtype, device=A.device)
    blocks = torch.cat([torch.cat([D11, W21.mT], -1), torch.cat([W21, corner], -1)], -2)
    basis = torch.cat([Ur, Uk], -1)
    D = symmetrise(basis @ blocks @ basis.mT)
    misfit = float(torch.linalg.matrix_norm(V - sign * D @ symmetrise(A)) / v_size)
    parts = {
        asymmetric: asymmetry,
        f"V is not sign D A for a symmetric D: |V - sign D A| / |V| = {max(misfit, skew):.3g}": max(
            misfit, skew
        ),
        f"D is not positive definite: its smallest eigenvalue is {-indefinite:.3g} of the largest": indefinite,
    }
    reason = max(parts, key=lambda k: parts[k])
    return Mobility(D, sign, parts[reason], reason)
