"""The main job: attention on particles, its Gaussian closure, the gradient flow of its energy, and JKO steps.

Over one time grid, for one cloud and one (A, V, eps):

1. the attention dynamics on particles;
2. its Gaussian closure (mean and covariance ODE), from the moments of the cloud;
3. the gradient flow of the energy that `gradient_structure` returns, in the metric that it returns;
4. JKO steps of that energy in that metric at several step sizes.

2 and 3 are the same curve; 4 tends to it at order 1; 1 stays as far from 2 as the cloud is from Gaussian.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np

from ..arrays import check_count
from ..errors import InvalidInput
from ._animation import flow_gif
from ._comparison import TOLERANCES, Curves, Plan, Tolerances, compute
from ._curves import distance_travelled, gap, rounding_of
from ._figures import agreement_figure, energy_figure, flow_figure, gap_figure, spectrum_figure
from ._problem import Problem, ProblemConfig, build
from ._result import (
    Finding,
    Progress,
    StudyFigure,
    StudyResult,
    Table,
    checked,
    format_number,
    options_of,
    silent,
)

__all__ = ["CompareConfig", "run"]

Floats = np.ndarray[Any, Any]


@dataclass(frozen=True)
class CompareConfig(ProblemConfig):
    """Options of `compare`: those of the problem, and

    Attributes
    ----------
    n_times : points of the time grid
    jko_steps : numbers of JKO steps over the interval, increasing, at least two; by default what the rates of
        the problem allow
    sizes : numbers of tokens of the Gaussian samples
    repeats : clouds a size
    animate : also write flow.gif, the particles over the ellipses of the closure
    """

    n_times: int = 49
    jko_steps: tuple[int, ...] | None = None
    sizes: tuple[int, ...] = (64, 128, 256, 512)
    repeats: int = 8
    animate: bool = False


def run(config: CompareConfig, progress: Progress = silent) -> StudyResult:
    """Compute the four curves and report the findings.

    Raises
    ------
    InvalidInput
        An option that cannot be used.
    """
    _check(config)
    progress("loading", 0.0)
    problem = build(config)
    tolerances = TOLERANCES[config.dtype]
    plan = Plan(
        config.t_end, config.n_times, config.jko_steps, config.sizes, config.repeats, config.seed, tolerances
    )
    curves, notes = compute(problem, plan, progress)
    progress("drawing", 0.97)
    result = StudyResult(
        study="compare",
        title=f"{_NAMES[config.attention]} attention on {problem.cloud.label}",
        summary=_summary(config, problem, curves),
        config=options_of(config),
        findings=_findings(config, problem, curves, tolerances),
        tables=_tables(curves),
        figures=_figures(problem, curves, tolerances),
        arrays=_arrays(problem, curves),
        notes=notes,
        files={"flow.gif": flow_gif(curves.grid.t, curves.clouds, curves.closure)} if config.animate else {},
    )
    progress("done", 1.0)
    return result


_NAMES = {"sinkhorn": "Sinkhorn", "softmax": "Softmax", "l2": "L2", "linear": "Linear"}


def _check(config: CompareConfig) -> None:
    check_count(config.n_times, "n_times", 5)
    check_count(config.repeats, "repeats", 2)
    for name, minimum in (("jko_steps", 1), ("sizes", 2)):
        numbers = getattr(config, name)
        if numbers is None:
            continue
        if len(numbers) < 2 or sorted(set(numbers)) != list(numbers):
            raise InvalidInput(f"{name} must be at least two increasing numbers, got {numbers}")
        check_count(numbers[0], name, minimum)


def _summary(config: CompareConfig, problem: Problem, curves: Curves) -> str:
    cloud, start = problem.cloud, curves.spectra[1]
    kept = "" if cloud.share > 0.9999 else f" ({100 * cloud.share:.0f}% of the variance)"
    eps = f", eps = {config.eps:g}" if config.attention == "sinkhorn" else ""
    return (
        f"{cloud.particles.n} tokens in dimension {cloud.particles.dim}{kept}, covariance of rank "
        f"{start.rank[0]}; {problem.parameters.text}{eps}; times 0 to {curves.grid.t[-1]:g}; {config.dtype}."
    )


def _findings(config: CompareConfig, problem: Problem, c: Curves, tol: Tolerances) -> list[Finding]:
    length = distance_travelled(c.closure)
    if c.flow is not None:
        found = _gradient_findings(problem, c, tol, length)
    elif problem.is_gradient:
        found = [_infinite_energy()]
    else:
        found = [_not_gradient(problem)]
    return [
        *found,
        *_gap_findings(config, problem, c, tol, length),
        *_energy_findings(c, tol),
        *_rank_findings(c),
    ]


def _gradient_findings(problem: Problem, c: Curves, tol: Tolerances, length: float) -> list[Finding]:
    assert c.flow is not None
    difference = float(gap(c.closure, c.flow).max())
    relative = difference / max(length, np.finfo(float).tiny)
    title = "The Gaussian closure is the gradient flow"
    text = (
        "Over the whole interval the Gaussian closure of the attention and the gradient flow of its energy are at "
        f"most {format_number(difference)} apart in Bures-Wasserstein distance, {format_number(relative)} of the "
        f"distance {format_number(length)} that they travel"
    )
    if rounding_of(c.closure) > tol.same * length:
        text += ". They hardly move: the difference is rounding, and there is no verdict."
        found = [Finding(title, text, relative)]
    else:
        found = [checked(title, f"{text}: they are one curve.", relative, tol.same)]
    if c.steps is None:
        return found
    s, title = c.steps, "JKO steps tend to the flow at order 1"
    errors = ", ".join(f"{format_number(e)} at step {t:.3g}" for t, e in zip(s.taus, s.errors, strict=True))
    text = f"The distance of the JKO steps to the flow at the final time is {errors}. "
    if s.converged:
        found.append(s.verdict(title, f"{text}Every inner problem converged. ", tol.order))
    else:
        text += f"{s.words()} Not every inner problem converged: the steps are too large for this energy."
        found.append(Finding(title, text, abs(s.order - 1.0), tol.order, False))
    return found


def _infinite_energy() -> Finding:
    return Finding(
        "The energy is infinite along the closure",
        "The attention is of gradient type, but its energy is infinite at some of these Gaussians, outside "
        "its domain: the gradient flow, the JKO steps and the energy balance are left out.",
    )


def _not_gradient(problem: Problem) -> Finding:
    offer = problem.parameters.symmetric
    hint = f" The symmetrised parameters are the preset {offer} (--preset {offer})." if offer else ""
    return Finding(
        "Not a gradient flow",
        f"{problem.why_not.rstrip('.')}. The gradient flow and the JKO steps are therefore left out, and "
        f"with them "
        f"the energy.{hint}",
        problem.residual,
    )


def _out_of_range(config: CompareConfig, problem: Problem, c: Curves) -> str:
    """Why the samples are too small for the law n^(-1/2), in words; empty where nothing speaks against it."""
    smallest, rank = int(c.rate.sizes[0]), int(c.spectra[1].rank[0])
    noise = c.rate.rtol * distance_travelled(c.closure) + rounding_of(c.closure)
    if float(c.rate.mean.min()) <= 10 * noise:
        return f"Distances of {format_number(10 * noise)} and less are errors of the solver and rounding"
    if smallest < 2 * rank:
        return f"The rank {rank} is not small against n"
    if float(c.grid.t[-1]) < config.t_end:
        return "So close to a blow-up the distance is that of the blow-up times"
    if config.attention in ("softmax", "l2"):
        # A mean of e^s over n Gaussian scores s of variance q is near its limit once n is large against e^q.
        A = problem.parameters.A.double()
        q = max(float((A.mT @ S @ A @ S).trace()) for S in (g.cov_t.double() for g in c.closure))
        if q > math.log(smallest):
            return f"The scores x^T A y have variance up to {format_number(q)}, and e to that is not small against n"
    return ""


def _gap_findings(
    config: CompareConfig, problem: Problem, c: Curves, tol: Tolerances, length: float
) -> list[Finding]:
    smallest, why_not = int(c.rate.sizes[0]), _out_of_range(config, problem, c)
    text = (
        f"For n tokens drawn from the Gaussian, the distance between particles and closure at the final time "
        f"decays like n to the power {c.rate.slope:.3f} +- {c.rate.half_width:.3f} (95% interval, n from "
        f"{smallest} to {int(c.rate.sizes[-1])}, {c.rate.gaps.shape[1]} clouds each); theory says -1/2."
    )
    value, bound = abs(c.rate.slope + 0.5), c.rate.half_width + tol.rate
    title = "Gaussian samples approach the closure"
    if why_not:
        text += f" {why_not}: this is not yet the range of that law, and there is no verdict."
        first = Finding(title, text, value)
    elif c.rate.half_width > tol.noise:
        text += " The interval is too wide for a verdict; more clouds a size (--repeats) narrow it."
        first = Finding(title, text, value)
    else:
        first = checked(title, text, value, bound)
    own, null = float(c.own_gap[-1]), c.null[-1]
    ratio = own / max(float(null.mean()), np.finfo(float).tiny)
    z = (own - null.mean()) / max(float(null.std(ddof=1)), np.finfo(float).tiny)
    n = problem.cloud.particles.n
    verdict = (
        "So the tokens are distinguishable from a Gaussian by their dynamics"
        if z > 3
        else "So their dynamics does not tell the tokens from a Gaussian sample"
    )
    second = Finding(
        "The gap of the tokens",
        f"Starting from equal moments, the {n} tokens end {format_number(own)} away from their Gaussian "
        f"closure, "
        f"{100 * own / max(length, np.finfo(float).tiny):.2g}% of the distance that the closure travels. "
        f"Gaussian clouds "
        f"of the "
        f"same mean, covariance and number end {format_number(null.mean())} +- "
        f"{format_number(null.std(ddof=1))} away: the gap of the tokens is {ratio:.3g} times that. "
        f"{verdict}.",
        own,
    )
    return [first, second]


def _energy_findings(c: Curves, tol: Tolerances) -> list[Finding]:
    if not c.balances:
        return []
    if not all(b.finite for b in c.balances.values()):
        names = ", ".join(k for k, b in c.balances.items() if not b.finite)
        text = f"The energy is infinite along: {names}. No balance can be drawn up there."
        return [Finding("Energy balance", text)]
    worst = {name: float(b.defect.max()) for name, b in c.balances.items()}
    drops = {name: b.energy[0] - b.energy[-1] for name, b in c.balances.items()}
    parts = ", ".join(f"{format_number(v)} for the {k}" for k, v in worst.items())
    title = "Energy decreases at the rate of its squared gradient"
    text = (
        f"dF/dt = -|grad F|^2 holds, in integrated form and relative to the change of energy, to {parts}. The energy "
        f"falls by {format_number(drops['closure'])} along the closure and by {format_number(drops['particles'])} "
        "along the particles."
    )
    if max(b.rounding for b in c.balances.values()) > tol.balance:
        text += " It hardly changes: the defect is rounding, and there is no verdict."
        found = [Finding(title, text, max(worst.values()))]
    else:
        allowed = tol.balance + max(b.quadrature for b in c.balances.values())
        found = [checked(title, text, max(worst.values()), allowed)]
    if c.steps is not None:
        rise = max(r.rise for r in c.steps.runs)
        text = "Largest increase of the energy in one JKO step, relative to its total change, of all runs."
        found.append(checked("JKO steps never increase the energy", text, rise, tol.rise))
    return found


def _rank_findings(c: Curves) -> list[Finding]:
    cloud, closure = c.spectra
    w0, w1 = closure.eigenvalues[0], closure.eigenvalues[-1]
    rank = int(closure.rank[0])
    text = (
        f"The covariance of the closure has rank {rank} of {w0.size} at all times. Its largest eigenvalue "
        f"goes from "
        f"{format_number(w0[0])} to {format_number(w1[0])}, the smallest that is not 0 from "
        f"{format_number(w0[rank - 1])} to {format_number(w1[rank - 1])}; the effective rank from "
        f"{closure.effective[0]:.3g} to {closure.effective[-1]:.3g} (particles: {cloud.effective[-1]:.3g})."
    )
    if (closure.rank != rank).any():
        text = text.replace("at all times", "at the start") + (
            f" Numerically the rank at the end is {int(closure.rank[-1])}: eigenvalues have become too "
            f"different in "
            "size to count; the exact rank is that of the factor, which does not change."
        )
        return [Finding("Ranks and eigenvalues", text)]
    return [checked("Ranks and eigenvalues", text, float(np.ptp(closure.rank)), 0.0)]


def _figures(problem: Problem, c: Curves, tol: Tolerances) -> list[StudyFigure]:
    t, n = c.grid.t, problem.cloud.particles.n
    figures = [flow_figure(t, c.clouds, c.closure)]
    if c.flow is not None and c.steps is not None:
        figures.append(
            agreement_figure(t, gap(c.closure, c.flow), distance_travelled(c.closure), tol.same, c.steps)
        )
    figures.append(gap_figure(t, c.own_gap, c.null, c.rate, c.tokens, n))
    if c.balances:
        figures.append(energy_figure(t, c.balances, c.steps))
    figures.append(spectrum_figure(t, *c.spectra))
    return figures


def _tables(c: Curves) -> list[Table]:
    tables: list[Table] = []
    if c.steps is not None:
        orders = [None, *c.steps.orders()]
        runs = [
            (r.tau, len(r.times) - 1, r.gaps[-1], p, r.energies[-1], r.rise, r.converged)
            for r, p in zip(c.steps.runs, orders, strict=True)
        ]
        head = (
            "step tau",
            "steps",
            "distance at the end",
            "order",
            "final energy",
            "largest rise",
            "converged",
        )
        tables.append(Table("jko", "JKO steps against the gradient flow", head, runs))
    rows = [("Gaussian", *row) for row in zip(c.rate.sizes, c.rate.mean, c.rate.standard_error, strict=True)]
    if c.tokens is not None:
        more = zip(c.tokens.sizes, c.tokens.mean, c.tokens.standard_error, strict=True)
        rows += [("subsets of the tokens", *row) for row in more]
    tables.append(
        Table(
            "gap_against_n",
            "Distance of particles to the closure at the final time",
            ("tokens from", "n", "mean distance", "standard error"),
            rows,
        )
    )
    tables.append(_in_time(c))
    return tables


def _in_time(c: Curves) -> Table:
    cloud, closure = c.spectra
    columns: dict[str, Floats] = {
        "time": c.grid.t,
        "gap of the tokens": c.own_gap,
        "gap, Gaussian mean": c.null.mean(1),
    }
    if c.flow is not None:
        columns["closure to gradient flow"] = gap(c.closure, c.flow)
    for name, b in c.balances.items():
        columns |= {f"F, {name}": b.energy, f"|grad F|^2, {name}": b.dissipation, f"dF/dt, {name}": b.rate}
    columns |= {
        "rank": closure.rank,
        "effective rank": closure.effective,
        "effective rank, particles": cloud.effective,
        "largest eigenvalue": closure.eigenvalues[:, 0],
        "largest eigenvalue, particles": cloud.eigenvalues[:, 0],
    }
    rows = list(zip(*columns.values(), strict=True))
    return Table("in_time", "Along the curves", list(columns), rows)


def _arrays(problem: Problem, c: Curves) -> dict[str, Floats]:
    arrays: dict[str, Floats] = {
        "times": c.grid.t,
        "A": problem.parameters.A.cpu().numpy(),
        "V": problem.parameters.V.cpu().numpy(),
        "tokens_start": c.clouds[0].x_t.cpu().numpy(),
        "tokens_end": c.clouds[-1].x_t.cpu().numpy(),
        "closure_mean": np.stack([g.mean_t.cpu().numpy() for g in c.closure]),
        "closure_cov_start": c.closure[0].cov_t.cpu().numpy(),
        "closure_cov_end": c.closure[-1].cov_t.cpu().numpy(),
        "eigenvalues_particles": c.spectra[0].eigenvalues,
        "eigenvalues_closure": c.spectra[1].eigenvalues,
        "gap_tokens": c.own_gap,
        "gap_gaussian": c.null,
        "gap_sizes": c.rate.sizes,
        "gap_against_n": c.rate.gaps,
    }
    for name, b in c.balances.items():
        key = name.replace(" ", "_")
        arrays |= {f"energy_{key}": b.energy, f"dissipation_{key}": b.dissipation}
    if c.steps is not None:
        arrays |= {"jko_tau": c.steps.taus, "jko_error": c.steps.errors}
    return arrays
