"""Rough lengths of the shortest paths from one point to many: one batched minimisation.

The same polynomials, clocks and preconditioner as in `paths`, at one low degree and without a second attempt: what
orders candidates, not what is reported.
"""

from __future__ import annotations

import torch
from torch import Tensor

from .minimise import lbfgs
from .paths import LogSpeed, bent, path_matrices

__all__ = ["rough_lengths"]


def rough_lengths(
    log_speed: LogSpeed, start: Tensor, ends: Tensor, scale: Tensor, *, degree: int, max_iter: int
) -> tuple[Tensor, Tensor]:
    """log lengths (m,) and displacements (m, degree + 1, k) of paths from `start` (k,) to `ends` (m, k).

    `scale` (m, k) as in `shortest_path`; lengths are inf where a path leaves the domain, and upper bounds up to their
    quadrature (of 4 degree + 8 points, twice those of the minimisation).
    """
    m, k = ends.shape
    N = degree
    V, dV, w = path_matrices(N, 2 * N + 4, start)
    guess = bent(ends - start, N)
    log_w = torch.log(w)

    def log_g(offsets: Tensor, V: Tensor, dV: Tensor) -> Tensor:
        points, slopes = start + V @ offsets, dV @ offsets
        return log_speed(points.reshape(-1, k), slopes.reshape(-1, k)).reshape(m, -1)

    with torch.no_grad():
        first = log_g(guess, V, dV)
        clock = torch.where(torch.isfinite(first).all(-1, keepdim=True), 0.5 * first, 0.0)
        clock = clock - torch.logsumexp(log_w + clock, -1, keepdim=True)
        base = torch.logsumexp(log_w + first - clock, -1)
        base = torch.where(torch.isfinite(base), base, 0.0)
        rho = torch.exp(clock)
        rate = w * (rho + 1e-6 * rho.amax(-1, keepdim=True))
        K = dV.mT @ (rate.unsqueeze(-1) * dV)
        Rinv = torch.linalg.inv(torch.linalg.cholesky(K[:, 1:-1, 1:-1]).mT)

    def offsets_of(z: Tensor) -> Tensor:
        inner = guess[:, 1:-1] + (Rinv @ z.reshape(m, N - 1, k)) * scale.unsqueeze(1)
        return torch.cat([guess[:, :1], inner, guess[:, -1:]], 1)

    def evaluate(z: Tensor) -> tuple[Tensor, Tensor]:
        with torch.enable_grad():
            z = z.detach().requires_grad_()
            log_action = torch.logsumexp(log_w + log_g(offsets_of(z), V, dV) - clock, -1)
            value = torch.exp(log_action - base)
            (g,) = torch.autograd.grad(value.sum(), z)
        value = torch.where(torch.isfinite(value), value, torch.inf)
        return value.detach(), torch.nan_to_num(g)

    z0 = start.new_zeros(m, (N - 1) * k)
    found = lbfgs(evaluate, z0, scale=0.5, tolerance=start.new_full((m,), 6e-3), max_iter=max_iter)
    with torch.no_grad():
        offsets = offsets_of(found.y)
        V, dV, w = path_matrices(N, 4 * N + 8, start)
        logs = torch.logsumexp(torch.log(w) + 0.5 * log_g(offsets, V, dV), -1)
    return torch.where(torch.isnan(logs), torch.inf, logs), offsets
