"""`solve` on particles: against the closure where it is exact, layers, masks, equivariance."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.linalg import expm

import ot_transformers as otf


def cloud(n=12, d=2, seed=0):
    return 0.7 * np.random.default_rng(seed).standard_normal((n, d))


def matrices(d=2, seed=1):
    return np.random.default_rng(seed).standard_normal((2, d, d))


def test_linear_attention_moves_moments_as_its_closure():
    x, (A, V) = cloud(), 0.4 * matrices()
    w = np.random.default_rng(2).dirichlet(np.ones(12))
    p = otf.Particles(x, w)
    a = otf.solve(otf.LinearAttention(A, V), p, 1.0).states[-1]
    b = otf.solve(otf.LinearAttention(A, V), p.to_gaussian(), 1.0).states[-1]
    np.testing.assert_allclose(a.mean, b.mean, rtol=1e-7)
    np.testing.assert_allclose(a.cov, b.cov, rtol=1e-6, atol=1e-9)


def test_two_tokens_of_softmax_against_a_scalar_equation():
    """x = (-r, r), d = 1: r' = v r tanh(a r^2), so int dr / (v r tanh(a r^2)) = t."""
    from scipy.integrate import quad
    from scipy.optimize import brentq

    a, v, r0, t = 0.8, 0.9, 0.6, 1.3
    exact = brentq(
        lambda r: quad(lambda u: 1 / (v * u * np.tanh(a * u * u)), r0, r, epsabs=1e-13, epsrel=1e-13)[0] - t,
        r0,
        10.0,
        xtol=1e-14,
    )
    run = otf.solve(otf.SoftmaxAttention(a, v), otf.Particles([[-r0], [r0]]), t, rtol=1e-11, atol=1e-13)
    np.testing.assert_allclose(run.states[-1].x[:, 0], [-exact, exact], rtol=1e-10)


@settings(max_examples=6, deadline=None)
@given(seed=st.integers(0, 10_000))
def test_permutations_commute_with_the_flow(seed):
    x, (A, V) = cloud(8, 2, seed), 0.5 * matrices(2, seed)
    order = np.random.default_rng(seed).permutation(8)
    attention = otf.L2Attention(A, V, np.eye(2))
    a = otf.solve(attention, otf.Particles(x), 0.5, save_at=[0.5]).states[-1].x
    b = otf.solve(attention, otf.Particles(x[order]), 0.5, save_at=[0.5]).states[-1].x
    np.testing.assert_allclose(a[order], b, rtol=1e-10, atol=1e-12)


def test_rotations_commute_with_the_flow():
    x, (A, V) = cloud(), 0.5 * matrices()
    R = expm(np.array([[0.0, 0.7], [-0.7, 0.0]]))
    a = otf.solve(otf.SoftmaxAttention(A, V), otf.Particles(x), 1.0).states[-1].x
    b = otf.solve(otf.SoftmaxAttention(R @ A @ R.T, R @ V @ R.T), otf.Particles(x @ R.T), 1.0).states[-1].x
    np.testing.assert_allclose(a @ R.T, b, rtol=1e-8, atol=1e-8)


def test_a_batch_of_clouds_gives_what_the_loop_gives():
    x = np.stack([cloud(6, 2, k) * 3.0**k for k in range(3)])
    attention = otf.SoftmaxAttention(*matrices())
    together = otf.solve(attention, otf.Particles(x), 0.4)
    for k in range(3):
        alone = otf.solve(attention, otf.Particles(x[k]), 0.4)
        np.testing.assert_allclose(together.states[-1].x[k], alone.states[-1].x, rtol=1e-12, atol=1e-13)


@pytest.mark.parametrize("kind", ["uniform", "weighted", "masked"])
def test_a_batch_of_parameters_gives_what_the_loop_gives(tmp_path, kind):
    """At the start, between save times, at the end, and from a file."""
    x, w, s = cloud(6), np.random.default_rng(3).dirichlet(np.ones(6)), np.array([0, 0.8, 0.1, 0.4, 1, 0.1])
    heads = [otf.SoftmaxAttention(*matrices(seed=k)) for k in range(3)]
    stack = otf.SoftmaxAttention(np.stack([h.A for h in heads]), np.stack([h.V for h in heads]))
    measure = otf.Particles(x, None if kind == "uniform" else w)
    if kind == "masked":
        measure = otf.PositionedParticles(x, s, w)
        heads, stack = [otf.MaskedAttention(h) for h in heads], otf.MaskedAttention(stack)
    together = otf.solve(stack, measure, 0.4, save_at=[0.1, 0.4])
    loaded = otf.Trajectory.load(together.save(tmp_path / "run.npz"))
    for k, head in enumerate(heads):
        alone = otf.solve(head, measure, 0.4, save_at=[0.1, 0.4])
        pairs = [(together.at(t)[k], alone.at(t)) for t in (0.0, 0.05, 0.1, 0.3, 0.4)]
        pairs += [(loaded.states[i][k], alone.states[i]) for i in range(2)]
        for a, b in pairs:
            assert type(a) is type(b)
            np.testing.assert_array_equal(a.weights, b.weights)
            np.testing.assert_allclose(a.x, b.x, rtol=1e-12, atol=1e-13)
            np.testing.assert_allclose(a.mean, b.mean, rtol=1e-12, atol=1e-13)
            np.testing.assert_allclose(a.cov, b.cov, rtol=1e-12, atol=1e-13)
            if kind == "masked":
                np.testing.assert_array_equal(a.s, b.s)
        assert together.status[k] == alone.status


def test_a_mean_of_a_member_is_that_of_its_weighted_cloud():
    """V = v I and A = 0: the mean moves like e^(v t)."""
    p = otf.Particles([[0.0], [1.0], [3.0]], [0.2, 0.3, 0.5])
    run = otf.solve(otf.SoftmaxAttention([[0.0]], [[[-1.0]], [[2.0]]]), p, 0.1)
    np.testing.assert_array_equal(run.states[-1][0].weights, [0.2, 0.3, 0.5])
    for k, v in enumerate((-1.0, 2.0)):
        assert run.states[-1][k].mean[0] == pytest.approx(1.8 * np.exp(0.1 * v), rel=1e-9)


@pytest.mark.parametrize("gaussian", [True, False])
@pytest.mark.parametrize("function", [True, False])
def test_layers_that_bring_batch_dimensions_later(gaussian, function):
    one, two = np.array([[-0.5]]), np.array([[[-1.0]], [[0.3]]])
    layers = [otf.AffineBlock(one), otf.AffineBlock(two)]
    schedule = otf.Schedule(layers, [0.0, 0.5])
    if function:
        schedule = otf.Schedule.from_function(lambda t: layers[int(t >= 0.5)], jumps=[0.5])
    measure = otf.Gaussian([1.0], [[2.0]]) if gaussian else otf.Particles([[1.0], [3.0]], [0.9, 0.1])
    energy = otf.PotentialEnergy(lambda x: x.square().sum(-1))
    run = otf.solve(schedule, measure, 1.0, rtol=1e-10, atol=1e-12, save_at=[0.3, 1.0], energy=energy)
    np.testing.assert_allclose(run.at(0.3).mean, np.exp(-0.15) * np.stack([measure.mean] * 2), rtol=1e-9)
    for k in range(2):
        growth = np.exp(0.5 * (-0.5 + two[k, 0, 0]))
        np.testing.assert_allclose(run.states[-1][k].mean, growth * measure.mean, rtol=1e-8)
        np.testing.assert_allclose(run.states[-1][k].cov, growth**2 * measure.cov, rtol=1e-8)
    assert run.energies["energy"].shape == (2, 2)


def test_a_callable_that_brings_batch_dimensions_unannounced_says_so():
    schedule = otf.Schedule.from_function(
        lambda t: otf.AffineBlock(np.array([[[-1.0]], [[-2.0]]]) if 0.4 < t < 0.7 else [[-1.0]])
    )
    with pytest.raises(otf.InvalidInput, match=r"f brings batch dimensions \(2,\) at t = "):
        otf.solve(schedule, otf.Gaussian([1.0], [[1.0]]), 1.0)


def test_a_jump_named_twice_is_one_jump():
    schedule = otf.Schedule.from_function(
        lambda t: otf.AffineBlock(1.0 if t < 0.5 else -2.0), jumps=[0.5, 0.5]
    )
    run = otf.solve(schedule, otf.Particles([[1.0], [2.0]]), 1.0, rtol=1e-10, atol=1e-12)
    assert run.status == "completed"
    np.testing.assert_allclose(run.states[-1].x, np.exp(0.5 - 1.0) * np.array([[1.0], [2.0]]), rtol=1e-8)


def test_one_token_and_dimension_one():
    run = otf.solve(otf.SoftmaxAttention(0.3, -1.0), otf.Particles([[2.0]]), 1.0)
    assert run.states[-1].x.shape == (1, 1)
    assert run.states[-1].x[0, 0] == pytest.approx(2 * np.exp(-1.0), rel=1e-8)


def test_clusters_stop_when_converged():
    """V = -I: every token decays like e^-t, relative to the start, whatever its size."""
    x = cloud()
    runs = [
        otf.solve(
            otf.SoftmaxAttention(np.zeros((2, 2)), -np.eye(2)),
            otf.Particles(scale * (x + 1.0)),
            50.0,
            stop_when_converged=True,
            converged_tol=1e-3,
        )
        for scale in (1.0, 1e-6)
    ]
    assert all(r.status == "converged" for r in runs)
    assert runs[0].last_times == pytest.approx(runs[1].last_times, rel=1e-6)
    assert runs[0].valid.all()


def test_masked_attention_flows_its_positions_along():
    """The prefix of a causal cloud does not see the rest: it flows as if alone."""
    x, s = cloud(6), np.linspace(0, 1, 6)
    attention = otf.MaskedAttention(otf.SoftmaxAttention(*matrices()))
    whole = otf.solve(attention, otf.PositionedParticles(x, s), 0.7)
    prefix = otf.solve(attention, otf.PositionedParticles(x[:3], s[:3]), 0.7)
    assert isinstance(whole.states[-1], otf.PositionedParticles)
    np.testing.assert_allclose(whole.states[-1].x[:3], prefix.states[-1].x, rtol=1e-7)


def test_layers_are_integrated_exactly_up_to_each_jump():
    """Affine layers compose as matrix exponentials; a save time may lie on a jump."""
    W = matrices(3, 4)
    x = cloud(4, 3)
    schedule = otf.Schedule([otf.AffineBlock(W[0]), otf.AffineBlock(W[1])], [0.0, 0.37])
    run = otf.solve(schedule, otf.Particles(x), 1.0, save_at=[0.37, 0.5, 1.0], rtol=1e-11, atol=1e-13)
    E = expm(0.37 * W[0])
    np.testing.assert_allclose(run.states[0].x, x @ E.T, rtol=1e-9)
    np.testing.assert_allclose(run.states[1].x, x @ E.T @ expm(0.13 * W[1]).T, rtol=1e-9)
    np.testing.assert_allclose(run.states[2].x, x @ E.T @ expm(0.63 * W[1]).T, rtol=1e-9)
    np.testing.assert_allclose(run.at(0.2).x, x @ expm(0.2 * W[0]).T, rtol=1e-9)


@pytest.mark.parametrize("gaussian", [True, False])
def test_a_callable_schedule_has_the_parameters_of_the_time(gaussian):
    """W(t) = t w: x(t) = x0 e^(w t^2 / 2); members of a batch share their steps."""
    schedule = otf.Schedule.from_function(lambda t: otf.AffineBlock(np.array([[-0.8 * t]])))
    start = np.array([[[1.0]], [[2.0]]])
    measure = otf.Gaussian(start[..., 0], start) if gaussian else otf.Particles(start)
    run = otf.solve(schedule, measure, 1.5, rtol=1e-10, atol=1e-12)
    decay = np.exp(-0.8 * 1.5**2 / 2)
    np.testing.assert_allclose(run.states[-1].mean, start[..., 0] * decay, rtol=1e-9)
    assert run.status.tolist() == ["completed"] * 2
    np.testing.assert_allclose(run.at(0.7).mean, start[..., 0] * np.exp(-0.8 * 0.7**2 / 2), rtol=1e-9)


def test_residual_networks_converge_to_the_flow_at_order_one():
    x, (A, V) = cloud(20), 0.8 * matrices()
    attention = otf.SoftmaxAttention(A, V)
    exact = otf.solve(attention, otf.Particles(x), 1.0, rtol=1e-11, atol=1e-13).states[-1].x
    depths = np.array([32, 64, 128, 256])
    errors = []
    for depth in depths:
        y = x.copy()
        for _ in range(depth):
            y = y + attention.velocity(otf.Particles(y)) / depth
        errors.append(np.abs(y - exact).max())
    orders = -np.diff(np.log(errors)) / np.log(2.0)
    assert np.abs(orders - 1).max() < 0.06
    assert abs(orders[-1] - 1) < abs(orders[0] - 1) + 1e-3


def test_multihead_of_different_kinds():
    """Softmax minus the same softmax plus an affine block is the affine flow."""
    A, V = matrices()
    x = cloud()
    head = otf.SoftmaxAttention(A, V)
    three = otf.MultiHeadAttention(
        [head, head, otf.AffineBlock(np.eye(2))], [np.eye(2), -np.eye(2), np.eye(2)]
    )
    run = otf.solve(three, otf.Particles(x), 1.0)
    np.testing.assert_allclose(run.states[-1].x, np.e * x, rtol=1e-7)
