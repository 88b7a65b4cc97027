"""What every JKO step promises, in every metric: decrease, an honest report, warm starts that change nothing."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import ot_transformers as otf
from ot_transformers.flows.grid_jko import grid_jko
from ot_transformers.measures import GridMeasure

A = np.array([[-1.0, 0.2], [0.2, -0.5]])
D = np.array([[1.0, 0.2], [0.2, 0.5]])
CLOUD = otf.Particles(
    np.random.default_rng(0).normal(size=(12, 2)), np.random.default_rng(1).dirichlet(np.ones(12))
)
GAUSSIAN = otf.Gaussian([0.3, -0.2], [[0.5, 0.1], [0.1, 0.4]])
INTERACTION = otf.InteractionEnergy(A)
KL = otf.KLDivergence(otf.Gaussian(np.zeros(2), np.diag([1.0, 0.2])))
TWISTED = otf.TwistedWasserstein(A, D=D)

CASES = {
    "W2": (INTERACTION, CLOUD, otf.Wasserstein()),
    "W2 with D": (INTERACTION, CLOUD, otf.Wasserstein(D=D)),
    "twisted": (INTERACTION, CLOUD, TWISTED),
    "Bures-Wasserstein": (INTERACTION, GAUSSIAN, otf.BuresWasserstein()),
    "Bures-Wasserstein with D, KL": (KL, GAUSSIAN, otf.BuresWasserstein(D=D)),
    "twisted on Gaussians": (INTERACTION, GAUSSIAN, TWISTED),
    "twisted on Gaussians, KL": (KL, GAUSSIAN, TWISTED),
}
METRICS = pytest.mark.parametrize(("energy", "measure", "metric"), list(CASES.values()), ids=list(CASES))


@METRICS
def test_energy_decreases_for_every_step_size(energy: Any, measure: Any, metric: Any) -> None:
    """All these energies are bounded below, so that every step has a minimiser: each is found."""
    for tau in (0.01, 0.3, 3.0, 100.0):
        run = otf.jko(energy, measure, tau, 2, metric=metric)
        assert run.stats["converged"].all(), tau
        assert (run.stats["gradient_norms"] <= 1e-9).all(), tau
        assert (run.stats["increases"] < 0).all(), tau


@METRICS
def test_energy_falls_by_at_least_the_squared_length_of_the_step(
    energy: Any, measure: Any, metric: Any
) -> None:
    """mu itself competes with mu+: F(mu+) + d^2 / (2 tau) <= F(mu), d the metric's own distance."""
    step = otf.jko_step(energy, measure, 0.1, metric=metric)
    d = float(metric.distance(measure, step.measure))
    assert step.energy_before - step.energy_after >= d**2 / 0.2 * (1 - 1e-6)
    # and to first order in tau it is twice that: F decreases by about tau |grad F|^2, d = tau |grad F|
    small = otf.jko_step(energy, measure, 1e-3, metric=metric)
    d = float(metric.distance(measure, small.measure))
    assert small.energy_before - small.energy_after == pytest.approx(d**2 / 1e-3, rel=0.05)


@METRICS
def test_a_warm_start_changes_the_work_only(energy: Any, measure: Any, metric: Any) -> None:
    cold = otf.jko_step(energy, measure, 0.2, metric=metric)
    warm = otf.jko_step(energy, measure, 0.2, metric=metric, warm_start=cold.measure)
    assert warm.converged
    assert warm.n_iter < cold.n_iter
    names = ("mean", "cov") if isinstance(measure, otf.Gaussian) else ("x",)
    for name in names:
        np.testing.assert_allclose(getattr(warm.measure, name), getattr(cold.measure, name), atol=1e-7)


@METRICS
def test_a_step_that_stops_early_still_lowers_the_energy_and_says_so(
    energy: Any, measure: Any, metric: Any
) -> None:
    step = otf.jko_step(energy, measure, 3.0, metric=metric, max_iter=1)
    assert not step.converged
    assert step.gradient_norm > 1e-9
    assert step.energy_after <= step.energy_before


@METRICS
def test_the_three_variants_agree_to_first_order(energy: Any, measure: Any, metric: Any) -> None:
    """Steps differ by O(tau^2): halving tau divides the gap by 4."""
    gaps = []
    for tau in (4e-3, 2e-3):
        ends = [
            otf.jko_step(energy, measure, tau, metric=metric, tol=1e-11, variant=v).measure for v in VARIANTS
        ]
        gaps.append([_gap(ends[0], end) for end in ends[1:]])
    for coarse, fine in zip(*gaps, strict=True):
        if coarse > 1e-9:  # the linearised step is the implicit one where the metric is flat
            assert coarse / fine == pytest.approx(4.0, rel=0.1)


VARIANTS = ("implicit", "linearised", "explicit")


def _gap(a: Any, b: Any) -> float:
    if isinstance(a, otf.Gaussian):
        return float(np.linalg.norm(a.mean - b.mean) + np.linalg.norm(a.cov - b.cov))
    return float(np.linalg.norm(a.x - b.x))


def test_converged_is_false_where_the_value_is_no_number() -> None:
    """Steps of an energy without a minimiser run off; what follows from there is not called converged."""
    energy = -1.0 * otf.InteractionEnergy(np.eye(1))
    far = otf.Particles([[40.0], [41.0]])  # e^{1600} overflows
    for metric in (otf.Wasserstein(), otf.TwistedWasserstein(np.eye(1), D=np.eye(1))):
        step = otf.jko_step(energy, far, 1.0, metric=metric)
        assert not step.converged


def test_steps_on_a_grid_lower_an_implicit_energy_and_report_their_error() -> None:
    axis = np.linspace(-4.0, 4.0, 41)
    start = GridMeasure.from_gaussian(otf.Gaussian([0.5, -0.3], [[0.4, 0.1], [0.1, 0.3]]), [axis, axis])
    energy = otf.KLDivergence(otf.Gaussian(np.zeros(2), np.eye(2)))
    for tau in (0.1, 1.0, 10.0):
        path = grid_jko(energy, start, tau, 2, eps=0.05, tol=1e-9)
        assert path.converged.all()
        assert path.marginal_errors.dtype == path.times.dtype == np.float64
        assert (path.marginal_errors <= 1e-9).all()
        assert (np.diff(path.energies) < 0).all()


def test_a_step_without_a_minimiser_does_not_claim_to_have_converged() -> None:
    """Known fault: a NaN gradient or an infinite energy counted as a residual of 0."""
    twisted = otf.TwistedWasserstein([[-1.0]], [[1.0]])
    concave = otf.PotentialEnergy(lambda x: -x.square().sum(-1))
    point = otf.Gaussian([0.0], [[0.0]])
    cases = [
        (concave, otf.Particles([[1.0], [0.2]]), 10.0, twisted),
        (otf.KLDivergence(otf.Gaussian([0.0], [[1.0]])), point, 1.0, otf.BuresWasserstein()),
    ]
    for energy, start, tau, metric in cases:
        step = otf.jko_step(energy, start, tau, metric=metric)
        assert not step.converged
        assert step.gradient_norm > 0
