"""Flows that explicit steps do not carry to their end: SciPy's LSODA, one member of a batch at a time.

Where a value matrix is ill-conditioned, directions die at rates far apart and the steps of an explicit method
stay as short as the fastest asks for, long after that direction is gone.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from scipy.integrate import LSODA
from torch import Tensor

from ._integrate import CONVERGED, OUT_OF_STEPS, RUNNING, Run
from ._options import plain
from ._system import System

__all__ = ["SWITCH_AFTER", "finish_stiff"]

SWITCH_AFTER = 1000
"""Explicit steps of a member before it goes on implicitly; a blow-up takes about 200, a smooth flow as many."""


def finish_stiff(
    run: Run,
    member: Callable[[int], System],
    save: Sequence[float],
    *,
    rtol: float,
    atol: float,
    max_steps: int,
    at_rest: Callable[[Tensor, Tensor], Tensor] | None,
) -> Run:
    """Carry the members that ran out of steps to the end; the others stay as they are.

    Parameters
    ----------
    run : Run
        Of an explicit method with few steps.
    member : callable i -> System of that member alone
    save : the save times of `run`
    rtol, atol : floats, as in `integrate`
    max_steps : int
        For each member, those of `run` included.
    at_rest : the test of convergence of the whole batch, as `integrate` has it
    """
    ys, code, t_last = list(run.ys), run.code.clone(), run.t_last.clone()
    n_steps, n_accepted, evaluations = run.n_steps.clone(), run.n_accepted.clone(), run.n_evaluations
    for i in torch.nonzero(run.code == OUT_OF_STEPS)[:, 0].tolist():
        left = max_steps - int(n_steps[i])
        flow = _Member(member(i), rtol, atol, left)
        y, t, state = run.ys[-1][i].detach(), float(t_last[i]), RUNNING
        for k, end in enumerate(save):
            if end <= float(run.t_last[i]):
                continue
            if state == RUNNING:
                y, t, state = flow.advance(y, t, end)
                if state == RUNNING and at_rest is not None and _still(at_rest, flow, ys[-1], i, y):
                    state = CONVERGED
            ys[k] = _put(ys[k], i, y)
        code[i], t_last[i] = state, t
        n_steps[i] += left - flow.left
        n_accepted[i] += left - flow.left
        evaluations += flow.evaluations
    return Run(ys, code, t_last, run.blow_up, run.remainder, n_steps, n_accepted, evaluations)


def _put(batch: Tensor, i: int, y: Tensor) -> Tensor:
    return batch.index_put((torch.tensor([i], device=batch.device),), y.unsqueeze(0))


def _still(
    at_rest: Callable[[Tensor, Tensor], Tensor], flow: _Member, batch: Tensor, i: int, y: Tensor
) -> bool:
    f = _put(torch.zeros_like(batch.detach()), i, flow.system.field_of_many(y.unsqueeze(0))[0])
    return bool(at_rest(_put(batch.detach(), i, y), f)[i])


class _Member:
    """One flow in NumPy, with the Jacobian by differences in one batched call."""

    def __init__(self, system: System, rtol: float, atol: float, left: int) -> None:
        self.system, self.rtol, self.atol, self.left = system, rtol, atol, left
        self.like = system.y0
        self.evaluations = 0

    def field(self, _: float, y: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
        self.evaluations += 1
        return plain(self.system.field_of_many(torch.from_numpy(y).to(self.like).unsqueeze(0))[0]).astype(
            float
        )

    def jacobian(self, t: float, y: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
        """Central differences: Newton's method needs no more."""
        self.evaluations += 2 * len(y)
        scale = plain(self.system.scale(torch.from_numpy(y).to(self.like).unsqueeze(0))[0]).astype(float)
        h = np.cbrt(torch.finfo(self.like.dtype).eps) * np.maximum(np.maximum(np.abs(y), scale), 1e-300)
        moved = np.concatenate([y + np.diag(h), y - np.diag(h)])
        f = plain(self.system.field_of_many(torch.from_numpy(moved).to(self.like))).astype(float)
        return ((f[: len(y)] - f[len(y) :]) / (2 * h[:, None])).T

    def advance(self, y: Tensor, t: float, end: float) -> tuple[Tensor, float, int]:
        """From t to end, or as far as the method goes."""
        with torch.no_grad():
            # Anew for each stretch between save times, so that vanishing directions keep their digits.
            y, sizes = self.system.graded(y)
            scale = plain(sizes).astype(float)
            solver = LSODA(
                self.field,
                t,
                plain(y).astype(float),
                end,
                rtol=self.rtol,
                atol=self.atol * scale + np.finfo(float).tiny,
                jac=self.jacobian,
            )
            with warnings.catch_warnings():
                # A failure is in the status, which becomes that of the member.
                warnings.simplefilter("ignore", UserWarning)
                while solver.status == "running" and self.left > 0:
                    solver.step()
                    self.left -= 1
            found = torch.from_numpy(np.array(solver.y)).to(self.like)
        if solver.status == "finished" and bool(torch.isfinite(found).all()):
            return found, end, RUNNING
        return (
            (found, float(solver.t), OUT_OF_STEPS)
            if bool(torch.isfinite(found).all())
            else (y, t, OUT_OF_STEPS)
        )
