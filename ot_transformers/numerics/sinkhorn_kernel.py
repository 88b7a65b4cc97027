"""The stabilised Sinkhorn kernel: potentials absorbed, products in blocks, dense or recomputed on the fly.

Everything is in units of eps: score s_ij = y_j^T A x_i / eps, potentials phi = f / eps and psi = g / eps, and

    K_ij = exp(s_ij + phi_i + psi_j),    kappa_ij = u_i K_ij v_j,

with scalings u, v that stay near 1 because (phi, psi) are re-absorbed before they leave the floating range.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor

from ..forward_mode import tracked

__all__ = ["KERNEL_BUDGET", "Kernel", "Problem", "SolverMemory", "gauge", "log_half_sweeps", "scaling_limit"]

KERNEL_BUDGET = 2**29
"""Bytes that a dense kernel may take (n = 8,192 in float64). Above, blocks are recomputed: memory O(n d)."""

_BLOCK_BYTES = 2**24  # large enough for the threads, small enough to stay in a shared cache between products


@dataclass
class SolverMemory:
    """What a solve leaves to the next one along a flow: secant pairs, and the storage of the kernel.

    One kernel is alive at a time, so that all kernels of a solve share the storage; fresh pages would cost as
    much as filling them.
    """

    dh: list[Tensor] = field(default_factory=list)
    drho: list[Tensor] = field(default_factory=list)
    storage: Tensor | None = None

    def pairs_fit(self, like: Tensor) -> bool:
        """Whether the pairs belong to a problem of this shape."""
        return all(t.shape == like.shape and t.dtype == like.dtype for t in self.dh)

    def matrix(self, shape: tuple[int, ...], like: Tensor) -> Tensor:
        """Storage of this shape, the old one if it fits."""
        old = self.storage
        if old is None or old.shape != shape or old.dtype != like.dtype or old.device != like.device:
            self.storage = old = like.new_empty(shape)
        return old


@dataclass(frozen=True, eq=False)
class Problem:
    """One batch of problems: x (B, n, d) holds (x_i - m_x)^T A^T / eps, y (B, m, d) holds y_j - m_y."""

    x: Tensor
    a: Tensor
    y: Tensor
    b: Tensor
    mask: Tensor | None = None
    memory: SolverMemory = field(default_factory=SolverMemory)

    def rows(self) -> list[slice]:
        """Slices of rows, small enough that a block stays in the cache."""
        per_row = self.y.shape[0] * self.y.shape[1] * self.y.element_size()
        n = self.x.shape[1]
        step = max(16, _BLOCK_BYTES // per_row)
        return [slice(i, min(i + step, n)) for i in range(0, n, step)]

    def fits(self) -> bool:
        """Whether the dense kernel is within the budget."""
        return self.x[..., 0].numel() * self.y.shape[1] * self.x.element_size() <= KERNEL_BUDGET

    def chunk(self) -> int:
        """Members of the batch whose dense kernels fit the budget together."""
        one = self.x.shape[1] * self.y.shape[1] * self.x.element_size()
        return max(1, KERNEL_BUDGET // one)

    @property
    def differentiable(self) -> bool:
        """Whether any of the tensors carries a derivative, of whichever mode."""
        return any(tracked(t) for t in (self.x, self.a, self.y, self.b))

    def detached(self) -> Problem:
        """The same numbers without their gradient history."""
        return Problem(self.x.detach(), self.a.detach(), self.y.detach(), self.b.detach(), self.mask)

    def take(self, members: slice) -> Problem:
        """Some members of the batch."""
        return Problem(
            self.x[members], self.a[members], self.y[members], self.b[members], self.mask, self.memory
        )

    def heated(self, factor: float) -> Problem:
        """The same problem at eps * factor."""
        return Problem(self.x / factor, self.a, self.y, self.b, self.mask, self.memory)


def scaling_limit(dtype: torch.dtype) -> float:
    """Largest |log u|, |log v| before re-absorption: what underflows in K is negligible."""
    return 100.0 if dtype == torch.float64 else 15.0


def _matvec(block: Tensor, v: Tensor) -> Tensor:
    """(B, k, m) x (B, m) -> (B, k); one member goes through the 2-D product, which is the fast one."""
    if block.shape[0] == 1:
        return torch.mv(block[0], v[0]).unsqueeze(0)
    return torch.matmul(block, v.unsqueeze(-1)).squeeze(-1)


def _vecmat(u: Tensor, block: Tensor) -> Tensor:
    """(B, k) x (B, k, m) -> (B, m)."""
    if block.shape[0] == 1:
        return torch.mv(block[0].mT, u[0]).unsqueeze(0)
    return torch.matmul(u.unsqueeze(-2), block).squeeze(-2)


class Kernel:
    """K with potentials absorbed; `sweep` is one whole Sinkhorn iteration in one pass over K."""

    def __init__(self, problem: Problem, phi: Tensor, psi: Tensor) -> None:
        self.problem, self.phi, self.psi = problem, phi, psi
        one_x, one_y = torch.ones_like(phi), torch.ones_like(psi)
        # The potentials ride along as two more coordinates: one product gives the whole exponent.
        self._left = torch.cat([problem.x, phi.unsqueeze(-1), one_x.unsqueeze(-1)], -1)
        self._right = torch.cat([problem.y, one_y.unsqueeze(-1), psi.unsqueeze(-1)], -1).mT.contiguous()
        self._rows = problem.rows()
        self._has_zero = bool((problem.a == 0).any() or (problem.b == 0).any())
        self._dense: Tensor | None = None
        if problem.fits():
            self._dense = problem.memory.matrix((*phi.shape, psi.shape[-1]), phi)
            for rows in self._rows:
                self._fill(rows, self._dense[:, rows])

    def _fill(self, rows: slice, out: Tensor) -> Tensor:
        if out.shape[0] == 1:
            torch.mm(self._left[0, rows], self._right[0], out=out[0])
        else:
            torch.matmul(self._left[:, rows], self._right, out=out)
        if self._has_zero:
            # a pair of two zero-weight points may have any exponent: inf * 0 would be NaN
            out.clamp_(max=7.0 * scaling_limit(out.dtype) if out.dtype == torch.float64 else 80.0)
        out.exp_()
        if self.problem.mask is not None:
            out.masked_fill_(~self.problem.mask[rows], 0.0)
        return out

    def block(self, rows: slice) -> Tensor:
        """K at some rows, (B, k, m)."""
        if self._dense is not None:
            return self._dense[:, rows]
        k = rows.stop - rows.start
        return self._fill(rows, self.phi.new_empty(self.phi.shape[0], k, self.psi.shape[-1]))

    def sweep(self, v: Tensor) -> tuple[Tensor, Tensor]:
        """u = 1 / (K (b v)) and the column sums v K^T (a u), which are 1 at the solution."""
        p = self.problem
        bv = p.b * v
        u, column = torch.empty_like(self.phi), torch.zeros_like(self.psi)
        for rows in self._rows:
            block = self.block(rows)
            u[:, rows] = 1.0 / _matvec(block, bv)
            column += _vecmat(p.a[:, rows] * u[:, rows], block)
        return u, v * column

    def gram(self, u: Tensor, v: Tensor, p: Tensor) -> Tensor:
        """P_y P_x p: the conditional expectations E[E[p(y) | x] | y] under the coupling u K v, (B, m)."""
        q = self.problem
        out = torch.zeros_like(p)
        bvp = q.b * v * p
        for rows in self._rows:
            block = self.block(rows)
            mean = u[:, rows] * _matvec(block, bvp)
            out += _vecmat(q.a[:, rows] * u[:, rows] * mean, block)
        return v * out

    def average(self, u: Tensor, v: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        """Sum_j kappa_ij b_j values_j (B, n, k) and the row sums (B, n) of kappa."""
        p = self.problem
        weighted = torch.cat([values, torch.ones_like(v).unsqueeze(-1)], -1) * (p.b * v).unsqueeze(-1)
        out = values.new_empty(*u.shape, weighted.shape[-1])
        for rows in self._rows:
            block = self.block(rows)
            if block.shape[0] == 1:
                torch.mm(block[0], weighted[0], out=out[0, rows])
            else:
                out[:, rows] = block @ weighted
        out *= u.unsqueeze(-1)
        return out[..., :-1], out[..., -1]

    def coupling(self, u: Tensor, v: Tensor) -> Tensor:
        """The dense matrix kappa (B, n, m) (small problems only)."""
        blocks = [self.block(rows) for rows in self._rows]
        return u.unsqueeze(-1) * torch.cat(blocks, 1) * v.unsqueeze(-2)


def log_half_sweeps(problem: Problem, psi: Tensor) -> tuple[Tensor, Tensor]:
    """One Sinkhorn iteration in the log domain, streaming: (phi, psi) from psi; finite whatever eps is."""
    p = problem
    log_a, log_b = p.a.log(), p.b.log()
    phi = torch.empty_like(p.a)
    # running log-sum-exp over row blocks for the columns
    top = torch.full_like(psi, -torch.inf)
    total = torch.zeros_like(psi)
    right = p.y.mT
    for rows in problem.rows():
        s = p.x[:, rows] @ right
        if p.mask is not None:
            s = s.masked_fill(~p.mask[rows], -torch.inf)
        phi[:, rows] = -torch.logsumexp(s + (log_b + psi).unsqueeze(-2), -1)
        s += (log_a[:, rows] + phi[:, rows]).unsqueeze(-1)
        new_top = torch.maximum(top, s.amax(-2))
        safe = torch.where(new_top == -torch.inf, torch.zeros_like(new_top), new_top)
        total = total * (top - safe).exp() + (s - safe.unsqueeze(-2)).exp().sum(-2)
        top = new_top
    return phi, -(top + total.log())


def gauge(f: Tensor, g: Tensor, a: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
    """Fix the free constant by sum a f = sum b g."""
    c = 0.5 * ((b * g).sum(-1, keepdim=True) - (a * f).sum(-1, keepdim=True))
    return f + c, g - c
