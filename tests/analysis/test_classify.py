"""Long-run classes and exact ranks where the theory gives them."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest

from ot_transformers.analysis import classify
from ot_transformers.attention import AffineBlock, L2Attention, SinkhornAttention, SoftmaxAttention
from ot_transformers.errors import NotConverged
from ot_transformers.flows import solve
from ot_transformers.measures import Gaussian

I2 = np.eye(2)
UNIT = Gaussian(np.zeros(2), I2)


@pytest.mark.parametrize("d", [3, 5])
def test_softmax_with_identity_value_leaves_rank_d_minus_half(d: int) -> None:
    draw = np.random.default_rng(d)
    n = 20
    Q = draw.standard_normal((n, d // 2, d))
    X = draw.standard_normal((n, d, d))
    attention = SoftmaxAttention(-Q.transpose(0, 2, 1) @ Q / np.sqrt(d), np.eye(d))
    times = np.concatenate([[0.0], np.geomspace(1.0, 1e6, 12)])
    run = solve(attention, Gaussian(np.zeros((n, d)), X @ X.transpose(0, 2, 1)), 1e6, save_at=times)
    found = classify(attention, run)
    assert set(found.label) == {"converges to lower rank"}
    np.testing.assert_array_equal(found.rank, d - d // 2)


def test_one_of_each_class() -> None:
    cases = {
        "converges to a point": (SoftmaxAttention(-I2, I2), 200.0),
        "converges to full rank": (AffineBlock(np.zeros((2, 2))), 5.0),
        "blows up": (SoftmaxAttention(I2, I2), 5.0),
        "undecided": (SoftmaxAttention(-I2, I2), 0.2),
    }
    for label, (attention, t_end) in cases.items():
        found = classify(attention, solve(attention, UNIT, t_end))
        assert found.label == label
        assert int(found.rank) == {"converges to a point": 0, "converges to full rank": 2}.get(label, -1)


def test_l2_and_sinkhorn_grow_where_softmax_blows_up() -> None:
    softmax = classify(SoftmaxAttention(I2, I2), solve(SoftmaxAttention(I2, I2), UNIT, 20.0))
    assert float(softmax.blow_up_time) == pytest.approx(0.5, rel=1e-6)  # 1 / lambda_max(A + A^T)
    for attention in (L2Attention(I2, I2, I2), SinkhornAttention(I2, I2)):
        found = classify(attention, solve(attention, UNIT, 20.0))
        assert found.label == "diverges exponentially"
        # M tends to V A = I for both, so that tr S grows like e^{2t}.
        assert float(found.growth_rate) == pytest.approx(2.0, rel=1e-6)
        assert np.isinf(found.blow_up_time)


def test_exponents_of_one_over_t_decay() -> None:
    run = solve(SoftmaxAttention(-I2, I2), UNIT, 100.0)
    # S(t) = 1 / (1 + 2t): t d log S / dt = -2t / (1 + 2t).
    np.testing.assert_allclose(classify(SoftmaxAttention(-I2, I2), run).exponents, -200 / 201, rtol=1e-6)


@pytest.mark.parametrize(
    ("A", "S0", "t_end"),
    [
        (I2, 1e-3 * I2, 10.0),  # blows up at 500
        (I2, 1e-9 * I2, 10.0),  # at 5e8
        (np.diag([-1.0, 1e-4]), I2, 100.0),  # at 5000, after the other direction is gone
        (-I2, 1e-3 * I2, 10.0),  # tends to a point, but has not begun to
    ],
)
@pytest.mark.parametrize("ends_only", [False, True])
def test_a_flow_that_has_not_begun_to_move_is_undecided(
    A: np.ndarray, S0: np.ndarray, t_end: float, ends_only: bool
) -> None:
    attention = SoftmaxAttention(A, I2)
    save_at = [0.0, t_end] if ends_only else None
    found = classify(attention, solve(attention, Gaussian(np.zeros(2), S0), t_end, save_at=save_at))
    assert found.label == "undecided"
    assert int(found.rank) == -1


@pytest.mark.parametrize("ends_only", [False, True])
def test_a_limit_approached_like_one_over_t_is_one(ends_only: bool) -> None:
    # A <= 0 of rank 1: S(t) = S0^{1/2} (I - 2 t B)^{-1} S0^{1/2} tends to rank 1 like S_inf + c/t.
    attention = SoftmaxAttention(np.diag([-1.0, 0.0]), I2)
    start = Gaussian(np.zeros(2), np.array([[1.0, 0.3], [0.3, 0.5]]))
    found = classify(attention, solve(attention, start, 1e4, save_at=[0.0, 1e4] if ends_only else None))
    assert found.label == "converges to lower rank"
    assert int(found.rank) == 1


def test_a_flow_at_its_step_limit_has_shown_no_limit() -> None:
    attention = SoftmaxAttention(I2, I2)
    with pytest.warns(NotConverged):
        run = solve(attention, UNIT, 1.0, max_steps=3)
    assert classify(attention, run).label == "undecided"
    still = SoftmaxAttention(0.0 * I2, I2)
    rest = solve(still, UNIT, 1.0)
    assert classify(still, rest).label == "converges to full rank"
    assert classify(still, dataclasses.replace(rest, status="step limit")).label == "undecided"
