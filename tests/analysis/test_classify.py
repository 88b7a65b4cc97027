"""Long-run classes and exact ranks where the theory gives them."""

from __future__ import annotations

import numpy as np
import pytest

from ot_transformers.analysis import classify
from ot_transformers.attention import AffineBlock, L2Attention, SinkhornAttention, SoftmaxAttention
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
