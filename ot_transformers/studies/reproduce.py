"""The paper's numerical section: covariance trajectories in the cone, limit ranks, blow-up against growth."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from ..analysis import CLASSES, classify, numerical_rank
from ..arrays import check_count, check_positive
from ..errors import InvalidInput
from ..flows import Trajectory, solve
from ..measures import Gaussian
from ..plotting.cone import plot_cone, plot_disc
from ..plotting.phase import plot_rank_histogram
from ..spd import eigh_psd
from ._paper import KINDS, PANELS, Panel, rank_ensemble, starts
from ._result import (
    Finding,
    Progress,
    StudyFigure,
    StudyResult,
    Table,
    checked,
    new_figure,
    options_of,
    silent,
)

__all__ = ["ReproduceConfig", "run"]

Floats = np.ndarray[Any, Any]
_DIMS = (3, 4, 5)
_SHORTEST, _LONGEST = 1e-6, 1e12


@dataclass(frozen=True)
class ReproduceConfig:
    """Options of `reproduce`.

    Attributes
    ----------
    starts : initial covariances of each panel
    draws : random flows of each rank histogram (the paper's section has 100)
    rank_t_end : time to which they run with random V (with V = I: 1,000 times longer)
    seed : int
    """

    starts: int = 8
    draws: int = 100
    rank_t_end: float = 1e5
    seed: int = 0


def run(config: ReproduceConfig, progress: Progress = silent) -> StudyResult:
    """Compute and draw all panels.

    Raises
    ------
    InvalidInput
        An option that cannot be used.
    """
    check_count(config.starts, "starts", 2)
    check_count(config.draws, "draws")
    check_count(config.seed, "seed", 0)
    if not _SHORTEST <= check_positive(config.rank_t_end, "rank_t_end") <= _LONGEST:
        raise InvalidInput(f"rank_t_end must lie in [{_SHORTEST:g}, {_LONGEST:g}], got {config.rank_t_end:g}")
    panels, tables, findings, arrays = _panels(config, progress)
    ranks = _ranks(config, progress)
    progress("growth", 0.9)
    growth, growth_findings, growth_arrays = _growth()
    return StudyResult(
        study="reproduce",
        title="The numerical section of arXiv 2501.18322",
        summary="Covariances under softmax, L2, multi-head and Sinkhorn attention: where they go, at which rank they "
        "end, and which blow up. Every flow is adaptive with relative error 1e-8 a step.",
        config=options_of(config),
        findings=[*findings, *ranks.findings, *growth_findings],
        tables=[tables, ranks.table],
        figures=[*panels, ranks.figure, growth],
        arrays={**arrays, **ranks.arrays, **growth_arrays},
        notes=[
            "Multi-head: half a softmax head, half an L2 head, of the same parameters. Sinkhorn: eps = 1.",
            "Exact rank: local decay exponents (a direction whose variance decays like 1/t or faster has rank 0). "
            "Rank at 0.1: eigenvalues above 0.1 at the end, which a plain script prints; it depends on the scale.",
        ],
    )


def _times(t_end: float) -> Floats:
    return np.concatenate([[0.0], np.geomspace(1e-3 * t_end, t_end, 48)])


def _panels(
    config: ReproduceConfig, progress: Progress
) -> tuple[list[StudyFigure], Table, list[Finding], dict[str, Floats]]:
    begin = starts(config.starts, config.seed)
    figures, rows, findings, arrays = [], [], [], {}
    total = len(PANELS) * len(KINDS)
    for i, panel in enumerate(PANELS):
        view = {} if panel.disc else {"subplot_kw": {"projection": "3d"}}
        figure, axes = new_figure(1, len(KINDS), width=3.6, height=3.5, **view)
        for j, kind in enumerate(KINDS):
            progress(f"{panel.title}, {kind}", 0.6 * (i * len(KINDS) + j) / total)
            attention = panel.attention(kind)
            flow = solve(
                attention, begin, panel.t_end, save_at=_times(panel.t_end), max_steps=20_000, method="auto"
            )
            covs = _alive(flow)
            ax = axes[0, j]
            (plot_disc if panel.disc else plot_cone)(covs, ax=ax)
            ax.set_title(kind)
            found = classify(attention, flow)
            counts = [int((found.code == k).sum()) for k in range(len(CLASSES))]
            rows.append([panel.title, kind, *counts])
            arrays[f"{panel.key}_{kind}_cov"] = covs
            if kind == "softmax":
                findings += _against_theory(panel, begin, flow)
        figure.suptitle(f"{panel.title}: A = K$^T$Q = {_inline(panel.A)}, V = {_inline(panel.V)}")
        caption = f"{panel.theory}. Colour runs with time from dark to bright; red dots are the ends. " + (
            "Trace-normalised: the circle is rank 1."
            if panel.disc
            else "The wire is the cone of PSD matrices."
        )
        figures.append(StudyFigure(f"panel_{panel.key}", figure, caption))
    table = Table(
        "panels",
        "How the trajectories of each panel end (number of starts)",
        ["panel", "attention", *CLASSES],
        rows,
    )
    return figures, table, findings, arrays


def _alive(flow: Trajectory) -> Floats:
    """Covariances (T, B, 2, 2); a member keeps its last state after its end."""
    return np.stack([np.asarray(s.cov) for s in flow.states])


def _inline(M: Floats) -> str:
    return "[" + "; ".join(" ".join(f"{v:g}" for v in row) for row in M) + "]"


def _against_theory(panel: Panel, begin: Gaussian, flow: Trajectory) -> list[Finding]:
    """Softmax with V = I has a closed form; elsewhere there is nothing exact to compare with."""
    if not np.array_equal(panel.V, np.eye(2)):
        return []
    S0 = begin.cov_t
    w, U = eigh_psd(S0)
    R = ((U * w.sqrt().unsqueeze(-2)) @ U.mT).numpy()
    B = R @ (panel.A + panel.A.T) @ R
    top = np.linalg.eigvalsh(B)[:, -1]
    if np.all(top > 1e-12):
        exact = 1 / top
        gap = np.abs(np.asarray(flow.blow_up_time) - exact)
        inside = bool(np.all(gap <= np.asarray(flow.blow_up_error)))
        text = (
            f"t* = 1 / lambda_max against the flow: largest relative difference {np.max(gap / exact):.1e}; "
            f"every error bar {'holds' if inside else 'does NOT hold'}."
        )
        value = float(np.max(gap / exact)) if inside else np.inf
        return [checked(f"{panel.title}: blow-up times", text, value, 1e-6)]
    t = panel.t_end
    exact_cov = R @ np.linalg.solve(np.eye(2) - t * B, R)
    gap = np.abs(np.asarray(flow.states[-1].cov) - exact_cov).max() / np.abs(exact_cov).max()
    text = f"S(t) of the closed form at t = {t:g} against the flow: relative difference {gap:.1e}."
    return [checked(f"{panel.title}: closed form", text, gap, 1e-6)]


@dataclass(frozen=True)
class _Ranks:
    figure: StudyFigure
    table: Table
    findings: list[Finding]
    arrays: dict[str, Floats]


def _ranks(config: ReproduceConfig, progress: Progress) -> _Ranks:
    figure, axes = new_figure(2, len(_DIMS), width=4.0, height=3.0)
    rows: list[list[Any]] = []
    arrays: dict[str, Floats] = {}
    wrong = 0
    for j, d in enumerate(_DIMS):
        for i, value in enumerate(("identity", "random")):
            shown, labels = [], []
            for kind in ("softmax", "L2"):
                progress(f"ranks, d = {d}, V {value}, {kind}", 0.6 + 0.3 * (2 * j + i) / 6)
                rng = np.random.default_rng([config.seed, d, i])
                attention, gaussian, _ = rank_ensemble(d, config.draws, kind, value, rng)
                # For V = I steps grow with t, so that a later end costs little; the smallest eigenvalues of
                # the start need it before their directions show the decay like 1/t.
                end = config.rank_t_end * (1e3 if value == "identity" else 1.0)
                times = np.concatenate([[0.0], np.geomspace(1e-5 * end, end, 12)])
                # Random V are ill-conditioned, which makes the flows stiff.
                flow = solve(attention, gaussian, end, save_at=times, max_steps=20_000, method="auto")
                found = classify(attention, flow)
                exact = np.asarray(found.rank)
                plain = np.asarray(numerical_rank(flow.states[-1], absolute=0.1))
                plain = np.where(np.asarray(found.code) == CLASSES.index("blows up"), -1, plain)
                key = f"rank_{kind}_d{d}_{value}"
                arrays[f"{key}_exact"], arrays[f"{key}_plain"] = exact, plain
                if kind == "softmax" and value == "identity":
                    wrong += int((exact != d - d // 2).sum())
                shown += [exact, plain]
                labels += [f"{kind}, exact", f"{kind}, > 0.1"]
                counts = [int((exact == r).sum()) for r in range(-1, max(_DIMS) + 1)]
                rows.append([d, value, kind, *counts, int((plain == d - d // 2).sum())])
            ax = axes[i, j]
            plot_rank_histogram(shown, labels, ax=ax, dim=d, expected=d - d // 2)
            ax.set_title(f"d = {d}, V = {'I' if value == 'identity' else '$B^T B$'}")
    head = [
        "d",
        "V",
        "attention",
        "no limit",
        *[f"rank {r}" for r in range(max(_DIMS) + 1)],
        "d - d//2 at 0.1",
    ]
    n = config.draws * len(_DIMS)
    return _Ranks(
        StudyFigure(
            "ranks",
            figure,
            f"Ranks of the limits of {config.draws} random flows each. Grey band: d - d//2, which the theory gives for "
            "softmax with V = I.",
        ),
        Table("ranks", "Ranks of the limit covariances (number of flows)", head, rows),
        [
            checked(
                "Softmax, V = I: rank d - d//2",
                f"{n - wrong} of {n} limits have exactly the rank of the theory, by their decay exponents.",
                wrong,
                0,
            )
        ],
        arrays,
    )


def _growth() -> tuple[StudyFigure, list[Finding], dict[str, Floats]]:
    """Softmax against L2 against Sinkhorn for one set of parameters: blow-up against exponential growth."""
    panel = next(p for p in PANELS if p.key == "blow-up")
    start = Gaussian(np.zeros(2), np.array([[1.0, 0.3], [0.3, 0.5]]))
    figure, axes = new_figure(1, 1, width=6.0, height=3.8)
    ax = axes[0, 0]
    findings, arrays = [], {}
    for kind in ("softmax", "L2", "Sinkhorn"):
        attention = panel.attention(kind)
        coarse = solve(attention, start, 8.0)
        end = float(coarse.last_times)
        flow = solve(attention, start, 8.0, save_at=np.linspace(0, end * (1 - 1e-9), 200))
        trace = np.array([float(np.trace(s.cov)) for s in flow.states])
        arrays[f"growth_{kind}_t"], arrays[f"growth_{kind}_trace"] = flow.times, trace
        ax.semilogy(flow.times, trace, label=kind)
        if coarse.status == "blew up":
            ax.axvline(float(coarse.blow_up_time), color="0.6", ls=":", lw=1)
            text = f"Softmax blows up at t* = {coarse.blow_up_time:.9f} +- {coarse.blow_up_error:.1e}."
            findings.append(Finding("Softmax blows up", text, float(coarse.blow_up_time)))
        else:
            rate = float(classify(attention, coarse).growth_rate)
            text = f"{kind} does not blow up: at t = 8 its trace grows at rate {rate:.4f} (2 is the limit)."
            findings.append(checked(f"{kind} grows exponentially", text, abs(rate - 2.0), 0.05))
    ax.set(xlabel="time t", ylabel="tr S(t)", title="same parameters, three attentions", ylim=(0.5, 1e8))
    ax.legend(frameon=False)
    caption = "V = I, A = diag(-1, 1), S0 = [1 0.3; 0.3 0.5]. Dotted: the blow-up time of softmax."
    return StudyFigure("growth", figure, caption), findings, arrays
