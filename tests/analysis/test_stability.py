"""The Gronwall constant against closed forms, and measured ratios below it."""

from __future__ import annotations

import numpy as np
import pytest
from scipy.integrate import quad

from ot_transformers.analysis import stability_constant, stability_experiment
from ot_transformers.attention import (
    AffineBlock,
    Attention,
    L2Attention,
    LinearAttention,
    MaskedAttention,
    MultiHeadAttention,
    Schedule,
    SigmoidAttention,
    SinkhornAttention,
    SoftmaxAttention,
    UnnormalisedAttention,
)
from ot_transformers.errors import InvalidInput
from ot_transformers.measures import Particles

rng = np.random.default_rng(0)
A = 0.3 * rng.standard_normal((2, 2))
V = rng.standard_normal((2, 2))
NORM_A, NORM_V = np.linalg.norm(A, 2), np.linalg.norm(V, 2)
R0, T = 0.8, 0.3


def test_linear_attention_has_a_closed_form() -> None:
    exact = (1 - 2 * NORM_V * NORM_A * R0**2 * 0.1) ** -1.5
    found = stability_constant(LinearAttention(A, V), 0.1, R0)
    assert float(found) == pytest.approx(exact, rel=1e-9)
    blow_up = 1 / (2 * NORM_V * NORM_A * R0**2)
    assert stability_constant(LinearAttention(A, V), 1.01 * blow_up, R0) == np.inf


def test_softmax_attention_against_quadrature() -> None:
    def rate(s: float) -> float:
        u = NORM_A * (R0 * np.exp(NORM_V * s)) ** 2
        return NORM_V * u + NORM_V * (1 + 2 * u) * np.exp(2 * u)

    found = stability_constant(SoftmaxAttention(A, V), T, R0)
    assert found.log_value == pytest.approx(quad(rate, 0, T, epsabs=0, epsrel=1e-12)[0], rel=1e-8)
    assert found.radius == pytest.approx(R0 * np.exp(NORM_V * T), rel=1e-9)


def test_affine_block_and_schedule() -> None:
    block = AffineBlock(np.diag([2.0, -1.0]))
    assert float(stability_constant(block, 1.5, R0)) == pytest.approx(np.exp(3.0), rel=1e-9)
    layers = Schedule([block, AffineBlock(np.eye(2))], times=[0.0, 0.5])
    assert float(stability_constant(layers, 1.5, R0)) == pytest.approx(np.exp(2 * 0.5 + 1.0), rel=1e-9)


def test_overflow_keeps_the_logarithm() -> None:
    found = stability_constant(SoftmaxAttention(A, V), 0.5, 2.0)
    assert float(found) == np.inf
    assert 709 < found.log_value < np.inf


KINDS: list[Attention] = [
    SoftmaxAttention(A, V),
    L2Attention(A, 0.5 * A, V),
    SigmoidAttention(A, V, bias=0.3),
    LinearAttention(A, V),
    UnnormalisedAttention(A, V),
    MultiHeadAttention([SoftmaxAttention(A, V), SigmoidAttention(A, -V)], outputs=[0.5 * np.eye(2), V]),
]


@pytest.mark.parametrize("attention", KINDS, ids=lambda a: type(a).__name__)
@pytest.mark.parametrize("p", [1, 2])
def test_measured_ratios_lie_below_the_constant(attention: Attention, p: int) -> None:
    draw = np.random.default_rng(1)
    x = draw.uniform(-0.5, 0.5, (15, 2))
    report = stability_experiment(
        attention, Particles(x), Particles(x + 0.02 * draw.standard_normal((15, 2))), T, p=p, n_times=4
    )
    assert report.holds
    assert report.ratios[0] == 1.0
    assert np.all(report.ratios[1:] <= report.bounds[1:])
    assert np.all(np.diff(report.bounds) > 0)


def test_kinds_without_a_constant_say_why() -> None:
    with pytest.raises(InvalidInput, match="Carlier"):
        stability_constant(SinkhornAttention(A, V), T, R0)
    with pytest.raises(InvalidInput, match="position 0"):
        stability_constant(MaskedAttention(SoftmaxAttention(A, V)), T, R0)
    cloud = Particles(np.ones((3, 2)))
    with pytest.raises(InvalidInput, match="same measure"):
        stability_experiment(SoftmaxAttention(A, V), cloud, cloud, T)


@pytest.mark.parametrize("R0", [19.0, 30.0, 1e3, 1e160])
@pytest.mark.parametrize(
    "kind",
    [
        SoftmaxAttention(np.eye(2), np.eye(2)),
        L2Attention(np.eye(2), np.eye(2), np.eye(2)),
        UnnormalisedAttention(np.eye(2), np.eye(2)),
    ],
)
@pytest.mark.filterwarnings("error")
def test_a_constant_beyond_the_floating_range_is_inf(kind: Attention, R0: float) -> None:
    assert stability_constant(kind, 1.0, R0) == np.inf
    assert stability_constant(kind, 1e3, 1.0) == np.inf


def test_tokens_of_weight_0_do_not_widen_the_support() -> None:
    attention = SoftmaxAttention(-np.eye(2), np.eye(2))
    x = np.array([[0.1, 0.0], [0.0, 0.2], [0.3, 0.3]])
    with_far = Particles(np.concatenate([x, [[50.0, 0.0]]]), [0.5, 0.25, 0.25, 0.0])
    report = stability_experiment(attention, with_far, Particles(x + 0.01), 0.5, n_times=3)
    assert pytest.approx(0.31 * np.sqrt(2)) == report.R0
    assert report.holds
    one = stability_experiment(attention, Particles(x), Particles(x + 0.01), 0.5, n_times=3, p=2.0)
    two = stability_experiment(attention, Particles(x), Particles(x + 0.01), 0.5, n_times=3, p=2)
    np.testing.assert_array_equal(one.ratios, two.ratios)
