"""Sinkhorn attention: closed forms, reference values, invariances, and the warm start along a flow."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from ot_transformers.attention import MaskedAttention, SinkhornAttention
from ot_transformers.errors import InvalidInput
from ot_transformers.measures import Gaussian, Particles


def random_problem(n: int, d: int, seed: int = 0) -> tuple[np.ndarray, ...]:
    rng = np.random.default_rng(seed)
    x, w = rng.normal(size=(n, d)), rng.dirichlet(np.ones(n))
    return x, w, rng.normal(size=(d, d)) / np.sqrt(d), rng.normal(size=(d, d))


@pytest.mark.parametrize("case", ["closure_d3", "closure_d4_singular_S_rank2_A_rank1"])
def test_gaussian_closure_reference(reference: Any, case: str) -> None:
    r = reference[case]
    gaussian = Gaussian(r["m"].ravel(), r["S"])
    for attention in (
        SinkhornAttention(r["A"], r["V"]),
        SinkhornAttention.from_qkv(r["Q"], r["K"], r["V"]),
        SinkhornAttention(2 * r["A"], r["V"], eps=2.0),  # only A / eps matters
    ):
        field = attention.affine(gaussian)
        truth = r["sinkhorn"]
        np.testing.assert_allclose(field.b, truth["b"].ravel(), rtol=1e-12, atol=1e-13)
        np.testing.assert_allclose(field.M, truth["M"], rtol=1e-12, atol=1e-12 * np.abs(truth["M"]).max())


@pytest.mark.parametrize(("s", "a", "eps"), [(1.0, 1.0, 1.0), (0.7, -2.0, 0.5), (3.0, 1.0, 1e-4)])
def test_two_tokens_in_closed_form(s: float, a: float, eps: float) -> None:
    """mu = (delta_s + delta_-s) / 2: E[y | x] = x tanh(a s^2 / eps)."""
    v = SinkhornAttention(a, 1.5, eps=eps).velocity(np.array([[s], [-s]]))
    np.testing.assert_allclose(v[:, 0], 1.5 * s * np.tanh(a * s**2 / eps) * np.array([1, -1]), rtol=1e-8)


def test_particles_tend_to_the_closure_on_gaussian_quadrature() -> None:
    """Tensor Gauss-Hermite nodes in d = 2 carry the closure's affine field, up to the solver's tolerance."""
    z, w = np.polynomial.hermite_e.hermegauss(24)
    grid = np.stack(np.meshgrid(z, z, indexing="ij"), -1).reshape(-1, 2)
    weights = np.outer(w, w).ravel() / w.sum() ** 2
    heavy = weights > 1e-14
    grid, weights = grid[heavy], weights[heavy] / weights[heavy].sum()
    L, m = np.array([[0.6, 0.0], [0.2, 0.4]]), np.array([0.3, -0.5])
    A, V = np.array([[0.7, -0.4], [0.3, 0.5]]), np.array([[1.0, 0.2], [-0.3, 0.8]])
    attention = SinkhornAttention(A, V, eps=0.8)
    gaussian = Gaussian.from_factor(m, L)
    v = attention.velocity(Particles(m + grid @ L.T, weights))
    exact = attention.affine(gaussian).at(m + grid @ L.T, gaussian)
    near = np.abs(grid).max(1) < 2.5
    np.testing.assert_allclose(v[near], exact[near], rtol=0, atol=1e-7)


def test_closure_at_singular_covariance_and_singular_form() -> None:
    """Directions without variance do not matter: restricted to the support it is the smaller problem."""
    rng = np.random.default_rng(0)
    U = np.linalg.qr(rng.normal(size=(4, 4)))[0][:, :2]
    L, A, V = U @ rng.normal(size=(2, 2)), rng.normal(size=(4, 4)), rng.normal(size=(4, 4))
    M = SinkhornAttention(A, V).affine(Gaussian.from_factor(np.zeros(4), L)).M
    small = SinkhornAttention(U.T @ A @ U, np.eye(2)).affine(Gaussian.from_factor(np.zeros(2), U.T @ L)).M
    np.testing.assert_allclose(M @ U, V @ U @ small, rtol=1e-11, atol=1e-12)
    zero = SinkhornAttention(np.zeros((4, 4)), V).affine(Gaussian.from_factor(np.ones(4), L))
    np.testing.assert_array_equal(zero.M, 0.0)


def test_doubly_stochastic_means_the_mean_moves_by_V_of_the_mean() -> None:
    """Both marginals of the coupling are mu: sum_i w_i Gamma(x_i) = V m, whatever A is."""
    x, w, A, V = random_problem(40, 3)
    for eps in (1.0, 0.05):
        v = SinkhornAttention(A, V, eps=eps).velocity(Particles(x, w))
        np.testing.assert_allclose(w @ v, V @ (w @ x), rtol=0, atol=1e-8)


@settings(max_examples=15, deadline=None)
@given(st.integers(0, 10_000), st.integers(1, 12), st.integers(1, 4))
def test_equivariance_under_permutation_and_rotation(seed: int, n: int, d: int) -> None:
    x, w, A, V = random_problem(n, d, seed)
    rng = np.random.default_rng(seed)
    p, R = rng.permutation(n), np.linalg.qr(rng.normal(size=(d, d)))[0]
    v = SinkhornAttention(A, V, tol=1e-12).velocity(Particles(x, w))
    permuted = SinkhornAttention(A, V, tol=1e-12).velocity(Particles(x[p], w[p]))
    np.testing.assert_allclose(permuted, v[p], rtol=0, atol=1e-9)
    turned = SinkhornAttention(R @ A @ R.T, R @ V @ R.T, tol=1e-12).velocity(Particles(x @ R.T, w))
    np.testing.assert_allclose(turned, v @ R.T, rtol=0, atol=1e-9)


def test_batch_loop_numpy_torch_and_float32() -> None:
    parts = [random_problem(15, 2, s) for s in range(3)]
    x, w, A, V = (np.stack(t) for t in zip(*parts, strict=True))
    together = SinkhornAttention(A, V).velocity(Particles(x, w))
    for k in range(3):
        one = SinkhornAttention(A[k], V[k]).velocity(Particles(x[k], w[k]))
        np.testing.assert_allclose(together[k], one, rtol=0, atol=1e-8)
    tensors = SinkhornAttention(A, V).velocity(Particles(torch.from_numpy(x), torch.from_numpy(w)))
    assert isinstance(tensors, torch.Tensor)
    np.testing.assert_array_equal(tensors.numpy(), together)
    single = SinkhornAttention(A, V).velocity(Particles(x.astype(np.float32), w.astype(np.float32)))
    assert single.dtype == np.float32
    np.testing.assert_allclose(single, together, rtol=0, atol=2e-5)


@pytest.mark.parametrize("symmetric", [True, False])
def test_the_warm_start_changes_the_work_and_not_the_velocity(symmetric: bool) -> None:
    x, w, A, _ = random_problem(200, 4)
    A = A + A.T if symmetric else A
    attention = SinkhornAttention(A, -0.5 * np.eye(4), eps=0.5)
    X, W = torch.from_numpy(x), torch.from_numpy(w)
    sweeps: list[int] = []
    plain = attention.solve

    def counted(*args: Any) -> Any:
        result = plain(*args)
        sweeps.append(result.n_iter)
        return result

    attention.solve = counted  # type: ignore[method-assign]
    velocity = attention.evaluator()
    for _ in range(10):
        v = velocity(X, W)
        cold = SinkhornAttention(A, -0.5 * np.eye(4), eps=0.5).raw_velocity(X, W)
        torch.testing.assert_close(v, cold, rtol=0, atol=1e-7)
        X = X + 0.02 * v
    assert sweeps[-1] <= sweeps[0] // 3


def test_an_evaluator_survives_another_cloud() -> None:
    x, w, A, V = random_problem(20, 2)
    velocity = SinkhornAttention(A, V).evaluator()
    X, W = torch.from_numpy(x), torch.from_numpy(w)
    velocity(X, W)
    velocity(X + 0.01, W)
    for other, weights in ((X[:7], W[:7] / W[:7].sum()), (X * 3, W.flip(0)), (X[None].expand(2, -1, -1), W)):
        fresh = SinkhornAttention(A, V).raw_velocity(other, weights)
        torch.testing.assert_close(velocity(other, weights), fresh, rtol=0, atol=1e-7)


def test_the_velocity_is_differentiable_in_tokens_weights_and_parameters() -> None:
    x, w, A, V = (torch.from_numpy(t) for t in random_problem(4, 2))

    def velocity(x: torch.Tensor, logits: torch.Tensor, A: torch.Tensor) -> torch.Tensor:
        return SinkhornAttention(A, V, tol=1e-13).velocity(Particles(x, logits.softmax(-1)))

    arguments = [t.clone().requires_grad_() for t in (x, w.log(), A)]
    assert torch.autograd.gradcheck(velocity, arguments)
    assert torch.autograd.gradgradcheck(velocity, arguments)


def test_one_token_sees_itself() -> None:
    np.testing.assert_allclose(SinkhornAttention(2.0, 3.0).velocity(np.array([[5.0]])), [[15.0]], rtol=1e-14)


def test_the_field_at_other_points_extends_the_velocity() -> None:
    """At the tokens it is the velocity; between them, the closed form of two tokens."""
    x, w, A, V = random_problem(30, 2)
    attention = SinkhornAttention(A, V, eps=0.5, tol=1e-12)
    mu = Particles(x, w)
    np.testing.assert_allclose(attention.field(mu, x), attention.velocity(mu), rtol=0, atol=1e-10)
    pair = SinkhornAttention(1.3, 1.0, eps=0.7)
    z = np.linspace(-2, 2, 9)[:, None]
    np.testing.assert_allclose(pair.field(np.array([[1.0], [-1.0]]), z), np.tanh(1.3 * z / 0.7), rtol=1e-8)


def test_causal_sinkhorn_is_an_error_that_explains_itself() -> None:
    with pytest.raises(InvalidInput, match="total support"):
        MaskedAttention(SinkhornAttention(1.0, 1.0))


@pytest.mark.parametrize("seed", range(4))
def test_clusters_without_mass_between_them_have_their_values_and_derivatives(seed: int) -> None:
    """Known fault: a derivative step through a matrix with one null vector a cluster moved the value itself."""
    rng = np.random.default_rng(seed)
    x = torch.from_numpy(rng.normal(size=(10, 2)) + np.repeat([[-6, 0], [6, 0]], 5, 0))
    attention = SinkhornAttention(torch.eye(2).double(), torch.eye(2).double())
    c, v = (torch.from_numpy(rng.normal(size=(10, 2))) for _ in range(2))

    def value(z: torch.Tensor) -> torch.Tensor:
        return (torch.as_tensor(attention.velocity(Particles(z))) * c).sum()

    z = x.clone().requires_grad_()
    out = value(z)
    assert float(out.detach()) == pytest.approx(float(value(x)), abs=1e-8)  # both at the tolerance 1e-9
    (g,) = torch.autograd.grad(out, z)
    slope = float(value(x + 1e-5 * v) - value(x - 1e-5 * v)) / 2e-5
    assert float((g * v).sum()) == pytest.approx(slope, rel=1e-6, abs=1e-6)
