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


@pytest.mark.parametrize("p", [1, 2, 3, 2.5])
@pytest.mark.parametrize("factor", [1e160, 1e300, 1e-170, 1e-300])
@pytest.mark.parametrize("s", [S, np.linspace(0, 1, 7)], ids=["ties", "distinct"])
def test_a_distance_scales_with_its_tokens_where_its_power_leaves_the_floating_range(
    p: float, factor: float, s: np.ndarray
) -> None:
    x, y, metric = RNG.normal(size=(7, 2)), RNG.normal(size=(7, 2)), ConditionalWasserstein(p=p)
    one = metric.distance(PositionedParticles(x, s), PositionedParticles(y, s))
    mu, nu = PositionedParticles(factor * x, s), PositionedParticles(factor * y, s)
    assert metric.distance(mu, nu) / factor == pytest.approx(one, rel=1e-14)
    path = metric.geodesic(mu, nu)
    assert path.length / factor == pytest.approx(one, rel=1e-14)
    assert 0 < path.error / factor < 1e-13


def test_a_large_power_is_a_bottleneck() -> None:
    """W_1000 of pairs at distances 3 and 1, half of the mass each: 3 (1/2)^(1/1000)."""
    metric, half = ConditionalWasserstein(p=1000), 0.5 ** (1 / 1000)
    s = [0.0, 1.0]
    zero = PositionedParticles(np.zeros((2, 2)), s)
    far = PositionedParticles([[0.0, 3.0], [1.0, 0.0]], s)
    assert metric.distance(zero, far) == pytest.approx(3 * half, rel=1e-14)
    tied = PositionedParticles([[0.0, 3.0], [1.0, 0.0]], [0.0, 0.0])
    assert metric.distance(PositionedParticles(np.zeros((1, 2)), [0.0]), tied) == pytest.approx(
        3 * half, rel=1e-14
    )


@pytest.mark.parametrize("factor", [1.0, 1e160])
def test_derivatives_in_tokens_and_weights_to_second_order(factor: float) -> None:
    metric = ConditionalWasserstein(p=3)
    y = torch.from_numpy(factor * RNG.normal(size=(7, 2)))
    v = torch.from_numpy(RNG.dirichlet(np.ones(7)))
    x = torch.from_numpy(RNG.normal(size=(7, 2))).requires_grad_()
    raw = torch.from_numpy(RNG.random(7) + 0.5).requires_grad_()
    levels = torch.from_numpy(np.unique(S, return_inverse=True)[1])
    total = torch.zeros(4, dtype=torch.float64).index_add(0, levels, v)

    def distance(x: torch.Tensor, raw: torch.Tensor) -> torch.Tensor:
        sums = torch.zeros(4, dtype=torch.float64).index_add(0, levels, raw)
        w = raw / sums[levels] * total[levels]  # the mass of each position is given
        return metric.distance(PositionedParticles(factor * x, S, w), PositionedParticles(y, S, v)) / factor

    assert torch.autograd.gradcheck(distance, (x, raw))
    assert torch.autograd.gradgradcheck(lambda x: distance(x, raw.detach()), (x,))


def test_the_higher_of_two_precisions_is_used() -> None:
    """Positions and weights of the other one are right to its precision only."""
    metric, s = ConditionalWasserstein(), np.array([0.0, 0.1, 0.7])
    x, y = RNG.normal(size=(3, 2)), RNG.normal(size=(3, 2)).astype(np.float32)
    weights = np.array([0.1, 0.3, 0.6])
    for w in (None, weights):
        mu, nu = PositionedParticles(x, s, w), PositionedParticles(y, s.astype(np.float32), w)
        share = np.full(3, 1 / 3) if w is None else w
        expected = np.sqrt((share * ((x - y) ** 2).sum(-1)).sum())
        for order in ([0, 1, 2], [2, 0, 1]):
            other = PositionedParticles(
                y[order], s[order].astype(np.float32), None if w is None else w[order].astype(np.float32)
            )
            for a, b in ((mu, other), (other, mu)):
                assert metric.distance(a, b) == pytest.approx(expected, rel=1e-15 if w is None else 1e-7)
                assert metric.distance(a, b).dtype == np.float64
                assert metric.geodesic(a, b).length == pytest.approx(
                    expected, rel=1e-15 if w is None else 1e-7
                )
                assert metric.geodesic(a, b).at(0.5).x.dtype == np.float64
    assert nu.dtype == torch.float32


def test_a_mass_within_the_tolerance_may_be_in_one_measure_alone() -> None:
    metric = ConditionalWasserstein()
    a = PositionedParticles([[0.0], [1.0]], [0.0, 1.0], [1 - 5e-10, 5e-10])
    b = PositionedParticles([[2.0]], [0.0])
    for mu, nu in ((a, b), (b, a)):
        assert metric.distance(mu, nu) == pytest.approx(2.0, rel=1e-9)
        path = metric.geodesic(mu, nu)
        assert path.length == pytest.approx(2.0, rel=1e-9)
        assert float(path.at(0.5).mean[0]) == pytest.approx(1.0, rel=1e-9)
        assert float(path.at(0.5).weights.sum()) == pytest.approx(1.0, abs=1e-15)
