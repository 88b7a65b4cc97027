"""JKO steps of the energy of an attention, on Gaussians and on the tokens, against its gradient flow."""

from __future__ import annotations

import warnings
from dataclasses import dataclass
from typing import Any

import matplotlib as mpl
import numpy as np

from ..arrays import check_count
from ..errors import InvalidInput, NotConverged
from ..measures import Measure
from ..plotting import COLOURS, STYLE, plot_energy
from ._comparison import TOLERANCES
from ._figures import rate_panel
from ._problem import Problem, ProblemConfig, build
from ._result import (
    Finding,
    Progress,
    StudyFigure,
    StudyResult,
    Table,
    checked,
    format_number,
    new_figure,
    options_of,
    silent,
)
from ._steps import Steps, jko_steps, step_counts

__all__ = ["JKOConfig", "run"]


@dataclass(frozen=True)
class JKOConfig(ProblemConfig):
    """Options of `jko`: those of the problem, and

    Attributes
    ----------
    steps : numbers of JKO steps over the interval, increasing, at least two; by default what the rates of the
        problem allow
    on : "both", "gaussian" (the Gaussian of the tokens' moments) or "particles"
    """

    t_end: float = 4.0
    steps: tuple[int, ...] | None = None
    on: str = "both"


def run(config: JKOConfig, progress: Progress = silent) -> StudyResult:
    """Run the steps at each size and measure their order.

    Raises
    ------
    InvalidInput
        An option that cannot be used, or parameters that are not of gradient type.
    """
    if config.on not in ("both", "gaussian", "particles"):
        raise InvalidInput(f"on must be one of both, gaussian, particles, got {config.on!r}")
    if config.steps is not None:
        if len(config.steps) < 2 or sorted(set(config.steps)) != list(config.steps):
            raise InvalidInput(f"steps must be at least two increasing numbers, got {config.steps}")
        check_count(config.steps[0], "steps")
    progress("loading", 0.0)
    problem = build(config)
    if problem.structure is None:
        offer = problem.parameters.symmetric
        hint = f"; try --preset {offer}" if offer else ""
        raise InvalidInput(
            f"preset (or matrices) must be of gradient type for JKO steps: {problem.why_not}{hint}"
        )
    runs, notes = _runs(config, problem, progress)
    if not runs:
        raise InvalidInput(f"on {config.on!r} leaves nothing to run: {' '.join(notes)}")
    tolerances = TOLERANCES[config.dtype]
    findings: list[Finding] = []
    for name, s in runs.items():
        errors = ", ".join(
            f"{format_number(e)} at step {t:.3g}" for t, e in zip(s.taus, s.errors, strict=True)
        )
        text = (
            f"On {name}, the distance of the JKO steps to the gradient flow at the final time is {errors}. "
        )
        findings.append(s.verdict(f"Order of JKO steps, {name}", text, tolerances.order))
        rise = max(r.rise for r in s.runs)
        text = f"Largest increase of the energy in one step on {name}, relative to its total change."
        findings.append(checked(f"Energy never increases, {name}", text, rise, tolerances.rise))
        bad = sum(not r.converged for r in s.runs)
        text = f"{len(s.runs) - bad} of {len(s.runs)} runs on {name} solved every inner problem."
        findings.append(checked(f"Inner problems, {name}", text, bad, 0.0))
    progress("drawing", 0.97)
    kept = f"{problem.cloud.particles.n} tokens in dimension {problem.cloud.particles.dim}"
    return StudyResult(
        study="jko",
        title=f"JKO steps for {config.attention} attention on {problem.cloud.label}",
        summary=f"{kept}; {problem.parameters.text}; times 0 to {config.t_end:g}; {config.dtype}.",
        config=options_of(config),
        findings=findings,
        tables=[_table(name, s) for name, s in runs.items()],
        figures=[_figure(runs)],
        arrays=_arrays(runs),
        notes=notes,
    )


def _runs(config: JKOConfig, problem: Problem, progress: Progress) -> tuple[dict[str, Steps], list[str]]:
    runs: dict[str, Steps] = {}
    notes: list[str] = []
    starts: dict[str, Measure] = {"gaussian": problem.cloud.gaussian, "particles": problem.cloud.particles}
    wanted = [name for name in starts if config.on in ("both", name)]
    rtol = TOLERANCES[config.dtype].rtol
    counts = step_counts(problem, config.t_end) if config.steps is None else config.steps
    for k, name in enumerate(wanted):

        def report(stage: str, fraction: float, k: int = k, name: str = name) -> None:
            progress(f"{name}: {stage}", 0.05 + 0.9 * (k + fraction) / len(wanted))

        report("gradient flow", 0.0)
        start = starts[name]
        tight = rtol if name == "gaussian" else max(rtol, 1e-8)
        label = "the Gaussian" if name == "gaussian" else "the tokens"
        try:
            with warnings.catch_warnings():
                # A step that did not converge is one of the findings; the warning would say it twice.
                warnings.simplefilter("ignore", NotConverged)
                runs[label] = jko_steps(
                    problem.structure, start, config.t_end, counts, rtol=tight, progress=report
                )
        except InvalidInput as err:
            notes.append(f"Steps on {label} are left out: {err}")
    return runs, notes


def _table(name: str, s: Steps) -> Table:
    rows = [
        (r.tau, len(r.times) - 1, r.gaps[-1], order, r.energies[-1], r.rise, r.converged)
        for r, order in zip(s.runs, [None, *s.orders()], strict=True)
    ]
    head = ("step tau", "steps", "distance at the end", "order", "final energy", "largest rise", "converged")
    return Table(f"jko_{name.split()[-1].lower()}", f"JKO steps on {name}", head, rows)


def _figure(runs: dict[str, Steps]) -> StudyFigure:
    figure, axes = new_figure(len(runs), 2, width=5.4, height=3.8)
    with mpl.rc_context(STYLE):
        for k, (name, s) in enumerate(runs.items()):
            left, right = axes[k]
            curves: dict[str, Any] = {f"step {r.tau:.3g}": (r.times, r.energies) for r in s.runs}
            plot_energy(curves, ax=left, ylabel="energy", steps=tuple(curves))
            left.set_title(f"Energy along the steps on {name}")
            rate_panel(
                s.taus,
                s.errors,
                ax=right,
                slope=1.0,
                xlabel=r"step $\tau$",
                ylabel="distance to the flow, final time",
                colour=COLOURS[k],
            )
            right.set_title(f"Order of the steps on {name}")
    return StudyFigure(
        "jko",
        figure,
        "Left: energy at each JKO step. Right: distance to the gradient flow at the final time (Gaussians: "
        "Bures-Wasserstein; tokens: root mean square) against the step size, slope 1 dashed.",
    )


def _arrays(runs: dict[str, Steps]) -> dict[str, np.ndarray[Any, Any]]:
    arrays: dict[str, np.ndarray[Any, Any]] = {}
    for name, s in runs.items():
        key = name.split()[-1].lower()
        arrays |= {f"{key}_tau": s.taus, f"{key}_error": s.errors}
        for r in s.runs:
            arrays |= {
                f"{key}_times_{len(r.times) - 1}": r.times,
                f"{key}_energy_{len(r.times) - 1}": r.energies,
            }
            arrays[f"{key}_distance_{len(r.times) - 1}"] = r.gaps
    return arrays
