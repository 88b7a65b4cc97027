"""The figures that compare, flow and jko share."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import matplotlib as mpl
import numpy as np

from ..measures import Gaussian, Particles
from ..plotting import (
    COLOURS,
    MARKERS,
    STYLE,
    motion_plane,
    plot_eigenvalues,
    plot_ellipses,
    plot_energy,
    plot_particles,
    plot_rate,
)
from ._curves import Balance, Spectrum
from ._result import StudyFigure, new_figure
from ._sampling import Rate
from ._steps import Steps

__all__ = ["agreement_figure", "energy_figure", "flow_figure", "gap_figure", "rate_panel", "spectrum_figure"]

Floats = np.ndarray[Any, Any]


def flow_figure(t: Floats, clouds: Sequence[Particles], gaussians: Sequence[Gaussian]) -> StudyFigure:
    """Tokens with trails, and the ellipses of the closure over the final tokens, in one plane."""
    figure, axes = new_figure(1, 2, width=5.4, height=4.7)
    plane = motion_plane(clouds[0], clouds[-1])
    with mpl.rc_context(STYLE):
        left, right = axes[0]
        plot_particles(clouds, times=t, ax=left, plane=plane)
        left.set_title("Tokens: start, trails, end")
        end = plane.project(clouds[-1].x)
        right.scatter(end[:, 0], end[:, 1], s=7, color="0.7", linewidths=0, label="tokens at the end")
        plot_ellipses(gaussians, times=t, ax=right, plane=plane)
        right.set_title("Gaussian closure: ellipses of 2 standard deviations")
        right.legend(handles=right.collections[:1] + right.lines[-1:], loc="best")
    return StudyFigure(
        "flow",
        figure,
        "Left: the tokens at the start (hollow), their paths, and at the end (filled). Right: covariance "
        "ellipses (2 standard deviations) of the Gaussian closure from the start (dark) to the end "
        "(bright), over the final tokens. Both in the plane that shows most of the motion: the two "
        "principal components of the displacement.",
    )


def spectrum_figure(t: Floats, cloud: Spectrum, closure: Spectrum) -> StudyFigure:
    """Eigenvalues of both curves in time, and their ranks."""
    figure, axes = new_figure(1, 2, width=5.4, height=3.9)
    with mpl.rc_context(STYLE):
        left, right = axes[0]
        plot_eigenvalues(values=closure.eigenvalues, times=t, ax=left)
        plot_eigenvalues(values=cloud.eigenvalues, times=t, ax=left, style=":")
        styles = [
            mpl.lines.Line2D([], [], color="0.3", ls=s, label=name)
            for s, name in (("-", "closure"), (":", "particles"))
        ]
        left.legend(handles=styles)
        left.set_title("Eigenvalues of the covariance")
        for k, (name, s) in enumerate((("closure", closure), ("particles", cloud))):
            style = {"color": COLOURS[k], "ls": "-" if k == 0 else "--"}
            right.plot(t, s.effective, **style, label=f"effective rank, {name}")
            right.plot(t, s.rank, **style, lw=1, alpha=0.6, label=f"numerical rank, {name}")
        right.set(xlabel="time $t$", ylabel="rank", ylim=(0, None))
        right.set_title("Ranks")
        right.legend()
    return StudyFigure(
        "eigenvalues",
        figure,
        "Left: eigenvalues of the covariance in time, closure (lines) and particles (dotted). Right: "
        "numerical rank (singular values of the covariance factor above d ulp of the largest) and "
        "effective rank (sum w)^2 / sum w^2.",
    )


def energy_figure(t: Floats, balances: Mapping[str, Balance], steps: Steps | None) -> StudyFigure:
    """Energy along each curve, and the defect of the energy balance."""
    figure, axes = new_figure(1, 2, width=5.4, height=3.9)
    with mpl.rc_context(STYLE):
        left, right = axes[0]
        curves: dict[str, Any] = {name: (t, b.energy) for name, b in balances.items()}
        marks = []
        for run in steps.runs if steps is not None else []:
            marks.append(f"JKO, step {run.tau:.3g}")
            curves[marks[-1]] = (run.times, run.energies)
        plot_energy(curves, ax=left, ylabel="energy", steps=tuple(marks))
        left.set_title("Energy along each curve")
        for k, (name, b) in enumerate(balances.items()):
            shown = np.where(b.defect > 0, b.defect, np.nan)
            right.semilogy(t, shown, color=COLOURS[k], marker=MARKERS[k], ms=3, lw=1.2, label=name)
        right.set(xlabel="time $t$", ylabel="relative defect of the balance")
        right.set_title(r"$|F(t) - F(0) + \int_0^t |\nabla F|^2|\,/\,\max|F - F(0)|$")
        right.legend()
    return StudyFigure(
        "energy",
        figure,
        "Left: the energy that is descended, along each curve (JKO steps as marks). Right: how far the "
        "energy is from its start minus the integral of the squared gradient, relative to its total change.",
    )


def rate_panel(x: Floats, y: Floats, *, ax: Any, **options: Any) -> None:
    """`plot_rate`, or a word instead where a distance is 0 and has no logarithm."""
    if (y > 0).all():
        plot_rate(x, y, ax=ax, **options)
        return
    ax.text(0.5, 0.5, "distances of 0: nothing to draw", ha="center", va="center", transform=ax.transAxes)
    ax.set(xlabel=options["xlabel"], ylabel=options["ylabel"], xticks=[], yticks=[])


def agreement_figure(
    t: Floats, difference: Floats, scale: float, tolerance: float, steps: Steps
) -> StudyFigure:
    """Closure against gradient flow in time, and JKO steps against it in the step size."""
    figure, axes = new_figure(1, 2, width=5.4, height=3.9)
    with mpl.rc_context(STYLE):
        left, right = axes[0]
        relative = difference / max(scale, np.finfo(float).tiny)
        left.semilogy(t, np.where(relative > 0, relative, np.nan), color=COLOURS[0], marker="o", ms=3, lw=1.2)
        left.axhline(tolerance, color=COLOURS[1], ls="--", lw=1.2, label=f"tolerance {tolerance:g}")
        left.set(xlabel="time $t$", ylabel="distance / distance travelled")
        left.set_title("Attention closure against the gradient flow")
        left.legend()
        rate_panel(
            steps.taus,
            steps.errors,
            ax=right,
            slope=1.0,
            xlabel=r"step $\tau$",
            ylabel="distance at the final time",
        )
        right.set_title("JKO steps against the gradient flow")
    return StudyFigure(
        "agreement",
        figure,
        "Left: Bures-Wasserstein distance between the Gaussian closure of the attention and the gradient "
        "flow of its energy, relative to the distance that they travel. Right: distance of JKO steps to "
        "that flow at the final time; slope 1 is first order.",
    )


def gap_figure(t: Floats, own: Floats, null: Floats, rate: Rate, tokens: Rate | None, n: int) -> StudyFigure:
    """Particles against closure: in time for the tokens, and as a function of n for Gaussian samples."""
    figure, axes = new_figure(1, 2, width=5.4, height=3.9)
    with mpl.rc_context(STYLE):
        left, right = axes[0]
        left.plot(t, own, color=COLOURS[1], label=f"the tokens (n = {n})")
        left.fill_between(t, null.min(1), null.max(1), color=COLOURS[0], alpha=0.2, lw=0)
        left.plot(t, null.mean(1), color=COLOURS[0], ls="--", label="Gaussian clouds of equal moments")
        left.set(xlabel="time $t$", ylabel="distance to the closure", ylim=(0, None))
        left.set_title("Particles against closure, equal moments at the start")
        left.legend()
        rate_panel(
            rate.sizes,
            rate.mean,
            ax=right,
            errors=rate.standard_error,
            slope=-0.5,
            xlabel="number of tokens $n$",
            ylabel="distance to the closure, final time",
            label="Gaussian samples",
        )
        if tokens is not None:
            right.errorbar(
                tokens.sizes,
                tokens.mean,
                tokens.standard_error,
                fmt="s",
                ms=5,
                mfc="white",
                mew=1.4,
                capsize=3,
                color=COLOURS[1],
                label="random subsets of the tokens",
            )
        right.set_title("As a function of the number of tokens")
        if right.has_data():
            right.legend()
    return StudyFigure(
        "gap",
        figure,
        "Bures-Wasserstein distance between the moments of the particles and the Gaussian closure. Left: "
        "for the tokens, and for Gaussian clouds of the same mean, covariance and number (mean and range). "
        "Right: at the final time for n tokens drawn from the Gaussian, slope -1/2 dashed, and for n of "
        "the tokens drawn at random (without replacement, so nearer to the whole cloud than independent "
        "ones).",
    )
