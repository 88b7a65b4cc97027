"""The sliced distance to the moment-matched Gaussian against quadrature, and its null level."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from scipy.integrate import quad
from scipy.special import ndtri
from scipy.stats import kstest

from ot_transformers.analysis.gaussianity import gaussianity
from ot_transformers.measures import Particles


def test_one_dimensional_value_is_the_quantile_integral() -> None:
    x = np.array([-1.3, 0.2, 0.4, 2.0])
    w = np.array([0.1, 0.4, 0.3, 0.2])
    z = (x - w @ x) / np.sqrt(w @ (x - w @ x) ** 2)
    edges = np.concatenate([[0.0], np.cumsum(w)])
    exact = sum(
        quad(lambda u, zi=zi: (zi - ndtri(u)) ** 2, a, min(b, 1.0), epsabs=1e-12, limit=200)[0]
        for zi, a, b in zip(z, edges[:-1], edges[1:], strict=True)
    )
    found = gaussianity(Particles(x[:, None], w), n_directions=3, n_null=2)
    assert found.value == pytest.approx(np.sqrt(exact), rel=1e-7)


def test_two_points_in_one_dimension_have_the_closed_form() -> None:
    # z = -1, 1 with mass 1/2 each: W2^2 = 2 - 2 E|N| = 2 - 2 sqrt(2/pi), here with each point doubled.
    found = gaussianity(Particles(np.array([[0.0], [0.0], [3.0], [3.0]])), n_directions=2, n_null=2)
    assert found.value == pytest.approx(np.sqrt(2 - 2 * np.sqrt(2 / np.pi)), rel=1e-12)


def test_p_values_of_gaussian_clouds_are_uniform() -> None:
    rng = np.random.default_rng(3)
    L = rng.standard_normal((3, 3))
    values = [
        gaussianity(Particles(rng.standard_normal((40, 3)) @ L), n_directions=20, n_null=39, seed=k).p_value
        for k in range(120)
    ]
    assert kstest(values, "uniform").pvalue > 1e-3


def test_a_bimodal_cloud_is_far_beyond_the_null() -> None:
    rng = np.random.default_rng(0)
    x = rng.standard_normal((400, 2)) * 0.2
    x[:200, 0] += 3
    found = gaussianity(x, seed=1)
    assert found.value > 2 * found.null_quantile
    assert found.p_value == pytest.approx(1 / 101)


def test_affine_maps_leave_the_value() -> None:
    rng = np.random.default_rng(1)
    x = rng.exponential(size=(100, 1))
    # The normal law is symmetric, so a reflection leaves the value as well.
    for y in (2 + 3 * x, 5 - 3 * x):
        assert gaussianity(y).value == pytest.approx(gaussianity(x).value, rel=1e-10)


def test_rank_is_that_of_the_affine_hull() -> None:
    x = torch.randn(50, 2, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    assert gaussianity(torch.cat([x, x.sum(1, keepdim=True)], 1)).rank == 2
