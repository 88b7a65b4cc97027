"""The computations of `compare`: four curves over one time grid, and what is measured on them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from ..errors import InvalidInput
from ..flows import gradient_flow, solve
from ..measures import Gaussian, Measure
from ._curves import Balance, Spectrum, as_gaussians, balance, gap, spectrum
from ._grid import TimeGrid, time_grid
from ._problem import Problem, gaussian_metric
from ._result import Progress
from ._sampling import Rate, null_gap, sampling_rate, subset_rate
from ._steps import Steps, jko_steps, step_counts

__all__ = ["Curves", "Plan", "Tolerances", "compute"]

Floats = np.ndarray[Any, Any]


@dataclass(frozen=True)
class Tolerances:
    """What is asked of each number, by dtype."""

    rtol: float
    same: float
    balance: float
    order: float = 0.1
    # The rate may miss -1/2 by the half width of its interval and this much bias of finite n; an interval wider
    # than `noise` gives no verdict.
    rate: float = 0.05
    noise: float = 0.15
    rise: float = 1e-9


TOLERANCES = {
    "float64": Tolerances(rtol=1e-10, same=1e-7, balance=1e-6),
    # The solver cannot be tighter than some hundred ulp, nor can the curves agree better than its error.
    "float32": Tolerances(rtol=1e-5, same=1e-3, balance=1e-2, order=0.3, rise=1e-4),
}


@dataclass(frozen=True)
class Plan:
    """What to compute: time grid, JKO step counts, sample sizes, repeats, seed, tolerances."""

    t_end: float
    n_times: int
    jko_steps: tuple[int, ...] | None
    sizes: tuple[int, ...]
    repeats: int
    seed: int
    tolerances: Tolerances


@dataclass(frozen=True, eq=False)
class Curves:
    """All that was computed; `flow` and `steps` are None where the attention is no gradient flow.

    Attributes
    ----------
    clouds, closure, flow : states of 1, 2, 3 at the times of the grid
    steps : 4, the JKO runs
    own_gap : distance of the moments of 1 to the closure that starts from them, (T,)
    null : the same for Gaussian clouds of equal moments, (T, R)
    rate, tokens : distances at the final time for Gaussian samples, and for subsets of the tokens
    balances : energy balance of each curve by name
    spectra : eigenvalues and ranks of 1 and 2
    """

    grid: TimeGrid
    clouds: list[Any]
    closure: list[Gaussian]
    flow: list[Gaussian] | None
    steps: Steps | None
    own_gap: Floats
    null: Floats
    rate: Rate
    tokens: Rate | None
    balances: dict[str, Balance]
    spectra: tuple[Spectrum, Spectrum]


def compute(problem: Problem, plan: Plan, progress: Progress) -> tuple[Curves, list[str]]:
    """Compute everything; also returns notes on what had to be changed or left out."""
    attention, start = problem.attention, problem.cloud.gaussian
    rtol = plan.tolerances.rtol
    notes: list[str] = []
    progress("Gaussian closure", 0.02)
    # The inner Sinkhorn solves are good to 1e-9 in the marginals: tighter steps would chase their noise.
    particle_rtol = max(rtol, 1e-8)
    grid, closure, clouds = _both(problem, plan, particle_rtol, progress, notes)
    t_end = float(grid.t[-1])
    options: dict[str, Any] = {"rtol": rtol, "atol": 0.01 * rtol, "save_at": grid.t}
    own = closure
    if problem.cloud.exact:
        own = list(solve(attention, problem.cloud.particles.to_gaussian(), t_end, **options).states)
    part = _part(progress, 0.15, 0.4)
    flow, steps = _gradient_curves(problem, plan, closure, options, part, notes)
    progress("energies", 0.4)
    balances = _balances(problem, grid, clouds, closure, flow)
    progress("Gaussian clouds of equal moments", 0.45)
    null = null_gap(
        attention, problem.cloud.particles, grid.t, own, plan.repeats, plan.seed + 1, rtol=particle_rtol
    )
    rate = sampling_rate(
        attention,
        start,
        closure[-1],
        t_end,
        plan.sizes,
        plan.repeats,
        plan.seed + 2,
        rtol=max(rtol, 1e-6),
        progress=_part(progress, 0.6, 0.9),
    )
    progress("subsets of the tokens", 0.9)
    tokens = subset_rate(
        attention,
        problem.cloud.particles,
        own[-1],
        t_end,
        plan.sizes,
        plan.repeats,
        plan.seed + 3,
        rtol=max(rtol, 1e-6),
    )
    spectra = (spectrum(clouds), spectrum(closure))
    own_gap = gap(as_gaussians(clouds), own)
    curves = Curves(grid, clouds, closure, flow, steps, own_gap, null, rate, tokens, balances, spectra)
    return curves, notes


def _both(
    problem: Problem, plan: Plan, particle_rtol: float, progress: Progress, notes: list[str]
) -> tuple[TimeGrid, list[Any], list[Any]]:
    """Closure and particles over one grid, shortened where one of them blows up before t_end."""
    runs: tuple[tuple[str, Measure, float], ...] = (
        ("closure", problem.cloud.gaussian, plan.tolerances.rtol),
        ("particle flow", problem.cloud.particles, particle_rtol),
    )
    t_end = plan.t_end
    for _ in range(3):  # either may shorten the interval once
        grid = time_grid(t_end, plan.n_times)
        found: list[list[Any]] = []
        for k, (name, start, rtol) in enumerate(runs):
            progress(name, 0.02 + 0.05 * k)
            flow = solve(problem.attention, start, t_end, rtol=rtol, atol=0.01 * rtol, save_at=grid.t)
            if flow.status != "completed":
                t_end = _shortened(flow, name, t_end, notes)
                break
            found.append(list(flow.states))
        if len(found) == len(runs):
            return grid, found[0], found[1]
    raise InvalidInput(f"t_end {plan.t_end:g} cannot be reached; the flow still blows up before {t_end:g}")


def _shortened(flow: Any, name: str, t_end: float, notes: list[str]) -> float:
    blow_up = float(flow.blow_up_time)
    if not np.isfinite(blow_up):
        raise InvalidInput(f"t_end {t_end:g} cannot be reached: the {name} stopped ({flow.status})")
    notes.append(
        f"The {name} blows up at t* = {blow_up:.6g} (error {float(flow.blow_up_error):.1e}); "
        f"the comparison ends at 0.9 t* = {0.9 * blow_up:.6g}."
    )
    return 0.9 * blow_up


def _gradient_curves(
    problem: Problem,
    plan: Plan,
    closure: Sequence[Gaussian],
    options: dict[str, Any],
    progress: Progress,
    notes: list[str],
) -> tuple[list[Gaussian] | None, Steps | None]:
    if problem.structure is None:
        return None, None
    progress("gradient flow", 0.0)
    start, structure, t_end = problem.cloud.gaussian, problem.structure, float(options["save_at"][-1])
    if not all(np.isfinite(float(structure.energy.value(state))) for state in closure):
        # The attention flow may leave the domain of its energy; there is no gradient flow to compare with there.
        return None, None
    flow: list[Any] = list(
        gradient_flow(structure.energy, start, t_end, metric=gaussian_metric(structure), **options).states
    )
    try:
        counts = step_counts(problem, t_end) if plan.jko_steps is None else plan.jko_steps
        steps = jko_steps(structure, start, t_end, counts, rtol=plan.tolerances.rtol, progress=progress)
    except InvalidInput as err:
        notes.append(f"JKO steps are left out: {err}")
        return flow, None
    return flow, steps


def _balances(
    problem: Problem,
    grid: TimeGrid,
    clouds: Sequence[Measure],
    closure: Sequence[Measure],
    flow: Sequence[Measure] | None,
) -> dict[str, Balance]:
    if problem.structure is None or flow is None:
        return {}
    curves = {"particles": clouds, "closure": closure, "gradient flow": flow}
    return {name: balance(c, problem.structure, problem.attention, grid) for name, c in curves.items()}


def _part(progress: Progress, start: float, end: float) -> Callable[[str, float], None]:
    return lambda stage, fraction: progress(stage, start + (end - start) * fraction)
