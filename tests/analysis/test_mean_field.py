"""The mean-field rate: slope fits on made data, and -1/2 for kinds that preserve Gaussians."""

from __future__ import annotations

import numpy as np
import pytest

from ot_transformers.analysis import fit_rate, mean_field_experiment
from ot_transformers.attention import (
    Attention,
    L2Attention,
    LinearAttention,
    SigmoidAttention,
    SoftmaxAttention,
)
from ot_transformers.errors import InvalidInput, NotGaussianPreserving
from ot_transformers.measures import Gaussian

I2 = np.eye(2)
START = Gaussian(np.array([0.2, -0.1]), np.array([[1.0, 0.3], [0.3, 0.5]]))


def test_fit_of_an_exact_power_is_exact() -> None:
    ns = np.array([10, 20, 40])
    errors = np.outer(ns**-0.75, [1.0, 1.0, 1.0])
    rate, low, high = fit_rate(ns, errors)
    assert (rate, low, high) == pytest.approx((-0.75, -0.75, -0.75), abs=1e-12)


def test_interval_covers_the_truth_about_as_often_as_it_says() -> None:
    draw = np.random.default_rng(0)
    ns = np.array([100, 200, 400, 800])
    hits = 0
    for k in range(60):
        errors = np.abs(draw.standard_normal((4, 30))) / np.sqrt(ns)[:, None]
        _, low, high = fit_rate(ns, errors, n_bootstrap=200, seed=k)
        hits += low <= -0.5 <= high
    assert hits >= 48  # 95% nominal; binomial(60, .9) falls below 48 with probability 1%


@pytest.mark.parametrize(
    "attention",
    [SoftmaxAttention(-I2, I2), L2Attention(0.7 * I2, -0.7 * I2, I2), LinearAttention(-0.5 * I2, I2)],
    ids=lambda a: type(a).__name__,
)
def test_rate_is_one_half(attention: Attention) -> None:
    report = mean_field_experiment(attention, START, 0.4, ns=(128, 256, 512, 1024), n_repeats=24, seed=3)
    # Twice the 95% interval: one seed of three must not fail by chance, a rate of -1 or 0 must.
    half = 0.5 * (report.rate_high - report.rate_low)
    assert report.rate == pytest.approx(-0.5, abs=2 * half)
    assert half < 0.2


def test_what_cannot_be_compared_says_so() -> None:
    with pytest.raises(NotGaussianPreserving):
        mean_field_experiment(SigmoidAttention(I2, I2), START, 0.4)
    with pytest.raises(InvalidInput, match="blew up"):
        mean_field_experiment(SoftmaxAttention(I2, I2), START, 50.0)
