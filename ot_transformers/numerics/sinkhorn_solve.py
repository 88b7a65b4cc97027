"""The Sinkhorn iteration: Anderson-accelerated sweeps of a stabilised kernel, Newton where those are slow.

The unknown is h = log v (relative to the absorbed potentials); a sweep gives u with exact row sums, and the
column sums, whose distance to 1 is the error. Tensors here are (B, n, d), know no gradient, and are right.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from .coupling import coupling_covariance, quadratic_potential
from .sinkhorn_accelerate import Anderson, newton_direction
from .sinkhorn_kernel import Kernel, Problem, SolverMemory, gauge, log_half_sweeps, scaling_limit
from .sinkhorn_mixed import MixedKernel, mixed_pays

__all__ = ["Solution", "gaussian_potentials", "solve", "spread"]

_RANGE = 200.0  # scores spread wider than this are approached from a larger eps
_COOLING = 4.0
_STAGE_TOL, _STAGE_SWEEPS = 1e-6, 200  # looser stages spare little and can leave the last one stuck
_PATIENCE = 30  # sweeps after which progress is judged: less than a factor of _SLOW asks for Newton steps
_SLOW = 1e-2
_REST = 10  # sweeps after a Newton step that failed
_HALVINGS = 11
_MIXED_PATIENCE, _MIXED_LIMIT = 15, 10.0  # sweeps judged together; |log u| up to which float32 has the range
_LONGEST = 20.0  # longest Newton step in log v


@dataclass(frozen=True, eq=False)
class Solution:
    """Potentials in units of eps with the last kernel and scalings: kappa = u K v."""

    kernel: Kernel | MixedKernel
    u: Tensor
    v: Tensor
    column: Tensor
    error: Tensor
    n_iter: int
    slack: Tensor | None = None
    """What single precision may add to either error, (B,), where it was used."""

    @property
    def phi(self) -> Tensor:
        """f / eps, (B, n)."""
        return self.kernel.phi + self.u.log()

    @property
    def psi(self) -> Tensor:
        """g / eps, (B, m)."""
        return self.kernel.psi + self.v.log()


def gaussian_potentials(problem: Problem) -> tuple[Tensor, Tensor]:
    """Potentials of the moment-matched centred Gaussians: quadratic, in closed form, no matrix inverted.

    With N = B S B^T and C = Cov(y | x), psi(y) = -y^T G y / 2, G = (I + N C)^(-1) N, and
    phi(x) = -(B x)^T C (B x) / 2 + const; the rows x of the problem are B x already.
    """
    p = problem
    factor_x = (p.a.sqrt().unsqueeze(-1) * p.x).mT
    factor_y = (p.b.sqrt().unsqueeze(-1) * p.y).mT
    N, T = factor_x @ factor_x.mT, factor_y @ factor_y.mT
    eye = torch.eye(T.shape[-1], dtype=T.dtype, device=T.device)
    C = coupling_covariance(N, eye, T)
    G = quadratic_potential(C, N)
    psi = -0.5 * ((p.y @ G) * p.y).sum(-1)
    # log E exp(y^T z + psi(y)) = z^T C z / 2 - log det(I + T G) / 2 for y ~ N(0, T), as (T^-1 + G)^-1 = C.
    constant = 0.5 * torch.linalg.slogdet(eye + T @ G).logabsdet
    phi = constant.unsqueeze(-1) - 0.5 * ((p.x @ C) * p.x).sum(-1)
    return phi, psi


def solve(
    problem: Problem,
    tol: float,
    max_iter: int,
    warm: tuple[Tensor, Tensor] | None = None,
    memory: SolverMemory | None = None,
    symmetric: bool = False,
) -> Solution:
    """Iterate until the L1 error of the column sums is <= tol in every member, or max_iter sweeps."""
    n_iter = 0
    if warm is None:
        warm, n_iter = _cool(problem)
    if max_iter - n_iter > 1 and mixed_pays(problem, symmetric):  # a last sweep stays for float64
        first, warm, used = _mixed(problem, warm, tol, max_iter - n_iter - 1, memory, symmetric)
        n_iter += used
        if first is not None:
            return replace(first, n_iter=n_iter)
    last = _iterate(problem, warm, tol, max(1, max_iter - n_iter), memory)
    return replace(last, n_iter=last.n_iter + n_iter)


def spread(problem: Problem) -> float:
    """A bound on the size of the scores, in units of eps (0 where it is not a number)."""
    bound = float((problem.x.norm(dim=-1).amax(-1) * problem.y.norm(dim=-1).amax(-1)).amax())
    return bound if math.isfinite(bound) else 0.0


def _cool(problem: Problem) -> tuple[tuple[Tensor, Tensor], int]:
    """Potentials to start from, by lowering eps to its value in stages, and the sweeps spent."""
    stages = math.ceil(math.log(max(spread(problem) / _RANGE, 1.0), _COOLING))
    warm = gaussian_potentials(problem.heated(_COOLING**stages))
    earlier: tuple[Tensor, Tensor] | None = None
    n_iter = 0
    for stage in range(stages, 0, -1):
        heated = problem.heated(_COOLING**stage)
        solution = _iterate(heated, warm, _STAGE_TOL, _STAGE_SWEEPS)
        n_iter += solution.n_iter
        # f(eps) = f_0 + eps f_1 + exponentially small (here in final units): two stages extrapolate
        scale = _COOLING**stage
        phi, psi = gauge(scale * solution.phi, scale * solution.psi, problem.a, problem.b)
        ahead = phi, psi
        if earlier is not None:
            ahead = phi + (phi - earlier[0]) / _COOLING, psi + (psi - earlier[1]) / _COOLING
        earlier = phi, psi
        warm = ahead[0] * _COOLING / scale, ahead[1] * _COOLING / scale
    return warm, n_iter


@dataclass(eq=False)
class _Point:
    """Where the iteration stands: h = log v, u with exact row sums, column sums, and the L1 error."""

    h: Tensor
    u: Tensor
    column: Tensor
    error: Tensor

    def where(self, take: Tensor, other: _Point) -> _Point:
        """Members of `other` where `take`, of this one elsewhere."""
        t = take.unsqueeze(-1)
        return _Point(
            torch.where(t, other.h, self.h),
            torch.where(t, other.u, self.u),
            torch.where(t, other.column, self.column),
            torch.where(take, other.error, self.error),
        )


def _evaluate(kernel: Kernel, h: Tensor) -> _Point:
    u, column = kernel.sweep(h.exp())
    return _Point(h, u, column, _column_error(kernel, u, column))


def _column_error(kernel: Kernel | MixedKernel, u: Tensor, column: Tensor) -> Tensor:
    """L1 error of the column sums; infinite where a number left the range: never a candidate."""
    error = (kernel.problem.b * (column - 1.0).abs()).sum(-1)
    sound = (
        torch.isfinite(column).all(-1) & torch.isfinite(u).all(-1) & (column > 0).all(-1) & (u > 0).all(-1)
    )
    return torch.where(sound, error, torch.inf)


def _start(problem: Problem, warm: tuple[Tensor, Tensor]) -> tuple[Kernel, _Point]:
    """Absorb the first potentials as they are if in range, else after a log-domain sweep."""
    phi, psi = warm
    limit = scaling_limit(phi.dtype)
    kernel = Kernel(problem, phi, psi)
    point = _evaluate(kernel, torch.zeros_like(psi))
    if bool((point.u.log().abs() < limit).all() & (point.column.log().abs() < limit).all()):
        return kernel, point
    return _absorb(problem, psi)


def _absorb(problem: Problem, psi: Tensor) -> tuple[Kernel, _Point]:
    phi, psi = log_half_sweeps(problem, torch.where(torch.isfinite(psi), psi, 0.0))
    kernel = Kernel(problem, phi, psi)
    return kernel, _evaluate(kernel, torch.zeros_like(psi))


def _iterate(
    problem: Problem,
    warm: tuple[Tensor, Tensor],
    tol: float,
    max_iter: int,
    memory: SolverMemory | None = None,
) -> Solution:
    limit = scaling_limit(problem.b.dtype)
    kernel, point = _start(problem, warm)
    best, anderson = point, Anderson(problem.b, memory)
    checkpoint, n_iter = best.error, 1
    newton, rest = False, _PATIENCE
    while True:
        rejected = ~(point.error <= 2.0 * best.error)
        best = best.where(point.error <= best.error, point)
        active = ~(best.error <= tol)
        if not bool(active.any()) or n_iter >= max_iter:
            return Solution(kernel, best.u, best.h.exp(), best.column, best.error, n_iter)
        if bool((best.h.abs() > 0.5 * limit).any()) or not bool(torch.isfinite(best.error).all()):
            if not bool(torch.isfinite(kernel.psi).all()):
                lost = torch.full_like(best.error, torch.nan)
                return Solution(kernel, best.u, best.h.exp(), best.column * torch.nan, lost, n_iter)
            kernel, point = _absorb(problem, kernel.psi + best.h)
            best, anderson = point, Anderson(problem.b)
            n_iter += 1
            continue
        if rest == 0:
            newton = newton or bool((best.error > _SLOW * checkpoint)[active].any())
            checkpoint, rest = best.error, 0 if newton else _PATIENCE
        if newton and rest == 0:
            point, used = _newton_step(kernel, best, active)
            n_iter += used
            rest = 0 if bool((point.error < best.error)[active].all()) else _REST
            anderson = Anderson(problem.b)
            continue
        current = point.where(rejected, best)
        h = anderson.propose(current.h, -current.column.log(), rejected)
        point = _evaluate(kernel, torch.where(active.unsqueeze(-1), h, best.h))
        n_iter, rest = n_iter + 1, rest - 1


def _mixed(
    problem: Problem,
    warm: tuple[Tensor, Tensor],
    tol: float,
    max_iter: int,
    memory: SolverMemory | None,
    symmetric: bool,
) -> tuple[Solution | None, tuple[Tensor, Tensor], int]:
    """The usual case, fast: accelerated sweeps in mixed precision; or None, the potentials reached, the sweeps.

    The base is moved to where the iteration stands once what is left to do is of the size of the rounding of
    the increments.
    """
    kernel, anderson = MixedKernel(problem, *warm, symmetric), Anderson(problem.b, memory)
    h, found, best, checked = torch.zeros_like(kernel.psi), warm, math.inf, math.inf
    point = h, h  # the best h with its residual
    for n_iter in range(1, max_iter + 1):
        v = h.exp()
        u, column = kernel.sweep(v)
        error, slack = (problem.b * (column - 1.0).abs()).sum(-1), kernel.slack(u, v)
        worst = float((error + slack).amax())
        if worst <= tol:
            return Solution(kernel, u, v, column, error, n_iter, slack), found, n_iter
        if (
            not float(torch.maximum(u.log().abs().amax(), h.abs().amax()) + 0.0 * worst) < _MIXED_LIMIT
        ):  # written so that a NaN leaves
            return None, found, n_iter
        rejected = worst > 2.0 * best
        if worst <= best:
            best, found, point = worst, (kernel.phi + u.log(), kernel.psi + h), (h, -column.log())
        if n_iter % _MIXED_PATIENCE == 0:
            if best > _SLOW * checked:
                return None, found, n_iter
            checked = best
        if bool(((error <= 4.0 * slack) | (error + slack <= tol)).all()):
            kernel, h = MixedKernel(problem, *found, symmetric), torch.zeros_like(h)
            anderson.forget_last()
            best = math.inf  # counted anew from the new base
        else:
            h, rho = point if rejected else (h, -column.log())
            h = anderson.propose(h, rho, torch.full_like(error, rejected, dtype=torch.bool))
    return None, found, max_iter


def _newton_step(kernel: Kernel, start: _Point, active: Tensor) -> tuple[_Point, int]:
    """One damped Newton step in the active members; the L1 error itself falls along a Newton direction."""
    damping = (1e-2 * start.error).clamp(max=1e-2) + 10 * torch.finfo(start.h.dtype).eps
    delta = newton_direction(kernel, start.u, start.h.exp(), start.column, damping)
    delta = torch.where(active.unsqueeze(-1), delta, 0.0)
    t = (_LONGEST / delta.abs().amax(-1).clamp_min(_LONGEST)).unsqueeze(-1)
    found, open_, used = start, active, 0
    while used < _HALVINGS and bool(open_.any()):
        used += 1
        trial = _evaluate(kernel, start.h + t * delta)
        accept = open_ & (trial.error <= (1.0 - 0.01 * t.squeeze(-1)) * start.error)
        found, open_ = found.where(accept, trial), open_ & ~accept
        t = 0.4 * t
    return found, used
