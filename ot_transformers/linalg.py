"""Linear solves and determinants whose derivatives are right in nested forward mode too.

The second derivatives of PyTorch's own `torch.linalg.solve`, `slogdet` and `det` by nested `torch.func.jvp`
are wrong, without an error (their forward rules use LU factors that carry no tangents); forward over reverse
is right. Those here are differentiable to any order in every mode. They trust their caller; singular
matrices give infinities.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from .forward_mode import nested_jvp

__all__ = ["log_abs_det", "solve"]


def solve(a: Tensor, b: Tensor) -> Tensor:
    """a^-1 b for a (..., n, n), b (..., n, k), broadcasting batch dimensions."""
    batch = torch.broadcast_shapes(a.shape[:-2], b.shape[:-2])
    a, b = a.expand(*batch, *a.shape[-2:]), b.expand(*batch, *b.shape[-2:])
    x: Tensor = _Solve.apply(a, b)  # type: ignore[no-untyped-call]
    return x


def log_abs_det(a: Tensor) -> Tensor:
    """log |det a| of a (..., n, n), (...)."""
    value: Tensor = _LogAbsDet.apply(a)  # type: ignore[no-untyped-call]
    return value


class _Solve(torch.autograd.Function):
    """x = a^-1 b; dx = a^-1 (db - da x)."""

    generate_vmap_rule = True

    @staticmethod
    def forward(a: Tensor, b: Tensor) -> Tensor:
        # solve_ex: an exactly singular matrix of a batch must not stop the others by an exception.
        return torch.linalg.solve_ex(a, b)[0]

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        ctx.save_for_backward(inputs[0], output)
        ctx.save_for_forward(inputs[0], output)

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Any) -> Any:
        a, x = ctx.saved_tensors
        g = solve(a.mT, grad_outputs[0])
        return -g @ x.mT, g

    @staticmethod
    @nested_jvp
    def jvp(ctx: Any, *grad_inputs: Any) -> Any:
        a, x = ctx.saved_tensors
        da, db = grad_inputs
        rhs = torch.zeros_like(x) if db is None else db
        return solve(a, rhs if da is None else rhs - da @ x)


class _LogAbsDet(torch.autograd.Function):
    """log |det a|; its derivative is tr(a^-1 da)."""

    generate_vmap_rule = True

    @staticmethod
    def forward(a: Tensor) -> Tensor:
        return torch.linalg.slogdet(a).logabsdet

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        ctx.save_for_backward(inputs[0])
        ctx.save_for_forward(inputs[0])

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Any) -> Any:
        (a,) = ctx.saved_tensors
        return grad_outputs[0][..., None, None] * solve(a.mT, _eye(a))

    @staticmethod
    @nested_jvp
    def jvp(ctx: Any, *grad_inputs: Any) -> Any:
        (a,) = ctx.saved_tensors
        return solve(a, grad_inputs[0]).diagonal(dim1=-2, dim2=-1).sum(-1)


def _eye(a: Tensor) -> Tensor:
    return torch.eye(a.shape[-1], dtype=a.dtype, device=a.device).expand(a.shape)
