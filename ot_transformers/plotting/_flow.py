"""What the figures of a flow share: times and states, and the plane in which d > 2 is drawn."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from ..arrays import ArrayLike, describe
from ..errors import InvalidInput
from ..measures import Measure, Particles, as_measure
from ..spd import eigh_psd
from ._style import to_float64

__all__ = ["Plane", "flow_of", "motion_plane", "principal_plane"]

Floats = np.ndarray[Any, Any]


@dataclass(frozen=True, eq=False)
class Plane:
    """An affine plane of R^d: x is drawn at basis^T (x - centre).

    Attributes
    ----------
    centre : array (d,)
    basis : array (d, 2) with orthonormal columns (d = 1: one column, the second coordinate is 0)
    share : share of the variance that each axis carries, (2,)
    name : what the components are of, for the axis labels
    """

    centre: Floats
    basis: Floats
    share: Floats
    name: str = "variance"

    def project(self, x: ArrayLike) -> Floats:
        """Coordinates (..., 2) of points (..., d)."""
        y = (to_float64(x, "x") - self.centre) @ self.basis
        return y if y.shape[-1] == 2 else np.concatenate([y, np.zeros_like(y)], -1)

    def project_cov(self, cov: ArrayLike) -> Floats:
        """Covariance (..., 2, 2) of the projection."""
        S = self.basis.T @ to_float64(cov, "cov") @ self.basis
        if S.shape[-1] == 2:
            return S
        return np.pad(S, [(0, 0)] * (S.ndim - 2) + [(0, 1), (0, 1)])

    def labels(self) -> tuple[str, str]:
        """Axis labels that say what is drawn."""
        if len(self.centre) <= 2:
            return "$x_1$", "$x_2$" if len(self.centre) == 2 else ""
        a, b = (100 * self.share).round().astype(int)
        return f"principal component 1 ({a}% of {self.name})", f"principal component 2 ({b}% of {self.name})"


def principal_plane(measure: Measure) -> Plane:
    """The plane of the two largest principal components of a measure; R^1 and R^2 are left as they are.

    The sign of a component is that of its largest entry, so that the same measure gives the same picture.
    """
    mu = as_measure(measure)
    _one(mu)
    d = mu.dim
    w, U = (t.detach().cpu().double().numpy() for t in eigh_psd(mu.cov_t))
    total = max(float(w.sum()), np.finfo(float).tiny)
    if d <= 2:
        return Plane(np.zeros(d), np.eye(d), np.diag(to_float64(mu.cov, "cov")) / total)
    basis = U[:, [-1, -2]]
    basis = basis * np.sign(basis[np.abs(basis).argmax(0), [0, 1]])
    return Plane(to_float64(mu.mean, "mean"), basis, w[[-1, -2]] / total)


def motion_plane(start: Particles, end: Particles) -> Plane:
    """The plane that shows most of a motion: principal components of the displacements, about 0.

    R^1 and R^2 are left as they are.
    """
    if start.dim <= 2:
        return principal_plane(start)
    move = to_float64(end.x, "end") - to_float64(start.x, "start")
    w = to_float64(start.weights, "weights")
    second = np.einsum("n,ni,nj->ij", w, move, move)
    if not second.any():
        return principal_plane(start)
    values, U = np.linalg.eigh(second)
    basis = U[:, [-1, -2]]
    basis = basis * np.sign(basis[np.abs(basis).argmax(0), [0, 1]])
    share = values[[-1, -2]] / values.sum()
    return Plane(to_float64(start.mean, "start"), basis, share, "the displacement")


def flow_of(flow: Any, times: ArrayLike | None = None) -> tuple[Floats, list[Any]]:
    """Times (T,) and states of a trajectory, or of a plain sequence of measures."""
    states = getattr(flow, "states", flow)
    when = getattr(flow, "times", None) if times is None else times
    if not isinstance(states, Sequence) or not states:
        raise InvalidInput(f"flow must be a Trajectory or a list of measures, got {describe(flow)}")
    for state in states:
        _one(as_measure(state, "flow"))
    t = np.arange(len(states), dtype=float) if when is None else to_float64(when, "times")
    if t.shape != (len(states),):
        raise InvalidInput(f"times must have shape ({len(states)},), got {t.shape}")
    return t, list(states)


def _one(mu: Measure) -> None:
    if mu.batch_shape:
        raise InvalidInput(f"flow is a batch of shape {mu.batch_shape}; draw one member at a time")
