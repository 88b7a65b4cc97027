"""Gaussians: moments, ranks, densities, samples; frozen, batch-first, NumPy and torch alike."""

from __future__ import annotations

import copy
import pickle

import numpy as np
import pytest
import torch
from scipy.stats import multivariate_normal

from ot_transformers.errors import InvalidInput
from ot_transformers.measures import AffineVelocity, Gaussian

S = np.array([[2.0, 0.6], [0.6, 0.5]])


def test_log_density_is_scipys() -> None:
    m = np.array([0.3, -1.0])
    x = np.random.default_rng(0).standard_normal((7, 2))
    np.testing.assert_allclose(Gaussian(m, S).log_density(x), multivariate_normal(m, S).logpdf(x), rtol=1e-13)
    one = Gaussian(m, S).log_density(x[0])
    assert float(one) == pytest.approx(multivariate_normal(m, S).logpdf(x[0]), rel=1e-13)


def test_factor_gives_the_covariance_and_keeps_rank() -> None:
    L = np.array([[1.0], [2.0], [0.5]])
    g = Gaussian.from_factor(np.zeros(3), L)
    np.testing.assert_allclose(g.cov, L @ L.T, rtol=1e-15)
    assert int(g.rank()) == 1
    h = Gaussian(np.zeros(2), S)
    np.testing.assert_allclose(h.factor @ h.factor.T, S, rtol=1e-13)


def test_a_square_factor_stays_a_factor_whatever_is_asked_first() -> None:
    # Its small singular value is lost in the covariance (1e-20 against 1): rank must not depend on the order of calls.
    g = Gaussian.from_factor(np.zeros((3, 2)), np.diag([1.0, 1e-10]))
    before = g.rank()
    np.testing.assert_allclose(g.cov[0], np.diag([1.0, 1e-20]), rtol=1e-15)
    for other in (g, g[1], copy.deepcopy(g), pickle.loads(pickle.dumps(g))):
        assert other.has_factor
        assert np.all(other.rank() == 2)
    assert np.all(before == 2)
    assert not Gaussian(np.zeros(2), np.diag([1.0, 1e-20])).has_factor


def test_samples_have_the_moments_and_repeat_with_the_seed() -> None:
    g = Gaussian([1.0, -2.0], S)
    x = g.sample(40_000, seed=1)
    # Five standard errors of the mean and of each covariance entry.
    np.testing.assert_allclose(x.mean(0), g.mean, atol=5 * np.sqrt(2 / 40_000))
    np.testing.assert_allclose(np.cov(x.T), S, atol=5 * np.sqrt(2 * 4 / 40_000))
    np.testing.assert_array_equal(x[:10], g.sample(40_000, seed=1)[:10])
    assert not np.array_equal(x, g.sample(40_000, seed=2))


def test_samples_of_a_singular_gaussian_stay_in_its_range() -> None:
    x = Gaussian.from_factor([0.0, 0.0], [[1.0], [2.0]]).sample(50, seed=0)
    np.testing.assert_allclose(x[:, 1], 2 * x[:, 0], atol=1e-14)


def test_ellipse_lies_at_its_mahalanobis_radius() -> None:
    curve = Gaussian([1.0, 2.0], S).ellipse(1.7) - np.array([1.0, 2.0])
    radius = np.sqrt(np.einsum("ni,ij,nj->n", curve, np.linalg.inv(S), curve))
    np.testing.assert_allclose(radius, 1.7, rtol=1e-12)


def test_a_callers_array_is_not_shared() -> None:
    m, cov = np.zeros(2), S.copy()
    g = Gaussian(m, cov)
    m[0], cov[0, 0] = 5.0, 100.0
    np.testing.assert_array_equal(g.mean, [0.0, 0.0])
    assert g.cov[0, 0] == 2.0
    with pytest.raises(AttributeError, match="frozen"):
        g.kind = "torch"  # type: ignore[misc]


def test_batches_broadcast_and_index() -> None:
    g = Gaussian(np.zeros((3, 1, 2)), np.stack([S, 2 * S]))
    assert g.batch_shape == (3, 2)
    np.testing.assert_array_equal(g[1, 1].cov, 2 * S)
    np.testing.assert_array_equal(g.rank(), np.full((3, 2), 2))


def test_kind_dtype_and_gradients_are_kept() -> None:
    cov = torch.tensor(S, dtype=torch.float32, requires_grad=True)
    g = Gaussian(torch.zeros(2), cov)
    assert isinstance(g.cov, torch.Tensor)
    assert g.dtype == torch.float32
    (grad,) = torch.autograd.grad(g.cov.sum(), cov)
    torch.testing.assert_close(grad, torch.ones(2, 2))
    assert isinstance(Gaussian(0.0, 1.0).mean, np.ndarray)


def test_copies_and_pickles_are_the_same_measure() -> None:
    g = Gaussian([0.0, 1.0], S)
    for other in (copy.deepcopy(g), pickle.loads(pickle.dumps(g))):
        np.testing.assert_array_equal(other.cov, g.cov)


def test_affine_velocity() -> None:
    g = Gaussian([1.0, 0.0], S)
    M = np.array([[0.0, 1.0], [-0.5, 0.2]])
    v = AffineVelocity(torch.tensor([0.1, 0.2]).double(), torch.from_numpy(M), "numpy")
    np.testing.assert_allclose(v.at(np.array([[2.0, 3.0]]), g), [[0.1 + 3.0, 0.2 - 0.5 + 0.6]], rtol=1e-7)
    np.testing.assert_allclose(v.cov_velocity(g), M @ S + S @ M.T, rtol=1e-14)


def test_singular_has_no_density() -> None:
    with pytest.raises(InvalidInput, match="singular"):
        Gaussian([0.0, 0.0], np.diag([1.0, 0.0])).log_density(np.zeros((1, 2)))
