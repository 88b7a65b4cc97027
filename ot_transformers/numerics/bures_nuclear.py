"""Nuclear norms of many small matrices at once: the whole batch moves through one algorithm in step.

LAPACK takes one matrix after another, at a cost that for small ones is calls and branches. Here each operation
acts on a contiguous row of members (batch index last, in pieces that stay in the cache):

1. M = P B Q^T by Householder reflections, B upper bidiagonal; the squares of its entries are the qd array
   (q_1, e_1, ..., e_{d-1}, q_d), and the eigenvalues of B B^T are the squared singular values.
2. Transforms of the dqds algorithm (Fernando, Parlett 1994), each of which subtracts a shift from all eigenvalues
   without cancellation. The shift is a lower bound of the smallest one, so that pivots stay positive.

The error is that of an SVD, d ulp sigma_max: squares are taken after the reduction, not of M, so that small
singular values keep their digits. The few members that converge slowly go to LAPACK.
"""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeAlias

import numpy as np
import torch
from torch import Tensor

__all__ = ["nuclear_norm"]

Rows: TypeAlias = "np.ndarray[Any, np.dtype[np.float64]]"
_LARGEST = 9
"""Widest matrices for which this beats LAPACK."""
_FEWEST = 1500
"""Smallest batch for which it does."""
_CACHE = 2**18
"""Entries of a piece: 2 MB."""
_RANGE = 1e60
"""Largest and smallest (inverse) size of a matrix whose squares are safe."""
_TRANSFORMS = 9
"""Transforms a singular value; whatever has not converged then goes to LAPACK."""
_ENOUGH = 0.99
"""Share of the members that must have converged to go on."""
_ULP = float(np.finfo(np.float64).eps)


def nuclear_norm(M: Tensor) -> Tensor:
    """Sum of the singular values of M (..., k, r), (...); no derivative."""
    if min(M.shape[-2:]) == 1:
        return torch.linalg.vector_norm(M, dim=(-2, -1))
    count, width = M.shape[:-2].numel(), max(M.shape[-2:])
    if not 3 <= width <= _LARGEST or count < _FEWEST or M.device.type != "cpu":
        return torch.linalg.svdvals(M).sum(-1)
    flat = M.detach().reshape(count, *M.shape[-2:]).double()
    size = flat.abs().amax((-2, -1))
    slow = (size < 1 / _RANGE) | (size > _RANGE)
    value = torch.empty_like(size)
    source, out, bad = flat.numpy(), value.numpy(), slow.numpy()
    step = max(_FEWEST, _CACHE // width**2)
    pieces = [slice(i, min(i + step, count)) for i in range(0, count, step)]

    def work(piece: slice) -> None:
        out[piece], unfinished = _piece(source[piece], width)
        bad[piece] |= unfinished

    threads = min(torch.get_num_threads(), len(pieces))
    if threads > 1:
        with ThreadPoolExecutor(threads) as pool:
            list(pool.map(work, pieces))
    else:
        for piece in pieces:
            work(piece)
    if bool(slow.any()):
        value[slow] = torch.linalg.svdvals(flat[slow]).sum(-1)
    return value.to(M.dtype).reshape(M.shape[:-2])


def _piece(M: Rows, width: int) -> tuple[Rows, Any]:
    A = np.zeros((width, width, M.shape[0]))
    A[: M.shape[1], : M.shape[2]] = M.transpose(1, 2, 0)
    with np.errstate(all="ignore"):
        total, slow = _dqds(*_bidiagonal(A))
    return total, slow | ~np.isfinite(total)


def _bidiagonal(A: Rows) -> tuple[Rows, Rows]:
    """Squares of the diagonal (d, b) and superdiagonal (d-1, b) of the bidiagonal form; destroys A (d, d, b)."""
    d, _, b = A.shape
    q, e = np.empty((d, b)), np.empty((d - 1, b))
    spare = np.empty(d * d * b)
    for k in range(d - 1):
        x, C = A[k:, k], A[k:, k + 1 :]
        w = _reflector(x, q[k]) * np.einsum("ib,ijb->jb", x, C)
        C -= np.multiply(x[:, None], w, out=spare[: C.size].reshape(C.shape))
        y, C = A[k, k + 1 :], A[k + 1 :, k + 1 :]
        w = _reflector(y, e[k]) * np.einsum("jb,ijb->ib", y, C)
        C -= np.multiply(w[:, None], y, out=spare[: C.size].reshape(C.shape))
    np.square(A[-1, -1], out=q[-1])
    return q, e


def _reflector(x: Rows, square: Rows) -> Rows:
    """Turn x (k, b) into v and return beta (b,): (I - beta v v^T) x = -+|x| e_1; |x|^2 goes to `square`."""
    np.einsum("ib,ib->b", x, x, out=square)
    norm = np.sqrt(square)
    beta = norm * (norm + np.abs(x[0]))
    np.divide(1.0, beta, out=beta, where=beta > 0)
    x[0] += np.copysign(norm, x[0])
    return beta


def _dqds(q: Rows, e: Rows) -> tuple[Rows, Any]:
    """Sum of the singular values (b,) from the qd array, and which members have not converged; destroys both."""
    d, b = q.shape
    tiny = 1e-36 * (q.sum(0) + e.sum(0)) + 1e-300
    total, shifted, shift = np.zeros(b), np.zeros(b), np.zeros(b)
    slow = np.zeros(b, dtype=bool)
    inverse, work = np.empty((d, b)), np.empty((3, b))
    for n in range(d, 2, -1):
        for _ in range(_TRANSFORMS):
            _transform(q[:n], e[: n - 1], shift, tiny, inverse, work)
            shifted += shift
            others = inverse[: n - 1].sum(0)
            # In B B^T the last row is coupled to the others by (q_n e)^{1/2} alone: leaving it out moves the
            # eigenvalue by q_n e / gap at most, and 1 / tr(inverse of the others) - q_n is below the gap.
            ratio = q[n - 1] * others
            done = (ratio <= 0.5) & (e[n - 2] * ratio <= 0.25 * _ULP * (shifted + q[n - 1]))
            if np.count_nonzero(done | slow) >= _ENOUGH * b:
                break
            shift = _below(q[n - 1], inverse[n - 1], others)
        slow |= ~done
        total += np.sqrt(shifted + q[n - 1])
        _drop_last(q[: n - 1], e[: n - 1])
        shift = (1 - 4 * _ULP) / others
    # (sigma_1 + sigma_2)^2 = trace + 2 det^{1/2} of the last two, moved back by what was shifted; no cancellation.
    trace = q[0] + e[0] + q[1]
    total += np.sqrt(trace + 2 * shifted + 2 * np.sqrt(q[0] * q[1] + shifted * (trace + shifted)))
    return total, slow


def _transform(q: Rows, e: Rows, shift: Rows, tiny: Rows, inverse: Rows, work: Rows) -> None:
    """One dqds transform in place; `inverse` gets the diagonal of (B B^T)^{-1} after it."""
    d, t, r = work
    np.subtract(q[0], shift, out=d)
    inverse[0] = 1.0
    for k in range(len(e)):
        np.add(d, e[k], out=q[k])
        np.divide(1.0, q[k], out=r)
        np.multiply(q[k + 1], r, out=t)
        e[k] *= t
        d *= t
        d -= shift
        inverse[k] *= r
        np.multiply(inverse[k], e[k], out=inverse[k + 1])
        inverse[k + 1] += 1.0
    # The last pivot is 0 up to rounding where the shift has hit the eigenvalue.
    np.maximum(d, tiny, out=q[-1])
    inverse[len(e)] /= q[-1]


def _below(q: Rows, inverse: Rows, others: Rows) -> Rows:
    """Lower bound of the smallest eigenvalue of B B^T = [[C, c], [c^T, q]].

    lambda >= 1 / tr (B B^T)^{-1}. And lambda = q - c^T (C - lambda)^{-1} c >= q - c^T C^{-1} c mu / (mu - u) for
    mu <= C and any u in [lambda, mu): with u = 1 / inverse = q - c^T C^{-1} c and mu = 1 / others, that is
    q - (q inverse - 1) / (inverse - others), which is nearly exact once the coupling c is small.
    """
    bound = q - (q * inverse - 1.0) / np.maximum(inverse - others, 0.0)
    return (1 - 4 * _ULP) * np.fmax(bound, 1.0 / (inverse + others))


def _drop_last(q: Rows, e: Rows) -> None:
    """Make the bidiagonal n-1 rows, with n columns, square again: same B B^T, in place (e_{n-1} is left behind)."""
    carry = e[-1].copy()
    for k in range(len(q) - 1, -1, -1):
        old = q[k].copy()
        q[k] += carry
        if k:
            ratio = e[k - 1] / q[k]
            np.multiply(ratio, old, out=e[k - 1])
            carry *= ratio
