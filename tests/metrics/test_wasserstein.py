"""W_p against POT and closed forms; geodesics, exp, log, inner products."""

from __future__ import annotations

import itertools

import numpy as np
import ot
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from ot_transformers import Gaussian, Particles, Wasserstein
from ot_transformers.measures import AffineVelocity
from ot_transformers.metrics import BuresWasserstein

RNG = np.random.default_rng(6)
D2 = np.array([[1.0, 0.3], [0.3, 0.7]])


def norm_D(x: np.ndarray) -> np.ndarray:
    return np.sqrt(np.einsum("...i,...i", x @ np.linalg.inv(D2), x))


@pytest.mark.parametrize("d", [1, 3])
@pytest.mark.parametrize("p", [1, 1.5, 2, 4])
def test_distance_against_pot_in_a_batch(d: int, p: float) -> None:
    x, y = RNG.normal(size=(3, 8, d)), RNG.normal(size=(5, d))
    w, v = RNG.dirichlet(np.ones(8), size=3), RNG.dirichlet(np.ones(5))
    value = Wasserstein(p=p).distance(Particles(x, w), Particles(y, v))
    expected = [ot.emd2(a, v, ot.dist(q, y, "euclidean") ** p) ** (1 / p) for q, a in zip(x, w, strict=True)]
    np.testing.assert_allclose(value, expected, rtol=1e-11)


def test_line_in_the_sorted_form() -> None:
    x, y = RNG.normal(size=(50, 1)), RNG.normal(size=(50, 1))
    for p in (1, 3):
        expected = (np.abs(np.sort(x[:, 0]) - np.sort(y[:, 0])) ** p).mean() ** (1 / p)
        assert Wasserstein(p=p).distance(x, y) == pytest.approx(expected, rel=1e-13)
        assert Wasserstein(p=p).geodesic(x, y).length == pytest.approx(expected, rel=1e-13)


def test_inner_product_of_D() -> None:
    x, y = RNG.normal(size=(7, 2)), RNG.normal(size=(6, 2))
    w, v = RNG.dirichlet(np.ones(7)), RNG.dirichlet(np.ones(6))
    value = Wasserstein(D=D2).distance(Particles(x, w), Particles(y, v))
    cost = norm_D(x[:, None] - y[None]) ** 2
    assert value == pytest.approx(np.sqrt(ot.emd2(w, v, cost)), rel=1e-11)
    assert Wasserstein(D=4.0).distance(x[:, :1], x[:, :1] + 1.0) == pytest.approx(0.5, rel=1e-13)


def test_distance_to_itself_is_zero_with_finite_gradient() -> None:
    x = torch.from_numpy(RNG.normal(size=(6, 2))).requires_grad_()
    for p in (1, 1.5, 2):
        value = Wasserstein(p=p).distance(Particles(x), Particles(x.detach()))
        assert float(value.detach()) == 0.0
        (g,) = torch.autograd.grad(value, x)
        assert torch.isfinite(g).all()


def test_gradient_of_the_distance_flows_through_the_plan() -> None:
    x, y = torch.from_numpy(RNG.normal(size=(2, 6, 2))), torch.from_numpy(RNG.normal(size=(2, 4, 2)))
    logits = torch.from_numpy(RNG.normal(size=(2, 6)))
    metric = Wasserstein(D=torch.from_numpy(D2))

    def distance(x: torch.Tensor, logits: torch.Tensor) -> torch.Tensor:
        return metric.distance(Particles(x, torch.softmax(logits, -1)), Particles(y))

    assert torch.autograd.gradcheck(distance, (x.requires_grad_(), logits.requires_grad_()))


def test_fault_empirical_means_that_ignore_weights() -> None:
    # Dirac against a weighted pair: W_2^2 = sum_i w_i |x_i|^2.
    x, w = RNG.normal(size=(4, 3)), RNG.dirichlet(np.ones(4))
    value = Wasserstein().distance(Particles(x, w), Particles(np.zeros((1, 3))))
    assert value == pytest.approx(np.sqrt(w @ (x**2).sum(-1)), rel=1e-13)
    # A translation between weighted clouds is optimal, its length is |shift|.
    shift = np.array([3.0, 0.0, 4.0])
    assert Wasserstein().distance(Particles(x, w), Particles(x + shift, w)) == pytest.approx(5.0, rel=1e-13)


def test_fault_a_callers_array_changed_in_place() -> None:
    x, y, w = RNG.normal(size=(4, 2)), RNG.normal(size=(4, 2)), RNG.dirichlet(np.ones(4))
    kept = x.copy(), y.copy(), w.copy()
    metric = Wasserstein()
    metric.geodesic(Particles(x, w), Particles(y)).at(0.5)
    metric.exp(Particles(x, w), metric.log(Particles(x, w), Particles(y)))
    for now, before in zip((x, y, w), kept, strict=True):
        np.testing.assert_array_equal(now, before)


@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("batch", [(), (3,)])
def test_geodesics_have_constant_speed(weighted: bool, batch: tuple[int, ...]) -> None:
    x, y = RNG.normal(size=(*batch, 6, 2)), RNG.normal(size=(*batch, 6, 2))
    w = RNG.dirichlet(np.ones(6), size=batch or None) if weighted else None
    mu, nu = Particles(x, w), Particles(y)
    for metric in (Wasserstein(), Wasserstein(D=D2), Wasserstein(p=3)):
        path = metric.geodesic(mu, nu)
        assert path.converged
        np.testing.assert_allclose(path.length, metric.distance(mu, nu), rtol=1e-12)
        # An ulp of mass over the diameter of the clouds costs its p-th root.
        rounding = 10 * (8 * 2.3e-16) ** (1 / metric.p) if weighted else 0.0
        np.testing.assert_allclose(metric.distance(path.at(0.0), mu), 0.0, atol=rounding)
        np.testing.assert_allclose(metric.distance(path.at(1.0), nu), 0.0, atol=rounding)
        np.testing.assert_allclose(
            metric.distance(path.at(0.2), path.at(0.7)), 0.5 * np.asarray(path.length), rtol=1e-10
        )
    if not weighted:
        np.testing.assert_array_equal(metric.geodesic(mu, nu).at(0.0).x, x)


def test_fault_geodesic_cross_term_of_non_commuting_pairs() -> None:
    # The midpoint is at half the distance from both ends, also where the covariances do not commute.
    g = Gaussian(np.zeros(2), np.array([[2.0, 0.9], [0.9, 0.5]]))
    h = Gaussian(np.ones(2), np.array([[0.3, -0.2], [-0.2, 1.5]]))
    for metric in (Wasserstein(), Wasserstein(D=D2)):
        path = metric.geodesic(g, h)
        for end in (g, h):
            assert metric.distance(end, path.at(0.5)) == pytest.approx(0.5 * path.length, rel=1e-11)


def test_log_and_exp_are_inverse_and_log_has_the_length_of_the_geodesic() -> None:
    x, y = RNG.normal(size=(2, 9, 2)), RNG.normal(size=(2, 9, 2))
    metric = Wasserstein(D=D2)
    v = metric.log(Particles(x), Particles(y))
    np.testing.assert_allclose(metric.distance(metric.exp(Particles(x), v), Particles(y)), 0.0, atol=1e-12)
    np.testing.assert_allclose(
        np.sqrt(metric.inner(Particles(x), v, v)), metric.distance(Particles(x), Particles(y)), rtol=1e-12
    )


def test_inner_product_is_weighted_and_riesz_represents_it() -> None:
    x, w = RNG.normal(size=(5, 2)), RNG.dirichlet(np.ones(5))
    v, g = RNG.normal(size=(5, 2)), RNG.normal(size=(5, 2))
    metric = Wasserstein(D=D2)
    mu = Particles(x, w)
    assert metric.inner(mu, v, g) == pytest.approx(
        np.einsum("i,ia,ab,ib", w, v, np.linalg.inv(D2), g), rel=1e-13
    )
    # <Riesz(g), v>_D = sum_i w_i g_i . v_i, the differential.
    riesz = metric.raw_particles_riesz(mu.x_t, mu.weights_t, torch.from_numpy(g))
    assert metric.inner(mu, riesz, v) == pytest.approx(np.einsum("i,ia,ia", w, g, v), rel=1e-13)


def test_gaussians_agree_with_bures_wasserstein_and_large_samples_of_moments() -> None:
    m, S = RNG.normal(size=2), np.array([[2.0, 0.4], [0.4, 0.5]])
    n, T = RNG.normal(size=2), np.array([[0.3, -0.2], [-0.2, 1.5]])
    g, h = Gaussian(m, S), Gaussian(n, T)
    assert Wasserstein(D=D2).distance(g, h) == pytest.approx(BuresWasserstein(D=D2).distance(g, h), rel=1e-12)
    # <u, v> at a Gaussian against its exact second moments.
    u = AffineVelocity(torch.from_numpy(m), torch.from_numpy(T), "numpy")
    v = AffineVelocity(torch.from_numpy(n), torch.from_numpy(S @ T), "numpy")
    Dinv = np.linalg.inv(D2)
    expected = m @ Dinv @ n + np.trace(T.T @ Dinv @ S @ T @ S)
    assert Wasserstein(D=D2).inner(g, u, v) == pytest.approx(expected, rel=1e-12)
    # Riesz: b = D g, M = 2 D H represents dm -> g . b, dS -> tr(H dS).
    grad, H = RNG.normal(size=2), np.array([[0.3, 0.1], [0.1, -0.5]])
    b, M = Wasserstein(D=D2).raw_gaussian_riesz(
        g.mean_t, g.cov_t, torch.from_numpy(grad), torch.from_numpy(H)
    )
    tangent = AffineVelocity(torch.from_numpy(n), torch.from_numpy(D2 @ T), "numpy")
    d_cov = D2 @ T @ S + S @ T @ D2
    value = Wasserstein(D=D2).inner(g, AffineVelocity(b, M, "numpy"), tangent)
    assert value == pytest.approx(grad @ n + np.trace(H @ d_cov), rel=1e-12)


@given(st.integers(0, 10_000))
@settings(max_examples=15, deadline=None)
def test_axioms_and_equivariance(seed: int) -> None:
    rng = np.random.default_rng(seed)
    a, b, c = (Particles(rng.normal(size=(5, 2)), rng.dirichlet(np.ones(5))) for _ in range(3))
    for metric in (Wasserstein(p=1), Wasserstein(), Wasserstein(D=D2)):
        ab, bc, ac = metric.distance(a, b), metric.distance(b, c), metric.distance(a, c)
        assert metric.distance(b, a) == pytest.approx(ab, rel=1e-11)
        assert ac <= ab + bc + 1e-12
    R, _ = np.linalg.qr(rng.normal(size=(2, 2)))
    order = rng.permutation(5)
    turned = Wasserstein().distance(
        Particles(a.x[order] @ R.T, a.weights[order]), Particles(b.x @ R.T, b.weights)
    )
    assert turned == pytest.approx(Wasserstein().distance(a, b), rel=1e-10)
    # W_p grows with p.
    assert Wasserstein(p=1).distance(a, b) <= Wasserstein().distance(a, b) * (1 + 1e-12)


def test_numpy_in_numpy_out_torch_in_torch_out_float32() -> None:
    x, y = RNG.normal(size=(6, 2)), RNG.normal(size=(5, 2))
    value = Wasserstein().distance(x, y)
    assert isinstance(value, np.float64)
    tensor = Wasserstein().distance(torch.from_numpy(x), y)
    assert isinstance(tensor, torch.Tensor)
    assert float(tensor) == pytest.approx(value, rel=1e-14)
    single = Wasserstein().distance(x.astype(np.float32), y.astype(np.float32))
    assert single.dtype == np.float32
    assert single == pytest.approx(value, rel=1e-6)


@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("d", [1, 2])
@pytest.mark.parametrize("p", [1, 2, 3])
@pytest.mark.parametrize("factor", [1e160, 1e300, 1e-170, 1e-300])
def test_distances_scale_where_their_powers_leave_the_floating_range(factor, p, d, weighted):
    rng = np.random.default_rng(4)
    x, y, w = rng.standard_normal((6, d)), rng.standard_normal((6, d)), rng.dirichlet(np.ones(6))
    metric, w = Wasserstein(p=p), w if weighted else None
    one = metric.distance(Particles(x, w), Particles(y))
    mu, nu = Particles(factor * x, w), Particles(factor * y)
    assert metric.distance(mu, nu) / factor == pytest.approx(one, rel=1e-14)
    path = metric.geodesic(mu, nu)
    assert path.length / factor == pytest.approx(one, rel=1e-14)
    assert 0 <= path.error / factor <= 1e-4


@pytest.mark.parametrize("p", [30.0, 1000.0])
def test_a_large_power_finds_the_plan_among_distances_far_below_the_largest(p):
    """Against all matchings; a token split in two halves is the same measure, by the network simplex."""
    rng = np.random.default_rng(1)
    x = rng.standard_normal((6, 2))
    x[0] = [30.0, 0.0]
    y = x[rng.permutation(6)] + 0.3 * rng.standard_normal((6, 2))
    gaps = np.linalg.norm(x[:, None] - y[None], axis=-1)
    pairs = np.array([[gaps[i, j] for i, j in enumerate(q)] for q in itertools.permutations(range(6))])
    longest = pairs.max(1)
    expected = (longest * np.mean((pairs / longest[:, None]) ** p, 1) ** (1 / p)).min()
    assert Wasserstein(p=p).distance(x, y) == pytest.approx(expected, rel=1e-14)
    split, w = [0, 0, 1, 2, 3, 4, 5], np.array([1, 1, 2, 2, 2, 2, 2]) / 12
    halves = Wasserstein(p=p).distance(Particles(x[split], w), Particles(y[split], w))
    assert halves == pytest.approx(expected, rel=1e-14)
