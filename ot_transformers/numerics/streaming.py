"""Softmax-weighted and general sums over pairs of tokens in O(n d) memory.

Two paths for the softmax average. Where no derivative is asked for, the fused attention kernel of torch does
it (log weights and score offsets ride along as one more coordinate). Where one is, blocks of rows are formed
in the log domain with plain operations, differentiable to any order, in forward mode and under `torch.vmap`;
in reverse mode each block is recomputed instead of stored.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from functools import partial

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from ..forward_mode import in_transform, wants_derivative
from .tilted import safe_log

__all__ = [
    "BLOCK",
    "attend",
    "attend_sorted",
    "block_rows",
    "blockwise",
    "exponentials",
    "stream",
    "wants_derivative",
]

BLOCK = 1 << 21
"""Pairs (times batch) that are formed at once without streaming: 16 MB in float64."""

STREAM = 1 << 19
"""Pairs (times batch) of one block of a stream: it stays in cache, and its temporaries in a few MB."""

RECORDED = 5 << 20
"""The same where autograd keeps the results of the blocks: temporaries of at least 32 MB have memory of their
own, smaller ones share a heap that the results between them fragment (1 GB at n = 16,384)."""

Rows = Callable[..., Tensor]


def block_rows(m: int, pairs: int, *tensors: Tensor) -> int:
    """How many of m rows to take at once where all of them make `pairs` pairs (times batch)."""
    if pairs <= BLOCK:
        return m
    block = STREAM
    if wants_derivative(*tensors):
        block = RECORDED * (8 // tensors[0].element_size())
    return min(m, max(1, m * block // pairs))


def blockwise(function: Rows, rows: tuple[Tensor, ...], others: tuple[Tensor, ...]) -> Tensor:
    """Apply `function(*row_blocks, *others)` to blocks of rows (dimension -2) and join the results.

    Parameters
    ----------
    function : callable
        From rows (..., k, .) and the others to (..., k, r).
    rows : tensors (..., m, .) that are cut along dimension -2
    others : tensors passed whole; the first has the keys (..., n, .) along dimension -2
    """
    m, n = rows[0].shape[-2], others[0].shape[-2]
    batch = torch.broadcast_shapes(rows[0].shape[:-2], others[0].shape[:-2])
    step = block_rows(m, math.prod(batch) * m * n, *rows, *others)
    if step == m:
        return function(*rows, *others)
    cuts = (tuple(t[..., i : i + step, :] for t in rows) for i in range(0, m, step))
    return stream(function, ((*cut, *others) for cut in cuts), m)


def stream(function: Rows, blocks: Iterator[tuple[Tensor, ...]], m: int) -> Tensor:
    """Apply `function` to the arguments of one block of rows after the other; join to (..., m, r).

    Recorded by autograd, each block but the first is recomputed in the backward pass instead of stored.
    """
    first = function(*next(blocks))
    if wants_derivative(first):
        run = function
        if first.requires_grad and not in_transform():
            run = partial(checkpoint, function, use_reentrant=False, preserve_rng_state=False)
        return torch.cat([first, *(run(*block) for block in blocks)], -2)
    # Copied and freed at once: small results kept alive between large temporaries would fragment the heap.
    out = first.new_empty(*first.shape[:-2], m, first.shape[-1])
    out[..., : first.shape[-2], :] = first
    i = first.shape[-2]
    for block in blocks:
        part = function(*block)
        out[..., i : i + part.shape[-2], :] = part
        i += part.shape[-2]
    return out


def exponentials(scores: Tensor, weights: Tensor) -> tuple[Tensor, Tensor]:
    """(c, e) with w_j e^{s_ij} = e^{c_i} e_ij, c (..., k, 1) without derivative and e (..., k, n) in range.

    Parameters
    ----------
    scores : Tensor (..., k, n)
    weights : Tensor (..., 1 or k, n)
        Nonnegative, not all 0 in a row.
    """
    if not wants_derivative(scores, weights):
        scores = scores.masked_fill(weights == 0, -torch.inf)
        c = scores.amax(-1, keepdim=True)
        return c, scores.sub_(c).exp_().mul_(weights)
    c = torch.where(weights > 0, scores, -torch.inf).detach().amax(-1, keepdim=True)
    # w e^{s - c} has its derivative in w at w = 0 too, which e^{s + log w - c} loses. Only tokens of weight 0
    # have s > c: the bound changes no value, it keeps inf * 0 out.
    top = 0.5 * math.log(torch.finfo(scores.dtype).max)
    return c, weights * torch.exp((scores - c).clamp_max(top))


def attend(q: Tensor, k: Tensor, v: Tensor, weights: Tensor | None = None, *, causal: bool = False) -> Tensor:
    """Softmax average sum_j p_ij v_j, p_ij proportional to w_j e^{q_i . k_j}, streaming: (..., m, r).

    Parameters
    ----------
    q : Tensor (..., m, c)
    k : Tensor (..., n, c)
    v : Tensor (..., n, r)
    weights : Tensor (..., n), optional
        Zero weights are allowed (not all zero). Default: equal.
    causal : bool
        Row i sees j <= i only (m = n; the first weight must be positive).
    """
    if weights is not None and (weights.shape[-1] == 1 or weights.stride(-1) == 0):
        weights = None  # one number broadcast over the tokens: it cancels
    batch = torch.broadcast_shapes(
        q.shape[:-2], k.shape[:-2], v.shape[:-2], () if weights is None else weights.shape[:-1]
    )
    q, k, v = (t.expand(*batch, *t.shape[-2:]) for t in (q, k, v))
    if not wants_derivative(q, k, v, *(() if weights is None else (weights,))):
        if weights is not None:
            log_w = safe_log(weights).unsqueeze(-1).expand(*batch, k.shape[-2], 1)
            q, k = torch.cat([q, torch.ones_like(q[..., :1])], -1), torch.cat([k, log_w], -1)
        return _fused(q, k, v, causal=causal)
    if weights is None and not causal:
        return blockwise(_softmax_average, (q,), (k, v))
    w = k.new_ones(1, k.shape[-2]) if weights is None else weights.unsqueeze(-2)
    if not causal:
        return blockwise(_average, (q,), (k, v, w))
    row = torch.arange(q.shape[-2], device=q.device).unsqueeze(-1)
    return blockwise(_causal_average, (q, row), (k, v, w))


def attend_sorted(q: Tensor, k: Tensor, v: Tensor, weights: Tensor, s: Tensor) -> Tensor | None:
    """Softmax average where row i sees the tokens with s_j <= s_i, s (..., n) ascending; ties see one another.

    Blocks of rows through the fused kernel, each against the prefix that it sees. None where a derivative may
    be asked for: the caller then has to form its rows.
    """
    if wants_derivative(q, k, v, weights):
        return None
    n = q.shape[-2]
    batch = torch.broadcast_shapes(q.shape[:-2], k.shape[:-2], v.shape[:-2], weights.shape[:-1], s.shape[:-1])
    q, k, v = (t.expand(*batch, n, t.shape[-1]) for t in (q, k, v))
    s, log_w = s.expand(*batch, n), safe_log(weights).expand(*batch, n)
    step = max(1, STREAM // (math.prod(batch) * n))

    def rows(i: int) -> tuple[Tensor, ...]:
        block = slice(i, i + step)
        seen = int((s <= s[..., block][..., -1:]).sum(-1).max())
        hidden = s[..., None, :seen] > s[..., block, None]
        mask = torch.where(hidden, -torch.inf, log_w[..., None, :seen])
        return q[..., block, :], k[..., :seen, :], v[..., :seen, :], mask

    return stream(_fused, (rows(i) for i in range(0, n, step)), n)


def _softmax_average(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return torch.softmax(q @ k.mT, -1) @ v


def _average(q: Tensor, k: Tensor, v: Tensor, w: Tensor) -> Tensor:
    _, e = exponentials(q @ k.mT, w)
    return (e @ v) / e.sum(-1, keepdim=True)


def _causal_average(q: Tensor, row: Tensor, k: Tensor, v: Tensor, w: Tensor) -> Tensor:
    seen = torch.arange(k.shape[-2], device=q.device) <= row
    return _average(q, k, v, torch.where(seen, w, 0.0))


def _fused(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None = None, causal: bool = False) -> Tensor:
    """The fused kernel wants four dimensions and equal widths; otherwise it would form the n x n matrix."""
    batch, m = q.shape[:-2], q.shape[-2]
    width = max(q.shape[-1], v.shape[-1])
    q, k, v4 = (
        torch.nn.functional.pad(t, (0, width - t.shape[-1])).reshape(-1, 1, t.shape[-2], width)
        for t in (q, k, v)
    )
    if mask is not None:
        mask = mask.reshape(-1, 1, *mask.shape[-2:])
    out = torch.nn.functional.scaled_dot_product_attention(q, k, v4, mask, scale=1.0, is_causal=causal)
    return out[..., : v.shape[-1]].reshape(*batch, m, v.shape[-1])
