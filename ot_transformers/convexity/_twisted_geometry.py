"""Geometry of the twisted metric on clouds: g_x(v, v) = sum_i w_i G_i |v_i|^2_{D^-1}, its geodesic equation.

With P_ik = w_k e^{x_i^T A x_k} / G_i (rows sum to 1), b_i = sum_k P_ik x_k and q_i = |v_i|^2_{D^-1}, the
Euler-Lagrange equation of g / 2 is solved for the acceleration of geodesics:

    a_i = 1/2 D A sum_k P_ik (q_i + q_k) x_k - (v_i^T A b_i + x_i^T A sum_k P_ik v_k) v_i.

Only P appears, so nothing overflows. A is symmetric. Tensors in and out; n x n matrices are formed.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from ..numerics.tilted import safe_log

__all__ = ["Kernel", "geodesic_acceleration", "kernel_at", "twisted_square"]


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
    P, b, _ = kernel
    q = (v * torch.linalg.solve(D, v.mT).mT).sum(-1, keepdim=True)
    pull = 0.5 * (q * b + P @ (q * x)) @ A @ D
    rate = (v * (b @ A)).sum(-1, keepdim=True) + (x @ A * (P @ v)).sum(-1, keepdim=True)
    return pull - rate * v


def twisted_square(v: Tensor, weights: Tensor, D: Tensor, log_g: Tensor) -> Tensor:
    """g_x(v, v), (...)."""
    q = (v * torch.linalg.solve(D, v.mT).mT).sum(-1)
    return (weights * torch.exp(log_g) * q).sum(-1)
