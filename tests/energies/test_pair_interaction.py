"""Pair interactions and quadratic potentials against dense sums, exact moments and each other."""

from __future__ import annotations

import numpy as np
import pytest

import ot_transformers as otf
from ot_transformers.energies import QuadraticInteraction, QuadraticPotential, SoftplusInteraction


def problem(d=3, n=7):
    rng = np.random.default_rng(0)
    return rng.standard_normal((d, d)), rng.standard_normal((n, d)), rng.dirichlet(np.ones(n))


def test_values_are_the_double_sums():
    A, x, w = problem()
    s = x @ A @ x.T
    dense = {
        QuadraticInteraction(A): 0.5 * s**2,
        SoftplusInteraction(A, 0.3): np.logaddexp(0.0, s + 0.3),
    }
    for energy, phi in dense.items():
        assert energy.value(otf.Particles(x, w)) == pytest.approx(0.5 * w @ phi @ w, rel=1e-13)


def test_softplus_does_not_overflow():
    energy = SoftplusInteraction(1.0)
    assert energy.value(otf.Particles([[100.0]])) == pytest.approx(0.5 * 1e4, rel=1e-15)


def test_gaussian_value_is_the_fourth_moment():
    """d = 1: E E (a x y)^2 / 4 = a^2 (s + m^2)^2 / 4; d = 3 through a cloud of the same moments."""
    assert QuadraticInteraction(2.0).value(otf.Gaussian(0.5, [[1.5]])) == pytest.approx(1.75**2, rel=1e-14)
    A, x, w = problem()
    p = otf.Particles(x, w)
    energy = QuadraticInteraction(A)
    assert energy.value(p.to_gaussian()) == pytest.approx(energy.value(p), rel=1e-12)


def test_quadratic_potential_against_quadrature_and_moments():
    A, x, w = problem()
    c = np.array([1.0, -0.5, 0.2])
    H = 0.5 * (A + A.T)
    energy = QuadraticPotential(A, c)
    p = otf.Particles(x, w)
    g = p.to_gaussian()
    exact = w @ (0.5 * np.einsum("ni,ij,nj->n", x, H, x) + x @ c)
    assert energy.value(p) == pytest.approx(exact, rel=1e-13)
    assert energy.value(g) == pytest.approx(exact, rel=1e-12)
    np.testing.assert_allclose(energy.wasserstein_gradient(p), x @ H + c, rtol=1e-13)
    field = energy.wasserstein_gradient(g)
    np.testing.assert_allclose(field.b, H @ g.mean + c, rtol=1e-12)
    np.testing.assert_allclose(field.M, H, rtol=1e-13)
