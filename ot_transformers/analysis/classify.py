"""What a Gaussian trajectory does in the long run: converge (to which rank), diverge, or blow up."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ..arrays import check_nonnegative, describe
from ..attention import Attention, Schedule
from ..errors import InvalidInput
from ..flows import Trajectory
from ..measures import Gaussian

__all__ = ["CLASSES", "Classification", "classify"]

Floats = np.ndarray[Any, Any]
Ints = np.ndarray[Any, Any]

CLASSES = (
    "undecided",
    "converges to a point",
    "converges to lower rank",
    "converges to full rank",
    "diverges exponentially",
    "blows up",
)
"""The classes, in the order of the integer codes that phase diagrams store."""


@dataclass(frozen=True, eq=False)
class Classification:
    """Long-run behaviour of the covariance of each batch member.

    Attributes
    ----------
    code : integers (...), index into `CLASSES`
    rank : integers (...)
        Rank of the limit covariance where it converges; -1 elsewhere.
    numerical_rank : integers (...)
        Eigenvalues above tol * largest at the last time reached (scale-aware; counts slow decay as rank).
    growth_rate : floats (...)
        d log tr(S) / dt at the last time reached.
    blow_up_time : floats (...)
        inf where there is none.
    exponents : floats (..., r)
        t d log(lambda_i) / dt, ascending in lambda: -1 is decay like 1/t, 0 a positive limit.
    """

    code: np.ndarray[Any, Any]
    rank: np.ndarray[Any, Any]
    numerical_rank: np.ndarray[Any, Any]
    growth_rate: np.ndarray[Any, Any]
    blow_up_time: np.ndarray[Any, Any]
    exponents: np.ndarray[Any, Any]

    @property
    def label(self) -> Any:
        """The class in words: a string, or an array of strings (...)."""
        words = np.array(CLASSES, dtype=object)[self.code]
        return words if np.ndim(words) else str(words)


def classify(attention: Attention, trajectory: Trajectory, *, tol: float = 1e-6) -> Classification:
    r"""Classify a Gaussian trajectory by its local decay exponents.

    With lambda_i, u_i the eigenpairs of S = L L^T and S' = M S + S M^T,

        kappa_i = t d log(lambda_i)/dt = 2 t u_i^T M u_i,

    which loses no digits for tiny lambda_i. A direction whose variance tends to 0 has kappa_i -> -1 (decay
    like 1/t, the generic case: S' is quadratic in S) or -inf (exponential decay); one with a positive limit
    has kappa_i -> 0. kappa_i > -1/2 counts as rank; a kappa_i in (-0.9, -0.1), or a growth that is neither
    settled nor exponential, makes the member "undecided": integrate longer. Growth is exponential if tr S
    has grown tenfold and its rate over the last half of the time agrees with the rate at the end to 10%.

    A small kappa_i alone does not tell a limit from a direction that has not begun to move, a slow blow-up
    among them: both have it. A limit S_inf + c/t has |kappa_i| falling like 1/t, the others have it rising like
    t. So |kappa_i| <= 0.1 is a limit only where |kappa_i| has fallen, at least like t^(-1/2), since the last saved
    time before half of the end, or where the velocity is at rounding level; elsewhere the member is undecided.

    What is seen is seen up to the end: a direction that stands still at rounding level counts as rank. A flow
    that ended at its step limit has shown no limit; only its exponential growth counts.

    The class speaks of the covariance; the mean has its own equation.

    Parameters
    ----------
    attention : Attention
        The one that made the trajectory (not time-dependent).
    trajectory : Trajectory
        Of a Gaussian or a batch of them. Where it has no saved time in the first half (0 excluded), the state
        there is computed once more.
    tol : float
        Relative threshold of `numerical_rank`.

    Raises
    ------
    InvalidInput
        The trajectory is one of particles or of another dimension, or the attention is a `Schedule`.
    """
    last = _checked(attention, trajectory)
    check_nonnegative(tol, "tol")
    ends = np.minimum(np.asarray(trajectory.last_times, dtype=float), float(trajectory.times[-1]))
    t_last = np.broadcast_to(ends, last.batch_shape)
    t = torch.from_numpy(np.array(t_last)).to(last.mean_t)
    lam, rates, size = _rates(attention, last.mean_t, last.factor_t)
    kappa = t.unsqueeze(-1) * rates
    trace = lam.sum(-1)
    growth = (lam * rates).sum(-1) / trace.clamp_min(torch.finfo(trace.dtype).tiny)
    present = _present(trajectory.states[0], lam)
    at_rest = _at_rest(attention, trajectory, t_last, rates, size)
    settled = (((kappa.abs() <= 0.1) & at_rest) | (kappa <= -0.9) | ~present).all(-1)
    code, rank = _decide(kappa, present, settled, growth, t, _mean_rate(trajectory, t_last, trace), last.dim)
    status = np.broadcast_to(np.asarray(trajectory.status), last.batch_shape)
    code = np.where((status == "step limit") & (code <= 3), 0, code)
    code = np.where(status == "blew up", 5, code)
    rank = np.where((code >= 1) & (code <= 3), rank, -1)
    above = (lam > tol * lam.amax(-1, keepdim=True)).sum(-1)
    return Classification(
        code=code,
        rank=rank,
        numerical_rank=above.cpu().numpy(),
        growth_rate=growth.cpu().numpy(),
        blow_up_time=np.broadcast_to(np.asarray(trajectory.blow_up_time, dtype=float), last.batch_shape),
        exponents=kappa.cpu().numpy(),
    )


def _checked(attention: Any, trajectory: Any) -> Gaussian:
    """The last state, of a Gaussian trajectory that this attention can have made."""
    if not isinstance(attention, Attention):
        raise InvalidInput(f"attention must be an Attention, got {describe(attention)}")
    if isinstance(attention, Schedule):
        raise InvalidInput("attention must not depend on time: a Schedule has no long run")
    if not isinstance(trajectory, Trajectory):
        raise InvalidInput(f"trajectory must be a Trajectory, got {describe(trajectory)}")
    last = trajectory.states[-1]
    if not isinstance(last, Gaussian):
        raise InvalidInput("trajectory must be one of Gaussians; use clustering_report for particles")
    attention._check(last, "trajectory")
    return last


def _rates(attention: Attention, mean: Tensor, factor: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Eigenvalues of S in ascending order, d log(lambda_i)/dt, and the size of M (the scale of rounding)."""
    L = factor.detach()
    M = attention.raw_affine(mean.detach(), L)[1].detach()
    U, s, _ = torch.linalg.svd(L, full_matrices=False)
    rates = 2.0 * torch.einsum("...ji,...jk,...ki->...i", U, M, U).flip(-1)
    return s.square().flip(-1), rates, M.square().sum((-2, -1)).sqrt().unsqueeze(-1)


def _at_rest(
    attention: Attention, trajectory: Trajectory, t_last: Floats, rates: Tensor, size: Tensor
) -> Tensor:
    """Which directions come to rest: |kappa_i| falls at least like t^(-1/2), or the velocity is rounding."""
    before, mean, factor = _earlier(trajectory, t_last)
    _, rates_before, size_before = _rates(attention, mean, factor)
    first: Any = trajectory.initial if trajectory.initial is not None else trajectory.states[0]
    _, rates_first, size_first = _rates(attention, first.mean_t, first.factor_t)
    t, s = (torch.from_numpy(np.array(v)).to(rates).unsqueeze(-1) for v in (t_last, before))
    # |t rate| <= (s / t)^(1/2) |s rate_before|; s = 0 (no state known in the first half) is never falling.
    falling = rates.abs() * t <= (s / t.clamp_min(1e-300)).sqrt() * s * rates_before.abs()
    rounding = torch.finfo(rates.dtype).eps * 16 * rates.shape[-1]
    rest = rates.abs() <= rounding * torch.maximum(torch.maximum(size, size_before), size_first)
    # An exponentially fast limit ends in the errors of the steps, which rise and fall at random.
    fastest = torch.maximum(rates_before.abs(), rates_first.abs())
    noise = (rates.abs() * t <= 1e-6) & (rates.abs() <= 1e-3 * fastest)
    return falling | rest | noise


def _earlier(trajectory: Trajectory, t_last: Floats) -> tuple[Floats, Tensor, Tensor]:
    """For each member the last saved time up to half of its end, with mean and factor there; 0 for none."""
    times = np.asarray(trajectory.times, dtype=float)
    states: list[Any] = list(trajectory.states)
    half = 0.5 * float(t_last.min())
    if not np.any((times > 0) & (times <= half)) and trajectory.resume is not None and half > 0:
        k = int(np.searchsorted(times, half))
        times, states = np.insert(times, k, half), [*states[:k], trajectory.at(half), *states[k:]]
    index = np.searchsorted(times, 0.5 * t_last.reshape(-1), side="right") - 1
    known = index >= 0
    index = np.maximum(index, 0)
    means = torch.stack([g.mean_t.detach() for g in states])
    factors = torch.stack([g.factor_t.detach() for g in states])
    members = np.arange(index.size)
    mean = means.flatten(1, -2) if means.ndim > 2 else means.unsqueeze(1)
    factor = factors.flatten(1, -3) if factors.ndim > 3 else factors.unsqueeze(1)
    before = np.where(known, times[index], 0.0).reshape(t_last.shape)
    return (
        before,
        mean[index, members].reshape(means.shape[1:]),
        factor[index, members].reshape(factors.shape[1:]),
    )


def _present(first: Any, lam: Tensor) -> Tensor:
    """Which of the (ascending) eigenvalues belong to the initial rank; the flow keeps the others at 0."""
    s = torch.linalg.svdvals(first.factor_t.detach())
    floor = s.amax(-1, keepdim=True) * max(first.factor_t.shape[-2:]) * torch.finfo(s.dtype).eps
    rank = (s > floor).sum(-1, keepdim=True)
    place = torch.arange(lam.shape[-1], 0, -1, device=lam.device)
    return place <= rank


def _mean_rate(trajectory: Trajectory, t_last: np.ndarray[Any, Any], trace: Tensor) -> tuple[Tensor, Tensor]:
    """Growth rate of log tr S over the last half of the time, and tr S(end) / tr S(0)."""
    times = np.asarray(trajectory.times, dtype=float)
    traces = torch.stack([s.factor_t.detach().square().sum((-2, -1)) for s in trajectory.states])
    flat = traces.reshape(len(times), -1).cpu().numpy()
    ends = np.array(t_last).reshape(-1)
    middle = np.array(
        [np.interp(0.5 * e, times, np.log(f + 1e-300)) for e, f in zip(ends, flat.T, strict=True)]
    )
    final = np.log(trace.reshape(-1).cpu().numpy() + 1e-300)
    rate = (final - middle) / np.maximum(0.5 * ends, 1e-300)
    ratio = np.exp(np.clip(final - np.log(flat[0] + 1e-300), -700, 700))
    return torch.from_numpy(rate).to(trace).reshape(trace.shape), torch.from_numpy(ratio).to(trace).reshape(
        trace.shape
    )


def _decide(
    kappa: Tensor,
    present: Tensor,
    settled: Tensor,
    growth: Tensor,
    t: Tensor,
    history: tuple[Tensor, Tensor],
    dim: int,
) -> tuple[Ints, Ints]:
    mean_rate, ratio = history
    rank = ((kappa > -0.5) & present).sum(-1)
    exponential = (ratio > 10) & (growth * t > 1) & ((mean_rate - growth).abs() <= 0.1 * growth.abs())
    code = torch.zeros_like(rank)
    code = torch.where(settled & (rank == 0), 1, code)
    code = torch.where(settled & (rank > 0) & (rank < dim), 2, code)
    code = torch.where(settled & (rank == dim), 3, code)
    code = torch.where(~settled & exponential, 4, code)
    return code.cpu().numpy(), rank.cpu().numpy()
