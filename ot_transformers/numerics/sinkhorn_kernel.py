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

__all__ = [
    "KERNEL_BUDGET",
    "Kernel",
    "Problem",
    "SecantPairs",
    "SolverMemory",
    "augmented",
    "gauge",
    "log_half_sweeps",
    "matvec",
    "product",
    "scaling_limit",
    "thin",
    "vecmat",
]

KERNEL_BUDGET = 2**29
"""Bytes that a dense kernel may take (n = 8,192 in float64). Above, blocks are recomputed: memory O(n d)."""

_BLOCK_BYTES = 2**24  # large enough for the threads, small enough to stay in a shared cache between products


@dataclass
class SecantPairs:
    """Differences of an iteration h -> h + rho: of h + rho, and of rho in the weighted inner product."""

    steps: Tensor
    residuals: Tensor
    count: int = 0
    oldest: int = 0

    @classmethod
    def empty(cls, like: Tensor, size: int) -> SecantPairs:
        """Room for `size` pairs of vectors `like` (B, m)."""
        shape = like.shape[0], size, like.shape[1]
        return cls(like.new_empty(shape), like.new_empty(shape))

    def fit(self, like: Tensor) -> bool:
        """Whether the pairs belong to a problem of this shape."""
        s = self.steps
        return (s.shape[0], s.shape[2]) == like.shape and (s.dtype, s.device) == (like.dtype, like.device)

    def add(self, step: Tensor, residual: Tensor) -> None:
        """Remember a pair, in the place of the oldest if there is no other."""
        size = self.steps.shape[1]
        self.steps[:, self.oldest], self.residuals[:, self.oldest] = step, residual
        self.oldest, self.count = (self.oldest + 1) % size, min(self.count + 1, size)

    def forget(self, members: Tensor) -> None:
        """Zero pairs for these members of the batch."""
        self.steps[members], self.residuals[members] = 0.0, 0.0


@dataclass
class SolverMemory:
    """What a solve leaves to the next one along a flow: secant pairs, and the storage of the kernel.

    One kernel is alive at a time, so that all kernels of a solve share the storage; fresh pages would cost as
    much as filling them.
    """

    pairs: SecantPairs | None = None
    buffers: dict[str, Tensor] = field(default_factory=dict)

    def buffer(self, name: str, shape: tuple[int, ...], dtype: torch.dtype, like: Tensor) -> Tensor:
        """Storage of this shape and type on the device of `like`, the old one of that name if it fits."""
        old = self.buffers.get(name)
        if old is None or old.shape != shape or old.dtype != dtype or old.device != like.device:
            self.buffers[name] = old = torch.empty(shape, dtype=dtype, device=like.device)
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


def matvec(block: Tensor, v: Tensor) -> Tensor:
    """(B, k, m) x (B, m) -> (B, k); one member goes through the 2-D product, which is the fast one."""
    if block.shape[0] == 1:
        return torch.mv(block[0], v[0]).unsqueeze(0)
    return torch.matmul(block, v.unsqueeze(-1)).squeeze(-1)


def vecmat(u: Tensor, block: Tensor) -> Tensor:
    """(B, k) x (B, k, m) -> (B, m)."""
    if block.shape[0] == 1:
        return torch.mv(block[0].mT, u[0]).unsqueeze(0)
    return torch.matmul(u.unsqueeze(-2), block).squeeze(-2)


def product(left: Tensor, right: Tensor, out: Tensor) -> None:
    """(B, k, j) x (B, j, m) into place."""
    if out.shape[0] == 1:
        torch.mm(left[0], right[0], out=out[0])
    else:
        torch.matmul(left, right, out=out)


def thin(values: Tensor, block: Tensor) -> Tensor:
    """(B, j, m) x (B, m, k); one member and one row go through the products that are fast for them.

    With few rows j this is two to three times faster than the same product as (B, k, m) x (B, m, j).
    """
    if values.shape[-2] == 1:
        return vecmat(values[:, 0], block).unsqueeze(-2)
    return torch.mm(values[0], block[0]).unsqueeze(0) if block.shape[0] == 1 else values @ block


def augmented(problem: Problem, phi: Tensor, psi: Tensor) -> tuple[Tensor, Tensor]:
    """(B, n, d + 2) and (B, d + 2, m) whose product is the whole exponent, the potentials two coordinates more."""
    one_x, one_y = torch.ones_like(phi), torch.ones_like(psi)
    left = torch.cat([problem.x, phi.unsqueeze(-1), one_x.unsqueeze(-1)], -1)
    return left, torch.cat([problem.y, one_y.unsqueeze(-1), psi.unsqueeze(-1)], -1).mT.contiguous()


class Kernel:
    """K with potentials absorbed; `sweep` is one whole Sinkhorn iteration in one pass over K."""

    def __init__(self, problem: Problem, phi: Tensor, psi: Tensor) -> None:
        self.problem, self.phi, self.psi = problem, phi, psi
        self._left, self._right = augmented(problem, phi, psi)
        self._rows = problem.rows()
        self._has_zero = bool((problem.a == 0).any() or (problem.b == 0).any())
        self._dense: Tensor | None = None
        if problem.fits():
            self._dense = problem.memory.buffer("kernel", (*phi.shape, psi.shape[-1]), phi.dtype, phi)
            for rows in self._rows:
                self._fill(rows, self._dense[:, rows])

    def _fill(self, rows: slice, out: Tensor) -> Tensor:
        product(self._left[:, rows], self._right, out)
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
            u[:, rows] = 1.0 / matvec(block, bv)
            column += vecmat(p.a[:, rows] * u[:, rows], block)
        return u, v * column

    def gram(self, u: Tensor, v: Tensor, p: Tensor) -> Tensor:
        """P_y P_x p: the conditional expectations E[E[p(y) | x] | y] under the coupling u K v, (B, m)."""
        q = self.problem
        out = torch.zeros_like(p)
        bvp = q.b * v * p
        for rows in self._rows:
            block = self.block(rows)
            mean = u[:, rows] * matvec(block, bvp)
            out += vecmat(q.a[:, rows] * u[:, rows] * mean, block)
        return v * out

    def average(self, u: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """Sum_j kappa_ij b_j y_j (B, n, d) and the row sums (B, n) of kappa."""
        p = self.problem
        moments = torch.cat([p.y.mT, torch.ones_like(v).unsqueeze(-2)], -2)
        weighted = moments * (p.b * v).unsqueeze(-2)
        out = u.new_empty(u.shape[0], weighted.shape[-2], u.shape[1])
        for rows in self._rows:
            out[..., rows] = thin(weighted, self.block(rows).mT)
        out *= u.unsqueeze(-2)
        return out[:, :-1].mT, out[:, -1]

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
