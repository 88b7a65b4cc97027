"""The attention flow on a token cloud and on its Gaussian: where it goes, how it ends, what rank it keeps."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import matplotlib as mpl
import numpy as np

from ..analysis.clustering import clustering_report
from ..arrays import check_count
from ..errors import InvalidInput
from ..flows import Trajectory, solve
from ..measures import Gaussian
from ..plotting import COLOURS, STYLE
from ._animation import flow_gif
from ._comparison import TOLERANCES
from ._curves import Spectrum, as_gaussians, distance_travelled, gap, spectrum
from ._figures import flow_figure, spectrum_figure
from ._problem import Problem, ProblemConfig, build
from ._result import (
    Finding,
    Progress,
    StudyFigure,
    StudyResult,
    Table,
    format_number,
    new_figure,
    options_of,
    silent,
)

__all__ = ["FlowConfig", "run"]

Floats = np.ndarray[Any, Any]


@dataclass(frozen=True)
class FlowConfig(ProblemConfig):
    """Options of `flow`: those of the problem, and

    Attributes
    ----------
    n_times : equally spaced times that are kept
    animate : also write flow.gif, the particles over the ellipses of the closure
    """

    n_times: int = 65
    animate: bool = False


@dataclass(frozen=True, eq=False)
class _Run:
    """Times and states up to the end of both flows."""

    t: Floats
    clouds: list[Any]
    closure: list[Gaussian]
    gap: Floats
    spectra: tuple[Spectrum, Spectrum]


def run(config: FlowConfig, progress: Progress = silent) -> StudyResult:
    """Run both flows and report how they end.

    Raises
    ------
    InvalidInput
        An option that cannot be used.
    """
    check_count(config.n_times, "n_times", 2)
    progress("loading", 0.0)
    problem = build(config)
    times = np.linspace(0.0, config.t_end, config.n_times)
    rtol = max(TOLERANCES[config.dtype].rtol, 1e-8)
    options: dict[str, Any] = {"rtol": rtol, "atol": 0.01 * rtol, "save_at": times}
    progress("Gaussian closure", 0.05)
    closure = solve(problem.attention, problem.cloud.gaussian, config.t_end, **options)
    progress("particles", 0.3)
    clouds = solve(problem.attention, problem.cloud.particles, config.t_end, **options)
    kept = int((np.asarray(closure.valid) & np.asarray(clouds.valid)).sum())
    if kept < 2:
        raise InvalidInput(
            f"t_end {config.t_end:g} is beyond the end of the flow before its second saved time"
        )
    progress("measuring", 0.8)
    gaussians: list[Any] = list(closure.states[:kept])
    tokens: list[Any] = list(clouds.states[:kept])
    distance = gap(as_gaussians(tokens), gaussians)
    r = _Run(times[:kept], tokens, gaussians, distance, (spectrum(tokens), spectrum(gaussians)))
    progress("drawing", 0.9)
    report = [clustering_report(tokens[k]) for k in (0, -1)]
    return StudyResult(
        study="flow",
        title=f"{config.attention.capitalize()} attention flow of {problem.cloud.label}",
        summary=f"{problem.cloud.particles.n} tokens in dimension {problem.cloud.particles.dim}; "
        f"{problem.parameters.text}; times 0 to {config.t_end:g}; {config.dtype}.",
        config=options_of(config),
        findings=[_ending(closure, "Gaussian closure"), _ending(clouds, "particles"), *_findings(r, report)],
        tables=[_table(r)],
        figures=[flow_figure(r.t, tokens, gaussians), spectrum_figure(r.t, *r.spectra), _gap_figure(r)],
        arrays=_arrays(r, problem),
        files={"flow.gif": flow_gif(r.t, tokens, gaussians)} if config.animate else {},
    )


def _ending(flow: Trajectory, name: str) -> Finding:
    title = f"How the {name} end" if name == "particles" else f"How the {name} ends"
    if flow.status == "blew up":
        when, error = float(flow.blow_up_time), float(flow.blow_up_error)
        text = f"The flow blows up at t* = {when:.8g}, known to {error:.1e}."
        return Finding(title, text, when)
    return Finding(title, f"The flow is {flow.status} at t = {float(np.max(flow.last_times)):g}.")


def _findings(r: _Run, report: list[Any]) -> list[Finding]:
    cloud, closure = r.spectra
    length = max(distance_travelled(r.closure), np.finfo(float).tiny)
    return [
        Finding(
            "Particles against closure",
            f"At the last common time {r.t[-1]:.4g} the moments of the particles are "
            f"{format_number(r.gap[-1])} from "
            f"the closure in Bures-Wasserstein distance, {100 * r.gap[-1] / length:.2g}% of the distance "
            f"that the "
            "closure travels.",
            float(r.gap[-1]),
        ),
        Finding(
            "Clusters",
            f"Single linkage finds {report[0].n_clusters} cluster(s) at the start and "
            f"{report[1].n_clusters} at the end.",
            float(report[1].n_clusters),
        ),
        Finding(
            "Ranks and eigenvalues",
            f"Rank {int(closure.rank[0])} at the start and {int(closure.rank[-1])} (numerically) at the "
            f"end; largest "
            f"eigenvalue from {format_number(closure.eigenvalues[0, 0])} to "
            f"{format_number(closure.eigenvalues[-1, 0])}; effective rank from {closure.effective[0]:.3g} to "
            f"{closure.effective[-1]:.3g} (particles: {cloud.effective[-1]:.3g}).",
        ),
    ]


def _gap_figure(r: _Run) -> StudyFigure:
    figure, axes = new_figure(1, 1, width=6.4, height=3.8)
    with mpl.rc_context(STYLE):
        ax = axes[0, 0]
        ax.plot(r.t, r.gap, color=COLOURS[1])
        ax.set(xlabel="time $t$", ylabel="distance to the closure", ylim=(0, None))
        ax.set_title("Particles against closure")
    caption = "Bures-Wasserstein distance between the moments of the particles and the Gaussian closure."
    return StudyFigure("gap", figure, caption)


def _table(r: _Run) -> Table:
    cloud, closure = r.spectra
    columns = {
        "time": r.t,
        "gap": r.gap,
        "rank": closure.rank,
        "effective rank": closure.effective,
        "effective rank, particles": cloud.effective,
        "largest eigenvalue": closure.eigenvalues[:, 0],
        "largest eigenvalue, particles": cloud.eigenvalues[:, 0],
    }
    return Table("in_time", "Along the flow", list(columns), list(zip(*columns.values(), strict=True)))


def _arrays(r: _Run, problem: Problem) -> dict[str, Floats]:
    return {
        "times": r.t,
        "A": problem.parameters.A.cpu().numpy(),
        "V": problem.parameters.V.cpu().numpy(),
        "tokens_start": r.clouds[0].x_t.cpu().numpy(),
        "tokens_end": r.clouds[-1].x_t.cpu().numpy(),
        "closure_mean": np.stack([g.mean_t.cpu().numpy() for g in r.closure]),
        "closure_cov_end": r.closure[-1].cov_t.cpu().numpy(),
        "eigenvalues_particles": r.spectra[0].eigenvalues,
        "eigenvalues_closure": r.spectra[1].eigenvalues,
        "gap": r.gap,
    }
