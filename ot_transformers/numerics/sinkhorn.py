"""Entropic optimal transport between weighted clouds for the bilinear cost -y^T A x."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from ..errors import InvalidInput
from .sinkhorn_core import Job, run
from .sinkhorn_implicit import attach_potentials, dual_value, soft_average
from .sinkhorn_kernel import Problem, SolverMemory, gauge
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
    excess : Tensor (...)
        The mass of kappa a x b beyond 1: OT is sum a f + sum b g - eps excess, to second order in the errors.
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
    excess: Tensor
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
    memory: SolverMemory | None = None,
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
        Bound on the L1 errors of both marginals; raised to 2 ulp max |y^T A x| / eps, the rounding of the
        exponents, where that is larger. float32 input is solved in float64 and rounded at the end.
    max_iter : int
        Sweeps at most.
    warm : (f, g), optional
        Potentials to start from. Default: those of the moment-matched Gaussians, in closed form.
    mask : Tensor (n, m) of bool, optional
        Pairs that may be coupled; must have total support.
    symmetric : bool
        The caller knows that (y, b) is (x, a) and A symmetric: one potential serves both sides.
    memory : SolverMemory, optional
        What earlier solves of the same flow leave behind; used, and written to.

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
    dtype = x.dtype
    # float32 exponents of size 1e3 round to errors of 1e-4: the solve is in float64, rounded once at the end
    x, a, y, b, A = (t.to(torch.float64) for t in (x, a, y, b, A))
    # masses that differ by float32 rounding admit no coupling
    a, b = a / a.sum(-1, keepdim=True), b / b.sum(-1, keepdim=True)
    x, y = (t.expand(*batch, *t.shape[-2:]).reshape(-1, *t.shape[-2:]) for t in (x, y))
    a, b = (t.expand(*batch, t.shape[-1]).reshape(-1, t.shape[-1]) for t in (a, b))
    A = A.expand(*batch, *A.shape[-2:]).reshape(-1, *A.shape[-2:])
    problem, shift_x, shift_y, mean_y = _centred(x, a, y, b, A / eps, mask)
    start = None
    if warm is not None:
        start = (_flat(warm[0], a) / eps - shift_x).detach(), (_flat(warm[1], b) / eps - shift_y).detach()
    job = Job(tol, max_iter, symmetric, mask, memory)
    phi, psi, mean, value, excess, error_x, error_y = run(job, problem, start)
    if problem.differentiable:
        first, (phi, psi) = attach_potentials(problem, phi, psi)
        value = dual_value(problem, *first)
        mean = soft_average(problem, psi, problem.y)
        excess = torch.zeros_like(excess)  # two Newton steps on, it is gone
    f, g = gauge(eps * (phi + shift_x), eps * (psi + shift_y), a, b)
    if symmetric:
        f = g = 0.5 * (f + g)  # equal to rounding already; now to the bit
    value = eps * (value + (a * shift_x).sum(-1) + (b * shift_y).sum(-1))
    return SinkhornResult(
        f.reshape(*batch, -1).to(dtype),
        g.reshape(*batch, -1).to(dtype),
        value.reshape(batch).to(dtype),
        excess.reshape(batch),
        error_x.reshape(batch),
        error_y.reshape(batch),
        (mean + mean_y).reshape(*batch, *mean.shape[-2:]).to(dtype),
        job.converged,
        job.n_iter,
    )


def barycentre(result: SinkhornResult) -> Tensor:
    """E_pi[y | x_i] of a solved problem, (..., n, d)."""
    return result.mean_y


def _flat(t: Tensor, like: Tensor) -> Tensor:
    return t.detach().to(like).reshape(like.shape)


def _centred(
    x: Tensor, a: Tensor, y: Tensor, b: Tensor, B: Tensor, mask: Tensor | None
) -> tuple[Problem, Tensor, Tensor, Tensor]:
    """Centre both clouds: y^T B x changes by functions of x or y alone, which the potentials absorb."""
    mean_x, mean_y = (a.unsqueeze(-2) @ x), (b.unsqueeze(-2) @ y)
    x, y = x - mean_x, y - mean_y
    Bx, Bm = x @ B.mT, mean_x @ B.mT
    half = 0.5 * (mean_y * Bm).sum(-1)
    shift_x = -(Bx @ mean_y.mT).squeeze(-1) - half
    shift_y = -(y @ Bm.mT).squeeze(-1) - half
    return Problem(Bx, a, y, b, mask), shift_x, shift_y, mean_y
