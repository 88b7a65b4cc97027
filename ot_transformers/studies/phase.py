"""Phase diagram of attention on Gaussians: class, rank and blow-up time over the eigenvalues of the score matrix."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np

from ..analysis import CLASSES, PhaseDiagram, phase_diagram
from ..analysis.phase import check_diagram_file
from ..arrays import as_scalar, check_choice, check_count, check_positive
from ..attention import Attention, L2Attention, SinkhornAttention, SoftmaxAttention
from ..errors import InvalidInput
from ..measures import Gaussian
from ..plotting.phase import plot_phase
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

__all__ = ["PhaseConfig", "run"]

Floats = np.ndarray[Any, Any]
_KINDS = ("softmax", "l2", "sinkhorn")
_LARGEST = 1e9
_BLOWN = CLASSES.index("blows up")


@dataclass(frozen=True)
class PhaseConfig:
    """Options of `phase`.

    Attributes
    ----------
    attention : "softmax", "l2" or "sinkhorn"
    points : values of each of the two eigenvalues
    draws : random rotations and initial covariances at each point
    low, high : range of the eigenvalues
    t_end : end of each flow; default 1e6 for softmax, whose steps grow with t, and 30 for the others
    eps : entropic regularisation of Sinkhorn
    seed : int
    save : .npz that is saved as chunks are done and resumed from, or None; finished, it is read and not run again
    """

    attention: str = "softmax"
    points: int = 21
    draws: int = 4
    low: float = -1.0
    high: float = 1.0
    t_end: float | None = None
    eps: float = 1.0
    seed: int = 0
    save: str | None = None


def run(config: PhaseConfig, progress: Progress = silent) -> StudyResult:
    """Compute and draw the diagram.

    Raises
    ------
    InvalidInput
        An option that cannot be used, or `save` holds another diagram.
    """
    check_choice(config.attention, "attention", _KINDS)
    check_count(config.points, "points", 2)
    check_count(config.draws, "draws")
    check_positive(config.eps, "eps")
    t_end = 1e6 if config.attention == "softmax" else 30.0
    t_end = t_end if config.t_end is None else check_positive(config.t_end, "t_end")
    check_count(config.seed, "seed", 0)
    low, high = as_scalar(config.low, "low"), as_scalar(config.high, "high")
    for value, name in ((low, "low"), (high, "high")):
        # Far beyond, products of eigenvalues and variances leave the floating range, and so do the axes.
        if abs(value) > _LARGEST:
            raise InvalidInput(f"{name} must be at most {_LARGEST:g} in size, got {value:g}")
    if not high - low > 1e-9 * max(abs(low), abs(high)):
        raise InvalidInput(f"low must be below high, got {low:g} and {high:g}")
    if config.save is not None:
        check_diagram_file(config.save, "save")
    values = np.linspace(config.low, config.high, config.points)
    # Rounding would turn the singular case into a slow blow-up or a slow decay.
    values[np.abs(values) < 1e-12 * (config.high - config.low)] = 0.0
    build = partial(_build, config.attention, config.eps)
    diagram = phase_diagram(
        build,
        {"a": values.tolist(), "b": values.tolist()},
        t_end=t_end,
        n_draws=config.draws,
        seed=config.seed,
        file=config.save,
        progress=lambda done, total: progress(f"{done} of {total} flows", 0.95 * done / total),
    )
    figure, axes = new_figure(1, 3, width=4.6, height=4.0)
    for ax, show in zip(axes[0], ("class", "rank", "blow-up time"), strict=True):
        plot_phase(diagram, ax=ax, show=show)
        ax.set_title(f"most frequent class: {config.attention}" if show == "class" else show)
    counts = [int((diagram.code == k).sum()) for k in range(len(CLASSES))]
    table = Table(
        "classes",
        "How the flows end",
        ["class", "flows", "share"],
        [[label, n, n / diagram.code.size] for label, n in zip(CLASSES, counts, strict=True)],
    )
    return StudyResult(
        study="phase",
        title=f"Phase diagram of {config.attention} attention on Gaussians",
        summary="V = I and A = U diag(a, b) U^T with a random rotation U; random initial covariances. Each flow is "
        "adaptive with its own step, all flows of a chunk are one batched solve.",
        config=options_of(config),
        findings=_findings(config, t_end, diagram, values),
        tables=[table],
        figures=[
            StudyFigure(
                "phase",
                figure,
                "Over the eigenvalues a, b of A: the class that most draws have, the mean rank of "
                "the limit where there is one, the median blow-up time where there is one.",
            )
        ],
        arrays={
            "a": values,
            "b": values,
            "code": diagram.code,
            "rank": diagram.rank,
            "numerical_rank": diagram.numerical_rank,
            "growth_rate": diagram.growth_rate,
            "blow_up_time": diagram.blow_up_time,
            "blow_up_error": diagram.blow_up_error,
        },
        notes=[f"Classes by code: {', '.join(f'{k} {label}' for k, label in enumerate(CLASSES))}."],
    )


def _build(
    kind: str, eps: float, values: Mapping[str, Floats], rng: np.random.Generator
) -> tuple[Attention, Gaussian]:
    a, b = values["a"], values["b"]
    angle = rng.uniform(0.0, np.pi, len(a))
    X = rng.standard_normal((len(a), 2, 3))
    U = np.stack(
        [np.stack([np.cos(angle), -np.sin(angle)], -1), np.stack([np.sin(angle), np.cos(angle)], -1)], -2
    )
    eigenvalues = np.stack([a, b], -1)
    gaussian = Gaussian(np.zeros((len(a), 2)), X @ X.transpose(0, 2, 1) / 3)
    V = np.broadcast_to(np.eye(2), U.shape).copy()
    A = (U * eigenvalues[:, None, :]) @ U.transpose(0, 2, 1)
    if kind == "l2":
        root = np.sqrt(np.abs(eigenvalues))[:, :, None] * U.transpose(0, 2, 1)
        return L2Attention(np.sign(eigenvalues)[:, :, None] * root, root, V), gaussian
    if kind == "sinkhorn":
        return SinkhornAttention(A, V, eps=eps), gaussian
    return SoftmaxAttention(A, V), gaussian


def _findings(config: PhaseConfig, t_end: float, diagram: PhaseDiagram, values: Floats) -> list[Finding]:
    blown = diagram.code == _BLOWN
    undecided = int((diagram.code == 0).sum())
    reported = Finding(
        "Undecided",
        f"{undecided} of {blown.size} flows have no verdict at t = {t_end:g}.",
        float(undecided),
    )
    top = np.maximum(values[:, None], values[None, :])[..., None]
    if config.attention != "softmax":
        text = f"{int(blown.sum())} of {blown.size} flows blow up: the theory has none."
        return [checked("No blow-up", text, float(blown.sum()), 0.0), reported]
    # V = I: S(t) is singular first at t* = 1 / lambda_max(S0^(1/2) 2 A S0^(1/2)), so none where A <= 0.
    wrong = int((blown & (top <= 0)).sum())
    text = f"{int(blown.sum())} flows blow up, {wrong} of them where A <= 0 and the theory has none."
    zeros = (values[:, None] == 0).astype(int) + (values[None, :] == 0).astype(int)
    settled = (diagram.code >= 1) & (diagram.code <= 3) & (top <= 0)
    off = int((settled & (diagram.rank != zeros[..., None])).sum())
    limits = (
        f"{int(settled.sum()) - off} of {int(settled.sum())} limits have the rank dim ker A of the theory."
    )
    return [
        checked("Blow-up only where A has a positive eigenvalue", text, float(wrong), 0.0),
        checked("Rank of the limit", limits, float(off), 0.0),
        _times(config, t_end, diagram, values),
        reported,
    ]


def _times(config: PhaseConfig, t_end: float, diagram: PhaseDiagram, values: Floats) -> Finding:
    """Blow-up times against the closed form, from the random draws made once more."""
    mesh = np.meshgrid(values, values, np.arange(config.draws), indexing="ij")
    flat = {"a": mesh[0].reshape(-1), "b": mesh[1].reshape(-1)}
    exact, chunk = np.empty(len(flat["a"])), 1000
    for k, begin in enumerate(range(0, len(exact), chunk)):
        part = {name: v[begin : begin + chunk] for name, v in flat.items()}
        attention, gaussian = _build("softmax", 1.0, part, np.random.default_rng([config.seed, k]))
        assert isinstance(attention, SoftmaxAttention)
        w, U = np.linalg.eigh(np.asarray(gaussian.cov))
        R = (U * np.sqrt(w)[:, None, :]) @ U.transpose(0, 2, 1)
        rate = np.linalg.eigvalsh(2 * R @ attention.A_t.numpy() @ R)[:, -1]
        exact[begin : begin + chunk] = np.where(rate > 0, 1 / np.where(rate > 0, rate, 1.0), np.inf)
    exact = exact.reshape(diagram.code.shape)
    due = exact < t_end * (1 - 1e-6)
    blown = diagram.code == _BLOWN
    missed = int((due & ~blown).sum())
    gap = np.abs(diagram.blow_up_time[due & blown] / exact[due & blown] - 1)
    worst = float(gap.max()) if gap.size else 0.0
    text = (
        f"Of {int(due.sum())} blow-ups due before t = {t_end:g}, {missed} were missed; largest relative "
        f"difference of the others to 1 / lambda_max: {worst:.1e}."
    )
    return checked("Blow-up times", text, np.inf if missed else worst, 1e-6)
