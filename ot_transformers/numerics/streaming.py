"""Softmax-weighted and general sums over pairs of tokens in O(n d) memory.

Two paths for the softmax average. Where no derivative is asked for, the fused attention kernel of torch does
it (log weights and score offsets ride along as one more coordinate). Where one is, blocks of rows are formed
in the log domain with plain operations, differentiable to any order, in forward mode and under `torch.vmap`;
in reverse mode each block is recomputed instead of stored.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from .tilted import safe_log

__all__ = ["BLOCK", "attend", "blockwise", "wants_derivative"]

BLOCK = 1 << 21
"""Pairs (times batch) whose scores are formed at once: 16 MB in float64."""


def wants_derivative(*tensors: Tensor) -> bool:
    """Whether a derivative may be asked for: autograd is recording, or a functorch transform is active."""
    if any(torch._C._functorch.is_functorch_wrapped_tensor(t) for t in tensors):
        return True
    if torch.autograd.forward_ad._current_level >= 0:
        return True
    return torch.is_grad_enabled() and any(t.requires_grad for t in tensors)


def blockwise(
    function: Callable[..., Tensor], rows: tuple[Tensor, ...], others: tuple[Tensor, ...]
) -> Tensor:
    """Apply `function(*row_blocks, *others)` to blocks of rows (dimension -2) and join the results.

    Parameters
    ----------
    function : callable
        From rows (..., k, .) and the others to (..., k, r).
    rows : tensors (..., m, .) that are cut along dimension -2
    others : tensors passed whole; the first has the keys (..., n, .) along dimension -2
    """
    m, n = rows[0].shape[-2], others[0].shape[-2]
    pairs = rows[0].shape[:-2].numel() * m * n
    if pairs <= BLOCK:
        return function(*rows, *others)
    step = max(1, m * BLOCK // pairs)
    recompute = any(t.requires_grad for t in (*rows, *others)) and torch.is_grad_enabled()
    recompute = recompute and not any(
        torch._C._functorch.is_functorch_wrapped_tensor(t) for t in (*rows, *others)
    )
    parts = []
    for i in range(0, m, step):
        block = tuple(t[..., i : i + step, :] for t in rows)
        if recompute:
            parts.append(checkpoint(function, *block, *others, use_reentrant=False))
        else:
            parts.append(function(*block, *others))
    return torch.cat(parts, -2)


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
    if weights is not None:
        q = torch.cat([q, torch.ones_like(q[..., :1])], -1)
        k = torch.cat([k, safe_log(weights).unsqueeze(-1).expand(*k.shape[:-1], 1)], -1)
    batch = torch.broadcast_shapes(q.shape[:-2], k.shape[:-2], v.shape[:-2])
    q, k, v = (t.expand(*batch, *t.shape[-2:]) for t in (q, k, v))
    if not wants_derivative(q, k, v):
        return _fused(q, k, v, causal)
    if causal:
        row = torch.arange(q.shape[-2], device=q.device, dtype=q.dtype).unsqueeze(-1).expand(*q.shape[:-1], 1)
        return blockwise(_causal_rows, (q, row), (k, v))
    return blockwise(_softmax_rows, (q,), (k, v))


def _softmax_rows(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return torch.softmax(q @ k.mT, -1) @ v


def _causal_rows(q: Tensor, row: Tensor, k: Tensor, v: Tensor) -> Tensor:
    hidden = torch.arange(k.shape[-2], device=q.device) > row
    return torch.softmax(torch.where(hidden, -torch.inf, q @ k.mT), -1) @ v


def _fused(q: Tensor, k: Tensor, v: Tensor, causal: bool) -> Tensor:
    """The fused kernel wants four dimensions and equal widths; otherwise it would form the n x n matrix."""
    batch, m = q.shape[:-2], q.shape[-2]
    width = max(q.shape[-1], v.shape[-1])
    q, k, v4 = (
        torch.nn.functional.pad(t, (0, width - t.shape[-1])).reshape(-1, 1, t.shape[-2], width)
        for t in (q, k, v)
    )
    out = torch.nn.functional.scaled_dot_product_attention(q, k, v4, scale=1.0, is_causal=causal)
    return out[..., : v.shape[-1]].reshape(*batch, m, v.shape[-1])
