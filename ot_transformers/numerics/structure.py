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
        max of |A - A^T| / |A| (at most 2), the least |V - sign D A| / |V| over symmetric D (at most 1) and the
        relative distance of that D to the positive definite matrices (at most 1); at rounding level iff the
        structure exists.
    reason : str
        What the largest part of the residual speaks of.
    """

    D: Tensor
    sign: int
    residual: float
    reason: str


def find_mobility(A: Tensor, V: Tensor) -> Mobility:
    """Find D and the sign with V = sign D A, for regular and singular symmetric A, by least squares.

    In the eigenbasis of A, eigenvalues a_i, the symmetric D that minimises |V - sign D A| is

        D_ij = sign (V_ij a_j + a_i V_ji) / (a_i^2 + a_j^2),

    free on the kernel of A. It takes each entry from the larger of a_i, a_j, so that small eigenvalues do not
    amplify rounding, and its residual is at most |V|. In the basis (range, kernel) it is [[W11, W21^T],
    [W21, X]], positive definite for X = W21 W11^{-1} W21^T + c I iff W11 is; c is the mean eigenvalue of W11.
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
    top = a.abs().max()
    keep = a.abs() > top * d * torch.finfo(a.dtype).eps
    Ur, Uk = U[:, keep], U[:, ~keep]
    sign = 1 if float((V * A.mT).sum()) >= 0 else -1  # tr(V A) = sign tr(A D A)
    v, a = sign * U.mT @ V @ U, torch.where(keep, a / top, 0.0)  # squares of tiny entries would underflow
    squares = a.square().unsqueeze(-1) + a.square()
    free = squares == 0
    least = torch.where(free, 0.0, (v * a + (v * a).mT) / torch.where(free, 1.0, squares))
    misfit = float(torch.linalg.matrix_norm(v - least * a) / v_size)
    W11, W21 = least[keep][:, keep] / top, least[~keep][:, keep] / top
    w, R = torch.linalg.eigh(symmetrise(W11))
    lowest = float(w[0] / w.abs().max().clamp_min(1e-300))
    indefinite = max(-lowest, 0.0)
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
    parts = {
        asymmetric: asymmetry,
        f"V is not sign D A for a symmetric D: |V - sign D A| / |V| = {misfit:.3g} at best": misfit,
        f"D is not positive definite: its smallest eigenvalue is {lowest:.3g} of the largest": indefinite,
    }
    reason = max(parts, key=lambda k: parts[k])
    return Mobility(D, sign, parts[reason], reason)
