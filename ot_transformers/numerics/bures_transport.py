"""Parallel transport along Bures-Wasserstein geodesics: raw, batched."""

from __future__ import annotations

import torch
from torch import Tensor

from ..forward_mode import underlying
from ..spd import solve_lyapunov, symmetrise, transfer

__all__ = ["transport_along_map"]

_FIRST, _LAST = 8, 4096


def transport_along_map(S0: Tensor, T: Tensor, Y: Tensor, tol: float) -> tuple[Tensor, float]:
    """Transport the map tangent Y along t -> B S0 B, B = (1 - t) I + t T; the result and its relative error."""
    steps, last = _FIRST, _integrate(S0, T, Y, _FIRST)
    while True:
        steps *= 2
        new = _integrate(S0, T, Y, steps)
        # The method has order 4: a fifteenth of the change is the error, and taking it off leaves order 5.
        change = (new - last) / 15
        size = torch.linalg.matrix_norm(new.detach())
        ratio = torch.linalg.matrix_norm(change.detach()) / torch.where(size > 0, size, 1.0)
        # All members take the steps that the worst one needs, those of torch.vmap too.
        error = float(underlying(ratio).max())
        if error <= max(tol, 16 * torch.finfo(new.dtype).eps) or steps >= _LAST:
            return new + change, error
        last = new


def _integrate(S0: Tensor, T: Tensor, Y: Tensor, steps: int) -> Tensor:
    eye = torch.eye(T.shape[-1], dtype=T.dtype, device=T.device)
    X = T - eye

    def slope(t: float, Z: Tensor) -> Tensor:
        B = eye + t * X
        return solve_lyapunov(transfer(B, S0), -2.0 * symmetrise(Z @ X @ S0 @ B))

    h = 1.0 / steps
    for k in range(steps):
        t = k * h
        k1 = slope(t, Y)
        k2 = slope(t + 0.5 * h, Y + 0.5 * h * k1)
        k3 = slope(t + 0.5 * h, Y + 0.5 * h * k2)
        k4 = slope(t + h, Y + h * k3)
        Y = Y + h / 6 * (k1 + 2 * k2 + 2 * k3 + k4)
    return Y
