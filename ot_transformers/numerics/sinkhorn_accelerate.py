"""Two accelerations of Sinkhorn: Anderson mixing of the sweeps, and Newton steps of the semi-dual."""

from __future__ import annotations

import torch
from torch import Tensor

from .sinkhorn_kernel import Kernel, SecantPairs, SolverMemory

__all__ = ["Anderson", "newton_direction"]

_MEMORY = 6
_DIRECT_SIZE = 1024  # up to here the Newton system is factorised, above it is solved by conjugate gradients
_CG_STEPS = 200


class Anderson:
    """Anderson mixing of h -> h + rho(h), a history for each batch member, least squares weighted by b."""

    def __init__(self, b: Tensor, memory: SolverMemory | None = None) -> None:
        self._root = b.sqrt()
        self._last: tuple[Tensor, Tensor] | None = None
        pairs = None if memory is None else memory.pairs
        if pairs is None or not pairs.fit(b):
            pairs = SecantPairs.empty(b, _MEMORY if memory is None else 2 * _MEMORY)
            if memory is not None:
                memory.pairs = pairs
        self._pairs = pairs

    def forget_last(self) -> None:
        """The unknown is counted from elsewhere now: differences stay, the last point does not."""
        self._last = None

    def propose(self, h: Tensor, rho: Tensor, restart: Tensor) -> Tensor:
        """Return the next h from (h, rho); members in `restart` (B,) forget and take the plain step."""
        pairs, plain = self._pairs, h + rho
        if self._last is not None:
            drho = rho - self._last[1]
            pairs.add(h - self._last[0] + drho, self._root * drho)
        self._last = h, rho
        if bool(restart.any()):
            pairs.forget(restart)
        if not pairs.count:
            return plain
        steps, residuals = pairs.steps[:, : pairs.count], pairs.residuals[:, : pairs.count]
        gram = residuals @ residuals.mT
        square = torch.diagonal(gram, dim1=-2, dim2=-1)
        # zero rows drop out of the least squares: that is how one member forgets
        alive = square > 0
        scale = torch.where(alive, square, 1.0).rsqrt()
        eye = torch.eye(pairs.count, dtype=h.dtype, device=h.device)
        gram = scale.unsqueeze(-1) * gram * scale.unsqueeze(-2)
        gram = torch.where(eye > 0, 1.0 + 10 * torch.finfo(h.dtype).eps, gram)
        rhs = scale.unsqueeze(-1) * (residuals @ (self._root * rho).unsqueeze(-1))
        c = torch.linalg.solve_ex(gram, rhs)[0] * scale.unsqueeze(-1)
        mixed = plain - (c.mT @ steps).squeeze(-2)
        return torch.where(torch.isfinite(mixed), mixed, plain)


def newton_direction(kernel: Kernel, u: Tensor, v: Tensor, column: Tensor, damping: Tensor) -> Tensor:
    """Newton direction in h = log v of the semi-dual D(h) = sum_j b_j h_j + sum_i a_i log u_i(h), (B, m).

    Solves (diag(b c) - pi^T diag(1/a) pi + damping diag(b)) delta = b (1 - c), c the column sums.
    """
    p = kernel.problem
    rhs = 1.0 - column
    lam = damping.unsqueeze(-1)
    if p.b.shape[-1] > _DIRECT_SIZE:
        return _conjugate_gradients(kernel, u, v, column + lam, rhs)
    kappa = kernel.coupling(u, v)
    root = p.b.sqrt()
    half = kappa * root.unsqueeze(-2)  # (B, n, m)
    H = torch.diag_embed(column + lam) - half.mT @ (p.a.unsqueeze(-1) * half)
    # constants are the gauge: the rank-one term fixes them without touching anything else
    H = H + root.unsqueeze(-1) * root.unsqueeze(-2)
    solved, info = torch.linalg.solve_ex(H, (root * rhs).unsqueeze(-1))
    delta = solved.squeeze(-1)
    # zero-weight points follow the others: their own equation is one substitution
    delta = delta / root.clamp_min(torch.finfo(root.dtype).tiny)
    delta = torch.where(p.b > 0, delta, 0.0)
    failed = (info != 0).unsqueeze(-1) | ~torch.isfinite(delta).all(-1, keepdim=True)
    return torch.where(failed, rhs, delta)


def _conjugate_gradients(kernel: Kernel, u: Tensor, v: Tensor, diagonal: Tensor, rhs: Tensor) -> Tensor:
    """Inexact Newton: conjugate gradients in the inner product of b, relative residual <= 0.1, falling."""
    b = kernel.problem.b

    def dot(p: Tensor, q: Tensor) -> Tensor:
        return (b * p * q).sum(-1, keepdim=True)

    x, r = torch.zeros_like(rhs), rhs - dot(rhs, torch.ones_like(rhs))
    z, rr = r, dot(r, r)
    goal = rr * rr.sqrt().clamp_max(1e-2)
    for _ in range(_CG_STEPS):
        Az = diagonal * z - kernel.gram(u, v, z)
        alpha = rr / dot(z, Az).clamp_min(torch.finfo(b.dtype).tiny)
        alpha = torch.where(rr > goal, alpha, 0.0)
        x, r = x + alpha * z, r - alpha * Az
        new = dot(r, r)
        z, rr = torch.where(rr > goal, r + new / rr.clamp_min(torch.finfo(b.dtype).tiny) * z, z), new
        if bool((rr <= goal).all()):
            break
    return torch.where(torch.isfinite(x).all(-1, keepdim=True), x, rhs)
