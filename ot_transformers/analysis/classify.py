"""What a Gaussian trajectory does in the long run: converge (to which rank), diverge, or blow up."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ..attention import Attention, Schedule
from ..errors import InvalidInput
from ..flows import Trajectory
from ..measures import Gaussian

__all__ = ["CLASSES", "Classification", "classify"]

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

    What is seen is seen up to the end: a direction so small that t lambda_i is still below 1 has not begun to
    decay and counts as rank; integrate longer to be sure.

    The class speaks of the covariance; the mean has its own equation.

    Parameters
    ----------
    attention : Attention
        The one that made the trajectory (not time-dependent).
    trajectory : Trajectory
        Of a Gaussian or a batch of them.
    tol : float
        Relative threshold of `numerical_rank`.

    Raises
    ------
    InvalidInput
        The trajectory is one of particles, or the attention is a `Schedule`.
    """
    last = trajectory.states[-1]
    if not isinstance(last, Gaussian):
        raise InvalidInput("trajectory must be one of Gaussians; use clustering_report for particles")
    if isinstance(attention, Schedule):
        raise InvalidInput("attention must not depend on time: a Schedule has no long run")
    t_last = np.broadcast_to(np.asarray(trajectory.last_times, dtype=float), last.batch_shape)
    t = torch.from_numpy(np.array(t_last)).to(last.mean_t)
    L = last.factor_t.detach()
    _, M = attention.raw_affine(last.mean_t.detach(), L)
    U, s, _ = torch.linalg.svd(L, full_matrices=False)
    rates = 2.0 * torch.einsum("...ji,...jk,...ki->...i", U, M.detach(), U).flip(-1)
    lam = s.square().flip(-1)
    kappa = t.unsqueeze(-1) * rates
    trace = lam.sum(-1)
    growth = (lam * rates).sum(-1) / trace.clamp_min(torch.finfo(trace.dtype).tiny)
    present = _present(trajectory.states[0], lam)
    code, rank = _decide(kappa, present, growth, t, trace, _mean_rate(trajectory, t_last, trace), last.dim)
    blown = np.broadcast_to(np.asarray(trajectory.status) == "blew up", last.batch_shape)
    code, rank = np.where(blown, 5, code), np.where(blown, -1, rank)
    above = (lam > tol * lam.amax(-1, keepdim=True)).sum(-1)
    return Classification(
        code=code,
        rank=rank,
        numerical_rank=above.cpu().numpy(),
        growth_rate=growth.cpu().numpy(),
        blow_up_time=np.broadcast_to(np.asarray(trajectory.blow_up_time, dtype=float), last.batch_shape),
        exponents=kappa.cpu().numpy(),
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
    growth: Tensor,
    t: Tensor,
    trace: Tensor,
    history: tuple[Tensor, Tensor],
    dim: int,
) -> tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]:
    mean_rate, ratio = history
    settled = ((kappa.abs() <= 0.1) | (kappa <= -0.9) | ~present).all(-1)
    rank = ((kappa > -0.5) & present).sum(-1)
    exponential = (ratio > 10) & (growth * t > 1) & ((mean_rate - growth).abs() <= 0.1 * growth.abs())
    code = torch.zeros_like(rank)
    code = torch.where(settled & (rank == 0), 1, code)
    code = torch.where(settled & (rank > 0) & (rank < dim), 2, code)
    code = torch.where(settled & (rank == dim), 3, code)
    code = torch.where(~settled & exponential, 4, code)
    rank = torch.where((code >= 1) & (code <= 3), rank, -1)
    return code.cpu().numpy(), rank.cpu().numpy()
