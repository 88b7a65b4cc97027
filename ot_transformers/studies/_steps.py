"""JKO steps of an energy at several step sizes, and the order at which they tend to the gradient flow."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from ..flows import gradient_flow, jko
from ..measures import Gaussian, Measure, Particles
from ._curves import as_gaussians, distance_travelled, extent, gap
from ._problem import Problem, gaussian_metric
from ._result import Finding, Progress, checked, format_number, silent

__all__ = ["Steps", "jko_steps", "labelled_gap", "step_counts"]

Floats = np.ndarray[Any, Any]


@dataclass(frozen=True, eq=False)
class Run:
    """One step size: tau, times, energies, gaps to the flow at these times, whether every step converged."""

    tau: float
    times: Floats
    energies: Floats
    gaps: Floats
    states: list[Any]
    converged: bool

    @property
    def rise(self) -> float:
        """Largest increase of the energy in a step beyond its rounding, relative to its total change (0 if none)."""
        change = max(float(np.abs(self.energies - self.energies[0]).max()), np.finfo(float).tiny)
        rounding = 4 * np.finfo(float).eps * float(np.abs(self.energies).max())
        return max(float(np.diff(self.energies).max()) - rounding, 0.0) / change


@dataclass(frozen=True, eq=False)
class Steps:
    """Runs from the largest to the smallest step.

    `floor` is what the distances to the flow may be off by: the tolerance of its solver, and the rounding that the
    steps pile up.
    """

    runs: list[Run]
    floor: float = 0.0

    @property
    def order(self) -> float:
        """Order at step 0: the orders between successive sizes differ from it by a multiple of the step.

        Extrapolated from the last two of them; with two sizes only, the one that there is.
        """
        p, tau = self.orders(), self.taus
        if len(p) < 2:
            return float(p[-1])
        return float((p[-1] * tau[-3] - p[-2] * tau[-2]) / (tau[-3] - tau[-2]))

    @property
    def taus(self) -> Floats:
        """Step sizes."""
        return np.array([r.tau for r in self.runs])

    @property
    def errors(self) -> Floats:
        """Distances to the flow at the final time."""
        return np.array([r.gaps[-1] for r in self.runs])

    @property
    def converged(self) -> bool:
        """Whether every inner problem converged."""
        return all(r.converged for r in self.runs)

    def orders(self) -> Floats:
        """Order between each step size and the next."""
        error = np.maximum(self.errors, np.finfo(float).tiny)
        return np.diff(np.log(error)) / np.diff(np.log(self.taus))

    @property
    def resolved(self) -> bool:
        """Whether every distance is ten times what it may be off by: else there is no order to be read."""
        return float(self.errors.min()) > 10 * self.floor

    def verdict(self, title: str, text: str, tolerance: float) -> Finding:
        """The order against 1, undecided where the distances are rounding."""
        value = abs(self.order - 1.0)
        if self.resolved:
            return checked(title, f"{text}{self.words()}", value, tolerance)
        low = f"Distances of {format_number(10 * self.floor)} and less are errors of the solver and rounding"
        return Finding(title, f"{text}{low}: no order can be read, and there is no verdict.", value)

    def words(self) -> str:
        """The orders in words."""
        between = ", ".join(f"{p:.3f}" for p in self.orders())
        if len(self.runs) < 3:
            return f"The order between the two sizes is {between}; theory says 1."
        return (
            f"The orders between successive sizes are {between}, which extrapolates to {self.order:.3f} at step 0; "
            "theory says 1."
        )


def jko_steps(
    structure: Any,
    start: Measure,
    t_end: float,
    counts: Sequence[int],
    *,
    rtol: float,
    progress: Progress = silent,
) -> Steps:
    """Run JKO with t_end / k as the step for each k in `counts`, and compare with the gradient flow.

    Gaussians are compared in Bures-Wasserstein distance; particles, which both keep their labels, in the root
    mean square distance of the tokens.
    """
    metric = gaussian_metric(structure) if isinstance(start, Gaussian) else structure.metric
    compare = gap if isinstance(start, Gaussian) else labelled_gap
    finest = np.unique(np.concatenate([_times(t_end, k) for k in counts]))
    options: dict[str, Any] = {"rtol": rtol, "atol": 0.01 * rtol}
    flow = gradient_flow(structure.energy, start, t_end, metric=metric, save_at=finest, **options)
    runs: list[Run] = []
    done, total = 0, sum(counts)
    for k in counts:
        steps = jko(structure.energy, start, t_end / k, k, metric=metric)
        times = _times(t_end, k)
        states: list[Any] = list(steps.states)
        exact: list[Any] = [flow.states[m] for m in np.searchsorted(finest, times)]
        energies = np.array([float(structure.energy.value(state)) for state in states])
        converged = bool(np.all(steps.stats["converged"]))
        runs.append(Run(t_end / k, times, energies, compare(states, exact), states, converged))
        done += k
        progress(f"JKO steps of {t_end / k:.3g}", done / total)
    travelled, size = distance_travelled(as_gaussians(flow.states)), extent(flow.states)
    ulp = torch.finfo(flow.states[0].dtype).eps
    return Steps(runs, rtol * travelled + max(counts) * ulp * size)


def step_counts(problem: Problem, t_end: float) -> tuple[int, int, int]:
    """Numbers of JKO steps that the problem allows: k, 2k, 4k, with k at least 8.

    An energy with negative curvature has no JKO step beyond a critical size, the inverse of the rate at which the
    flow expands. The largest step is half the inverse of the rates at hand, |V| and |M|.
    """
    field = problem.attention.affine(problem.cloud.gaussian)
    norms = [torch.linalg.matrix_norm(m.double(), 2) for m in (problem.parameters.V, field.M_t)]
    base = max(8, math.ceil(2.0 * t_end * float(max(norms))))
    return base, 2 * base, 4 * base


def labelled_gap(a: Sequence[Particles], b: Sequence[Particles]) -> Floats:
    """Root mean square distance of the tokens of two clouds of equal weights and labels, (T,)."""
    rows = []
    for x, y in zip(a, b, strict=True):
        square = (x.x_t.double() - y.x_t.double()).square().sum(-1)
        rows.append(float((x.weights_t.double() * square).sum().sqrt()))
    return np.array(rows)


def _times(t_end: float, count: int) -> Floats:
    times = t_end * (np.arange(count + 1) / count)
    times[-1] = t_end
    return times
