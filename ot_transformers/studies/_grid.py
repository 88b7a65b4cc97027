"""One time grid for all curves, on which integrals and derivatives in time are spectrally accurate."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.polynomial import chebyshev

__all__ = ["TimeGrid", "time_grid"]

Floats = np.ndarray[Any, Any]


@dataclass(frozen=True, eq=False)
class TimeGrid:
    """Chebyshev-Lobatto points 0 = t_0 < ... < t_N = T, and the polynomial through values there."""

    t: Floats

    def coefficients(self, values: Floats) -> Floats:
        """Chebyshev coefficients of the interpolant."""
        x = self._unit
        return np.linalg.solve(chebyshev.chebvander(x, len(x) - 1), np.asarray(values, dtype=float))

    def integral(self, values: Floats) -> Floats:
        """Integrals from 0 to each grid point."""
        c = chebyshev.chebint(self.coefficients(values), lbnd=-1)
        return 0.5 * self.t[-1] * chebyshev.chebval(self._unit, c)

    def derivative(self, values: Floats) -> Floats:
        """Derivative of the interpolant at each grid point."""
        c = chebyshev.chebder(self.coefficients(values))
        return chebyshev.chebval(self._unit, c) / (0.5 * self.t[-1])

    def truncation(self, values: Floats) -> float:
        """Estimated relative error of the interpolant: the last three coefficients against the largest."""
        c = np.abs(self.coefficients(values))
        return float(c[-3:].max() / max(c.max(), np.finfo(float).tiny))

    @property
    def _unit(self) -> Floats:
        return 2.0 * self.t / self.t[-1] - 1.0


def time_grid(t_end: float, n_points: int = 33) -> TimeGrid:
    """The grid of N + 1 = `n_points` Chebyshev-Lobatto points of [0, t_end]."""
    # (1 - cos) / 2 as sin^2 of the half angle: the first points keep their digits.
    return TimeGrid(t_end * np.sin(0.5 * np.pi * np.arange(n_points) / (n_points - 1)) ** 2)
