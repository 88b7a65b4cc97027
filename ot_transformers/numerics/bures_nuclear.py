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

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeAlias

import numpy as np
import torch
from torch import Tensor

__all__ = [
    "bidiagonal",
    "empty",
    "in_pieces",
    "nuclear_norm",
    "subtract_product",
    "suits",
    "sum_of_singular_values",
]

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
_ENOUGH = 0.01
"""Share of the members that may be left over."""
_FEW = 0.3
"""Share of the members from which on those left go on by themselves."""
_ULP = float(np.finfo(np.float64).eps)


def nuclear_norm(M: Tensor) -> Tensor:
    """Sum of the singular values of M (..., k, r), (...); no derivative."""
    if min(M.shape[-2:]) == 1:
        # In units of the largest entry: squares of 1e160 overflow.
        size = M.abs().amax((-2, -1), keepdim=True)
        size = torch.where(size > 0, size, 1.0)
        return torch.linalg.vector_norm(M / size, dim=(-2, -1)) * size[..., 0, 0]
    count, width = M.shape[:-2].numel(), max(M.shape[-2:])
    if not suits(count, width, M):
        return torch.linalg.svdvals(M).sum(-1)
    flat = M.detach().reshape(count, *M.shape[-2:]).double()
    size = flat.abs().amax((-2, -1))
    source, q, e = flat.numpy(), empty(width, count), empty(width - 1, count)

    def reduce(piece: slice) -> None:
        A = empty(width, width, len(source[piece]))
        A[...] = 0.0
        A[: M.shape[-2], : M.shape[-1]] = source[piece].transpose(1, 2, 0)
        with np.errstate(all="ignore"):
            bidiagonal(A, q[:, piece], e[:, piece])

    in_pieces(reduce, count, width**2)
    total, unfinished = sum_of_singular_values(q, e)
    value = torch.from_numpy(total)
    slow = torch.from_numpy(unfinished) | (size < 1 / _RANGE) | (size > _RANGE)
    if bool(slow.any()):
        value = value.masked_scatter(slow, torch.linalg.svdvals(flat[slow]).sum(-1))
    return value.to(M.dtype).reshape(M.shape[:-2])


def suits(count: int, width: int, like: Tensor) -> bool:
    """Whether a batch is better off here than with LAPACK."""
    return 3 <= width <= _LARGEST and count >= _FEWEST and like.device.type == "cpu"


def empty(*shape: int) -> Rows:
    """A new array on a 64-byte boundary, where NumPy's own are not: vector instructions run at twice the speed."""
    return torch.empty(shape, dtype=torch.float64).numpy()


def in_pieces(work: Callable[[slice], None], count: int, entries: int) -> None:
    """Run over a batch in pieces that fit into the cache, on as many threads as torch may use.

    `entries` is what a member occupies.
    """
    step = max(1024, _CACHE // entries // 8 * 8)
    threads = min(torch.get_num_threads(), -(-count // step))
    # Pieces of equal size, a multiple of the threads, on 64-byte boundaries.
    number = -(-count // (step * threads)) * threads
    step = (-(-count // number) + 7) // 8 * 8
    pieces = [slice(i, min(i + step, count)) for i in range(0, count, step)]
    if threads == 1:
        for piece in pieces:
            work(piece)
        return
    with ThreadPoolExecutor(threads) as pool:
        list(pool.map(work, pieces))


def sum_of_singular_values(q: Rows, e: Rows) -> tuple[Rows, Any]:
    """Sums (b,) from the qd array, and where they are not to be trusted; destroys it."""
    total, slow = empty(q.shape[1]), np.empty(q.shape[1], dtype=bool)

    def work(piece: slice) -> None:
        with np.errstate(all="ignore"):
            total[piece], slow[piece] = _dqds(q[:, piece], e[:, piece])

    in_pieces(work, q.shape[1], 3 * len(q))
    return total, slow | ~np.isfinite(total)


def bidiagonal(A: Rows, q: Rows, e: Rows) -> None:
    """Squares of the diagonal to q (d, b), of the superdiagonal to e (d-1, b); destroys A (d, d, b)."""
    d, _, b = A.shape
    spare = empty(d, b)
    for k in range(d - 1):
        x, C = A[k:, k], A[k:, k + 1 :]
        beta = _reflector(x, q[k])
        w = np.einsum("ib,ijb->jb", x, C, out=spare[: d - 1 - k])
        subtract_product(C, x[:, None], np.multiply(w, beta, out=w))
        y, C = A[k, k + 1 :], A[k + 1 :, k + 1 :]
        beta = _reflector(y, e[k])
        w = np.einsum("jb,ijb->ib", y, C, out=spare[: d - 1 - k])
        subtract_product(C, np.multiply(w, beta, out=w)[:, None], y)
    np.square(A[-1, -1], out=q[-1])


def subtract_product(C: Rows, x: Rows, y: Rows) -> None:
    """C -= x y, broadcasting, in one pass over memory."""
    torch.from_numpy(C).addcmul_(torch.from_numpy(x), torch.from_numpy(y), value=-1.0)


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
    total, shifted, shift = empty(3, b)
    total[...], shifted[...], shift[...] = 0.0, 0.0, 0.0
    slow = np.zeros(b, dtype=bool)
    for n in range(d, 2, -1):
        done, others = _decouple(
            q[:n], e[: n - 1], shift, shifted, tiny, slow, int(_ENOUGH * b), int(_FEW * b)
        )
        slow |= ~done
        total += np.sqrt(shifted + q[n - 1])
        _drop_last(q[: n - 1], e[: n - 1])
        np.divide(1 - 4 * _ULP, others, out=shift)
    # (sigma_1 + sigma_2)^2 = trace + 2 det^{1/2} of the last two, moved back by what was shifted; no cancellation.
    trace = q[0] + e[0] + q[1]
    total += np.sqrt(trace + 2 * shifted + 2 * np.sqrt(q[0] * q[1] + shifted * (trace + shifted)))
    return total, slow


def _decouple(
    q: Rows, e: Rows, shift: Rows, shifted: Rows, tiny: Rows, slow: Any, enough: int, few: int
) -> tuple[Any, Rows]:
    """Transform in place until the last row has come loose; where it has, and the trace of the others' inverse."""
    n, b = q.shape
    inverse, work = empty(n, b), empty(3, b)
    others = empty(b)
    for _ in range(_TRANSFORMS):
        _transform(q, e, shift, tiny, inverse, work)
        shifted += shift
        np.sum(inverse[:-1], axis=0, out=others)
        # In B B^T the last row is coupled to the others by (q_n e)^{1/2} alone: leaving it out moves the
        # eigenvalue by q_n e / gap at most, and 1 / tr(inverse of the others) - q_n is below the gap.
        ratio = q[-1] * others
        done = (ratio <= 0.5) & (e[-1] * ratio <= 0.25 * _ULP * (shifted + q[-1]))
        left = b - np.count_nonzero(done | slow)
        if left <= enough:
            break
        _below(q[-1], inverse[-1], others, work, shift)
        if left <= few:
            # The rest go on by themselves: the many do not wait for the few.
            rest = np.flatnonzero(~(done | slow))
            q_, e_, shifted_ = (np.take(t, rest, axis=-1) for t in (q, e, shifted))
            done[rest], others[rest] = _decouple(
                q_, e_, shift[rest], shifted_, tiny[rest], slow[rest], enough, 0
            )
            q[:, rest], e[:, rest], shifted[rest] = q_, e_, shifted_
            break
    return done, others


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


def _below(q: Rows, inverse: Rows, others: Rows, work: Rows, out: Rows) -> None:
    """Lower bound of the smallest eigenvalue of B B^T = [[C, c], [c^T, q]].

    lambda >= 1 / tr (B B^T)^{-1}. And lambda = q - c^T (C - lambda)^{-1} c >= q - c^T C^{-1} c mu / (mu - u) for
    mu <= C and any u in [lambda, mu): with u = 1 / inverse = q - c^T C^{-1} c and mu = 1 / others, that is
    q - (q inverse - 1) / (inverse - others), which is nearly exact once the coupling c is small.
    """
    a, b, _ = work
    np.multiply(q, inverse, out=a)
    a -= 1.0
    np.subtract(inverse, others, out=b)
    np.maximum(b, 0.0, out=b)
    a /= b
    np.subtract(q, a, out=a)
    np.add(inverse, others, out=b)
    np.divide(1.0, b, out=b)
    np.fmax(a, b, out=out)
    out *= 1 - 4 * _ULP


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
