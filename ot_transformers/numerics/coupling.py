"""The entropic coupling of Gaussians in closed form: conditional covariance and transport value.

With B = A / eps, the optimal coupling of x ~ N(0, S) and y ~ N(0, T) for the cost -y^T A x + eps KL is
Gaussian, and C = Cov(y | x) is the PSD solution of

    C + C (B S B^T) C = T.

Nothing here inverts S, T or B. C is a smooth function of S even where S is singular (S^(1/2) is not):
derivatives come from the equation itself. Differentiated, it is dC W + W^T dC = dT - C d(B S B^T) C with
W = I/2 + B S B^T C, whose eigenvalues are >= 1/2.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ..arrays import readable
from ..spd import eigh_psd, sqrt_psd, symmetrise

__all__ = ["coupling_covariance", "coupling_covariance_of_factor", "gaussian_self_transport"]

_SIGN_STEPS = 60


def coupling_covariance_of_factor(L: Tensor, B: Tensor, other: Tensor | None = None) -> Tensor:
    """C of the coupling of N(0, other other^T) with itself or with N(0, L L^T), from factors.

    C = 2 L (I + (I + 4 K K^T)^(1/2))^(-1) L^T,  K = L^T B L_x, with L_x = L if `other` is None.

    Parameters
    ----------
    L : Tensor (..., d, r)
        Factor of the covariance of y.
    B : Tensor (..., d, d)
        A / eps.
    other : Tensor (..., d, q), optional
        Factor of the covariance of x, where it is not the law of y.

    Returns
    -------
    Tensor (..., d, d)
        Cov(y | x); smooth in L and B to any order, at every rank.
    """
    K = L.mT @ B @ (L if other is None else other)
    eye = torch.eye(K.shape[-2], dtype=K.dtype, device=K.device)
    # The form (sqrt(1 + 4 w) - 1) / (2 w) loses every digit for small w and needs w > 0.
    half = sqrt_psd(eye + 4.0 * symmetrise(K @ K.mT))
    return 2.0 * symmetrise(L @ torch.linalg.solve(eye + half, L.mT))


def coupling_covariance(S: Tensor, B: Tensor) -> Tensor:
    """C = Cov(y | x) of the entropic self-coupling of N(m, S), from the covariance: C + C (B S B^T) C = S.

    Parameters
    ----------
    S : Tensor (..., d, d)
        PSD, of any rank.
    B : Tensor (..., d, d)
        A / eps, any matrix.

    Returns
    -------
    Tensor (..., d, d)
        C, differentiable in S and B to any order (reverse) and to second order (forward), at singular S too.

    References
    ----------
    Castin, Ablin, Carrillo, Peyré, arXiv 2501.18322, section 4 (Gaussian closure of Sinkhorn attention).
    """
    S, B = torch.broadcast_tensors(symmetrise(S), B)
    C: Tensor = _Coupling.apply(S, B)  # type: ignore[no-untyped-call]
    return C


def gaussian_self_transport(S: Tensor, B: Tensor) -> Tensor:
    """OT(N(0, S), N(0, S)) / eps for the cost -y^T A x, B = A / eps: sum_i (1 - h_i + log(h_i) / 2).

    h_i = (1 + sqrt(1 + 4 w_i)) / 2, w_i the eigenvalues of S^(1/2) B S B^T S^(1/2). A mean m adds -m^T B m.

    Returns
    -------
    Tensor (...)
        Differentiable in S and B to any order, at singular S too: dF/dS = -(N (I + C N)^(-1) + B^T C B) / 2
        with N = B S B^T, and dF/dB = -C B S.
    """
    S, B = torch.broadcast_tensors(symmetrise(S), B)
    value: Tensor = _SelfTransport.apply(S, B)  # type: ignore[no-untyped-call]
    return value


class _Coupling(torch.autograd.Function):
    """C(S, B); its derivatives solve the differentiated quadratic equation."""

    generate_vmap_rule = True

    @staticmethod
    def forward(S: Tensor, B: Tensor) -> Tensor:
        w, U = eigh_psd(S)
        return coupling_covariance_of_factor(U * w.sqrt().unsqueeze(-2), B)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        ctx.save_for_backward(*inputs, output)
        ctx.save_for_forward(*inputs, output)

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Any) -> Any:
        S, B, C = ctx.saved_tensors
        Z = _solve_sylvester(_linear_part(S, B, C).mT, symmetrise(grad_outputs[0]))
        CZC = symmetrise(C @ Z @ C)
        return Z - symmetrise(B.mT @ CZC @ B), -2.0 * CZC @ B @ S

    @staticmethod
    def jvp(ctx: Any, *grad_inputs: Any) -> Any:
        S, B, C = ctx.saved_tensors
        dS, dB = (torch.zeros_like(C) if t is None else t for t in grad_inputs)
        dS = symmetrise(dS)
        dN = symmetrise(B @ dS @ B.mT) + 2.0 * symmetrise(dB @ S @ B.mT)
        return _solve_sylvester(_linear_part(S, B, C), dS - symmetrise(C @ dN @ C))


class _SelfTransport(torch.autograd.Function):
    """The value by eigenvalues, its derivatives by the envelope theorem."""

    generate_vmap_rule = True

    @staticmethod
    def forward(S: Tensor, B: Tensor) -> Tensor:
        w, U = eigh_psd(S)
        L = U * w.sqrt().unsqueeze(-2)
        s = torch.linalg.svdvals(L.mT @ B @ L)
        # u = h - 1 without cancellation: 1 - h + log(h)/2 loses every digit for small w.
        u = 2.0 * s.square() / (1.0 + torch.hypot(torch.ones_like(s), 2.0 * s))
        return (0.5 * torch.log1p(u) - u).sum(-1)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        ctx.save_for_backward(*inputs)
        ctx.save_for_forward(*inputs)

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Any) -> Any:
        gS, gB = _self_transport_gradient(*ctx.saved_tensors)
        g = grad_outputs[0][..., None, None]
        return g * gS, g * gB

    @staticmethod
    def jvp(ctx: Any, *grad_inputs: Any) -> Any:
        gradient = _self_transport_gradient(*ctx.saved_tensors)
        parts = [(g * t).sum((-2, -1)) for g, t in zip(gradient, grad_inputs, strict=True) if t is not None]
        return torch.stack(parts).sum(0)


def _self_transport_gradient(S: Tensor, B: Tensor) -> tuple[Tensor, Tensor]:
    C = coupling_covariance(S, B)
    N = symmetrise(B @ S @ B.mT)
    eye = torch.eye(S.shape[-1], dtype=S.dtype, device=S.device)
    left = symmetrise(torch.linalg.solve(eye + N @ C, N))
    return -0.5 * (left + symmetrise(B.mT @ C @ B)), -C @ B @ S


def _linear_part(S: Tensor, B: Tensor, C: Tensor) -> Tensor:
    eye = torch.eye(S.shape[-1], dtype=S.dtype, device=S.device)
    return 0.5 * eye + symmetrise(B @ S @ B.mT) @ C


def _solve_sylvester(W: Tensor, R: Tensor) -> Tensor:
    Y: Tensor = _Sylvester.apply(*torch.broadcast_tensors(W, R))  # type: ignore[no-untyped-call]
    return Y


class _Sylvester(torch.autograd.Function):
    """Symmetric Y with Y W + W^T Y = R, for symmetric R and W with spectrum in the right half plane.

    By the Newton iteration of the matrix sign function (Roberts 1980), determinant-scaled: only inverses, so
    that it batches, and no eigenvectors of the non-normal W.
    """

    generate_vmap_rule = True

    @staticmethod
    def forward(W: Tensor, R: Tensor) -> Tensor:
        d = W.shape[-1]
        watch = readable(W) and readable(R)
        tol = 4 * d * torch.finfo(W.dtype).eps
        X, Y = W, R
        for _ in range(_SIGN_STEPS):
            inverse = torch.linalg.inv(X)
            # |det|^(1/d) brings the eigenvalues around 1, from where convergence is quadratic.
            c = torch.exp(torch.linalg.slogdet(X).logabsdet / d)[..., None, None]
            last = X
            X = 0.5 * (X / c + c * inverse)
            Y = 0.5 * (Y / c + c * inverse.mT @ Y @ inverse)
            if watch and bool(((X - last).abs().amax((-2, -1)) <= tol * X.abs().amax((-2, -1))).all()):
                break
        return symmetrise(0.5 * Y)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        ctx.save_for_backward(inputs[0], output)
        ctx.save_for_forward(inputs[0], output)

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Any) -> Any:
        W, Y = ctx.saved_tensors
        Z = _solve_sylvester(W.mT, symmetrise(grad_outputs[0]))
        return -2.0 * Y @ Z, Z

    @staticmethod
    def jvp(ctx: Any, *grad_inputs: Any) -> Any:
        W, Y = ctx.saved_tensors
        dW, dR = (torch.zeros_like(Y) if t is None else t for t in grad_inputs)
        return _solve_sylvester(W, symmetrise(dR) - 2.0 * symmetrise(Y @ dW))
