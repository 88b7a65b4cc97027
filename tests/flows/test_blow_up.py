"""Finite-time blow-up: its time, an error bar that holds, and growth that is not one."""

from __future__ import annotations

import warnings

import numpy as np
import pytest
from scipy.integrate import quad

import ot_transformers as otf

from .closed_forms import random_spd, softmax_blow_up


def test_reference_blow_up(reference):
    case = reference["blowup_V_identity"]
    d = len(case["A"])
    g = otf.Gaussian(np.zeros(d), case["S0"])
    run = otf.solve(otf.SoftmaxAttention(case["A"], np.eye(d)), g, t_end=5.0)
    assert run.status == "blew up"
    error = abs(run.blow_up_time - case["t_star"])
    assert error <= 1e-9 * case["t_star"]
    assert error <= run.blow_up_error <= 1e-7


@pytest.mark.parametrize("rtol", [1e-5, 1e-8])
@pytest.mark.parametrize(("d", "mean"), [(1, 0.0), (3, 1.0), (4, 100.0)])
def test_the_error_bar_holds(rtol, d, mean):
    """80 random problems over 3 decades of time scales, in one batch each."""
    rng = np.random.default_rng(d)
    A = rng.standard_normal((80, d, d)) * np.exp(rng.uniform(-2, 2, (80, 1, 1)))
    S0 = random_spd(rng, d, (80,)) * np.exp(rng.uniform(-2, 2, (80, 1, 1)))
    exact = softmax_blow_up(S0, A)
    run = otf.solve(
        otf.SoftmaxAttention(A, np.eye(d)),
        otf.Gaussian(mean * rng.standard_normal((80, d)), S0),
        t_end=10.0,
        rtol=rtol,
        atol=0.01 * rtol,
        save_at=[10.0],
    )
    blown = exact < 10.0
    assert blown.sum() > 20
    np.testing.assert_array_equal(run.status == "blew up", blown)
    assert np.isinf(run.blow_up_time[~blown]).all()
    error = np.abs(run.blow_up_time[blown] - exact[blown])
    assert (error <= run.blow_up_error[blown]).all()
    assert (error <= 1e-8 * exact[blown]).all()
    assert (run.blow_up_error[blown] <= 1000 * rtol * exact[blown]).all()


def test_blow_up_of_linear_attention():
    """d = 1, centred: S' = 2 v a S^2, like softmax; a Dirac mass: m' = v a m^3, t* = 1 / (2 v a m0^2)."""
    attention = otf.LinearAttention(1.5, 1.0)
    spread = otf.solve(attention, otf.Gaussian([0.0], [[0.5]]), 5.0)
    assert spread.blow_up_time == pytest.approx(1 / (2 * 1.5 * 0.5), rel=1e-9)
    dirac = otf.solve(attention, otf.Gaussian([0.5], [[0.0]]), 5.0)
    assert dirac.blow_up_time == pytest.approx(1 / (2 * 1.5 * 0.25), rel=1e-9)


def test_blow_up_of_particles_linear():
    """Linear attention sees only moments: the cloud blows up with the Gaussian of its moments."""
    x = np.random.default_rng(0).standard_normal((20, 2)) @ np.diag([1.0, 0.5])
    p = otf.Particles(x - x.mean(0))
    attention = otf.LinearAttention(np.eye(2), np.eye(2))
    run = otf.solve(attention, p, 5.0)
    exact = softmax_blow_up(p.to_gaussian().cov, np.eye(2))
    assert run.status == "blew up"
    assert abs(run.blow_up_time - exact) <= min(run.blow_up_error, 1e-8)


def test_blow_up_of_particles_unnormalised():
    """One token, d = 1: x' = x e^(x^2); log growth |x| ~ sqrt(-log(t* - t)), the weakest of blow-ups."""
    exact = quad(lambda x: np.exp(-(x**2)) / x, 0.5, 12.0, epsabs=1e-14, epsrel=1e-13)[0]
    run = otf.solve(otf.UnnormalisedAttention(1.0, 1.0), otf.Particles([[0.5]]), 5.0)
    assert run.status == "blew up"
    assert abs(run.blow_up_time - exact) <= min(run.blow_up_error, 1e-8)


@pytest.mark.parametrize(
    "attention",
    [otf.L2Attention(1.0, 1.0, 1.0), otf.SinkhornAttention(1.0, 1.0), otf.AffineBlock(2.0)],
    ids=["l2", "sinkhorn", "affine"],
)
def test_exponential_growth_is_not_blow_up(attention):
    g = otf.Gaussian([0.0], [[1.0]])
    run = otf.solve(attention, g, 20.0, rtol=1e-5)
    assert run.status == "completed"
    assert np.isinf(run.blow_up_time)
    assert run.states[-1].cov[0, 0] > 1e10
    with pytest.warns(otf.NotConverged, match="floating range"):
        far = otf.solve(attention, g, 1e9, rtol=1e-3, atol=1e-3)
    assert far.status == "step limit"
    assert np.isinf(far.blow_up_time)


def test_fast_exponential_growth_after_a_jump_is_not_blow_up():
    """rho t is 1e10 at once, yet 1/rho does not fall."""
    schedule = otf.Schedule([otf.AffineBlock(0.0), otf.AffineBlock(1e10)], [0.0, 1.0])
    run = otf.solve(schedule, otf.Gaussian([1.0], [[1.0]]), 1.0 + 1e-9, save_at=[1.0 + 1e-9])
    assert run.status == "completed"
    assert (
        abs(run.states[-1].mean[0] / np.exp(1e10 * ((1.0 + 1e-9) - 1.0)) - 1) <= 1e-4
    )  # an ulp of t is 2e-6 here


@pytest.mark.parametrize("gap", [1e-2, 1e-6, 1e-9, 1e-12])
def test_a_jump_just_before_the_blow_up_does_not_hide_it(gap):
    """The layer is the same before and after: t* = 1/2 as without the jump."""
    layer = otf.SoftmaxAttention(np.eye(2), np.eye(2))
    schedule = otf.Schedule([layer, layer], [0.0, 0.5 * (1 - gap)])
    run = otf.solve(schedule, otf.Gaussian([0.0, 0.0], np.eye(2)), 1.0, save_at=[1.0])
    assert run.status == "blew up"
    assert abs(run.blow_up_time - 0.5) <= run.blow_up_error <= 1e-7


@pytest.mark.parametrize("rate", [1e8, 1e9])
def test_the_fastest_direction_that_takes_over_after_a_late_jump_is_not_blow_up(rate):
    """rho t is 1e10 and 1/rho falls while the growing direction overtakes the dying one; then it stays."""
    schedule = otf.Schedule(
        [otf.AffineBlock(np.zeros((2, 2))), otf.AffineBlock(np.diag([rate, -rate]))], [0.0, 100.0]
    )
    end = 100 + 20 / rate
    run = otf.solve(schedule, otf.Gaussian([0.0, 0.0], np.diag([1e-4, 1.0])), end, save_at=[end])
    assert run.status == "completed"
    ulp = np.spacing(100.0) * rate  # of rate t
    assert np.log(run.states[-1].cov[0, 0] / 1e-4) == pytest.approx(2 * rate * (end - 100), abs=1e3 * ulp)


def test_softmax_particles_do_not_blow_up():
    """Compact support: growth at most e^(|V| t), where the closure blows up at t* = 0.5."""
    x = np.random.default_rng(1).standard_normal((50, 1))
    run = otf.solve(otf.SoftmaxAttention(1.0, 1.0), otf.Particles(x), 5.0)
    assert run.status == "completed"
    assert np.abs(run.states[-1].x).max() <= np.abs(x).max() * np.exp(5.0)


@pytest.mark.parametrize("t_end", [0.4, 0.4999, 0.499999])
def test_end_before_the_blow_up_is_completed(t_end):
    """An error of the tolerance in t* is one of rtol t* / (t* - t) in S."""
    run = otf.solve(otf.SoftmaxAttention(1.0, 1.0), otf.Gaussian([0.0], [[1.0]]), t_end, save_at=[t_end])
    assert run.status == "completed"
    assert np.isinf(run.blow_up_time)
    bound = 10 * 1e-8 * 0.5 / (0.5 - t_end)
    assert run.states[-1].cov[0, 0] == pytest.approx(1 / (1 - 2 * t_end), rel=bound)


def test_step_limit_says_so():
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        run = otf.solve(otf.SoftmaxAttention(1.0, 1.0), otf.Gaussian([0.0], [[1.0]]), 0.4, max_steps=3)
    assert run.status == "step limit"
    assert run.warnings
    assert any(w.category is otf.NotConverged for w in caught)
    assert run.last_times < 0.4
