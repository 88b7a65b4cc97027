"""The orthogonal polar factor, differentiable where singular values repeat, and the alignment of factors."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ..forward_mode import nested_jvp
from ..spd import eigh_psd, symmetrise

__all__ = ["align", "polar"]


def polar(M: Tensor) -> Tensor:
    """The orthogonal W (..., r, r) nearest to M: M = W H with H = (M^T M)^{1/2}.

    dW = W Omega with H Omega + Omega H = W^T dM - dM^T W, which divides by sums of singular values, where the
    derivative of an SVD divides by differences. On pairs of zero singular values W is not unique; there the
    derivative is 0.
    """
    W: Tensor = _Polar.apply(M)  # type: ignore[no-untyped-call]
    return W


def align(L0: Tensor, L1: Tensor) -> Tensor:
    """The factor L1 O (..., d, r) nearest to L0 among those of S1: X0 = L0 z, X1 = L1 O z is optimal.

    Factors of different width are padded with zero columns; the result has the width of the wider one.
    """
    r = max(L0.shape[-1], L1.shape[-1])
    A = torch.nn.functional.pad(L0, (0, r - L0.shape[-1]))
    B = torch.nn.functional.pad(L1, (0, r - L1.shape[-1]))
    turned = B @ polar(A.mT @ B).mT
    # Among nearly equal factors rounding in the polar factor of an ill-conditioned product can lose to O = I.
    worse = (A - turned).square().sum((-2, -1)) > (A - B).square().sum((-2, -1))
    return torch.where(worse[..., None, None], B, turned)


def _skew(X: Tensor) -> Tensor:
    return 0.5 * (X - X.mT)


def _skew_lyapunov(H: Tensor, X: Tensor) -> Tensor:
    """Skew Omega with H Omega + Omega H = X, for PSD H and skew X; 0 on ker H x ker H."""
    Omega: Tensor = _SkewLyapunov.apply(H, X)  # type: ignore[no-untyped-call]
    return Omega


class _Polar(torch.autograd.Function):
    generate_vmap_rule = True

    @staticmethod
    def forward(M: Tensor) -> Tensor:
        P, _, Qh = torch.linalg.svd(M)
        return P @ Qh

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        ctx.save_for_backward(inputs[0], output)
        ctx.save_for_forward(inputs[0], output)

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Any) -> Any:
        M, W = ctx.saved_tensors
        return 2.0 * W @ _skew_lyapunov(symmetrise(W.mT @ M), _skew(W.mT @ grad_outputs[0]))

    @staticmethod
    @nested_jvp
    def jvp(ctx: Any, *tangents: Any) -> Any:
        M, W = ctx.saved_tensors
        return W @ _skew_lyapunov(symmetrise(W.mT @ M), 2.0 * _skew(W.mT @ tangents[0]))


class _SkewLyapunov(torch.autograd.Function):
    generate_vmap_rule = True

    @staticmethod
    def forward(H: Tensor, X: Tensor) -> Tensor:
        h, U = eigh_psd(H)
        pair = h.unsqueeze(-1) + h.unsqueeze(-2)
        inverse = torch.where(pair > 0, 1 / torch.where(pair > 0, pair, 1.0), 0.0)
        return _skew(U @ (inverse * (U.mT @ X @ U)) @ U.mT)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        ctx.save_for_backward(inputs[0], output)
        ctx.save_for_forward(inputs[0], output)

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Any) -> Any:
        H, Omega = ctx.saved_tensors
        V = _skew_lyapunov(H, _skew(grad_outputs[0]))
        return V @ Omega + Omega @ V, V

    @staticmethod
    @nested_jvp
    def jvp(ctx: Any, *tangents: Any) -> Any:
        H, Omega = ctx.saved_tensors
        dH, dX = tangents
        right = torch.zeros_like(Omega) if dX is None else _skew(dX)
        if dH is not None:
            right = right - 2.0 * _skew(dH @ Omega)
        return _skew_lyapunov(H, right)
