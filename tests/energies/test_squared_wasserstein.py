"""W_2^2 / 2 to a target: closed forms, POT, and the gradient x - T(x)."""

from __future__ import annotations

import numpy as np
import ot
import pytest
import torch

from ot_transformers import Gaussian, Particles, SquaredWasserstein
from ot_transformers.energies import Energy

RNG = np.random.default_rng(3)


@pytest.mark.parametrize("d", [1, 3])
def test_value_against_pot_in_a_batch(d: int) -> None:
    x, y = RNG.normal(size=(4, 7, d)), RNG.normal(size=(5, d))
    w, v = RNG.dirichlet(np.ones(7), size=4), RNG.dirichlet(np.ones(5))
    value = SquaredWasserstein(Particles(y, v)).value(Particles(x, w))
    expected = [0.5 * ot.emd2(a, v, ot.dist(p, y)) for p, a in zip(x, w, strict=True)]
    np.testing.assert_allclose(value, expected, rtol=1e-11)


@pytest.mark.parametrize("d", [1, 2])
def test_gradient_is_x_minus_the_barycentric_projection(d: int) -> None:
    x, y = RNG.normal(size=(2, 7, d)), RNG.normal(size=(2, 5, d))
    w, v = RNG.dirichlet(np.ones(7), size=2), RNG.dirichlet(np.ones(5), size=2)
    energy = SquaredWasserstein(Particles(y, v))
    field = energy.wasserstein_gradient(Particles(x, w))
    for k in range(2):
        plan = ot.emd(w[k], v[k], ot.dist(x[k], y[k]))
        np.testing.assert_allclose(field[k], x[k] - plan @ y[k] / w[k][:, None], rtol=1e-10, atol=1e-12)
    automatic = Energy.raw_particles_gradient(energy, torch.from_numpy(x), torch.from_numpy(w))
    np.testing.assert_allclose(field, automatic, rtol=1e-10, atol=1e-12)


def test_translation_is_the_optimal_map() -> None:
    x, shift = RNG.normal(size=(20, 3)), np.array([1.0, -2.0, 0.5])
    field = SquaredWasserstein(x[RNG.permutation(20)] + shift).wasserstein_gradient(Particles(x))
    np.testing.assert_allclose(field, np.broadcast_to(-shift, x.shape), rtol=1e-12)


def test_gaussians_of_commuting_covariances() -> None:
    a, b = np.array([1.0, 4.0, 0.0]), np.array([9.0, 1.0, 2.0])
    m, n = np.array([0.1, 0.2, 0.3]), np.array([1.0, 0.0, -1.0])
    energy = SquaredWasserstein(Gaussian(n, np.diag(b)))
    value = energy.value(Gaussian(m, np.diag(a)))
    expected = 0.5 * (((m - n) ** 2).sum() + ((np.sqrt(a) - np.sqrt(b)) ** 2).sum())
    assert value == pytest.approx(expected, rel=1e-13)
    regular = a + np.array([0.0, 0.0, 1.0])
    field = energy.wasserstein_gradient(Gaussian(m, np.diag(regular)))
    np.testing.assert_allclose(field.b, m - n, rtol=1e-14)
    np.testing.assert_allclose(field.M, np.diag(1 - np.sqrt(b / regular)), rtol=1e-11, atol=1e-12)
