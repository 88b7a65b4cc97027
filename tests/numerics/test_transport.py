"""Exact transport against POT and against hand-made couplings."""

from __future__ import annotations

import numpy as np
import ot
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from ot_transformers.numerics.transport import (
    barycentric_projection,
    sorted_coupling,
    transport_cost,
    transport_plan,
)

RNG = np.random.default_rng(4)


def clouds(d: int, *batch: int, n: int = 8, m: int = 6) -> list[torch.Tensor]:
    x, y = RNG.normal(size=(*batch, n, d)), RNG.normal(size=(*batch, m, d))
    w, v = (RNG.dirichlet(np.ones(k), size=batch or None) for k in (n, m))
    return [torch.from_numpy(np.asarray(t)) for t in (x, w, y, v)]


@pytest.mark.parametrize("d", [1, 2, 5])
@pytest.mark.parametrize("p", [1.0, 1.5, 2.0, 3.0])
def test_cost_against_pot_in_a_batch(d: int, p: float) -> None:
    x, w, y, v = clouds(d, 3)
    value = transport_cost(x, w, y, v, p)
    expected = [
        ot.emd2(w[k].numpy(), v[k].numpy(), ot.dist(x[k].numpy(), y[k].numpy(), "euclidean") ** p)
        for k in range(3)
    ]
    np.testing.assert_allclose(value, expected, rtol=1e-12)


@pytest.mark.parametrize("n", [1, 2, 40])
def test_equal_masses_give_a_matching_of_the_cost_of_pot(n: int) -> None:
    x, y = torch.from_numpy(RNG.normal(size=(n, 2))), torch.from_numpy(RNG.normal(size=(n, 2)))
    w = torch.full((n,), 1 / n, dtype=torch.float64)
    plan = transport_plan(x, w, y, w, 2)
    assert plan.permutation
    assert sorted(plan.cols.tolist()) == list(range(n))
    cost = (plan.mass * (x[plan.rows] - y[plan.cols]).square().sum(-1)).sum()
    assert float(cost) == pytest.approx(ot.emd2([], [], ot.dist(x.numpy(), y.numpy())), rel=1e-12)


@pytest.mark.parametrize("d", [1, 2])
def test_derivatives_through_the_plan_in_points_and_weights(d: int) -> None:
    x, w, y, v = clouds(d, n=5, m=4)
    logits = [w.log().requires_grad_(), v.log().requires_grad_()]

    def cost(x: torch.Tensor, y: torch.Tensor, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        return transport_cost(x, torch.softmax(a, -1), y, torch.softmax(b, -1), 2)

    inputs = (x.requires_grad_(), y.requires_grad_(), *logits)
    assert torch.autograd.gradcheck(cost, inputs)
    assert torch.autograd.gradgradcheck(lambda x, y: transport_cost(x, w, y, v, 2), inputs[:2])


@given(st.integers(0, 10_000), st.integers(1, 9), st.integers(1, 9))
@settings(max_examples=30, deadline=None)
def test_sorted_coupling_has_the_marginals_and_is_monotone(seed: int, n: int, m: int) -> None:
    rng = np.random.default_rng(seed)
    x, y = torch.from_numpy(rng.normal(size=n).round(1)), torch.from_numpy(rng.normal(size=m).round(1))
    w, v = torch.from_numpy(rng.dirichlet(np.ones(n))), torch.from_numpy(rng.dirichlet(np.ones(m)))
    rows, cols, mass = sorted_coupling(x, w, y, v)
    assert (mass >= 0).all()
    torch.testing.assert_close(torch.zeros(n).double().index_add(0, rows, mass), w, rtol=0, atol=4e-16)
    torch.testing.assert_close(torch.zeros(m).double().index_add(0, cols, mass), v, rtol=0, atol=4e-16)
    used = mass > 0
    assert (torch.diff(x[rows][used]) >= 0).all()
    assert (torch.diff(y[cols][used]) >= 0).all()


def test_fault_one_hot_marginals() -> None:
    # (0, 1, 0, 0) against (1, 0, 0, 0): all the mass goes from the second node to the first.
    for d in (1, 2):
        x = torch.arange(4.0, dtype=torch.float64)[:, None] * torch.ones(d, dtype=torch.float64)
        a, b = torch.eye(4, dtype=torch.float64)[[1, 0]]
        assert float(transport_cost(x, a, x, b, 2)) == pytest.approx(d, rel=1e-15)
        plan = transport_plan(x, a, x, b, 2)
        assert (plan.rows.tolist(), plan.cols.tolist()) == ([1], [0])


def test_barycentric_projection_of_a_split_mass() -> None:
    x = torch.zeros(1, 2, dtype=torch.float64)
    y = torch.tensor([[1.0, 0.0], [0.0, 2.0]], dtype=torch.float64)
    w, v = torch.ones(1, dtype=torch.float64), torch.tensor([0.25, 0.75], dtype=torch.float64)
    plan = transport_plan(x, w, y, v, 2)
    np.testing.assert_allclose(barycentric_projection(plan, 1, w, y), [[0.25, 1.5]], rtol=1e-15)


@pytest.mark.parametrize("scale", [1e-9, 1e9])
def test_the_plan_does_not_depend_on_the_scale(scale: float) -> None:
    x, w, y, v = clouds(2)
    value = transport_cost(scale * x, w, scale * y, v, 2)
    torch.testing.assert_close(value / scale**2, transport_cost(x, w, y, v, 2), rtol=1e-12, atol=0)


def test_close_clouds_keep_their_digits() -> None:
    # |x|^2 + |y|^2 - 2 x.y would lose the cost of pairs 1e-9 apart at distance 1 from the origin.
    x = torch.from_numpy(RNG.normal(size=(30, 3)))
    w = torch.from_numpy(RNG.dirichlet(np.ones(30)))
    shift = 2.0**-30
    value = transport_cost(x, w, x + shift, w, 2)
    assert float(value) == pytest.approx(3 * shift**2, rel=1e-6)
