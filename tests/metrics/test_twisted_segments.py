"""Polygonal geodesics of the twisted metric: order in 1/N, extrapolation and its error, closed forms, far clouds."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from scipy.integrate import quad
from scipy.special import dawsn

from ot_transformers.measures import Particles
from ot_transformers.metrics import TwistedWasserstein
from ot_transformers.numerics.polygons import extrapolated

from .twisted_settings import cloud, setting

# (The tolerance is that of polynomials; polygons meet 1e-5 with 16 segments here.)
TOL = 1e-5


@pytest.mark.parametrize("seed", [4, 6, 9])
def test_lengths_of_polygons_are_of_order_two_and_extrapolated_ones_of_order_four(seed: int) -> None:
    A, D = setting(seed)
    p, q = cloud(seed, 4, weighted=False), cloud(seed + 1, 4, weighted=False)
    exact = float(TwistedWasserstein(A, D=D, tol=1e-10).geodesic(p, q, matching="identity").length)
    metric = TwistedWasserstein(A, D=D, tol=1e-6)
    path = metric.geodesic(p, q, matching="identity", method="segments", segments=64)
    finer = metric.geodesic(p, q, matching="identity", method="segments", segments=32)
    assert path.details["segments"] == (16, 32, 64)
    np.testing.assert_allclose(path.details["lengths"][:2], finer.details["lengths"][1:], rtol=1e-7)
    lengths = np.array([*finer.details["lengths"], path.details["lengths"][-1]])
    assert (lengths > exact).all()  # each is the length of a path
    np.testing.assert_allclose(-np.diff(np.log2(lengths - exact)), 2.0, atol=0.1)
    once = np.abs((4 * lengths[1:] - lengths[:-1]) / 3 - exact)
    np.testing.assert_allclose(-np.diff(np.log2(once))[0], 4.0, atol=0.5)
    assert abs(float(path.length) - exact) <= float(path.error)


@pytest.mark.parametrize("matching", ["identity", "optimal"])
@pytest.mark.parametrize("seed", [0, 3, 5, 7])
def test_segments_agree_with_polynomials(seed: int, matching: str) -> None:
    A, D = setting(seed)
    metric = TwistedWasserstein(A, D=D, tol=TOL)
    p, q = cloud(seed, 4, weighted=False), cloud(seed + 10, 4, weighted=False)
    polynomial = metric.geodesic(p, q, matching=matching)
    path = metric.geodesic(p, q, matching=matching, method="segments")
    assert abs(float(path.length) - float(polynomial.length)) <= float(path.error) + float(polynomial.error)
    np.testing.assert_array_equal(path.details["matching"], polynomial.details["matching"])


def test_different_weights_split_into_the_same_pieces() -> None:
    A, D = setting(2)
    metric = TwistedWasserstein(A, D=D, tol=TOL)
    p, q = cloud(2, 4), cloud(3, 3)
    polynomial, path = metric.geodesic(p, q), metric.geodesic(p, q, method="segments", segments=32)
    assert path.converged
    assert abs(float(path.length) - float(polynomial.length)) <= float(path.error) + float(polynomial.error)
    assert path.details["matching"] is None
    np.testing.assert_allclose(path.at(1.0).mean, q.mean, atol=1e-12)
    np.testing.assert_allclose(path.at(0.0).cov, p.cov, atol=1e-12)


@pytest.mark.parametrize(("a", "x", "y"), [(-1.0, -0.5, 2.0), (2.0, -1.0, 1.5), (-1.0, 1.0, 30.0)])
def test_dirac_masses_in_closed_form(a: float, x: float, y: float) -> None:
    exact = abs(quad(lambda s: np.exp(a * s * s / 2), x, min(y, 12.0), epsabs=0, epsrel=1e-13)[0])
    metric = TwistedWasserstein(a, D=1.0, tol=TOL)
    path = metric.geodesic(Particles([[x]]), Particles([[y]]), method="segments")
    # On a line every polygon is the geodesic: only the quadrature is left.
    assert float(path.length) == pytest.approx(exact, rel=1e-9)
    assert abs(float(path.length) - exact) <= float(path.error) < 1e-5 * exact
    half = metric.geodesic(Particles([[x]]), path.at(0.5), method="segments")
    assert float(half.length) == pytest.approx(0.5 * exact, rel=1e-6)


@pytest.mark.parametrize(
    ("a", "x", "y"), [(-1.0, 1.0, 30.0), (-1.0, 30.0, 28.0), (1.0, -3.0, 20.0), (1.0, 30.0, 31.0)]
)
def test_the_line_is_shortest_within_its_error(a: float, x: float, y: float) -> None:
    """Past y to infinity and back is no shorter than to y, however near the two lengths are."""
    metric = TwistedWasserstein(a, D=0.7, tol=1e-3)
    mu, nu = Particles([[x]]), Particles([[y]])
    exact = metric.geodesic(mu, nu).details["log_length"]
    path = metric.geodesic(mu, nu, method="segments")
    assert path.converged
    assert abs(np.expm1(path.details["log_length"] - exact)) <= path.details["relative_error"]


def test_thirty_away_does_not_overflow() -> None:
    metric = TwistedWasserstein(np.eye(2), D=np.eye(2), tol=1e-4)
    a, b = Particles([[30.0, 0.0]]), Particles([[30.0, 1.0]])
    path = metric.geodesic(a, b, method="segments", segments=64)
    # The radius in and the radius out, as in test_twisted_geodesics.
    radii = np.array([30.0, np.hypot(30.0, 1.0)])
    exact = np.log((np.sqrt(2) * dawsn(radii / np.sqrt(2)) * np.exp(radii**2 / 2 - 450.0)).sum())
    assert path.details["log_length"] - 450.0 == pytest.approx(exact, rel=1e-8)
    assert np.isfinite(path.details["lengths"]).all()
    assert path.details["relative_error"] < 1e-4


def test_constant_speed() -> None:
    A, D = setting(1)
    metric = TwistedWasserstein(A, D=D, tol=TOL)
    p, q = cloud(1, 3, weighted=False), cloud(2, 3, weighted=False)
    path = metric.geodesic(p, q, matching="identity", method="segments", segments=64)
    part = metric.geodesic(p, path.at(0.3), matching="identity")
    assert float(part.length) == pytest.approx(0.3 * float(path.length), rel=1e-4)
    end = path.details["end"]
    assert isinstance(end, np.ndarray)
    np.testing.assert_array_equal(end, q.x)


def test_kind_comes_back() -> None:
    metric = TwistedWasserstein(-np.eye(2), D=np.eye(2), tol=1e-4)
    x = torch.randn(3, 2, generator=torch.Generator().manual_seed(0), dtype=torch.float32)
    for p, kind in ((Particles(x), torch.Tensor), (Particles(x.numpy()), np.ndarray)):
        for method in ("polynomial", "segments"):
            path = metric.geodesic(p, Particles(0.5 * p.x + 0.3), method=method)
            assert isinstance(path.details["end"], kind)
            assert isinstance(path.details["initial_velocity"](), kind)
            assert path.length.dtype == x.dtype or path.length.dtype == np.float32


def test_extrapolation_by_hand() -> None:
    lengths = [1 + 3 / n**2 + 5 / n**4 for n in (8, 16, 32)]
    found, error = extrapolated(list(np.log(lengths)), [0.0, 0.0, 0.0])
    assert found == pytest.approx(0.0, abs=1e-15)
    # The last step of the table takes away 1/N^4, -4 * 5 / 32^4 here; the ratio of the differences exceeds 4.
    ratio = (lengths[0] - lengths[1]) / (lengths[1] - lengths[2])
    step = 4 * 5 / 32**4 * (1 + 15 * (ratio - 4))
    assert error == pytest.approx(max(step, (lengths[1] - lengths[2]) / 128), rel=1e-2)
    rough = [0.3, 0.1, 0.08]  # the differences fall by 10: no expansion yet
    found, error = extrapolated(rough, [0.0, 0.0, 0.5])
    assert found == 0.08
    assert error == pytest.approx(np.expm1(0.22) - np.expm1(0.02) + 0.5)
