"""Forward-mode rules of custom autograd functions that are right when `torch.func.jvp` is nested; who records.

PyTorch runs the `jvp` rule of a custom function with forward mode switched off, and hands it saved tensors
that still carry the tangents of the level being differentiated. So an outer `torch.func.jvp` silently misses
what the rule depends on: the second derivative by nested forward mode is wrong, without an error.
"""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import torch
import torch.autograd.forward_ad as forward_ad
from torch import Tensor

from .arrays import layers

__all__ = [
    "in_transform",
    "nested_jvp",
    "pair_jvp",
    "to_front",
    "tracked",
    "underlying",
    "wants_derivative",
]


def nested_jvp(rule: Callable[..., Any]) -> Callable[..., Any]:
    """Decorate the `jvp` of a `torch.autograd.Function` (below `@staticmethod`) so that it can be nested.

    The rule may read `ctx.saved_tensors` only; they come without the tangents of the present level, and what
    it computes is followed by the outer levels.
    """

    def jvp(ctx: Any, *tangents: Any) -> Any:
        saved = tuple(_primal(t) for t in ctx.saved_tensors)
        with forward_ad._set_fwd_grad_enabled(True):
            return rule(SimpleNamespace(saved_tensors=saved), *tangents)

    return jvp


def _primal(t: Tensor) -> Tensor:
    """Drop the tangent of the present level, also below the batch dimensions of `torch.vmap`."""
    functorch = torch._C._functorch
    if functorch.is_batchedtensor(t):
        inner = _primal(functorch.get_unwrapped(t))
        return functorch._add_batch_dim(inner, functorch.maybe_get_bdim(t), functorch.maybe_get_level(t))
    return forward_ad.unpack_dual(t).primal


def wants_derivative(*tensors: Tensor) -> bool:
    """Whether a derivative may be asked for: autograd is recording, or a functorch transform is active."""
    if in_transform() or forward_ad._current_level >= 0:
        return True
    return torch.is_grad_enabled() and any(t.requires_grad for t in tensors)


def in_transform() -> bool:
    """Whether the caller is inside `torch.func` (a closed-over parameter may be the one that is wrapped)."""
    return torch._C._functorch.peek_interpreter_stack() is not None


def underlying(t: Tensor) -> Tensor:
    """The detached values below every function transform: for `torch.vmap` those of all members at once.

    For decisions that all members share (an error, a step number), never for results.
    """
    *_, innermost = layers(t)
    return innermost.detach()


def tracked(t: Tensor) -> bool:
    """Whether a derivative in this very tensor is being recorded, by autograd or by a function transform."""
    for layer in layers(t):
        if torch._C._functorch.is_gradtrackingtensor(layer):
            return True
    dual = forward_ad._current_level >= 0 and forward_ad.unpack_dual(layer).tangent is not None
    return dual or (torch.is_grad_enabled() and layer.requires_grad)


def to_front(info: Any, in_dims: tuple[Any, ...], *tensors: Tensor) -> list[Tensor]:
    """Bring the dimension that `torch.vmap` runs over to the front of every argument."""
    return [
        t.unsqueeze(0).expand(info.batch_size, *t.shape) if dim is None else t.movedim(dim, 0)
        for t, dim in zip(tensors, in_dims, strict=True)
    ]


def pair_jvp(slope: Callable[[Tensor, Tensor], Tensor], pair: tuple[Tensor, Tensor], tangents: Any) -> Tensor:
    """<slope(a, b), da> + <slope(b, a), db> (...): the tangent of a symmetric function of two matrices.

    `slope(a, b)` is its gradient in a; an absent tangent is None.
    """
    a, b = pair
    out = torch.zeros_like(a[..., 0, 0])
    for first, second, tangent in ((a, b, tangents[0]), (b, a, tangents[1])):
        if tangent is not None:
            out = out + (slope(first, second) * tangent).sum((-2, -1))
    return out
