"""Functions of positive semi-definite (PSD) matrices, right at rank deficiency and repeated eigenvalues.

Everything here takes and returns tensors (..., d, d), trusts its caller (symmetric, finite, PSD up to
rounding) and is differentiable: reverse mode to any order, forward mode (`torch.func.jvp`) to second order,
also under `torch.vmap`. The derivatives never divide by eigenvalue differences: with R = S^(1/2), dR solves
R dR + dR R = dS, in the eigenbasis dR_ij = dS_ij / (r_i + r_j), which is harmless where eigenvalues repeat.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from .forward_mode import nested_jvp

__all__ = ["eigh_psd", "numerical_rank_psd", "solve_lyapunov", "sqrt_psd", "symmetrise", "transfer"]


def symmetrise(S: Tensor) -> Tensor:
    """Return (S + S^T) / 2."""
    return 0.5 * (S + S.mT)


def transfer(M: Tensor, S: Tensor) -> Tensor:
    """Return M S M^T, symmetrised: the covariance pushed by a linear map."""
    return symmetrise(M @ S @ M.mT)


def rank_tolerance(w: Tensor) -> Tensor:
    """Eigenvalues of a PSD matrix below d * ulp * largest are rounding, not rank; shape (..., 1)."""
    return w.abs().amax(-1, keepdim=True) * (w.shape[-1] * torch.finfo(w.dtype).eps)


def eigh_psd(S: Tensor) -> tuple[Tensor, Tensor]:
    """Eigenvalues (..., d), ascending with rounding-level ones clipped to 0, and eigenvectors (..., d, d)."""
    w, U = torch.linalg.eigh(symmetrise(S))
    return torch.where(w > rank_tolerance(w), w, torch.zeros_like(w)), U


def numerical_rank_psd(S: Tensor, tol: float | None = None) -> Tensor:
    """Count the eigenvalues above `tol` * largest (default: d ulp), shape (...)."""
    w = torch.linalg.eigvalsh(symmetrise(S.detach()))
    bound = rank_tolerance(w) if tol is None else tol * w.abs().amax(-1, keepdim=True)
    return (w > bound).sum(-1)


class _Sqrt(torch.autograd.Function):
    """R = S^(1/2), with dR from the Lyapunov equation R dR + dR R = dS."""

    generate_vmap_rule = True

    @staticmethod
    def forward(S: Tensor) -> Tensor:
        w, U = eigh_psd(S)
        return symmetrise((U * w.sqrt().unsqueeze(-2)) @ U.mT)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        ctx.save_for_backward(output)
        ctx.save_for_forward(output)

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Any) -> Any:
        (R,) = ctx.saved_tensors
        return solve_lyapunov(R, symmetrise(grad_outputs[0]))

    @staticmethod
    @nested_jvp
    def jvp(ctx: Any, *grad_inputs: Any) -> Any:
        (R,) = ctx.saved_tensors
        return solve_lyapunov(R, symmetrise(grad_inputs[0]))


class _Lyapunov(torch.autograd.Function):
    """Y with R Y + Y R = X for PSD R and symmetric X; on ker R x ker R the solution of least norm, 0."""

    generate_vmap_rule = True

    @staticmethod
    def forward(R: Tensor, X: Tensor) -> Tensor:
        r, U = eigh_psd(R)
        pair = r.unsqueeze(-1) + r.unsqueeze(-2)
        inverse = torch.where(pair > 0, 1 / torch.where(pair > 0, pair, 1.0), 0.0)
        return symmetrise(U @ (inverse * (U.mT @ X @ U)) @ U.mT)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        ctx.save_for_backward(inputs[0], output)
        ctx.save_for_forward(inputs[0], output)

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Any) -> Any:
        R, Y = ctx.saved_tensors
        g = solve_lyapunov(R, symmetrise(grad_outputs[0]))
        return -2.0 * symmetrise(g @ Y), g

    @staticmethod
    @nested_jvp
    def jvp(ctx: Any, *grad_inputs: Any) -> Any:
        R, Y = ctx.saved_tensors
        dR, dX = grad_inputs
        zero = torch.zeros_like(Y)
        dX = zero if dX is None else symmetrise(dX)
        dR = zero if dR is None else symmetrise(dR)
        return solve_lyapunov(R, dX - 2.0 * symmetrise(dR @ Y))


def sqrt_psd(S: Tensor) -> Tensor:
    """Return the PSD square root of PSD S, shape (..., d, d).

    On the null space of S the square root has no derivative; there the derivative used is 0 (tangents that
    leave the range of S at second order do not see it). Where a smooth function of S is wanted at singular S,
    differentiate through a factor or use a closed form instead.
    """
    R: Tensor = _Sqrt.apply(S)  # type: ignore[no-untyped-call]
    return R


def solve_lyapunov(R: Tensor, X: Tensor) -> Tensor:
    """Solve R Y + Y R = X for symmetric Y, R PSD and X symmetric, broadcasting batch dimensions."""
    R, X = torch.broadcast_tensors(R, X)
    Y: Tensor = _Lyapunov.apply(R, X)  # type: ignore[no-untyped-call]
    return Y
