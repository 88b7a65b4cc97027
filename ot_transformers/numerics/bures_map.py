"""The optimal map T(S0, S1) between centred Gaussians, with derivatives of every order in every mode.

T = T^T >= 0 solves T S0 T = S1, so its differential solves

    dT S0 T + T S0 dT = dS1 - T dS0 T,

a Lyapunov equation in the coordinates of a factor of S0: repeated eigenvalues are harmless. The solution
operator Y(S0, T, R) and its adjoint W(S0, T, Z) are differentiated by the same two operators.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ..forward_mode import nested_jvp
from ..spd import eigh_psd, solve_lyapunov, sqrt_psd, symmetrise

__all__ = ["bures_map_raw", "cholesky_regular", "map_derivative"]


def bures_map_raw(S0: Tensor, S1: Tensor) -> Tensor:
    """The optimal map T = T^T >= 0 from N(0, S0) to N(0, S1): T S0 T = S1 (..., d, d).

    Where S0 is regular, T = C^{-T} (C^T S1 C)^{1/2} C^{-1} with the Cholesky factor C of S0. Where it is
    singular, T acts on the range of S0 and is 0 on its complement: T = R^+ (R S1 R)^{1/2} R^+, R = S0^{1/2}
    and R^+ its inverse on the range; mass of S1 outside what T can reach is not transported. Derivatives are
    along the range too.
    """
    S0, S1 = torch.broadcast_tensors(S0, S1)
    T: Tensor = _Map.apply(S0, S1)  # type: ignore[no-untyped-call]
    return T


def map_derivative(S0: Tensor, T: Tensor, R: Tensor) -> Tensor:
    """Symmetric Y with Y S0 T + T S0 Y = R for the map T at S0 and symmetric R (on the range of S0)."""
    S0, T, R = torch.broadcast_tensors(S0, T, R)
    Y: Tensor = _Solve.apply(S0, T, R)  # type: ignore[no-untyped-call]
    return Y


def _adjoint(S0: Tensor, T: Tensor, Z: Tensor) -> Tensor:
    """Symmetric W with W T S0 + S0 T W = Z: the adjoint of `map_derivative` in R."""
    S0, T, Z = torch.broadcast_tensors(S0, T, Z)
    W: Tensor = _Adjoint.apply(S0, T, Z)  # type: ignore[no-untyped-call]
    return W


def cholesky_regular(S: Tensor) -> tuple[Tensor, Tensor]:
    """Cholesky factor, and where its pivots are all above rounding of the largest diagonal entry."""
    L, info = torch.linalg.cholesky_ex(S)
    pivot = L.diagonal(dim1=-2, dim2=-1).amin(-1).square()
    scale = S.diagonal(dim1=-2, dim2=-1).amax(-1)
    # A NaN pivot (failed factorisation) compares False.
    return L, (info == 0) & (pivot > 16 * S.shape[-1] * torch.finfo(S.dtype).eps * scale)


def _coordinates(S0: Tensor) -> tuple[Tensor, Tensor]:
    """C with C C^T = S0, and its inverse (on the range where S0 is singular)."""
    C, regular = cholesky_regular(S0)
    eye = torch.eye(S0.shape[-1], dtype=S0.dtype, device=S0.device)
    if bool(regular.all()):
        return C, torch.linalg.solve_triangular(C, eye.expand(C.shape), upper=False)
    w, U = eigh_psd(S0)
    root = w.sqrt()
    inverse = torch.where(root > 0, 1 / torch.where(root > 0, root, 1.0), 0.0)
    mask = regular[..., None, None]
    C = torch.where(mask, C, eye)
    lower = torch.linalg.solve_triangular(C, eye.expand(C.shape), upper=False)
    return (
        torch.where(mask, C, U * root.unsqueeze(-2)),
        torch.where(mask, lower, inverse.unsqueeze(-1) * U.mT),
    )


def _batched(info: Any, in_dims: tuple[Any, ...], *tensors: Tensor) -> list[Tensor]:
    """Bring the dimension that `torch.vmap` runs over to the front of every argument."""
    return [
        t.unsqueeze(0).expand(info.batch_size, *t.shape) if dim is None else t.movedim(dim, 0)
        for t, dim in zip(tensors, in_dims, strict=True)
    ]


def _plus(*terms: Tensor | None) -> Tensor:
    """Sum of the terms that are there (absent tangents are None)."""
    return torch.stack([t for t in terms if t is not None]).sum(0)


class _Map(torch.autograd.Function):
    @staticmethod
    def forward(S0: Tensor, S1: Tensor) -> Tensor:
        C, Ci = _coordinates(S0)
        return symmetrise(Ci.mT @ sqrt_psd(symmetrise(C.mT @ S1 @ C)) @ Ci)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        ctx.save_for_backward(inputs[0], output)
        ctx.save_for_forward(inputs[0], output)

    @staticmethod
    def vmap(info: Any, in_dims: tuple[Any, ...], *args: Tensor) -> tuple[Tensor, int]:
        return bures_map_raw(*_batched(info, in_dims, *args)), 0

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Any) -> Any:
        S0, T = ctx.saved_tensors
        W = _adjoint(S0, T, symmetrise(grad_outputs[0]))
        return -symmetrise(T @ W @ T), W

    @staticmethod
    @nested_jvp
    def jvp(ctx: Any, *tangents: Any) -> Any:
        S0, T = ctx.saved_tensors
        dS0, dS1 = tangents
        moved = None if dS0 is None else -T @ symmetrise(dS0) @ T
        return map_derivative(S0, T, _plus(moved, None if dS1 is None else symmetrise(dS1)))


class _Solve(torch.autograd.Function):
    @staticmethod
    def forward(S0: Tensor, T: Tensor, R: Tensor) -> Tensor:
        C, Ci = _coordinates(S0)
        Y = solve_lyapunov(symmetrise(C.mT @ T @ C), symmetrise(C.mT @ R @ C))
        return symmetrise(Ci.mT @ Y @ Ci)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        ctx.save_for_backward(inputs[0], inputs[1], output)
        ctx.save_for_forward(inputs[0], inputs[1], output)

    @staticmethod
    def vmap(info: Any, in_dims: tuple[Any, ...], *args: Tensor) -> tuple[Tensor, int]:
        return map_derivative(*_batched(info, in_dims, *args)), 0

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Any) -> Any:
        S0, T, Y = ctx.saved_tensors
        W = _adjoint(S0, T, symmetrise(grad_outputs[0]))
        return -2.0 * symmetrise(Y @ W @ T), -2.0 * symmetrise(S0 @ Y @ W), W

    @staticmethod
    @nested_jvp
    def jvp(ctx: Any, *tangents: Any) -> Any:
        S0, T, Y = ctx.saved_tensors
        dS0, dT, dR = tangents
        first = None if dS0 is None else -2.0 * symmetrise(Y @ dS0 @ T)
        second = None if dT is None else -2.0 * symmetrise(Y @ S0 @ dT)
        return map_derivative(S0, T, _plus(first, second, None if dR is None else symmetrise(dR)))


class _Adjoint(torch.autograd.Function):
    @staticmethod
    def forward(S0: Tensor, T: Tensor, Z: Tensor) -> Tensor:
        C, Ci = _coordinates(S0)
        W = solve_lyapunov(symmetrise(C.mT @ T @ C), symmetrise(Ci @ Z @ Ci.mT))
        return symmetrise(C @ W @ C.mT)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        ctx.save_for_backward(inputs[0], inputs[1], output)
        ctx.save_for_forward(inputs[0], inputs[1], output)

    @staticmethod
    def vmap(info: Any, in_dims: tuple[Any, ...], *args: Tensor) -> tuple[Tensor, int]:
        return _adjoint(*_batched(info, in_dims, *args)), 0

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Any) -> Any:
        S0, T, W = ctx.saved_tensors
        V = map_derivative(S0, T, symmetrise(grad_outputs[0]))
        return -2.0 * symmetrise(T @ W @ V), -2.0 * symmetrise(W @ V @ S0), V

    @staticmethod
    @nested_jvp
    def jvp(ctx: Any, *tangents: Any) -> Any:
        S0, T, W = ctx.saved_tensors
        dS0, dT, dZ = tangents
        first = None if dT is None else -2.0 * symmetrise(W @ dT @ S0)
        second = None if dS0 is None else -2.0 * symmetrise(W @ T @ dS0)
        return _adjoint(S0, T, _plus(first, second, None if dZ is None else symmetrise(dZ)))
