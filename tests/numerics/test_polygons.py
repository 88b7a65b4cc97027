"""Shortest polygons in spaces with closed forms: orders of their lengths, and peaks at the ends of segments."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from scipy.special import dawsn
from torch import Tensor

from ot_transformers.numerics.paths import LogSpeed, shortest_path
from ot_transformers.numerics.polygons import Polygon, shortest_polygon


def half_plane(points: Tensor, slopes: Tensor) -> Tensor:
    """Hyperbolic plane: |v|^2 / y^2."""
    return torch.log(slopes.square().sum(-1)) - 2 * torch.log(points[:, 1].clamp_min(0.0))


def steep(points: Tensor, slopes: Tensor) -> Tensor:
    """e^{x^2} v^2 on the line."""
    return points[:, 0].square() + torch.log(slopes.square().sum(-1))


def polygon(log_speed: LogSpeed, start: list[float], end: list[float], segments: int, tol: float) -> Polygon:
    x, y = (torch.tensor(p, dtype=torch.float64) for p in (start, end))
    scale = torch.full_like(x, float((y - x).norm()))
    guess = shortest_path(log_speed, x, y, scale=scale, tol=1e-3, degrees=(2, 4))
    return shortest_polygon(log_speed, guess, scale=scale, tol=tol, segments=segments)


def test_lengths_are_even_in_the_number_of_segments() -> None:
    """Orders 2, and 4 after one extrapolation, against arcosh(1 + |x - y|^2 / (2 x_2 y_2))."""
    exact = math.acosh(1 + 4.25 / (2 * 0.5))
    found = [polygon(half_plane, [0.0, 1.0], [2.0, 0.5], N, 1e-12) for N in (32, 64)]
    lengths = np.exp([*found[0].log_lengths, found[1].log_lengths[-1]])
    orders = np.log2((lengths[:-1] - exact) / (lengths[1:] - exact))
    assert orders[-1] == pytest.approx(2.0, abs=0.05)
    once = lengths[1:] + np.diff(lengths) / 3
    assert np.log2((once[:-1] - exact) / (once[1:] - exact))[-1] == pytest.approx(4.0, abs=0.5)
    for f in found:
        assert abs(math.expm1(f.log_length - math.log(exact))) <= f.error < 1e-4


@pytest.mark.parametrize(("x", "y"), [(-3.0, 20.0), (1.745, 17.403)])
def test_peaks_at_the_ends_of_segments_are_in_the_error(x: float, y: float) -> None:
    """e^{x^2 / 2} is 1/20 wide at its end: Gauss rules on few long panels agree on a value that misses it."""
    f = polygon(steep, [x], [y], 16, 1e-3)
    # int_0^s e^{r^2 / 2} dr = sqrt(2) e^{s^2 / 2} Dawson(s / sqrt 2)
    ends = dawsn(y / math.sqrt(2)) - math.exp((x * x - y * y) / 2) * dawsn(x / math.sqrt(2))
    exact = y * y / 2 + math.log(math.sqrt(2) * ends)
    assert abs(math.expm1(f.log_length - exact)) <= f.error < 1e-3
