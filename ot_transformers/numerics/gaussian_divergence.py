"""Debiased entropic cost of two centred Gaussians, without cancellation between near ones.

In units of eps, for covariances S and T and the cost -y^T x, with f(S, T) the entropic cost of a pair,

    D(S, T) = f(S, T) - f(S, S) / 2 - f(T, T) / 2 >= 0.

Let C(P; N) be the PSD solution of C + C N C = P. As df/dN = -C / 2 in the covariance N of one side, with P that of
the other, and E = T - S, T_t = S + t E,

    D(S, T) = 1/2 int_0^1 <C(T_t; T_t) - C(S; T_t), E> dt,

where the difference Y of two solutions solves exactly, with N = T_t and C their mean,

    Y + Y N C + C N Y = t E:

linear in E, no subtraction. The same equation gives the gradient dD/dS = Y / 2, N = S and right-hand side S - T.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor

from ..forward_mode import nested_jvp, pair_jvp, to_front
from ..spd import symmetrise
from .bures_singular import cholesky_regular
from .coupling import coupling_difference, gaussian_transport

__all__ = ["divergence_slope", "gaussian_divergence"]

_RULES = ((0.5, 16), (0.0625, 6))
"""Largest size of E relative to S + I/2 for the integral, and its nodes.

The integrand is analytic in t but where an eigenvalue of T_t is +-i/2 or S T_t has an eigenvalue <= -1/4. In one
dimension, with |E| <= q (S + 1/2), both are |t| >= 2^{-1/2} / q away from 0: Gauss then leaves 1e-16 of it.
"""


def gaussian_divergence(S: Tensor, T: Tensor) -> Tensor:
    """D(S, T) (...) of PSD matrices (..., d, d) in units of eps; differentiable to any order, singular ones too.

    Relative error: rounding of the terms f over D for distant pairs, a few ulp for near ones.
    """
    S, T = torch.broadcast_tensors(symmetrise(S), symmetrise(T))
    value: Tensor = _Divergence.apply(S, T)  # type: ignore[no-untyped-call]
    return value


def divergence_slope(S: Tensor, T: Tensor) -> Tensor:
    """dD/dS = (C(S; S) - C(T; S)) / 2 (..., d, d), exactly 0 at S = T."""
    S, T = torch.broadcast_tensors(symmetrise(S), symmetrise(T))
    return 0.5 * coupling_difference(S, T, S)


def _direct(S: Tensor, T: Tensor) -> Tensor:
    eye = torch.eye(S.shape[-1], dtype=S.dtype, device=S.device)
    own = gaussian_transport(S, S, eye) + gaussian_transport(T, T, eye)
    return gaussian_transport(S, T, eye) - 0.5 * own


def _integral(S: Tensor, T: Tensor, nodes: int) -> Tensor:
    x, w = np.polynomial.legendre.leggauss(nodes)
    t = torch.from_numpy(0.5 * (x + 1)).to(S).reshape(-1, *([1] * S.ndim))
    E = T - S
    Y = coupling_difference(S + t * E, S.expand(nodes, *S.shape), S + t * E, t * E)
    weights = torch.from_numpy(0.5 * w).to(S).reshape(-1, *([1] * (S.ndim - 2)))
    return 0.5 * (weights * (Y * E).sum((-2, -1))).sum(0)


def _within(S: Tensor, E: Tensor, size: float) -> Tensor:
    """Where -size (S + I/2) <= E <= size (S + I/2), by Cholesky."""
    bound = size * (S + 0.5 * torch.eye(S.shape[-1], dtype=S.dtype, device=S.device))
    return cholesky_regular(bound - E)[1] & cholesky_regular(bound + E)[1]


class _Divergence(torch.autograd.Function):
    @staticmethod
    def forward(S: Tensor, T: Tensor) -> Tensor:
        rules = [(_within(S, T - S, size), nodes) for size, nodes in _RULES]
        # All by the cheapest rule that suits them: what one member takes does not depend on the others.
        value = torch.zeros_like(S[..., 0, 0]) if bool(rules[0][0].all()) else _direct(S, T)
        finer = torch.zeros_like(rules[0][0])
        for near, nodes in reversed(rules):
            here = near & ~finer
            if bool(here.any()):
                value = value.masked_scatter(here, _integral(S[here], T[here], nodes))
            finer = finer | near
        # D >= 0: what the direct form leaves below is rounding of its terms.
        return value.clamp_min(0.0)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        ctx.save_for_backward(*inputs)
        ctx.save_for_forward(*inputs)

    @staticmethod
    def vmap(info: Any, in_dims: tuple[Any, ...], *args: Tensor) -> tuple[Tensor, int]:
        return gaussian_divergence(*to_front(info, in_dims, *args)), 0

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Any) -> Any:
        S, T = ctx.saved_tensors
        g = grad_outputs[0][..., None, None]
        return (
            g * divergence_slope(S, T) if ctx.needs_input_grad[0] else None,
            g * divergence_slope(T, S) if ctx.needs_input_grad[1] else None,
        )

    @staticmethod
    @nested_jvp
    def jvp(ctx: Any, *tangents: Any) -> Any:
        return pair_jvp(divergence_slope, ctx.saved_tensors, tangents)
