"""Stiff Gaussian flows, carried on by LSODA."""

import numpy as np
import pytest
import torch

import ot_transformers as otf
from ot_transformers.flows._stiff import SWITCH_AFTER


def ill_conditioned(n: int, cond: float, seed: int = 0):
    """Softmax flows with V of a condition number, A = -Q^T Q of rank 2, and a batch of starts, d = 4."""
    rng = np.random.default_rng(seed)
    Q = rng.standard_normal((n, 2, 4))
    U = np.linalg.qr(rng.standard_normal((n, 4, 4)))[0]
    V = (U * np.geomspace(1.0, 1.0 / cond, 4)) @ U.transpose(0, 2, 1)
    X = rng.standard_normal((n, 4, 4))
    return -Q.transpose(0, 2, 1) @ Q, V, X @ X.transpose(0, 2, 1)


def test_stiff_members_agree_with_explicit_steps():
    A, V, S0 = ill_conditioned(3, 1000.0)
    attention, start = otf.SoftmaxAttention(A, V), otf.Gaussian(np.zeros((3, 4)), S0)
    times = np.array([0.0, 1.0, 1e4, 1e6])
    slow = otf.solve(attention, start, 1e6, save_at=times)
    fast = otf.solve(attention, start, 1e6, save_at=times, method="auto")
    assert slow.stats["steps"].max() > SWITCH_AFTER, "not a stiff case"
    assert fast.stats["steps"].max() < slow.stats["steps"].max()
    assert set(fast.status) == {"completed"}
    for a, b in zip(slow.states, fast.states, strict=True):
        scale = np.abs(a.cov).max((-2, -1), keepdims=True)
        assert np.all(np.abs(a.cov - b.cov) <= 1e-6 * scale)


@pytest.mark.parametrize(
    "attention",
    [
        lambda A, V: otf.L2Attention(
            np.linalg.cholesky(-A + 1e-3 * np.eye(4)), -np.linalg.cholesky(-A + 1e-3 * np.eye(4)), V
        ),
        lambda A, V: otf.SinkhornAttention(A, V),
        lambda A, V: otf.MultiHeadAttention(
            [otf.SoftmaxAttention(A, V), otf.AffineBlock(-1e-6 * V)], outputs=[np.eye(4), V]
        ),
        lambda A, V: otf.LinearAttention(A, V),
    ],
    ids=["L2", "Sinkhorn", "multi-head", "linear"],
)
def test_a_member_of_a_batch_is_the_flow_alone(attention):
    A, V, S0 = ill_conditioned(2, 10.0)
    both = attention(A, V)
    for i in range(2):
        alone = attention(A[i], V[i]).affine(otf.Gaussian(np.ones(4), S0[i]))
        found = both.member((i,), (2,)).affine(otf.Gaussian(np.ones(4), S0[i]))
        np.testing.assert_allclose(found.M, alone.M, rtol=1e-13, atol=1e-15)
        np.testing.assert_allclose(found.b, alone.b, rtol=1e-13, atol=1e-15)


def test_a_step_limit_holds_for_stiff_members():
    A, V, S0 = ill_conditioned(2, 1000.0)
    run = otf.solve(
        otf.SoftmaxAttention(A, V),
        otf.Gaussian(np.zeros((2, 4)), S0),
        1e6,
        max_steps=SWITCH_AFTER + 5,
        method="auto",
    )
    stuck = run.status == "step limit"
    assert stuck.any()
    assert np.all(run.stats["steps"][stuck] == SWITCH_AFTER + 5)
    assert np.all(run.last_times[stuck] < 1e6)
    assert "stopped before t_end" in run.warnings[0]


def test_blow_up_is_found_before_any_switch():
    run = otf.solve(otf.SoftmaxAttention(1.0, 1.0), otf.Gaussian([0.0], [[0.5]]), 2.0, method="auto")
    assert run.status == "blew up"
    assert abs(run.blow_up_time - 1.0) <= run.blow_up_error


def test_a_flow_leaves_the_number_of_threads_as_it_was():
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(2)
        otf.solve(otf.SoftmaxAttention(-1.0, 1.0), otf.Gaussian([0.0], [[0.5]]), 2.0)
        otf.bures_distance(np.eye(4), 2 * np.eye(4))
        assert torch.get_num_threads() == 2
        with pytest.raises(otf.InvalidInput):
            otf.bures_distance(np.eye(4), -np.eye(4))
        assert torch.get_num_threads() == 2
    finally:
        torch.set_num_threads(before)
