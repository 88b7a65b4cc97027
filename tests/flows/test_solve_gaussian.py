"""`solve` on Gaussians against closed forms and quadrature."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from scipy.linalg import expm

import ot_transformers as otf

from .closed_forms import random_spd, softmax_covariance, softmax_limit, variance_by_quadrature


def centred(S):
    return otf.Gaussian(np.zeros(S.shape[:-1]), S)


@pytest.mark.parametrize("rtol", [1e-6, 1e-9])
def test_softmax_follows_its_closed_form(rtol):
    rng = np.random.default_rng(0)
    S0, A = random_spd(rng, 4), rng.standard_normal((4, 4))
    A = A - (np.linalg.eigvalsh(A + A.T)[-1] / 2) * np.eye(4)  # A + A^T <= 0: no blow-up
    run = otf.solve(otf.SoftmaxAttention(A, np.eye(4)), centred(S0), t_end=20.0, rtol=rtol, atol=rtol)
    assert run.status == "completed"
    for t, state in zip(run.times, run.states, strict=True):
        S = softmax_covariance(S0, A, t)
        assert np.linalg.norm(state.cov - S) <= 20 * rtol * np.linalg.norm(S)


def test_softmax_mean_solves_its_linear_equation():
    """d = 1, V = I: S = S0 / (1 - 2 a t S0), so m = m0 e^t (1 - 2 a t S0)^(-1/2)."""
    a, s0, m0, t = -0.7, 1.3, 0.4, 2.0
    state = otf.solve(otf.SoftmaxAttention(a, 1.0), otf.Gaussian(m0, s0 * np.eye(1)), t).states[-1]
    assert state.mean[0] == pytest.approx(m0 * np.exp(t) * (1 - 2 * a * t * s0) ** -0.5, rel=1e-8)


def test_limit_covariance_has_the_rank_of_theory():
    """V = I, Q (r, d), K = -Q: S(inf) = S0^(1/2) Pi S0^(1/2) of rank d - r, while S(t) keeps rank d."""
    rng = np.random.default_rng(1)
    d, r = 5, 2
    Q = rng.standard_normal((r, d))
    A, S0 = -Q.T @ Q / np.sqrt(d), random_spd(rng, d)
    run = otf.solve(otf.SoftmaxAttention(A, np.eye(d)), centred(S0), 1e7, save_at=[1e7])
    assert run.status == "completed"
    assert run.stats["n_steps"] < 300  # the steps grow with t
    limit, exact = softmax_limit(S0, A), softmax_covariance(S0, A, 1e7)
    assert np.linalg.norm(exact - limit) <= 1e-6
    assert np.linalg.norm(run.states[-1].cov - exact) <= 1e-8
    assert np.linalg.matrix_rank(limit, tol=1e-10) == d - r
    assert run.states[-1].rank() == d
    assert run.states[-1].rank(tol=1e-6) == d - r


@pytest.mark.parametrize("r", [0, 1, 2])
def test_rank_of_a_factor_is_kept_exactly(r):
    rng = np.random.default_rng(2)
    L = rng.standard_normal((3, max(r, 1))) * (r > 0)
    A, V = rng.standard_normal((2, 3, 3))
    run = otf.solve(otf.L2Attention(A, V, np.eye(3)), otf.Gaussian.from_factor(np.ones(3), L), 2.0)
    assert all(int(s.rank()) == r for s in run.states)
    assert all(s.factor.shape == L.shape for s in run.states)


def test_l2_in_dimension_one_against_quadrature():
    k, q, v, s0, t = 0.8, 1.1, 0.9, 0.5, 3.0
    expected = variance_by_quadrature(lambda s: 4 * v * k * q * s**2 / (1 + 2 * k**2 * s), s0, t)
    run = otf.solve(otf.L2Attention(q, k, v), centred(np.array([[s0]])), t)
    assert run.states[-1].cov[0, 0] == pytest.approx(expected, rel=2e-7)
    tight = otf.solve(otf.L2Attention(q, k, v), centred(np.array([[s0]])), t, rtol=1e-11, atol=1e-13)
    assert tight.states[-1].cov[0, 0] == pytest.approx(expected, rel=1e-10)


@pytest.mark.parametrize("eps", [1.0, 0.3])
def test_sinkhorn_in_dimension_one_against_quadrature(eps):
    a, v, s0, t = 0.7, 1.2, 0.6, 2.0
    b = a / eps

    def rate(s):
        return 4 * v * b * s**2 / (1 + np.sqrt(1 + 4 * b**2 * s**2))

    run = otf.solve(otf.SinkhornAttention(a, v, eps), centred(np.array([[s0]])), t, rtol=1e-11, atol=1e-13)
    assert run.states[-1].cov[0, 0] == pytest.approx(variance_by_quadrature(rate, s0, t), rel=1e-10)


def test_affine_block_is_the_matrix_exponential():
    rng = np.random.default_rng(3)
    W, S0, m0 = rng.standard_normal((3, 3)), random_spd(rng, 3), rng.standard_normal(3)
    run = otf.solve(otf.AffineBlock(W), otf.Gaussian(m0, S0), 1.5, rtol=1e-11, atol=1e-13)
    E = expm(1.5 * W)
    np.testing.assert_allclose(run.states[-1].mean, E @ m0, rtol=1e-9)
    np.testing.assert_allclose(run.states[-1].cov, E @ S0 @ E.T, rtol=1e-9)


def test_a_vanishing_factor_keeps_its_digits():
    """atol refers to the present size of L: S decays to 1e-26 of itself, to 8 digits."""
    run = otf.solve(otf.AffineBlock(-np.diag([1.0, 1.2])), otf.Gaussian(np.ones(2), np.eye(2)), 30.0)
    expected = np.diag(np.exp(-2 * 30.0 * np.array([1.0, 1.2])))
    np.testing.assert_allclose(np.diag(run.states[-1].cov), np.diag(expected), rtol=1e-5)


def test_multihead_adds_up():
    """Two softmax heads of V / 2 with one A are the head of V."""
    rng = np.random.default_rng(4)
    A, V = 0.5 * rng.standard_normal((2, 3, 3))
    g = otf.Gaussian(rng.standard_normal(3), random_spd(rng, 3))
    head = otf.SoftmaxAttention(A, 0.5 * V)
    two = otf.solve(otf.MultiHeadAttention([head, head]), g, 0.5)
    one = otf.solve(otf.SoftmaxAttention(A, V), g, 0.5)
    np.testing.assert_allclose(two.states[-1].cov, one.states[-1].cov, rtol=1e-13)


def test_a_batch_gives_what_the_loop_gives():
    """Members that blow up, converge or run on do not disturb the others; parameters batch too."""
    rng = np.random.default_rng(5)
    A = rng.standard_normal((2, 2, 3, 3))
    S0, m0 = random_spd(rng, 3, (2,)), rng.standard_normal((2, 3))
    times = [0.0, 0.05, 0.4, 1.0]
    together = otf.solve(
        otf.SoftmaxAttention(A, np.eye(3)), otf.Gaussian(m0, S0), 1.0, save_at=times, rtol=1e-6
    )
    assert together.status.shape == (2, 2)
    assert set(together.status.ravel()) == {"blew up", "completed"}
    for i, j in np.ndindex(2, 2):
        alone = otf.solve(
            otf.SoftmaxAttention(A[i, j], np.eye(3)),
            otf.Gaussian(m0[j], S0[j]),
            1.0,
            save_at=times,
            rtol=1e-6,
        )
        assert together.status[i, j] == alone.status
        assert together.blow_up_time[i, j] == pytest.approx(alone.blow_up_time, rel=1e-9)
        assert together.stats["steps"][i, j] == pytest.approx(alone.stats["n_steps"], abs=3)
        for k in range(len(times)):
            if together.valid[k, i, j]:
                np.testing.assert_allclose(
                    together.states[k].cov[i, j], alone.states[k].cov, rtol=1e-9, atol=1e-12
                )


def test_a_frozen_member_stays_frozen_between_save_times():
    A = np.array([1.0, -1.0]).reshape(2, 1, 1)
    run = otf.solve(otf.SoftmaxAttention(A, 1.0), otf.Gaussian(np.zeros((2, 1)), np.ones((2, 1, 1))), 4.0)
    assert run.status.tolist() == ["blew up", "completed"]
    assert run.valid[:, 1].all()
    assert not run.valid[-1, 0]
    middle = run.at(3.03).cov
    assert middle[0] == run.states[-1].cov[0]
    assert middle[1, 0, 0] == pytest.approx(1 / (1 + 2 * 3.03), rel=1e-7)


def test_numpy_and_torch_agree_and_come_back_as_they_went_in():
    S0 = random_spd(np.random.default_rng(6), 2)
    a = otf.solve(otf.SoftmaxAttention(-np.eye(2), np.eye(2)), centred(S0), 1.0)
    b = otf.solve(
        otf.SoftmaxAttention(-np.eye(2), np.eye(2)),
        otf.Gaussian(torch.zeros(2).double(), torch.tensor(S0)),
        1.0,
    )
    assert isinstance(a.states[-1].cov, np.ndarray)
    assert torch.is_tensor(b.states[-1].cov)
    np.testing.assert_array_equal(a.states[-1].cov, b.states[-1].cov.numpy())


def test_float32_keeps_its_dtype_and_its_digits():
    S0 = random_spd(np.random.default_rng(7), 3).astype(np.float32)
    A = -np.eye(3)
    run = otf.solve(otf.SoftmaxAttention(A, np.eye(3)), otf.Gaussian(np.zeros(3, np.float32), S0), 1.0)
    assert run.states[-1].cov.dtype == np.float32
    np.testing.assert_allclose(run.states[-1].cov, softmax_covariance(S0.astype(float), A, 1.0), atol=2e-5)


def test_derivative_in_parameters_and_start_against_the_closed_form():
    """d = 1: S(t) = S0 / (1 - 2 a t S0), first and second derivatives."""
    a = torch.tensor(-0.6, dtype=torch.float64, requires_grad=True)
    s = torch.tensor(0.8, dtype=torch.float64, requires_grad=True)
    g = otf.Gaussian.from_factor(torch.zeros(1).double(), s.sqrt().reshape(1, 1))
    end = otf.solve(otf.SoftmaxAttention(a, 1.0), g, 1.0, save_at=[1.0]).states[-1].cov[0, 0]
    exact = s / (1 - 2 * a * s)
    grads = torch.autograd.grad(end, (a, s), create_graph=True)
    truth = torch.autograd.grad(exact, (a, s), create_graph=True)
    for found, value in zip(grads, truth, strict=True):
        assert found.item() == pytest.approx(value.item(), rel=1e-6)
    second = torch.autograd.grad(grads[0], s)[0]
    assert second.item() == pytest.approx(torch.autograd.grad(truth[0], s)[0].item(), rel=1e-5)


def test_an_ensemble_converges_in_one_call():
    """30 of each d = 3, 4, 5, zero-padded to 5, K = -Q, V = I, against the closed form at their own end times."""
    rng = np.random.default_rng(8)
    A, S0 = np.zeros((90, 5, 5)), np.zeros((90, 5, 5))
    for i in range(90):
        d = 3 + i // 30
        Q = rng.standard_normal((d // 2, d))
        A[i, :d, :d], S0[i, :d, :d] = -Q.T @ Q / np.sqrt(d), random_spd(rng, d)
    run = otf.solve(
        otf.SoftmaxAttention(A, np.eye(5)),
        centred(S0),
        1e6,
        save_at=[1e6],
        stop_when_converged=True,
        converged_tol=1e-5,
    )
    assert (run.status == "converged").all()
    S = run.states[-1].cov
    np.testing.assert_allclose(S, softmax_covariance(S0, A, run.last_times), atol=1e-6)
    M = otf.SoftmaxAttention(A, np.eye(5)).affine(run.states[-1]).M
    speed = np.linalg.norm(M @ S + S @ np.swapaxes(M, -1, -2), axis=(-2, -1))
    assert (speed <= 1e-5 * np.linalg.norm(S0, axis=(-2, -1)) * (1 + 1e-6)).all()


def test_torch_func_transforms_go_through():
    """jvp, grad and jvp of grad of S(1) in a, d = 1; vmap is refused in words."""
    s = 0.81

    def end(a):
        g = otf.Gaussian.from_factor(torch.zeros(1).double(), torch.full((1, 1), 0.9).double())
        attention = otf.SoftmaxAttention(a.reshape(1, 1), torch.ones(1, 1).double())
        return otf.solve(attention, g, 1.0, save_at=[1.0]).states[-1].cov[0, 0]

    a, one = torch.tensor(-0.6).double(), torch.tensor(1.0).double()
    first, second = 2 * s**2 / (1 + 1.2 * s) ** 2, 8 * s**3 / (1 + 1.2 * s) ** 3
    assert torch.func.jvp(end, (a,), (one,))[1].item() == pytest.approx(first, rel=1e-6)
    value, curvature = torch.func.jvp(torch.func.grad(end), (a,), (one,))
    assert value.item() == pytest.approx(first, rel=1e-6)
    assert curvature.item() == pytest.approx(second, rel=1e-5)
    with pytest.raises(otf.InvalidInput, match=r"torch\.vmap"):
        torch.func.vmap(end)(torch.stack([a, a]))
