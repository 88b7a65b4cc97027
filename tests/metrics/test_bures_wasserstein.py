"""Bures-Wasserstein geometry: references, singular and near-equal pairs, geodesics, transport, barycentres, JKO."""

from __future__ import annotations

from typing import Any

import numpy as np
import ot
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from ot_transformers.energies import KLDivergence
from ot_transformers.errors import InvalidInput
from ot_transformers.measures import AffineVelocity, Gaussian
from ot_transformers.metrics import (
    BuresWasserstein,
    bures_barycenter,
    bures_barycenter_result,
    bures_distance,
    bures_exp,
    bures_geodesic,
    bures_inner,
    bures_log,
    bures_map,
    bures_transport,
)


def spd(seed: int, d: int, r: int | None = None) -> np.ndarray:
    X = np.random.default_rng(seed).standard_normal((d, r or d + 1))
    return X @ X.T


def test_reference(reference: Any) -> None:
    row = reference["bures_d3"]
    mu, nu = Gaussian(row["m0"][:, 0], row["S0"]), Gaussian(row["m1"][:, 0], row["S1"])
    assert float(BuresWasserstein().distance(mu, nu)) ** 2 == pytest.approx(row["squared"], rel=1e-12)


def test_close_pair_where_the_trace_form_loses_everything(reference: Any) -> None:
    row = reference["bures_close"]
    S0 = row["S0"]
    found = float(bures_distance(S0, S0 * (1 + 1e-8), squared=True))
    assert np.sqrt(found) == pytest.approx(np.sqrt(row["squared"]), rel=1e-4)
    R = np.linalg.cholesky(S0)
    trace_form = np.trace(S0) * (2 + 1e-8) - 2 * np.linalg.svd(R.T @ R * np.sqrt(1 + 1e-8))[1].sum()
    assert abs(trace_form / row["squared"] - 1) > 0.1  # the form that this one replaces


@pytest.mark.parametrize("S", [spd(0, 4), spd(1, 4, 2), np.eye(3), np.zeros((2, 2)), 1e-7 * np.eye(2)])
def test_distance_of_a_matrix_to_itself_is_zero_with_finite_gradients(S: np.ndarray) -> None:
    assert float(bures_distance(S, S)) == 0.0
    a = torch.from_numpy(S.copy()).requires_grad_()
    for squared in (True, False):
        (g,) = torch.autograd.grad(bures_distance(a, torch.from_numpy(S), squared=squared), a)
        # 0 on the range; off it mass is new: the one-sided derivative of BW^2 there is the projector.
        null = np.eye(len(S)) - S @ np.linalg.pinv(S, hermitian=True)
        np.testing.assert_allclose(g.numpy(), null if squared else 0 * null, atol=1e-6)


def test_covariance_of_129_samples_in_128_dimensions_float32() -> None:
    rng = np.random.default_rng(0)
    clouds = [rng.standard_normal((129, 128)).astype(np.float32) for _ in range(2)]
    covs = [np.cov(x.T, bias=True).astype(np.float32) for x in clouds]
    found = bures_distance(covs[0], covs[1])
    exact = bures_distance(*(c.astype(float) for c in covs))
    assert float(found) == pytest.approx(float(exact), rel=1e-4)


@settings(max_examples=20, deadline=None)
@given(seed=st.integers(0, 10_000), d=st.integers(1, 5))
def test_metric_axioms_and_rotations(seed: int, d: int) -> None:
    a, b, c = (spd(seed + k, d, max(1, d - k % 2)) for k in range(3))
    ab, bc, ac = (float(bures_distance(*p)) for p in ((a, b), (b, c), (a, c)))
    assert float(bures_distance(b, a)) == pytest.approx(ab, rel=1e-9, abs=1e-12)
    assert ac <= ab + bc + 1e-9
    Q = np.linalg.qr(np.random.default_rng(seed).standard_normal((d, d)))[0]
    assert float(bures_distance(Q @ a @ Q.T, Q @ b @ Q.T)) == pytest.approx(ab, rel=1e-7, abs=1e-9)


def test_regular_pairs_agree_with_pot_and_batch_is_the_loop() -> None:
    a, b = np.stack([spd(k, 4) for k in range(5)]), np.stack([spd(k + 9, 4) for k in range(5)])
    together = bures_distance(a, b)
    zero = np.zeros(4)
    for k in range(5):
        assert float(together[k]) == pytest.approx(float(bures_distance(a[k], b[k])), rel=1e-13)
        peer = ot.gaussian.bures_wasserstein_distance(zero, zero, a[k], b[k])
        assert float(together[k]) == pytest.approx(float(peer), rel=1e-9)
    as_torch = bures_distance(torch.from_numpy(a), torch.from_numpy(b))
    np.testing.assert_array_equal(as_torch.numpy(), together)


def test_rank_deficient_pairs_through_factors_are_exact() -> None:
    # Lines along e and f at angle t: BW^2 = a^2 + b^2 - 2 a b |cos t|.
    a, b, t = 2.0, 0.7, 1.1
    e, f = np.array([[a], [0.0]]), b * np.array([[np.cos(t)], [np.sin(t)]])
    exact = np.sqrt(a * a + b * b - 2 * a * b * abs(np.cos(t)))
    zero = np.zeros(2)
    through_factors = BuresWasserstein().distance(
        Gaussian.from_factor(zero, e), Gaussian.from_factor(zero, f)
    )
    assert float(through_factors) == pytest.approx(exact, rel=1e-13)
    assert float(bures_distance(e @ e.T, f @ f.T)) == pytest.approx(exact, rel=1e-7)


@pytest.mark.parametrize("r", [None, 3])
def test_derivatives_of_the_squared_distance(r: int | None) -> None:
    X, Y = (torch.from_numpy(np.linalg.cholesky(spd(k, 3))).requires_grad_() for k in (3, 4))

    def f(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return bures_distance(x @ x.T, y @ y.T, squared=True)

    assert torch.autograd.gradcheck(f, (X, Y))
    assert torch.autograd.gradgradcheck(f, (X, Y))
    S = (X @ X.T).detach().requires_grad_()
    T = (Y @ Y.T).detach()
    (g,) = torch.autograd.grad(bures_distance(S, T, squared=True), S)
    np.testing.assert_allclose(
        g.numpy(), np.eye(3) - bures_map(S.detach(), T).numpy(), rtol=1e-10, atol=1e-11
    )


def test_map_pushes_and_log_inverts_exp() -> None:
    a, b = spd(5, 4), spd(6, 4)
    T = bures_map(a, b)
    np.testing.assert_allclose(T @ a @ T, b, rtol=1e-11, atol=1e-11)
    np.testing.assert_allclose(bures_exp(a, bures_log(a, b)), b, rtol=1e-11, atol=1e-11)
    X = bures_log(a, b)
    np.testing.assert_allclose(bures_exp(a, cov_tangent=X @ a + a @ X), b, rtol=1e-9, atol=1e-9)
    assert float(bures_inner(a, X, X)) == pytest.approx(float(bures_distance(a, b, squared=True)), rel=1e-11)


def test_geodesic_cross_term_of_a_non_commuting_pair() -> None:
    a, b = np.array([[2.0, 0.0], [0.0, 0.1]]), np.array([[0.5, 0.4], [0.4, 0.9]])
    T = bures_map(a, b)
    for t in (0.0, 0.3, 1.0):
        F = (1 - t) * np.eye(2) + t * T
        np.testing.assert_allclose(bures_geodesic(a, b, t), F @ a @ F, rtol=1e-12, atol=1e-13)
    d = float(bures_distance(a, b))
    parts = [float(bures_distance(a, m)) for m in bures_geodesic(a, b, [0.25, 0.5, 0.75])]
    np.testing.assert_allclose(parts, [0.25 * d, 0.5 * d, 0.75 * d], rtol=1e-10)


def test_parallel_transport_keeps_inner_products_to_its_tolerance() -> None:
    a, b, X, Y = spd(7, 3), spd(8, 3), spd(9, 3), spd(10, 3) - 2 * np.eye(3)
    exact = float(bures_inner(a, X, Y))
    size = float(bures_inner(a, X, X) * bures_inner(a, Y, Y)) ** 0.5
    for tol in (1e-4, 1e-10):
        moved = [bures_transport(a, b, Z, tol=tol) for Z in (X, Y)]
        assert abs(float(bures_inner(b, *moved)) - exact) < 100 * tol * size
    # The geodesic's own velocity is parallel: T - I goes to (T - I) T^{-1}.
    T = bures_map(a, b)
    own = bures_transport(a, b, T - np.eye(3))
    np.testing.assert_allclose(own, (T - np.eye(3)) @ np.linalg.inv(T), atol=1e-8)


def test_barycentre_of_1e_minus_7_identity_twice() -> None:
    S = 1e-7 * np.eye(3)
    np.testing.assert_allclose(bures_barycenter(np.stack([S, S])), S, rtol=1e-12)


def test_barycentre_solves_its_fixed_point_equation_also_weighted() -> None:
    S = np.stack([spd(k, 3) for k in range(4)])
    w = np.array([0.4, 0.3, 0.2, 0.1])
    result = bures_barycenter_result(S, w)
    assert result.converged
    mean_map = sum(wi * bures_map(result.value, s) for wi, s in zip(w, S, strict=True))
    np.testing.assert_allclose(mean_map, np.eye(3), atol=1e-10)
    # Two measures: the point of their geodesic.
    np.testing.assert_allclose(
        bures_barycenter(S[:2], [0.7, 0.3]), bures_geodesic(S[0], S[1], 0.3), rtol=1e-9
    )


def test_barycentre_of_singular_matrices_is_finite_and_differentiable() -> None:
    found = bures_barycenter_result(np.stack([spd(1, 4, 2), spd(2, 4, 1)]))
    assert found.converged
    assert np.all(np.isfinite(found.value))
    S = torch.from_numpy(np.stack([spd(k, 2) for k in range(3)])).requires_grad_()
    (g,) = torch.autograd.grad(bures_barycenter(S).diagonal().sum(), S)
    step = 1e-6 * np.array([[0.0, 1.0], [1.0, 0.0]])
    values = []
    for sign in (1, -1):
        moved = S.detach().numpy().copy()
        moved[0] += sign * step
        values.append(np.trace(bures_barycenter(moved)))
    assert float((g[0].numpy() * step).sum()) == pytest.approx((values[0] - values[1]) / 2, rel=1e-5)


@pytest.mark.parametrize("D", [None, spd(11, 2)])
def test_metric_with_a_mobility_is_the_metric_of_whitened_measures(D: np.ndarray | None) -> None:
    metric = BuresWasserstein(D)
    mu, nu = Gaussian([1.0, 0.0], spd(12, 2)), Gaussian([0.0, 0.5], spd(13, 2))
    v = metric.log(mu, nu)
    end = metric.exp(mu, v)
    np.testing.assert_allclose(end.cov, nu.cov, rtol=1e-9)
    np.testing.assert_allclose(end.mean, nu.mean, atol=1e-12)
    assert float(metric.inner(mu, v, v)) == pytest.approx(float(metric.distance(mu, nu)) ** 2, rel=1e-9)
    middle = metric.geodesic(mu, nu).at(0.5)
    assert float(metric.distance(mu, middle)) == pytest.approx(0.5 * float(metric.distance(mu, nu)), rel=1e-9)
    moved = metric.parallel_transport(mu, nu, v)
    assert float(metric.inner(nu, moved, moved)) == pytest.approx(float(metric.inner(mu, v, v)), rel=1e-6)
    g, H = torch.randn(2).double(), torch.from_numpy(spd(14, 2))
    b, M = metric.raw_gaussian_riesz(mu.mean_t, mu.cov_t, g, H)
    w = AffineVelocity(torch.ones(2).double(), torch.from_numpy(spd(15, 2)), "numpy")
    rate = float((g * w.b_t).sum() + 2 * (H @ w.M_t @ mu.cov_t).diagonal().sum())
    assert float(metric.inner(mu, AffineVelocity(b, M, "numpy"), w)) == pytest.approx(rate, rel=1e-9)


@pytest.mark.parametrize("D", [None, spd(16, 2)])
def test_jko_step_meets_its_first_order_condition(D: np.ndarray | None) -> None:
    metric, tau = BuresWasserstein(D), 0.4
    mu, energy = Gaussian([1.0, -1.0], spd(17, 2)), KLDivergence(Gaussian([0.0, 0.0], spd(18, 2)))
    step = metric.proximal(energy, mu, tau)
    assert step.converged
    assert step.energy_after < step.energy_before
    new = step.measure
    g, H = (t.numpy() for t in energy.raw_gaussian_gradient(new.mean_t, new.cov_t))
    mobility = np.eye(2) if D is None else D
    back = np.eye(2) + 2 * tau * mobility @ H
    np.testing.assert_allclose(back @ new.cov @ back.T, mu.cov, rtol=1e-7)
    np.testing.assert_allclose(new.mean + tau * mobility @ g, mu.mean, atol=1e-7)


def test_jko_tends_to_ornstein_uhlenbeck_at_order_one() -> None:
    # KL to N(0, 1) flows like dm/dt = -m, ds/dt = 2 (1 - s).
    mu, energy = Gaussian([2.0], [[3.0]]), KLDivergence(Gaussian([0.0], [[1.0]]))
    exact = 1 + 2 * np.exp(-2.0)
    errors = []
    for n in (8, 16, 32):
        state = mu
        for _ in range(n):
            state = BuresWasserstein().proximal(energy, state, 1.0 / n).measure  # type: ignore[assignment]
        errors.append(abs(float(state.cov[0, 0]) - exact))
    np.testing.assert_allclose(np.log2(np.array(errors[:-1]) / errors[1:]), 1.0, atol=0.1)


def test_no_map_from_a_line_to_the_plane() -> None:
    with pytest.raises(InvalidInput, match="no map"):
        bures_map(np.diag([1.0, 0.0]), np.eye(2))
