"""Dirac masses on the line: the twisted distance D^{-1/2} |int_x^y e^{a s^2 / 2} ds| in closed form."""

from __future__ import annotations

import math

import numpy as np
import torch
from scipy import special
from scipy.optimize import brentq
from torch import Tensor

from ..numerics.paths import gauss

__all__ = ["line_lengths", "line_log_distance", "line_point", "line_velocity"]

_FEW_DIGITS = 8.0
"""Below this change of the exponent Gauss-Legendre quadrature is exact to rounding."""


def line_log_distance(a: float, D: float, x: float, y: float) -> float:
    """log of the distance of the Dirac masses at x and y; -inf where x = y."""
    low, high = min(x, y), max(x, y)
    if low == high:
        return -math.inf
    if a == 0 or abs(a) * (high - low) * max(abs(low), abs(high)) < _FEW_DIGITS:
        s, w = gauss(48)
        exponent = 0.5 * a * ((high - low) * s + low) ** 2
        top = float(exponent.max())
        log_value = math.log((high - low) * float(w @ np.exp(exponent - top))) + top
    elif a < 0:
        log_value = _decaying(math.sqrt(-0.5 * a), low, high)
    else:
        c = math.sqrt(0.5 * a)
        top = c * c * max(low**2, high**2)
        # int_0^s e^{c^2 r^2} dr = e^{c^2 s^2} Dawson(c s) / c, scaled by the largest of the two ends.
        ends = [float(special.dawsn(c * s) * math.exp(c * c * s * s - top)) for s in (low, high)]
        log_value = math.log((ends[1] - ends[0]) / c) + top
    return log_value - 0.5 * math.log(D)


def _decaying(c: float, low: float, high: float) -> float:
    """log int_low^high e^{-c^2 s^2} ds."""
    factor = 0.5 * math.sqrt(math.pi) / c
    if low * high <= 0:
        return math.log(factor * float(special.erf(c * high) - special.erf(c * low)))
    # Both on one side: differences of erf lose the tail, those of erfc keep it.
    near, far = sorted((abs(low), abs(high)))
    tail = special.erfcx(c * near) - special.erfcx(c * far) * math.exp(c * c * (near**2 - far**2))
    return math.log(factor * float(tail)) - (c * near) ** 2


def line_point(a: float, D: float, x: float, y: float, t: float) -> float:
    """The point at a fraction t of the distance from x to y."""
    if t <= 0 or x == y:
        return x
    if t >= 1:
        return y
    goal = line_log_distance(a, D, x, y) + math.log(t)

    def miss(r: float) -> float:
        return max(line_log_distance(a, D, x, x + r * (y - x)) - goal, -800.0)

    return float(x + (y - x) * brentq(miss, 0.0, 1.0, xtol=1e-15, rtol=1e-14))


def line_velocity(a: float, D: float, x: float, y: float) -> float:
    """dx/dt at t = 0 of the geodesic from x that is at y at t = 1."""
    log_length = line_log_distance(a, D, x, y)
    return 0.0 if x == y else math.copysign(math.exp(log_length + 0.5 * math.log(D) - 0.5 * a * x * x), y - x)


def line_lengths(A: Tensor, D: Tensor) -> Tensor:
    """Length sqrt(2 pi / |a|) of each eigenline of D^{1/2} A D^{1/2} through Dirac masses, (d,); inf for a >= 0."""
    w, U = torch.linalg.eigh(D)
    root = (U * w.sqrt()) @ U.mT
    a = torch.linalg.eigvalsh(root @ A @ root)
    # Along e in coordinates D^{1/2} e: int e^{a s^2 / 2} ds, s the D^{-1} length.
    return torch.where(a < 0, (2 * math.pi / torch.where(a < 0, -a, 1.0)).sqrt(), torch.inf)
