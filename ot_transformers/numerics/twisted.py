"""Geometry of the twisted metric on clouds, in raw form.

g_x(v, v) = sum_i w_i G_i |v_i|^2_{D^-1}, G_i = sum_j w_j e^{x_i^T A x_j}, A symmetric. With
P_ik = w_k e^{x_i^T A x_k} / G_i (rows sum to 1), b_i = sum_k P_ik x_k and q_i = |v_i|^2_{D^-1}, the
Euler-Lagrange equation of g / 2 solved for the acceleration of geodesics is

    a_i = 1/2 D A sum_k P_ik (q_i + q_k) x_k - (v_i^T A b_i + x_i^T A sum_k P_ik v_k) v_i.

Only P appears in it, so nothing overflows. Tensors in and out; n x n matrices are formed.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from .tilted import kernel_sums, safe_log

__all__ = [
    "Kernel",
    "geodesic_acceleration",
    "kernel_at",
    "log_speed",
    "raw_acceleration",
    "square_norm",
    "twisted_square",
]


class Kernel(NamedTuple):
    """P (..., n, n), its barycentres b (..., n, d) and log G (..., n)."""

    P: Tensor
    b: Tensor
    log_g: Tensor


def kernel_at(x: Tensor, weights: Tensor, A: Tensor) -> Kernel:
    """The tilted averages at a cloud."""
    scores = x @ A @ x.mT + safe_log(weights).unsqueeze(-2)
    P = torch.softmax(scores, -1)
    return Kernel(P, P @ x, torch.logsumexp(scores, -1))


def geodesic_acceleration(x: Tensor, v: Tensor, A: Tensor, D: Tensor, kernel: Kernel) -> Tensor:
    """d2x/dt2 of the geodesic through x with velocity v, (..., n, d); -Gamma(v, v)."""
    return raw_acceleration(x, v, A, A @ D, square_norm(v, D).unsqueeze(-1), kernel.P, kernel.b)


def raw_acceleration(x: Tensor, v: Tensor, A: Tensor, AD: Tensor, q: Tensor, P: Tensor, b: Tensor) -> Tensor:
    """The same from A D, q (..., n, 1), P and b: for integrators, which evaluate it thousands of times."""
    pull = 0.5 * (q * b + P @ (q * x)) @ AD
    rate = (v * (b @ A) + x @ A * (P @ v)).sum(-1, keepdim=True)
    return pull - rate * v


def twisted_square(v: Tensor, weights: Tensor, D: Tensor, log_g: Tensor) -> Tensor:
    """g_x(v, v), (...)."""
    return (weights * torch.exp(log_g) * square_norm(v, D)).sum(-1)


def square_norm(v: Tensor, D: Tensor) -> Tensor:
    """|v_i|^2_{D^-1}, (..., n)."""
    # Not torch.linalg.solve: its second derivative in D by nested forward mode is wrong; that of inv is right.
    return (v @ torch.linalg.inv(D) * v).sum(-1)


def log_speed(x: Tensor, v: Tensor, weights: Tensor, A: Tensor, Dinv: Tensor) -> Tensor:
    """log g_x(v, v), (...); -inf at v = 0. First derivatives in x and v, from one pass over the pairs."""
    out: Tensor = _LogSpeed.apply(x, v, weights, A, Dinv)  # type: ignore[no-untyped-call]
    return out


class _LogSpeed(torch.autograd.Function):
    """g = q^T K 1 with K_ij = w_i w_j e^{x_i^T A x_j} symmetric, q_i = |v_i|^2_{D^-1}.

    dg/dx_i = q_i A (K x)_i + A (K (q x))_i and dg/dv_i = 2 (K 1)_i D^{-1} v_i: one product K [1, x, q x].
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, v: Tensor, weights: Tensor, A: Tensor, Dinv: Tensor) -> Tensor:
        Dv = v @ Dinv
        q = (Dv * v).sum(-1, keepdim=True)
        blocks = [torch.ones_like(q), x, q * x] if any(ctx.needs_input_grad[:2]) else [torch.ones_like(q)]
        log_w = safe_log(weights).expand(q.shape[:-1])
        top, sums = kernel_sums(x @ A, x, log_w, torch.cat(blocks, -1))
        # Rows come in scales of their own: w_i e^{top_i}, brought to that of the largest.
        log_row = log_w + top
        top = log_row.amax(-1, keepdim=True)
        sums = torch.exp(log_row - top).unsqueeze(-1) * sums
        g = (q * sums[..., :1]).sum((-2, -1))
        if any(ctx.needs_input_grad[:2]):
            d = x.shape[-1]
            ctx.save_for_backward(
                (q * sums[..., 1 : 1 + d] + sums[..., 1 + d :]) @ A, 2.0 * sums[..., :1] * Dv, g
            )
        return top[..., 0] + safe_log(g)

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Any) -> Any:
        dx, dv, g = ctx.saved_tensors
        scale = torch.where(g > 0, grad_outputs[0] / torch.where(g > 0, g, 1.0), 0.0)[..., None, None]
        return scale * dx, scale * dv, None, None, None
