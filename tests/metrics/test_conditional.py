"""The conditional Wasserstein distance against per-position transport by POT."""

from __future__ import annotations

import numpy as np
import ot
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from ot_transformers import ConditionalWasserstein, InvalidInput, PositionedParticles, Wasserstein

RNG = np.random.default_rng(8)
S = np.array([0.0, 0.0, 0.0, 0.3, 0.3, 0.7, 1.0])


def by_pot(x: np.ndarray, y: np.ndarray, w: np.ndarray, v: np.ndarray, p: float) -> float:
    total = 0.0
    for level in np.unique(S):
        i = level == S
        mass = w[i].sum()
        cost = ot.dist(x[i], y[i], "euclidean") ** p
        total += mass * ot.emd2(w[i] / mass, v[i] / v[i].sum(), cost)
    return total ** (1 / p)


@pytest.mark.parametrize("p", [1, 2, 3])
@pytest.mark.parametrize("d", [1, 2])
def test_against_pot_in_a_batch_with_weights_and_ties(p: float, d: int) -> None:
    order = RNG.permutation(7)
    x, y = RNG.normal(size=(3, 7, d)), RNG.normal(size=(3, 7, d))
    w = RNG.dirichlet(np.ones(7))
    v = w.copy()
    v[:3], v[3:5] = w[:3].sum() * RNG.dirichlet(np.ones(3)), w[3:5].sum() * RNG.dirichlet(np.ones(2))
    mu, nu = PositionedParticles(x, S, w), PositionedParticles(y[:, order], S[order], v[order])
    value = ConditionalWasserstein(p=p).distance(mu, nu)
    expected = [by_pot(x[k], y[k], w, v, p) for k in range(3)]
    np.testing.assert_allclose(value, expected, rtol=1e-11)


def test_distinct_positions_compare_token_by_token() -> None:
    s = np.linspace(0, 1, 6)
    x, y = RNG.normal(size=(2, 6, 3)), RNG.normal(size=(2, 6, 3))
    w = RNG.dirichlet(np.ones(6))
    value = ConditionalWasserstein().distance(PositionedParticles(x, s, w), PositionedParticles(y, s, w))
    np.testing.assert_allclose(value, np.sqrt((w * ((x - y) ** 2).sum(-1)).sum(-1)), rtol=1e-14)
    order = RNG.permutation(6)  # another order of the tokens takes the other path
    shuffled = PositionedParticles(y[:, order], s[order], w[order])
    np.testing.assert_allclose(
        ConditionalWasserstein().distance(PositionedParticles(x, s, w), shuffled), value, rtol=1e-13
    )


@given(st.integers(0, 10_000))
@settings(max_examples=20, deadline=None)
def test_at_least_the_distance_on_the_product_space(seed: int) -> None:
    rng = np.random.default_rng(seed)
    s = np.sort(rng.integers(0, 4, size=8)) / 4
    x, y = rng.normal(size=(8, 2)), rng.normal(size=(8, 2))
    for p in (1.0, 2.0):
        conditional = ConditionalWasserstein(p=p).distance(
            PositionedParticles(x, s), PositionedParticles(y, s)
        )
        product = Wasserstein(p=p).distance(np.c_[s, x], np.c_[s, y])
        forgetful = Wasserstein(p=p).distance(x, y)
        assert conditional >= product * (1 - 1e-12)
        assert product >= forgetful * (1 - 1e-12)


def test_different_position_marginals_are_an_error_that_names_the_place() -> None:
    x = RNG.normal(size=(4, 2))
    mu = PositionedParticles(x, [0.0, 0.25, 0.5, 1.0])
    with pytest.raises(InvalidInput, match=r"same position marginal; at s = 0\.5 mu has mass 0\.25, nu 0"):
        ConditionalWasserstein().distance(mu, PositionedParticles(x[:3], [0.0, 0.25, 1.0], [0.25, 0.25, 0.5]))
    # Positions equal up to tol are equal, by rounding only.
    near = PositionedParticles(x + 1.0, np.array([0.0, 0.25, 0.5, 1.0]) * (1 - 1e-12))
    assert ConditionalWasserstein().distance(mu, near) == pytest.approx(np.sqrt(2), rel=1e-12)


def test_geodesic_keeps_positions_and_has_constant_speed() -> None:
    metric = ConditionalWasserstein()
    w = RNG.dirichlet(np.ones(7))
    v = w.copy()
    v[:3] = w[:3].sum() * RNG.dirichlet(np.ones(3))
    for a, b in ((None, None), (w, v)):
        mu = PositionedParticles(RNG.normal(size=(7, 2)), S, a)
        nu = PositionedParticles(RNG.normal(size=(7, 2)), S, b)
        path = metric.geodesic(mu, nu)
        assert path.length == pytest.approx(metric.distance(mu, nu), rel=1e-12)
        assert metric.distance(path.at(0.25), path.at(0.75)) == pytest.approx(0.5 * path.length, rel=1e-10)
        # An ulp of mass over the diameter of the clouds costs its square root.
        assert metric.distance(path.at(0.0), mu) <= (0.0 if a is None else 10 * (8 * 2.3e-16) ** 0.5)


def test_gradient_flows_through_the_plans() -> None:
    x = torch.from_numpy(RNG.normal(size=(7, 2))).requires_grad_()
    nu = PositionedParticles(torch.from_numpy(RNG.normal(size=(7, 2))), S)
    metric = ConditionalWasserstein()
    assert torch.autograd.gradcheck(lambda x: metric.distance(PositionedParticles(x, S), nu), (x,))
