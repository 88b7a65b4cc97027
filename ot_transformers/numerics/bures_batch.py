"""Bures-Wasserstein distances of many small covariances at once, batch index last (see `bures_nuclear`)."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor

from .bures_nuclear import (
    Rows,
    bidiagonal,
    empty,
    in_pieces,
    subtract_product,
    suits,
    sum_of_singular_values,
)

__all__ = ["squared_in_step"]

_RANGE = 1e60
"""Largest and smallest (inverse) covariances whose products and squares are safe."""


def squared_in_step(S0: Tensor, S1: Tensor, near: float) -> tuple[Tensor, Tensor] | None:
    """BW^2 (...) by the trace form, and where it is to be trusted; None where LAPACK is faster.

    Not trusted are singular matrices, near pairs (BW^2 below `near` times the traces) and those few whose
    singular values converge slowly. Both matrices have the same batch dimensions.
    """
    count, d = S0.shape[:-2].numel(), S0.shape[-1]
    if not suits(count, d, S0):
        return None
    a, b = (S.detach().reshape(count, d, d).double().numpy() for S in (S0, S1))
    q, e, total = empty(d, count), empty(d - 1, count), empty(count)
    good = np.empty(count, dtype=bool)
    slack = 16 * d * torch.finfo(S0.dtype).eps

    def reduce(piece: slice) -> None:
        with np.errstate(all="ignore"):
            L0, trace0, good0 = _cholesky(a[piece], slack)
            L1, trace1, good1 = _cholesky(b[piece], slack)
            M = empty(*L0.shape)
            for i in range(d):
                np.einsum("kb,kjb->jb", L0[i:, i], L1[i:], out=M[i])
            bidiagonal(M, q[:, piece], e[:, piece])
        total[piece], good[piece] = trace0 + trace1, good0 & good1

    in_pieces(reduce, count, 2 * d * d)
    nuclear, slow = sum_of_singular_values(q, e)
    value = total - 2.0 * nuclear
    # A NaN compares False.
    trusted = good & ~slow & (value > near * total)
    shape = S0.shape[:-2]
    return torch.from_numpy(value).to(S0.dtype).reshape(shape), torch.from_numpy(trusted).reshape(shape)


def _cholesky(S: Rows, slack: float) -> tuple[Rows, Rows, Any]:
    """Factor (d, d, b), trace, and where every pivot is above rounding of the largest diagonal entry."""
    b, d, _ = S.shape
    L = torch.from_numpy(S).reshape(b, d * d).T.contiguous().numpy().reshape(d, d, b)
    diagonal = L[np.arange(d), np.arange(d)]
    scale, trace = diagonal.max(0), diagonal.sum(0)
    good = (scale > 1 / _RANGE) & (scale < _RANGE)
    floor = slack * scale
    reciprocal = empty(b)
    for k in range(d):
        pivot = L[k, k]
        good &= pivot > floor
        np.sqrt(pivot, out=pivot)
        np.divide(1.0, pivot, out=reciprocal)
        L[k + 1 :, k] *= reciprocal
        L[k, k + 1 :] = 0.0
        for j in range(k + 1, d):
            subtract_product(L[j:, j], L[j:, k], L[j, k])
    return L, trace, good
