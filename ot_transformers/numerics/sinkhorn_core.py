"""The solver behind one opaque function: tensors in units of eps in, numbers out, batches in pieces.

Autograd and `torch.func` see a constant (derivatives are attached afterwards, in `sinkhorn_implicit`), and
`torch.vmap` becomes the batch dimension that the solver has anyway.
"""

from __future__ import annotations

import warnings
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from ..errors import NotConverged
from .sinkhorn_kernel import Kernel, Problem, SolverMemory, gauge, scaling_limit
from .sinkhorn_solve import Solution, solve, spread

__all__ = ["Job", "run"]


@dataclass
class Job:
    """What to do, and, filled in by the run, how it went."""

    tol: float
    max_iter: int
    symmetric: bool
    mask: Tensor | None
    memory: SolverMemory | None = None
    converged: bool = field(default=False, init=False)
    n_iter: int = field(default=0, init=False)
    errors: tuple[float, float] = field(default=(float("nan"), float("nan")), init=False)


def run(job: Job, problem: Problem, start: tuple[Tensor, Tensor] | None) -> tuple[Tensor, ...]:
    """Solve: (phi, psi, E[y | x], value, excess mass, error_x, error_y); may warn `NotConverged`."""
    p = problem.detached()
    phi, psi = (None, None) if start is None else start
    out: tuple[Tensor, ...] = _Solve.apply(job, p.x, p.a, p.y, p.b, phi, psi)  # type: ignore[no-untyped-call]
    if not job.converged:
        warnings.warn(
            f"Sinkhorn stopped after {job.n_iter} iterations with marginal errors (L1) "
            f"{job.errors[0]:.2e} and {job.errors[1]:.2e}, above tol = {job.tol:.1e}",
            NotConverged,
            stacklevel=3,
        )
    return out


class _Solve(torch.autograd.Function):
    """The numbers, without derivatives; vmapped dimensions join the batch."""

    @staticmethod
    def forward(job: Job, *tensors: Tensor | None) -> tuple[Tensor, ...]:
        x, a, y, b, phi, psi = tensors
        assert x is not None
        assert a is not None
        assert y is not None
        assert b is not None
        start = None if phi is None or psi is None else (phi, psi)
        return _solve_in_chunks(job, Problem(x, a, y, b, job.mask, job.memory or SolverMemory()), start)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        ctx.mark_non_differentiable(*output)

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Any) -> Any:
        return (None,) * 7

    @staticmethod
    def jvp(ctx: Any, *grad_inputs: Any) -> Any:
        return (None,) * 6

    @staticmethod
    def vmap(info: Any, in_dims: tuple[int | None, ...], job: Job, *tensors: Tensor | None) -> Any:
        size = info.batch_size
        flat: list[Tensor | None] = []
        for t, dim in zip(tensors, in_dims[1:], strict=True):
            if t is not None:
                t = t.expand(size, *t.shape) if dim is None else t.movedim(dim, 0)
                t = t.reshape(-1, *t.shape[2:])
            flat.append(t)
        out = _Solve.apply(job, *flat)  # type: ignore[no-untyped-call]
        return tuple(t.reshape(size, -1, *t.shape[1:]) for t in out), (0,) * len(out)


def _solve_in_chunks(job: Job, problem: Problem, start: tuple[Tensor, Tensor] | None) -> tuple[Tensor, ...]:
    """Solve the batch in pieces whose kernels fit the memory budget together."""
    job.tol = max(job.tol, 2 * torch.finfo(problem.x.dtype).eps * max(50.0, spread(problem)))
    size = problem.chunk()
    parts, job.n_iter = [], 0
    for i in range(0, problem.x.shape[0], size):
        members = slice(i, i + size)
        warm = None if start is None else (start[0][members], start[1][members])
        solution = solve(problem.take(members), job.tol, job.max_iter, warm, job.memory, job.symmetric)
        job.n_iter = max(job.n_iter, solution.n_iter)
        parts.append(_finish(solution, job.symmetric))
    out = tuple(torch.cat(t) if len(t) > 1 else t[0] for t in zip(*parts, strict=True))
    # written so that a NaN is not converged
    job.converged = bool(((out[-2] <= job.tol) & (out[-1] <= job.tol)).all())
    job.errors = float(out[-2].max()), float(out[-1].max())
    return out


def _finish(solution: Solution, symmetric: bool) -> tuple[Tensor, ...]:
    """Measure both marginals of what is returned, in one more pass that also gives the conditional means."""
    kernel, p = solution.kernel, solution.kernel.problem
    phi, psi = gauge(solution.phi, solution.psi, p.a, p.b)
    u, v = solution.u, solution.v
    if symmetric:
        # The antisymmetric part is of the size of the error, which averaging halves on either side, except
        # where the coupling falls apart (small eps): there it is a gauge of each part, and may be large.
        half = 0.5 * (phi - psi)
        u, v, phi, psi = u * (-half).exp(), v * half.exp(), phi - half, psi + half
        if not bool((half.abs() < scaling_limit(half.dtype)).all()):
            kernel, u, v = Kernel(p, phi, psi), torch.ones_like(u), torch.ones_like(v)
    total, row = kernel.average(u, v)
    # with f = g and a symmetric score the two marginals are the same numbers
    column = row if symmetric else solution.column
    error_x = (p.a * (row - 1.0).abs()).sum(-1)
    error_y = (p.b * (column - 1.0).abs()).sum(-1)
    if solution.slack is not None:
        error_x, error_y = error_x + solution.slack, error_y + solution.slack
    # at points of zero weight the potential is the soft-min of the others: one substitution
    phi = torch.where(p.a > 0, phi, phi - row.log())
    psi = torch.where(p.b > 0, psi, psi - column.log())
    excess = (p.a * (row - 1.0)).sum(-1)
    value = (p.a * (phi - (row - 1.0))).sum(-1) + (p.b * psi).sum(-1)
    return phi, psi, total / row.unsqueeze(-1), value, excess, error_x, error_y
