"""Flows at the ends of the floating range: each ends with a status."""

from __future__ import annotations

import numpy as np
import pytest

import ot_transformers as otf

X = np.random.default_rng(0).normal(size=(5, 2))
EYE = np.eye(2)
KINDS = {
    "softmax": otf.SoftmaxAttention(-EYE, EYE),
    "softmax-attractive": otf.SoftmaxAttention(EYE, EYE),
    "l2": otf.L2Attention(EYE, EYE, EYE),
    "linear": otf.LinearAttention(-EYE, EYE),
    "sinkhorn": otf.SinkhornAttention(-EYE, EYE),
    "affine": otf.AffineBlock(EYE),
}
HUGE = {
    "mean": lambda: otf.Gaussian(np.full(2, 1e160), EYE),
    "covariance": lambda: otf.Gaussian(np.zeros(2), 1e300 * EYE),
    "tokens": lambda: otf.Particles(1e160 * X),
}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("what", HUGE)
def test_a_measure_out_of_range_is_not_moved(what, kind):
    """Known fault: error estimates overflow, the step is not a number, and the loop ran through all its steps."""
    with pytest.warns(otf.NotConverged, match="floating range"):
        run = otf.solve(KINDS[kind], HUGE[what](), 1.0)
    assert run.status == "step limit"
    assert run.last_times == 0.0
    assert run.stats["n_steps"] == 0


def test_members_in_range_go_on():
    m = np.array([[1e160, 0.0], [1.0, 0.0]])
    with pytest.warns(otf.NotConverged, match="1 of 2 flows"):
        run = otf.solve(otf.AffineBlock(-EYE), otf.Gaussian(m, EYE), 1.0, save_at=[1.0])
    assert run.status.tolist() == ["step limit", "completed"]
    np.testing.assert_allclose(run.states[-1].mean[1], [np.exp(-1.0), 0.0], rtol=1e-7)


@pytest.mark.parametrize("kind", KINDS)
def test_a_very_short_time_changes_nothing(kind):
    for measure in (otf.Gaussian(np.ones(2), EYE), otf.Particles(X)):
        run = otf.solve(KINDS[kind], measure, 1e-300, save_at=[1e-300])
        assert run.status == "completed"
        np.testing.assert_array_equal(run.states[-1].mean, measure.mean)


@pytest.mark.parametrize("measure", [otf.Gaussian(np.ones(2), EYE), otf.Particles(X)])
def test_a_time_out_of_reach_is_given_up_early(measure):
    """At a pace of 0.1 a step the 100,000 steps lead to 1e4, not to 1e300: so much is known after 1,500."""
    with pytest.warns(otf.NotConverged, match="step limit"):
        run = otf.solve(otf.AffineBlock(np.diag([0.5, -1.0])), measure, 1e300)
    assert run.status == "step limit"
    assert run.stats["n_steps"] <= 1500


def test_a_blow_up_and_geometric_times_are_not_given_up():
    """S = 1 / (1 / S0 - 2 a t): blow-up at 1 / (2 a S0) for a > 0, and 1 / (1 + 2 t) with steps that grow with t."""
    blows = otf.solve(otf.SoftmaxAttention(1e-3, 1.0), otf.Gaussian([0.0], [[1.0]]), 1e300, save_at=[1.0])
    assert blows.status == "blew up"
    assert blows.blow_up_time == pytest.approx(500.0, rel=1e-6)
    decays = otf.solve(otf.SoftmaxAttention(-1.0, 1.0), otf.Gaussian([0.0], [[1.0]]), 1e60, save_at=[1e60])
    assert decays.status == "completed"
    assert float(decays.states[0].cov[0, 0]) == pytest.approx(0.5e-60, rel=1e-6)
