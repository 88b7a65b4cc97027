"""Entropic optimal transport between weighted clouds for the bilinear cost -y^T A x: potentials, value, gradients."""

from __future__ import annotations

import warnings
from dataclasses import dataclass

import torch
from torch import Tensor

from ..errors import InvalidInput, NotConverged
from .sinkhorn_implicit import attach_potentials, dual_value, soft_average
from .sinkhorn_kernel import Problem
from .sinkhorn_solve import Solution, solve
from .sinkhorn_support import check_total_support

__all__ = ["SinkhornResult", "barycentre", "sinkhorn"]


@dataclass(frozen=True, eq=False)
class SinkhornResult:
    """Potentials of the optimal coupling pi = kappa a x b, kappa = exp((y^T A x + f + g) / eps).

    Attributes
    ----------
    f : Tensor (..., n)
        Potential of x, finite also where a_i = 0 (its soft-min extension); gauge sum a f = sum b g.
    g : Tensor (..., m)
        Potential of y. For equal measures and symmetric A, f = g.
    value : Tensor (...)
        OT = E_pi[-y^T A x] + eps KL(pi | a x b).
    error_x, error_y : Tensor (...)
        L1 errors of the marginals: sum_i a_i |sum_j kappa_ij b_j - 1|, sum_j b_j |sum_i a_i kappa_ij - 1|.
    mean_y : Tensor (..., n, d)
        E_pi[y | x_i].
    converged : bool
        Whether both errors are <= tol in every member of the batch.
    n_iter : int
        Sinkhorn iterations (sweeps of the kernel, both half-steps).
    """

    f: Tensor
    g: Tensor
    value: Tensor
    error_x: Tensor
    error_y: Tensor
    mean_y: Tensor
    converged: bool
    n_iter: int


def sinkhorn(
    x: Tensor,
    a: Tensor,
    y: Tensor,
    b: Tensor,
    A: Tensor,
    eps: float,
    *,
    tol: float = 1e-9,
    max_iter: int = 5_000,
    warm: tuple[Tensor, Tensor] | None = None,
    mask: Tensor | None = None,
    symmetric: bool = False,
) -> SinkhornResult:
    """Solve min over couplings pi of (a, b) of E_pi[-y^T A x] + eps KL(pi | a x b).

    Parameters
    ----------
    x, a : Tensor (..., n, d), (..., n)
        First cloud and its weights (zero weights allowed).
    y, b : Tensor (..., m, d), (..., m)
        Second cloud and its weights.
    A : Tensor (..., d, d)
        Bilinear form.
    eps : float
        Strength of the entropic regularisation, > 0.
    tol : float
        Bound on the L1 errors of both marginals. Below 100 ulp it is raised to that (float32: 1e-5).
    max_iter : int
        Sweeps at most.
    warm : (f, g), optional
        Potentials to start from. Default: those of the moment-matched Gaussians, in closed form.
    mask : Tensor (n, m) of bool, optional
        Pairs that may be coupled; must have total support.
    symmetric : bool
        The caller knows that (y, b) is (x, a) and A symmetric: one potential serves both sides.

    Returns
    -------
    SinkhornResult
        With gradients in x, a, y, b, A: potentials, mean and value to second order in reverse mode.

    Warns
    -----
    NotConverged
        With the errors reached.

    Raises
    ------
    InvalidInput
        eps <= 0, or a mask without total support.
    """
    if not eps > 0:
        raise InvalidInput(f"eps must be > 0, got {eps:g}")
    if mask is not None:
        check_total_support(mask, a, b)
    batch = torch.broadcast_shapes(x.shape[:-2], a.shape[:-1], y.shape[:-2], b.shape[:-1], A.shape[:-2])
    tol = max(tol, 100 * torch.finfo(x.dtype).eps)
    x, y = (t.expand(*batch, *t.shape[-2:]).reshape(-1, *t.shape[-2:]) for t in (x, y))
    a, b = (t.expand(*batch, t.shape[-1]).reshape(-1, t.shape[-1]) for t in (a, b))
    A = A.expand(*batch, *A.shape[-2:]).reshape(-1, *A.shape[-2:])
    problem, shift_x, shift_y, mean_y = _centred(x, a, y, b, A / eps, mask)
    with torch.no_grad():
        start = None
        if warm is not None:
            start = _flat(warm[0], a) / eps - shift_x, _flat(warm[1], b) / eps - shift_y
        solution = _solve_in_chunks(problem.detached(), tol, max_iter, start, symmetric)
    phi, psi, mean = solution.phi, solution.psi, solution.mean
    value = solution.value
    if torch.is_grad_enabled() and problem.requires_grad:
        first, (phi, psi) = attach_potentials(problem, phi, psi)
        value = dual_value(problem, *first)
        mean = soft_average(problem, psi, problem.y)
    f, g = _gauge(eps * (phi + shift_x), eps * (psi + shift_y), a, b)
    value = eps * (value + (a * shift_x).sum(-1) + (b * shift_y).sum(-1))
    converged = bool(((solution.error_x <= tol) & (solution.error_y <= tol)).all())
    if not converged:
        warnings.warn(
            f"Sinkhorn stopped after {solution.n_iter} iterations with marginal errors (L1) "
            f"{float(solution.error_x.max()):.2e} and {float(solution.error_y.max()):.2e}, above tol = {tol:.1e}",
            NotConverged,
            stacklevel=2,
        )
    return SinkhornResult(
        f.reshape(*batch, -1),
        g.reshape(*batch, -1),
        value.reshape(batch),
        solution.error_x.reshape(batch),
        solution.error_y.reshape(batch),
        (mean + mean_y).reshape(*batch, *mean.shape[-2:]),
        converged,
        solution.n_iter,
    )


def barycentre(result: SinkhornResult) -> Tensor:
    """E_pi[y | x_i] of a solved problem, (..., n, d)."""
    return result.mean_y


@dataclass(frozen=True, eq=False)
class _Finished:
    phi: Tensor
    psi: Tensor
    mean: Tensor
    value: Tensor
    error_x: Tensor
    error_y: Tensor
    n_iter: int


def _flat(t: Tensor, like: Tensor) -> Tensor:
    return t.detach().to(like).reshape(like.shape)


def _centred(
    x: Tensor, a: Tensor, y: Tensor, b: Tensor, B: Tensor, mask: Tensor | None
) -> tuple[Problem, Tensor, Tensor, Tensor]:
    """Centre both clouds: y^T B x changes by functions of x alone and of y alone, which the potentials absorb."""
    mean_x, mean_y = (a.unsqueeze(-2) @ x), (b.unsqueeze(-2) @ y)
    x, y = x - mean_x, y - mean_y
    Bx, Bm = x @ B.mT, mean_x @ B.mT
    half = 0.5 * (mean_y * Bm).sum(-1)
    shift_x = -(Bx @ mean_y.mT).squeeze(-1) - half
    shift_y = -(y @ Bm.mT).squeeze(-1) - half
    return Problem(Bx, a, y, b, mask), shift_x, shift_y, mean_y


def _gauge(f: Tensor, g: Tensor, a: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
    """Fix the free constant by sum a f = sum b g."""
    c = 0.5 * ((b * g).sum(-1, keepdim=True) - (a * f).sum(-1, keepdim=True))
    return f + c, g - c


def _solve_in_chunks(
    problem: Problem, tol: float, max_iter: int, start: tuple[Tensor, Tensor] | None, symmetric: bool
) -> _Finished:
    """Solve the batch in pieces whose kernels fit the memory budget together."""
    size = problem.chunk()
    parts = []
    for i in range(0, problem.x.shape[0], size):
        members = slice(i, i + size)
        warm = None if start is None else (start[0][members], start[1][members])
        parts.append(_finish(solve(problem.take(members), tol, max_iter, warm), symmetric))
    if len(parts) == 1:
        return parts[0]
    names = ("phi", "psi", "mean", "value", "error_x", "error_y")
    return _Finished(
        *(torch.cat([getattr(p, k) for p in parts]) for k in names), max(p.n_iter for p in parts)
    )


def _finish(solution: Solution, symmetric: bool) -> _Finished:
    """Measure both marginals of what is returned, in one more pass that also gives the conditional means."""
    kernel, p = solution.kernel, solution.kernel.problem
    phi, psi = _gauge(solution.phi, solution.psi, p.a, p.b)
    if symmetric:
        phi = psi = 0.5 * (phi + psi)
    u, v = (phi - kernel.phi).exp(), (psi - kernel.psi).exp()
    total, row, column = kernel.average(u, v, p.y)
    error_x = (p.a * (row - 1.0).abs()).sum(-1)
    error_y = (p.b * (column - 1.0).abs()).sum(-1)
    # at points of zero weight the potential is the soft-min of the others: one substitution
    phi = torch.where(p.a > 0, phi, phi - row.log())
    psi = torch.where(p.b > 0, psi, psi - column.log())
    value = (p.a * (phi - (row - 1.0))).sum(-1) + (p.b * psi).sum(-1)
    return _Finished(phi, psi, total / row.unsqueeze(-1), value, error_x, error_y, solution.n_iter)
