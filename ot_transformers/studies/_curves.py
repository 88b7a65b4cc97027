"""Curves of measures: their moments, the gap between two of them, the energy balance along one."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from ..attention import Attention
from ..measures import Gaussian, Measure, Particles
from ..metrics import BuresWasserstein
from ..plotting import eigenvalues_along
from ._grid import TimeGrid
from ._problem import gaussian_metric

__all__ = [
    "Balance",
    "Spectrum",
    "as_gaussians",
    "balance",
    "distance_travelled",
    "extent",
    "gap",
    "rounding_of",
    "spectrum",
]

Floats = np.ndarray[Any, Any]


def as_gaussians(states: Sequence[Measure]) -> list[Gaussian]:
    """The Gaussians of the moments of each state."""
    return [s.to_gaussian() if isinstance(s, Particles) else s for s in states]


def gap(a: Sequence[Gaussian], b: Sequence[Gaussian]) -> Floats:
    """Bures-Wasserstein distances (mean included, not squared) of the states of two curves, (T,)."""
    metric = BuresWasserstein()
    return np.array([float(metric.distance(_double(x), _double(y))) for x, y in zip(a, b, strict=True)])


def _double(g: Gaussian) -> Gaussian:
    # Differences of float32 curves are still measured in float64.
    return Gaussian.unchecked(g.mean_t.double(), factor=g.factor_t.double())


def distance_travelled(states: Sequence[Gaussian]) -> float:
    """How far a curve gets from its start (Bures-Wasserstein): the scale of relative differences."""
    return float(gap(states, [states[0]] * len(states)).max())


def extent(states: Sequence[Measure]) -> float:
    """Largest (|m|^2 + tr S)^(1/2) along a curve: what an ulp of its numbers is to be multiplied with."""
    sizes = [
        (g.mean_t.double().square().sum() + g.factor_t.double().square().sum()).sqrt()
        for g in as_gaussians(states)
    ]
    return max(float(s) for s in sizes)


def rounding_of(states: Sequence[Measure]) -> float:
    """A distance between two such curves that is rounding: 32 ulp of their extent."""
    return 32 * torch.finfo(states[0].dtype).eps * extent(states)


@dataclass(frozen=True, eq=False)
class Balance:
    """Energy along a curve and its dissipation.

    Attributes
    ----------
    energy : F at each time, (T,)
    dissipation : |grad F|^2 in the metric at each time, (T,)
    rate : dF/dt at each time, by differentiating the Chebyshev interpolant of F, (T,)
    defect : |F(t) - F(0) + int_0^t |grad F|^2| / max |F - F(0)|, (T,)
    quadrature : estimated error of the integral in the defect, in its units
    rounding : 32 ulp of the energies, in units of the defect
    finite : whether all energies are finite
    """

    energy: Floats
    dissipation: Floats
    rate: Floats
    defect: Floats
    quadrature: float
    rounding: float
    finite: bool


def balance(states: Sequence[Measure], structure: Any, attention: Attention, grid: TimeGrid) -> Balance:
    """Check dF/dt = -|grad F|^2 along a curve: energies against the integral of the dissipation.

    The integrated form is checked, for differentiating in time would amplify the error of the solver.
    """
    energy = np.array([float(structure.energy.value(s)) for s in states])
    speed = np.array([_speed2(s, structure, attention) for s in states])
    finite = bool(np.isfinite(energy).all() and np.isfinite(speed).all())
    if not finite:
        nothing = np.full(len(energy), np.nan)
        return Balance(energy, speed, nothing, nothing, np.nan, np.nan, False)
    change = energy - energy[0]
    scale = max(float(np.abs(change).max()), np.finfo(float).tiny)
    defect = np.abs(change + grid.integral(speed)) / scale
    quadrature = grid.truncation(speed) * float(grid.t[-1] * speed.max()) / scale
    rounding = 32 * torch.finfo(states[0].dtype).eps * float(np.abs(energy).max()) / scale
    return Balance(energy, speed, grid.derivative(energy), defect, quadrature, rounding, True)


def _speed2(state: Measure, structure: Any, attention: Attention) -> float:
    """|v|^2 in the metric, v the velocity of the attention (the gradient of the energy up to its sign)."""
    if isinstance(state, Particles):
        v = attention.velocity(state)
        return float(structure.metric.inner(state, v, v))
    field = attention.affine(state)
    return float(gaussian_metric(structure).inner(state, field, field))


@dataclass(frozen=True, eq=False)
class Spectrum:
    """Eigenvalues (T, d) of the covariance, largest first; numerical rank and effective rank (T,)."""

    eigenvalues: Floats
    rank: Floats
    effective: Floats


def spectrum(states: Sequence[Measure]) -> Spectrum:
    """Ranks and eigenvalues along a curve.

    The numerical rank counts singular values of the covariance factor above d ulp of the largest; the
    effective rank is (sum w)^2 / sum w^2.
    """
    gaussians = as_gaussians(states)
    w = eigenvalues_along(gaussians)
    rank = np.array([int(g.rank()) for g in gaussians])
    total = w.sum(1)
    effective = np.divide(total**2, (w**2).sum(1), out=np.zeros_like(total), where=total > 0)
    return Spectrum(w, rank, effective)
