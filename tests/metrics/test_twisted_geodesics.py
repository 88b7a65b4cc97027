"""Shortest paths between clouds in the twisted metric: closed forms, error bars, infinity, derivatives."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from scipy.integrate import quad
from scipy.special import dawsn

from ot_transformers.attention import SoftmaxAttention
from ot_transformers.energies import InteractionEnergy
from ot_transformers.errors import InvalidInput, NotConverged
from ot_transformers.measures import Particles
from ot_transformers.metrics import TwistedWasserstein

from .twisted_settings import cloud, setting


def test_dirac_masses_reference(reference: Any) -> None:
    for row in reference["dirac_twisted_1d"]:
        metric = TwistedWasserstein(row["a"], D=row["D"])
        mu, nu = Particles([[row["x"]]]), Particles([[row["y"]]])
        assert float(metric.distance(mu, nu)) == pytest.approx(row["distance"], rel=1e-12)
        # The path optimiser finds the same number without the closed form.
        log_length = metric.geodesic(mu, nu).details["log_length"]
        assert np.exp(log_length) == pytest.approx(row["distance"], rel=1e-10)


@pytest.mark.parametrize(
    ("a", "x", "y"), [(-1.0, 3.0, 9.0), (-1.0, -9.0, -8.5), (2.0, -3.0, 3.0), (0.5, 1.0, 1.0001)]
)
def test_dirac_masses_against_quadrature(a: float, x: float, y: float) -> None:
    exact = abs(quad(lambda s: np.exp(a * s * s / 2), x, y, epsabs=0, epsrel=1e-12)[0])
    found = TwistedWasserstein(a, D=1.0).distance(Particles([[x]]), Particles([[y]]))
    assert float(found) == pytest.approx(exact, rel=1e-10)


def test_infinity_is_at_a_finite_distance_for_negative_a() -> None:
    metric = TwistedWasserstein(-2.0, D=0.5)
    assert float(metric.line_diameter[0]) == pytest.approx(np.sqrt(2 * np.pi / 2) / np.sqrt(0.5), rel=1e-14)
    far = metric.distance(Particles([[-50.0]]), Particles([[50.0]]))
    assert float(far) == pytest.approx(float(metric.line_diameter[0]), rel=1e-12)
    with pytest.raises(InvalidInput, match="not complete"):
        metric.exp(Particles([[0.0]]), np.array([[1.1 * float(far) * np.sqrt(0.5)]]))


def test_thirty_away_does_not_overflow() -> None:
    metric = TwistedWasserstein(np.eye(2), D=np.eye(2))
    # In the metric e^{|x|^2} of one Dirac mass geodesics dive towards the origin (Clairaut). From an angle on, the
    # shortest path is the radius in and the radius out: e^{r^2/2} integrates to sqrt(2) e^{r^2/2} Dawson(r/sqrt 2).
    far = metric.geodesic(Particles([[30.0, 0.0]]), Particles([[30.0, 1.0]]))
    radii = np.array([30.0, np.hypot(30.0, 1.0)])
    exact = np.log((np.sqrt(2) * dawsn(radii / np.sqrt(2)) * np.exp(radii**2 / 2 - 450.0)).sum())
    assert far.converged
    assert far.details["log_length"] - 450.0 == pytest.approx(exact, rel=1e-9)
    assert float(far.length) == pytest.approx(np.exp(450.0 + exact), rel=1e-7)
    attention = SoftmaxAttention(np.eye(2), np.eye(2))
    x = torch.tensor([[30.0, 0.0], [29.0, 3.0]], dtype=torch.float64)
    w = torch.tensor([0.5, 0.5], dtype=torch.float64)
    field = metric.raw_particles_steepest(InteractionEnergy(np.eye(2)), x, w)
    torch.testing.assert_close(field, attention.raw_velocity(x, w), rtol=1e-12, atol=1e-12)


def test_exp_conserves_energy_and_log_inverts_it() -> None:
    A, D = setting(1)
    metric = TwistedWasserstein(A, D=D)
    p, q = cloud(1, 5), cloud(2, 5)
    q = Particles(0.5 * q.x + 0.3, p.weights)
    g = metric.geodesic(p, q, matching="identity")
    v = metric.log(p, q, matching="identity")
    np.testing.assert_allclose(metric.exp(p, v).x, q.x, atol=1e-9)
    assert float(metric.inner(p, v, v)) == pytest.approx(float(g.length) ** 2, rel=1e-6)
    half = metric.exp(p, 0.5 * v)
    np.testing.assert_allclose(g.at(0.5).x, half.x, atol=2e-3)
    back = metric.geodesic(p, half, matching="identity")
    assert float(back.length) == pytest.approx(0.5 * float(g.length), rel=1e-6)


def test_error_estimate_of_a_length_holds() -> None:
    A, D = setting(4)
    p, q = cloud(4, 8, weighted=False), cloud(5, 8, weighted=False)
    exact = TwistedWasserstein(A, D=D, tol=1e-12).geodesic(p, q, matching="identity")
    for tol in (1e-3, 1e-5, 1e-7):
        rough = TwistedWasserstein(A, D=D, tol=tol).geodesic(p, q, matching="identity")
        assert abs(float(rough.length) - float(exact.length)) <= float(rough.error) + float(exact.error)


def test_length_is_the_limit_of_polygonal_actions() -> None:
    A, D = setting(6)
    metric = TwistedWasserstein(A, D=D)
    p, q = cloud(6, 4, weighted=False), cloud(7, 4, weighted=False)
    g = metric.geodesic(p, q, matching="identity")
    gaps = []
    for k in (8, 16, 32):
        points = np.stack([g.at(t).x for t in np.linspace(0, 1, k + 1)])
        gaps.append(float(metric.action(points)) - float(g.length) ** 2)
    assert min(gaps) > 0
    orders = np.log2(np.array(gaps[:-1]) / gaps[1:])
    np.testing.assert_allclose(orders, 2.0, atol=0.2)  # polygons: error 1/k^2 in the action


@pytest.mark.parametrize("seed", [0, 1, 480, 640])
def test_metric_axioms(seed: int) -> None:
    # At seed 480 two of the three ways run through infinity.
    A, D = setting(seed)
    metric = TwistedWasserstein(A, D=D, tol=1e-6)
    a, b, c = (cloud(seed + k, 3, weighted=False) for k in range(3))
    ab, bc, ac, ba = (float(metric.distance(*pair)) for pair in ((a, b), (b, c), (a, c), (b, a)))
    assert ab == pytest.approx(ba, rel=1e-5)
    assert ac <= (ab + bc) * (1 + 1e-5)
    assert ab > 0
    assert float(metric.distance(a, a)) == 0.0


@settings(max_examples=12, deadline=None)
@given(points=st.lists(st.floats(-3, 3), min_size=6, max_size=6))
@example(points=[1.296875, -2.032032763785783, -2.5517282580383753, 1.422303494216008, 0.0, 1.0])
def test_triangle_inequality_of_dirac_masses_through_infinity(points: list[float]) -> None:
    metric = TwistedWasserstein(-np.eye(2), D=np.eye(2), tol=1e-6)
    a, b, c = (Particles([points[2 * k : 2 * k + 2]]) for k in range(3))
    ab, bc, ac = (float(metric.distance(*pair)) for pair in ((a, b), (b, c), (a, c)))
    assert ac <= (ab + bc) * (1 + 1e-5) + 1e-9


def test_shortest_way_through_infinity() -> None:
    """Opposite points about the top of e^{-|x|^2}: out to infinity and back is 21 times shorter than across."""
    metric = TwistedWasserstein(-np.eye(2), D=np.eye(2))
    a, b = Particles([[2.0, 0.0]]), Particles([[-2.0, 0.0]])
    exact = 2 * quad(lambda s: np.exp(-s * s / 2), 2, np.inf, epsabs=0, epsrel=1e-12)[0]
    assert float(metric.distance(a, b)) == pytest.approx(exact, rel=1e-10)
    with pytest.warns(NotConverged, match="through infinity"):
        path = metric.geodesic(a, b)
    assert not path.converged
    # The straight line is a geodesic by symmetry, but a saddle: the path found has left it.
    assert float(path.length) < 0.1 * quad(lambda s: np.exp(-s * s / 2), -2, 2)[0]
    assert path.details["through_infinity"] == pytest.approx(exact, rel=1e-10)
    # With one negative direction only, the two sides of infinity are not joined.
    narrow = TwistedWasserstein(np.diag([-1.0, 1.0]), D=np.eye(2))
    across = quad(lambda s: np.exp(-s * s / 2), -2, 2)[0]
    assert float(narrow.distance(a, b)) == pytest.approx(across, rel=1e-8)


def test_near_clouds_keep_their_digits() -> None:
    metric = TwistedWasserstein(-np.eye(2), D=np.eye(2))
    x = 1.0 + 1e-9
    g = metric.geodesic(Particles([[1.0, 0.0]]), Particles([[x, 0.0]]))
    assert float(g.length) == pytest.approx((x - 1.0) * np.exp(-0.5), rel=1e-8)


def test_derivatives_of_the_distance_by_differences() -> None:
    A, D = (torch.from_numpy(t) for t in setting(3))
    x, y = (torch.from_numpy(cloud(k, 3).x).clone() for k in (3, 4))
    w = [0.2, 0.3, 0.5]

    def distance(x: torch.Tensor, y: torch.Tensor, A: torch.Tensor, D: torch.Tensor) -> torch.Tensor:
        return TwistedWasserstein(A, D=D, tol=1e-12).distance(Particles(x, w), Particles(y, w))

    inputs = [t.clone().requires_grad_() for t in (x, 0.4 * y + 0.6 * x, A, D)]
    value = distance(*inputs)
    grads = torch.autograd.grad(value, inputs)
    for k, g in enumerate(grads):
        move = torch.randn(g.shape, generator=torch.Generator().manual_seed(k), dtype=torch.float64)
        move = move + move.mT if k > 1 else move
        ends = []
        for s in (1e-4, -1e-4):
            moved = [t.detach() + (s * move if i == k else 0.0) for i, t in enumerate(inputs)]
            ends.append(float(distance(*moved)))
        assert float((g * move).sum()) == pytest.approx((ends[0] - ends[1]) / 2e-4, rel=1e-5, abs=1e-8)
    (g,) = torch.autograd.grad(distance(*inputs), inputs[:1], create_graph=True)
    with pytest.raises(InvalidInput, match="first derivatives only"):
        torch.autograd.grad(g.sum(), inputs[:1])


def test_derivatives_of_the_line_in_closed_form() -> None:
    a, D = (torch.tensor([[t]], dtype=torch.float64, requires_grad=True) for t in (-0.8, 1.7))
    x, y = (torch.tensor([[t]], dtype=torch.float64, requires_grad=True) for t in (-0.4, 1.3))
    d = TwistedWasserstein(a, D=D).distance(Particles(x), Particles(y))
    gx, gy, ga, gD = torch.autograd.grad(d, (x, y, a, D))
    root = np.sqrt(1.7)
    assert float(gx) == pytest.approx(-np.exp(-0.4 * 0.16) / root, rel=1e-12)
    assert float(gy) == pytest.approx(np.exp(-0.4 * 1.69) / root, rel=1e-12)
    assert float(gD) == pytest.approx(-float(d.detach()) / 3.4, rel=1e-12)
    moment = quad(lambda s: 0.5 * s * s * np.exp(-0.4 * s * s), -0.4, 1.3, epsrel=1e-12)[0]
    assert float(ga) == pytest.approx(moment / root, rel=1e-12)
