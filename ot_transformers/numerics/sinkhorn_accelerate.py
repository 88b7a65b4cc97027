"""Two accelerations of Sinkhorn: Anderson mixing of the sweeps, and Newton steps of the semi-dual."""

from __future__ import annotations

import torch
from torch import Tensor

from .sinkhorn_kernel import Kernel, SolverMemory

__all__ = ["Anderson", "newton_direction"]

_MEMORY = 6
_DIRECT_SIZE = 1024  # up to here the Newton system is factorised, above it is solved by conjugate gradients
_CG_STEPS = 200


class Anderson:
    """Anderson mixing of h -> h + rho(h), a history for each batch member, least squares weighted by b."""

    def __init__(self, b: Tensor, memory: SolverMemory | None = None) -> None:
        self._root = b.sqrt()
        self._last: tuple[Tensor, Tensor] | None = None
        self._pairs = memory if memory is not None and memory.pairs_fit(b) else SolverMemory()
        self._memory = _MEMORY if memory is None else 2 * _MEMORY

    def propose(self, h: Tensor, rho: Tensor, restart: Tensor) -> Tensor:
        """Return the next h from (h, rho); members in `restart` (B,) forget and take the plain step."""
        keep = (~restart).unsqueeze(-1)
        if self._last is not None:
            # zero columns drop out of the least squares: that is how one member forgets
            new, size = (h - self._last[0], rho - self._last[1]), self._memory
            pairs = self._pairs
            pairs.dh[:] = [torch.where(keep, t, 0.0) for t in (*pairs.dh, new[0])][-size:]
            pairs.drho[:] = [torch.where(keep, t, 0.0) for t in (*pairs.drho, new[1])][-size:]
        self._last = h, rho
        plain = h + rho
        if not self._pairs.dh:
            return plain
        dR, dH = torch.stack(self._pairs.drho, -1), torch.stack(self._pairs.dh, -1)
        R = self._root.unsqueeze(-1) * dR
        norm = R.norm(dim=-2, keepdim=True)
        scale = torch.where(norm > 0, 1.0 / norm.clamp_min(torch.finfo(h.dtype).tiny), 0.0)
        R = R * scale
        gram = R.mT @ R
        ridge = 10 * torch.finfo(h.dtype).eps + (scale == 0).to(h.dtype)
        gram = gram + torch.diag_embed(ridge.squeeze(-2))
        c = torch.linalg.solve(gram, R.mT @ (self._root * rho).unsqueeze(-1)) * scale.mT
        mixed = plain - ((dH + dR) @ c).squeeze(-1)
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
