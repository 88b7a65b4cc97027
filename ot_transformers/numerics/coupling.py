"""The entropic coupling of Gaussians in closed form: conditional covariance and transport value.

With B = A / eps, the optimal coupling of x ~ N(0, S) and y ~ N(0, T) for the cost -y^T A x + eps KL is
Gaussian, and C = Cov(y | x) is the PSD solution of

    C + C N C = T,  N = B S B^T.

Nothing here inverts S, T or B. C is a smooth function of T even where T is singular (T^(1/2) is not):
derivatives come from the equation itself, dC W + W^T dC = dT - C dN C with W = I/2 + N C, whose eigenvalues
are >= 1/2.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ..arrays import readable
from ..forward_mode import nested_jvp
from ..linalg import solve
from ..spd import eigh_psd, solve_lyapunov, symmetrise

__all__ = [
    "coupling_covariance",
    "coupling_difference",
    "coupling_covariance_of_factor",
    "gaussian_self_transport",
    "gaussian_transport",
    "quadratic_potential",
]

_SIGN_STEPS = 60


def coupling_covariance_of_factor(L: Tensor, B: Tensor) -> Tensor:
    """C = Cov(y | x) of the entropic self-coupling of N(m, L L^T), from the factor.

    C = 2 L (I + (I + 4 K K^T)^(1/2))^(-1) L^T,  K = L^T B L.

    Parameters
    ----------
    L : Tensor (..., d, r)
        Factor of the covariance, of any shape and rank.
    B : Tensor (..., d, d)
        A / eps, any matrix.

    Returns
    -------
    Tensor (..., d, d)
        C; smooth in L and B to any order, at every rank.
    """
    K = L.mT @ B @ L
    symmetric = readable(B) and bool((B.detach() == B.detach().mT).all())
    X: Tensor = _Contraction.apply(K, symmetric)  # type: ignore[no-untyped-call]
    return symmetrise(L @ X @ L.mT)


def coupling_covariance(S: Tensor, B: Tensor, T: Tensor | None = None) -> Tensor:
    """C = Cov(y | x) for x ~ N(0, S) and y ~ N(0, T), T = S by default: C + C (B S B^T) C = T.

    Parameters
    ----------
    S, T : Tensor (..., d, d)
        PSD, of any rank.
    B : Tensor (..., d, d)
        A / eps, any matrix.

    Returns
    -------
    Tensor (..., d, d)
        C, differentiable in S, T and B to any order (reverse) and to second order (forward), at singular
        S and T too.

    References
    ----------
    Castin, Ablin, Carrillo, Peyré, arXiv 2501.18322, section 4 (Gaussian closure of Sinkhorn attention).
    """
    N = symmetrise(B @ symmetrise(S) @ B.mT)
    return _coupling(symmetrise(S if T is None else T), N)


def coupling_difference(P: Tensor, Q: Tensor, N: Tensor, E: Tensor | None = None) -> Tensor:
    """Y = C(P; N) - C(Q; N) (..., d, d), C(P; N) the PSD solution of C + C N C = P, without cancellation.

    Y W + W^T Y = P - Q with W = I/2 + N (C(P; N) + C(Q; N)) / 2: linear in E = P - Q, which may be given where
    it is known better than by subtraction.
    """
    mean = 0.5 * (_coupling(P, N) + _coupling(Q, N))
    return _solve_sylvester(_linear_part(mean, N), symmetrise(P - Q) if E is None else E)


def gaussian_transport(S: Tensor, T: Tensor, B: Tensor) -> Tensor:
    """OT(N(0, S), N(0, T)) / eps for the cost -y^T A x, B = A / eps: sum_i (1 - h_i + log(h_i) / 2).

    h_i = (1 + sqrt(1 + 4 w_i)) / 2, w_i the eigenvalues of T^(1/2) B S B^T T^(1/2). Means add -m_y^T B m_x.

    Returns
    -------
    Tensor (...)
        Differentiable in S, T and B to any order, at singular S and T too.
    """
    T, N = torch.broadcast_tensors(symmetrise(T), symmetrise(B @ symmetrise(S) @ B.mT))
    value: Tensor = _Transport.apply(T, N)  # type: ignore[no-untyped-call]
    return value


def gaussian_self_transport(S: Tensor, B: Tensor) -> Tensor:
    """OT(N(0, S), N(0, S)) / eps for the cost -y^T A x, B = A / eps; a mean m adds -m^T B m."""
    return gaussian_transport(S, S, B)


def quadratic_potential(C: Tensor, N: Tensor) -> Tensor:
    """G = (I + N C)^(-1) N of g(y) = -eps y^T G y / 2 + const; it is C^(-1) - T^(-1) where T is regular."""
    eye = torch.eye(N.shape[-1], dtype=N.dtype, device=N.device)
    return symmetrise(solve(eye + N @ C, N))


def _coupling(T: Tensor, N: Tensor) -> Tensor:
    C: Tensor = _Coupling.apply(*torch.broadcast_tensors(T, N))  # type: ignore[no-untyped-call]
    return C


class _Coupling(torch.autograd.Function):
    """The PSD C with C + C N C = T; its derivatives solve the differentiated equation."""

    generate_vmap_rule = True

    @staticmethod
    def forward(T: Tensor, N: Tensor) -> Tensor:
        w, U = eigh_psd(T)
        L = U * w.sqrt().unsqueeze(-2)
        w, U = eigh_psd(L.mT @ N @ L)
        half = L @ U * (2.0 / (1.0 + (1.0 + 4.0 * w).sqrt())).sqrt().unsqueeze(-2)
        return symmetrise(half @ half.mT)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        ctx.save_for_backward(inputs[1], output)
        ctx.save_for_forward(inputs[1], output)

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Any) -> Any:
        N, C = ctx.saved_tensors
        Z = _solve_sylvester(_linear_part(C, N).mT, symmetrise(grad_outputs[0]))
        return Z, -symmetrise(C @ Z @ C)

    @staticmethod
    @nested_jvp
    def jvp(ctx: Any, *grad_inputs: Any) -> Any:
        N, C = ctx.saved_tensors
        dT, dN = (torch.zeros_like(C) if t is None else symmetrise(t) for t in grad_inputs)
        return _solve_sylvester(_linear_part(C, N), dT - symmetrise(C @ dN @ C))


class _Contraction(torch.autograd.Function):
    """X = 2 (I + (I + 4 K K^T)^(1/2))^(-1), the PSD solution of X + X K K^T X = I.

    From singular values of K: eigenvalues of K K^T lose twice the digits where a covariance is stretched. For a
    symmetric K they are the sizes of its eigenvalues, which cost less.
    With W = I/2 + K K^T X, which commutes with X, dX W + W dX = -X d(K K^T) X.
    """

    generate_vmap_rule = True

    @staticmethod
    def forward(K: Tensor, symmetric: bool) -> Tensor:
        if symmetric:
            s, U = torch.linalg.eigh(symmetrise(K))
        else:
            U, s, _ = torch.linalg.svd(K)
        # hypot does not overflow; (sqrt(1 + 4 w) - 1) / (2 w) would lose every digit for small w.
        return symmetrise((U * (2.0 / (1.0 + torch.hypot(torch.ones_like(s), 2.0 * s))).unsqueeze(-2)) @ U.mT)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        ctx.save_for_backward(inputs[0], output)
        ctx.save_for_forward(inputs[0], output)

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Any) -> Any:
        K, X = ctx.saved_tensors
        Z = solve_lyapunov(_commuting_part(K, X), symmetrise(grad_outputs[0]))
        return -2.0 * X @ Z @ X @ K, None

    @staticmethod
    @nested_jvp
    def jvp(ctx: Any, *grad_inputs: Any) -> Any:
        K, X = ctx.saved_tensors
        XK = X @ K
        return solve_lyapunov(_commuting_part(K, X), -2.0 * symmetrise(X @ grad_inputs[0] @ XK.mT))


def _commuting_part(K: Tensor, X: Tensor) -> Tensor:
    eye = torch.eye(X.shape[-1], dtype=X.dtype, device=X.device)
    return 0.5 * eye + symmetrise(K @ (K.mT @ X))


class _Transport(torch.autograd.Function):
    """The value by eigenvalues; its derivatives, by the envelope theorem, are -G / 2 in T and -C / 2 in N."""

    generate_vmap_rule = True

    @staticmethod
    def forward(T: Tensor, N: Tensor) -> Tensor:
        w, U = eigh_psd(T)
        L = U * w.sqrt().unsqueeze(-2)
        w, _ = eigh_psd(L.mT @ N @ L)
        # u = h - 1 without cancellation: 1 - h + log(h)/2 loses every digit for small w.
        u = 2.0 * w / (1.0 + (1.0 + 4.0 * w).sqrt())
        return (0.5 * torch.log1p(u) - u).sum(-1)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        ctx.save_for_backward(*inputs)
        ctx.save_for_forward(*inputs)

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Any) -> Any:
        gT, gN = _transport_gradient(*ctx.saved_tensors)
        g = grad_outputs[0][..., None, None]
        return g * gT, g * gN

    @staticmethod
    @nested_jvp
    def jvp(ctx: Any, *grad_inputs: Any) -> Any:
        T, N = ctx.saved_tensors
        gradient = _transport_gradient(T, N)
        dT, dN = (torch.zeros_like(T) if t is None else t for t in grad_inputs)
        return (gradient[0] * dT + gradient[1] * dN).sum((-2, -1))


def _transport_gradient(T: Tensor, N: Tensor) -> tuple[Tensor, Tensor]:
    C = _coupling(T, N)
    return -0.5 * quadratic_potential(C, N), -0.5 * C


def _linear_part(C: Tensor, N: Tensor) -> Tensor:
    return 0.5 * torch.eye(C.shape[-1], dtype=C.dtype, device=C.device) + N @ C


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
    @nested_jvp
    def jvp(ctx: Any, *grad_inputs: Any) -> Any:
        W, Y = ctx.saved_tensors
        dW, dR = (torch.zeros_like(Y) if t is None else t for t in grad_inputs)
        return _solve_sylvester(W, symmetrise(dR) - 2.0 * symmetrise(Y @ dW))
