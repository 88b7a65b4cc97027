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

from ..arrays import readable
from ..forward_mode import nested_jvp, to_front
from ..spd import eigh_psd, solve_lyapunov, sqrt_psd, symmetrise
from .bures_singular import cholesky_regular, regular_part, singular_map

__all__ = ["bures_map_raw", "cholesky_regular", "map_derivative"]


def bures_map_raw(S0: Tensor, S1: Tensor) -> Tensor:
    """The optimal map T = T^T >= 0 from N(0, S0) to N(0, S1): T S0 T = S1 (..., d, d).

    Where S0 is regular, T = C^{-T} (C^T S1 C)^{1/2} C^{-1} with the Cholesky factor C of S0. Where it is
    singular, T is the map of least rank of `bures_singular`: mass of S1 that no map reaches is not
    transported. Derivatives are then along the matrices of the rank of S0.
    """
    S0, S1 = torch.broadcast_tensors(S0, S1)
    if readable(S0) and readable(S1) and not _extreme(S0) and not _extreme(S1):
        return _map(S0, S1)
    # Products of two covariances overflow from 1e154 on; powers of 4 change no digit.
    c0, c1 = _power_of_four(S0), _power_of_four(S1)
    return _map(S0 / c0, S1 / c1) * (c1.sqrt() / c0.sqrt())


def _map(S0: Tensor, S1: Tensor) -> Tensor:
    regular = regular_part(S0)
    if readable(regular) and bool((regular > 0).all()):
        T: Tensor = _Map.apply(S0, S1)  # type: ignore[no-untyped-call]
        return T
    eye = torch.eye(S0.shape[-1], dtype=S0.dtype, device=S0.device)
    T = _Map.apply(torch.where(regular > 0, S0, eye), S1)  # type: ignore[no-untyped-call]
    return torch.where(regular > 0, T, singular_map(S0, S1))


def _extreme(S: Tensor) -> bool:
    """Whether entries are so large or small that products of them are not safe."""
    size = S.detach().abs().amax((-2, -1))
    limit = torch.finfo(S.dtype).max ** 0.25
    return bool(((size > limit) | ((size < 1 / limit) & (size > 0))).any())


def _power_of_four(S: Tensor) -> Tensor:
    """A power of 4 near the largest entry (..., 1, 1); 1 for the zero matrix."""
    size = S.detach().abs().amax((-2, -1), keepdim=True)
    power = torch.exp2(2 * torch.round(torch.log2(torch.where(size > 0, size, 1.0)) / 2))
    return torch.where(size > 0, power, 1.0)


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
        return bures_map_raw(*to_front(info, in_dims, *args)), 0

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
        return map_derivative(*to_front(info, in_dims, *args)), 0

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
        return _adjoint(*to_front(info, in_dims, *args)), 0

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
