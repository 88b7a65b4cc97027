"""Clouds: weighted moments, exact ranks, positions; nothing shared with the caller."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from ot_transformers.measures import Particles, PositionedParticles


def weighted(seed: int, n: int, d: int) -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(seed)
    w = rng.random(n) + 0.1
    return rng.standard_normal((n, d)), w / w.sum()


@settings(max_examples=25, deadline=None)
@given(seed=st.integers(0, 10_000), n=st.integers(1, 12), d=st.integers(1, 5))
def test_empirical_moments_use_the_weights(seed: int, n: int, d: int) -> None:
    x, w = weighted(seed, n, d)
    p = Particles(x, w)
    mean = w @ x
    cov = (x - mean).T @ (w[:, None] * (x - mean))
    np.testing.assert_allclose(p.mean, mean, rtol=1e-12, atol=1e-13)
    np.testing.assert_allclose(p.cov, cov, rtol=1e-12, atol=1e-13)
    g = p.to_gaussian()
    np.testing.assert_allclose(g.cov, cov, rtol=1e-12, atol=1e-12)
    assert int(g.rank()) == min(n - 1, d)


def test_a_repeated_token_is_a_token_of_twice_the_weight() -> None:
    twice = Particles(np.array([[0.0, 1.0], [0.0, 1.0], [3.0, 0.0]]))
    heavy = Particles(np.array([[0.0, 1.0], [3.0, 0.0]]), [2 / 3, 1 / 3])
    np.testing.assert_allclose(twice.cov, heavy.cov, rtol=1e-14)


def test_batch_is_the_loop() -> None:
    rng = np.random.default_rng(0)
    x = rng.standard_normal((3, 6, 2))
    w = rng.random((3, 6))
    w /= w.sum(-1, keepdims=True)
    p = Particles(x, w)
    for k in range(3):
        np.testing.assert_allclose(p[k].cov, Particles(x[k], w[k]).cov, rtol=1e-14)
        np.testing.assert_allclose(p.cov[k], p[k].cov, rtol=1e-14)


def test_a_callers_array_is_not_shared() -> None:
    x = np.zeros((2, 2))
    p = Particles(x)
    x += 7.0
    np.testing.assert_array_equal(p.x, np.zeros((2, 2)))
    with pytest.raises(AttributeError, match="frozen"):
        p.kind = "torch"  # type: ignore[misc]


def test_gradients_flow_through_moments() -> None:
    x = torch.randn(5, 2, dtype=torch.float64, generator=torch.Generator().manual_seed(0)).requires_grad_()
    (g,) = torch.autograd.grad(Particles(x).cov.diagonal().sum(), x)
    torch.testing.assert_close(g, 2 / 5 * (x - x.mean(0)).detach(), rtol=1e-12, atol=1e-14)


def test_weights_are_normalised_to_machine_precision() -> None:
    p = Particles(np.zeros((3, 1)), np.array([0.3, 0.3, 0.4000001]))
    assert float(p.weights.sum()) == pytest.approx(1.0, abs=1e-15)


def test_positions_travel_with_the_tokens() -> None:
    p = PositionedParticles(np.arange(6.0).reshape(3, 2), [0.0, 0.5, 1.0], [0.2, 0.3, 0.5])
    moved = p.moved(p.x_t + 1)
    assert isinstance(moved, PositionedParticles)
    np.testing.assert_array_equal(moved.s, p.s)
    np.testing.assert_array_equal(moved.weights, p.weights)
    batch = PositionedParticles(np.zeros((4, 3, 2)), [0.0, 0.5, 1.0])
    np.testing.assert_array_equal(batch[2].s, [0.0, 0.5, 1.0])


@pytest.mark.parametrize("positioned", [False, True])
def test_tokens_with_more_batch_dimensions_bring_weights_and_positions_along(positioned: bool) -> None:
    x, w, s = np.array([[0.0], [1.0], [3.0]]), [0.2, 0.3, 0.5], [0.0, 0.5, 1.0]
    one = PositionedParticles(x, s, w) if positioned else Particles(x, w)
    factors = torch.tensor([1.0, 2.0, -1.0, 4.0], dtype=torch.float64).reshape(2, 2, 1, 1)
    many = one.moved(factors * one.x_t)
    assert many.weights_t.shape == (2, 2, 3)
    for i, j in np.ndindex(2, 2):
        member = many[i, j]
        np.testing.assert_array_equal(member.weights, w)
        assert float(member.mean[0]) == pytest.approx(1.8 * float(factors[i, j, 0, 0]), rel=1e-15)
        assert float(many[i].weights[j, 2]) == 0.5
        if positioned:
            assert isinstance(member, PositionedParticles)
            np.testing.assert_array_equal(member.s, s)
    assert Particles.unchecked(factors * one.x_t, one.weights_t)[1, 1].weights_t.tolist() == w


def test_the_gaussian_of_a_cloud_of_many_tokens_has_derivatives():
    x = torch.randn(5, 2, generator=torch.Generator().manual_seed(0), dtype=torch.float64).requires_grad_()
    assert torch.autograd.gradcheck(lambda z: Particles(z).to_gaussian().cov, x)
    assert torch.autograd.gradgradcheck(lambda z: Particles(z).to_gaussian().cov, x)
