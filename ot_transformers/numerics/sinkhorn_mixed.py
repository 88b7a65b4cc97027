"""The Sinkhorn kernel in mixed precision: sums in float64 once, then float32 for what differs from them.

At base potentials (phi, psi) one pass over K gives, in float64, the row sums, the column sums and the means of y.
K itself is kept in float32. At other scalings v those sums change by K (b (v - 1)), and with v - 1 small, single
precision of the change is all that float64 of the sum asks for. The traffic halves, and halves again for a
symmetric problem, of which only the blocks right of the diagonal exist.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from .sinkhorn_kernel import KERNEL_BUDGET, Problem, augmented, gauge, matvec, product, thin, vecmat

__all__ = ["MixedKernel", "mixed_pays"]

_LEAST = 2**20  # entries of K up to which float64 stays in the cache as well, and is simpler
_BLOCK_BYTES = 2**23  # a block in float64 stays in a shared cache; smaller ones leave the threads idle
_UNIT = 2.0**-16  # 256 roundings: of K, of vectors, of sums (measured: 8 at n = 8,000, 200 for constant K)
_LIGHT = 1e-30  # weights below are for float64
_FLOOR = 1e-37  # below this float32 is subnormal, and slow; against row sums of 1 it is nothing
_DEEP = 85.0  # exponents below minus this are raised to the floor


def mixed_pays(problem: Problem, symmetric: bool) -> bool:
    """Whether K is large enough to gain, fits the budget in float32, and is free of masks and of tiny weights."""
    n, m = problem.x.shape[1], problem.y.shape[1]
    size = n * m * (2 if symmetric else 4)
    if problem.mask is not None or n * m < _LEAST or problem.x.shape[0] * size > KERNEL_BUDGET:
        return False
    # between two points of less weight an entry of K may be beyond float32
    return bool((problem.a > _LIGHT).all()) and (symmetric or bool((problem.b > _LIGHT).all()))


class MixedKernel:
    """K with potentials absorbed, `sweep` as in `Kernel`; of a symmetric problem half of K is stored."""

    def __init__(self, problem: Problem, phi: Tensor, psi: Tensor, symmetric: bool) -> None:
        p = problem
        if symmetric:
            phi, psi = gauge(phi, psi, p.a, p.b)
            phi = psi = 0.5 * (phi + psi)
        self.problem, self.phi, self.psi, self.symmetric = p, phi, psi, symmetric
        batch, n, m = phi.shape[0], phi.shape[1], psi.shape[1]
        left, right = augmented(p, phi, psi)
        bound = (p.x.norm(dim=-1).amax() * p.y.norm(dim=-1).amax()) + phi.abs().amax() + psi.abs().amax()
        deep = not float(bound) < _DEEP
        step = min(n, max(16, _BLOCK_BYTES // (batch * m * phi.element_size())))
        self._rows = [slice(i, min(i + step, n)) for i in range(0, n, step)]
        area = sum((r.stop - r.start) * (m - self._first(r)) for r in self._rows)
        self._store = p.memory.buffer("single", (batch, area), torch.float32, phi)
        scratch = p.memory.buffer("block", (batch, step * m), phi.dtype, phi)
        self._moments = torch.cat([p.y.mT, torch.ones_like(psi).unsqueeze(-2)], -2).contiguous()
        weighted = self._moments * p.b.unsqueeze(-2)
        self._sums = torch.zeros(batch, weighted.shape[-2], n, dtype=phi.dtype, device=phi.device)
        # Where the column sums are known: u = 1 / (K b), or, where K b serves both sides, u = 1.
        self._u, self._column = torch.ones_like(phi), torch.zeros_like(psi)
        for rows, single in self._blocks():
            k, first = rows.stop - rows.start, self._first(rows)
            block = scratch[:, : k * (m - first)].view(batch, k, m - first)
            product(left[:, rows], right[..., first:], block)
            block.exp_()
            self._sums[..., rows] += thin(weighted[..., first:], block.mT)
            if symmetric:
                self._sums[..., rows.stop :] += thin(weighted[..., rows], block[..., k:])
            else:
                self._u[:, rows] = 1.0 / self._sums[:, -1, rows]
                self._column += vecmat(p.a[:, rows] * self._u[:, rows], block)
            single.copy_(block)
            if deep:
                single.clamp_min_(_FLOOR)

    def _first(self, rows: slice) -> int:
        return int(rows.start) if self.symmetric else 0

    def _blocks(self) -> Iterator[tuple[slice, Tensor]]:
        m, start = self.psi.shape[1], 0
        for rows in self._rows:
            k, width = rows.stop - rows.start, m - self._first(rows)
            yield rows, self._store[:, start : start + k * width].view(-1, k, width)
            start += k * width

    def sweep(self, v: Tensor) -> tuple[Tensor, Tensor]:
        """u = 1 / (K (b v)) and the column sums v K^T (a u), which are 1 at the solution."""
        p, row = self.problem, self._sums[:, -1]
        change = p.b * (v - 1.0)
        at_base = not bool(change.any())  # the first sweep of every solve: nothing to multiply
        if self.symmetric:
            u = 1.0 / (row if at_base else row + self._symmetric_product(change.unsqueeze(-2)).squeeze(-2))
            change = p.a * (u - 1.0)
            return u, v * (row + self._symmetric_product(change.unsqueeze(-2)).squeeze(-2))
        if at_base:
            return self._u, self._column
        z = change.to(torch.float32)
        u, column = torch.empty_like(self.phi), self._column.clone()
        for rows, single in self._blocks():
            u[:, rows] = 1.0 / (row[:, rows] + matvec(single, z))
            column += vecmat((p.a[:, rows] * (u[:, rows] - self._u[:, rows])).to(z.dtype), single)
        return u, v * column

    def slack(self, u: Tensor, v: Tensor) -> Tensor:
        """What float32 may add to the L1 errors, (B,): _UNIT times the mass moved, seen from base or from here."""
        p, ratio = self.problem, self._u / u
        moved = torch.maximum((v - 1.0).abs(), (1.0 - 1.0 / v).abs())
        return _UNIT * (
            (p.b * moved).sum(-1)
            + (p.a * torch.maximum((1.0 - ratio).abs(), (1.0 / ratio - 1.0).abs())).sum(-1)
        )

    def average(self, u: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """Sum_j kappa_ij b_j y_j (B, n, d) and the row sums (B, n) of kappa."""
        change = self._moments * (self.problem.b * (v - 1.0)).unsqueeze(-2)
        if self.symmetric:
            out = self._sums + self._symmetric_product(change)
        else:
            z, out = change.to(torch.float32), self._sums.clone()
            for rows, single in self._blocks():
                out[..., rows] += thin(z, single.mT)
        out *= u.unsqueeze(-2)
        return out[:, :-1].mT, out[:, -1]

    def _symmetric_product(self, values: Tensor) -> Tensor:
        """Values K, (B, k, n), for the symmetric K of which the right half is stored."""
        z, out = values.to(torch.float32), torch.zeros_like(values)
        for rows, single in self._blocks():
            k = rows.stop - rows.start
            out[..., rows] += thin(z[..., rows.start :], single.mT)
            out[..., rows.stop :] += thin(z[..., rows], single[..., k:])
        return out
