"""Schedules give the right layer at the right time."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from ot_transformers import AffineBlock, InvalidInput, LinearAttention, SigmoidAttention, SoftmaxAttention
from ot_transformers.attention import Attention, Schedule

LAYERS = [AffineBlock(float(k)) for k in range(3)]


@pytest.mark.parametrize(
    ("t", "layer"), [(0.0, 0), (0.4999, 0), (0.5, 1), (1.9, 1), (2.0, 2), (2.5, 2), (np.nextafter(0.5, 0), 0)]
)
@pytest.mark.parametrize("times", [[0.0, 0.5, 2.0], np.array([0.0, 0.5, 2.0, 3.0]), (0, 0.5, 2)])
def test_the_layer_at_a_time(t: float, layer: int, times: object) -> None:
    schedule = Schedule(LAYERS, times)  # type: ignore[arg-type]
    assert schedule.at(t) is LAYERS[layer]
    assert schedule.jumps == (0.5, 2.0)
    assert not schedule.is_callable


def test_an_open_end_lasts_for_ever_and_a_closed_one_ends() -> None:
    assert Schedule(LAYERS, [0.0, 0.5, 2.0]).at(1e9) is LAYERS[2]
    closed = Schedule(LAYERS, [0.0, 0.5, 2.0, 3.0])
    assert closed.at(3.0) is LAYERS[2]
    with pytest.raises(InvalidInput, match=r"t = 3.1 lies outside the schedule \[0, 3\]"):
        closed.at(3.1)
    with pytest.raises(InvalidInput, match=r"t = -0\.1 lies outside"):
        closed.at(-0.1)
    with pytest.raises(InvalidInput, match="t must be finite"):
        closed.at(float("nan"))


def test_a_callable_gives_its_parameters_at_every_time() -> None:
    schedule = Schedule.from_function(lambda t: LinearAttention(np.cos(t), 2.0))
    assert schedule.jumps == ()
    assert schedule.is_callable
    assert float(schedule.at(1.3).A[0, 0]) == np.cos(1.3)  # type: ignore[attr-defined]
    jumping = Schedule.from_function(lambda t: AffineBlock(float(t > 1)), jumps=[2.0, 1.0])
    assert jumping.jumps == (1.0, 2.0)
    assert Schedule.from_function(lambda t: AffineBlock(t), jumps=[0.5, 1.0, 0.5]).jumps == (0.5, 1.0)
    for t in ("x", None, float("nan")):
        with pytest.raises(InvalidInput, match="t must be"):
            schedule.at(t)  # type: ignore[arg-type]


def test_a_callable_that_changes_its_mind_is_caught() -> None:
    def f(t: float) -> Attention:
        return AffineBlock(np.eye(2) if t < 1 else np.eye(3))

    with pytest.raises(InvalidInput, match="f must keep its dimension 2, got 3 at t = 1"):
        Schedule.from_function(f).at(1.0)
    with pytest.raises(InvalidInput, match="f must return an Attention, got NoneType None at t = 2"):
        Schedule.from_function(lambda t: AffineBlock(1.0) if t < 1 else None).at(2.0)  # type: ignore[arg-type,return-value]


def test_gaussians_are_kept_if_every_layer_keeps_them() -> None:
    softmax, sigmoid = SoftmaxAttention(1.0, 1.0), SigmoidAttention(1.0, 1.0)
    assert Schedule([softmax, AffineBlock(1.0)], [0, 1]).preserves_gaussians
    assert not Schedule([softmax, sigmoid], [0, 1]).preserves_gaussians
    assert Schedule.from_function(lambda t: softmax).preserves_gaussians
    assert not Schedule.from_function(lambda t: sigmoid).preserves_gaussians


def test_velocity_without_a_time_is_that_of_the_start() -> None:
    x = np.array([[1.0], [3.0]])
    schedule = Schedule([AffineBlock(2.0), AffineBlock(5.0)], [0.0, 1.0])
    np.testing.assert_array_equal(schedule.velocity(x), 2 * x)
    np.testing.assert_array_equal(schedule.field(x, x), 2 * x)
    np.testing.assert_array_equal(schedule.evaluator()(torch.from_numpy(x), torch.ones(2) / 2), 2 * x)
