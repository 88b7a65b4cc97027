"""Measures on grids: moments, densities, and what they share with particles."""

from __future__ import annotations

import pickle

import numpy as np
import pytest
import torch

from ot_transformers import Gaussian
from ot_transformers.measures import GridMeasure

AXIS = np.linspace(-7.0, 7.0, 71)


def test_a_gaussian_keeps_its_moments_and_density() -> None:
    m, S = np.array([0.3, -0.5]), np.array([[0.8, 0.3], [0.3, 0.6]])
    mu = GridMeasure.from_gaussian(Gaussian(m, S), [AXIS, np.linspace(-6.0, 6.0, 61)])
    np.testing.assert_allclose(mu.mean, m, atol=1e-10)
    np.testing.assert_allclose(mu.cov, S, atol=1e-10)
    log_density = Gaussian(m, S).log_density(mu.nodes_t.numpy())
    np.testing.assert_allclose(np.log(mu.density).ravel(), log_density, rtol=1e-9)


def test_weights_are_normalised_and_arrays_are_not_shared() -> None:
    mass = np.ones(71) / 71
    mu = GridMeasure(AXIS, mass)
    mass[0] = 5.0
    assert mu.mass[0] == pytest.approx(1 / 71, rel=1e-14)
    other = GridMeasure.from_density(lambda x: 1.0 + 0.0 * x[..., 0], AXIS)
    np.testing.assert_allclose(other.mass, mu.mass, rtol=1e-13)
    with pytest.raises(AttributeError, match="frozen"):
        mu.kind = "torch"


def test_particles_of_a_batch_and_pickling() -> None:
    masses = np.random.default_rng(0).dirichlet(np.ones(12), size=3).reshape(3, 3, 4)
    mu = GridMeasure([np.arange(3.0), np.arange(4.0)], masses)
    assert mu.batch_shape == (3,)
    cloud = mu.to_particles()
    np.testing.assert_allclose(cloud.mean[:, 1], (masses.sum(1) * np.arange(4.0)).sum(-1), rtol=1e-13)
    again = pickle.loads(pickle.dumps(mu))
    np.testing.assert_array_equal(again.mass, mu.mass)
    tensor = GridMeasure([torch.arange(3.0).double(), torch.arange(4.0).double()], torch.from_numpy(masses))
    assert isinstance(tensor.mean, torch.Tensor)
    np.testing.assert_allclose(tensor.mean, mu.mean, rtol=1e-15)
