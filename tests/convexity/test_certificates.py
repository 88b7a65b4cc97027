"""Witnesses are found again by their seed; certificates prove, and fail when anything in them is changed."""

from __future__ import annotations

from fractions import Fraction
from pathlib import Path
from typing import Any

import mpmath as mp
import numpy as np
import pytest

from ot_transformers import (
    BuresWasserstein,
    DisplacementCurve,
    Gaussian,
    InteractionEnergy,
    KLDivergence,
    Particles,
    PotentialEnergy,
    SelfTransportEnergy,
    TwistedWasserstein,
    Wasserstein,
    check_certificate,
    find_nonconvexity,
    load_witness,
    probe_convexity,
    riemannian_hessian,
)
from ot_transformers.convexity import Certificate, Witness, certify_displacement, certify_hessian
from ot_transformers.convexity._rational import dual_potentials, exact_masses, inverse, transport_costs
from ot_transformers.energies import QuadraticPotential

METRIC = TwistedWasserstein(-np.eye(2), np.eye(2))
ENERGY = InteractionEnergy(-np.eye(2))


def test_search_finds_the_dirac_mass_at_the_origin() -> None:
    witness = find_nonconvexity(ENERGY, METRIC, n=1, n_starts=3, seed=1)
    assert witness.modulus == pytest.approx(-1.0, abs=1e-9)
    assert np.abs(witness.measure.x).max() < 1e-4
    again = find_nonconvexity(ENERGY, METRIC, n=1, n_starts=3, seed=1)
    assert again.modulus == witness.modulus
    assert (again.measure.x == witness.measure.x).all()
    assert (again.direction == witness.direction).all()


def test_search_improves_on_its_starts_and_the_curve_shows_the_modulus() -> None:
    witness = find_nonconvexity(ENERGY, Wasserstein(), n=2, n_starts=3, radius=1.0)
    assert witness.negative
    hessian = riemannian_hessian(ENERGY, Wasserstein(), witness.measure)
    assert hessian.quadratic_form(witness.direction) == pytest.approx(witness.modulus)
    curve = witness.geodesic(0.05)
    middle = probe_convexity(ENERGY, curve, ts=[0.5])
    assert float(middle.modulus) == pytest.approx(witness.modulus, rel=1e-9)


@pytest.mark.parametrize(
    ("energy", "metric", "options"),
    [
        (ENERGY, METRIC, {"n": 2}),
        (-2.0 * ENERGY, Wasserstein(D=np.diag([1.0, 2.0])), {"n": 2, "radius": 1.0}),
        (SelfTransportEnergy(-np.eye(2)), BuresWasserstein(), {"radius": 1.0}),
        (KLDivergence(Gaussian(np.zeros(2), np.diag([0.5, 2.0]))), BuresWasserstein(), {"radius": 1.0}),
    ],
)
def test_a_witness_is_saved_and_read_back(
    energy: Any, metric: Any, options: dict[str, Any], tmp_path: Path
) -> None:
    witness = find_nonconvexity(energy, metric, n_starts=1, max_iter=5, **options)
    back = load_witness(witness.save(tmp_path / "witness.npz"))
    assert back.modulus == witness.modulus
    assert back.seed == witness.seed
    pair = riemannian_hessian(back.energy, back.metric, back.measure).min_eigenpair()
    assert pair.value == pytest.approx(witness.modulus, abs=1e-9)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["witness.npz"]


def test_kl_has_no_witness() -> None:
    target = Gaussian(np.zeros(2), np.diag([0.5, 2.0]))
    witness = find_nonconvexity(KLDivergence(target), BuresWasserstein(), n_starts=2, max_iter=20)
    assert witness.modulus + witness.error >= 0.5  # the smallest precision
    assert not witness.negative


def test_dirac_certificate_holds_the_closed_form(tmp_path: Path) -> None:
    x, v = np.array([[0.5, -0.25]]), np.array([[1.0, 0.5]])
    certificate = certify_hessian(ENERGY, METRIC, Particles(x), v)
    low, high = (Fraction(s) for s in certificate.data["enclosure"]["modulus"])
    assert low <= Fraction(5, 16) - 1 <= high < 0  # |x|^2 - 1, exactly
    assert high - low < Fraction(1, 10**25)
    check = check_certificate(certificate.save(tmp_path / "dirac.json"))
    assert check.valid, check.reason
    # outside the unit disc the Hessian is positive: no proof, and it says so
    outside = certify_hessian(ENERGY, METRIC, Particles([[2.0, 0.0]]), v)
    assert not outside.proved
    assert "not negative" in outside.reason
    assert not check_certificate(outside.save(tmp_path / "outside.json")).valid


def test_exactly_zero_is_not_proved_negative() -> None:
    # |x| = 1: the Hessian vanishes; every enclosure reaches 0.
    boundary = certify_hessian(ENERGY, METRIC, Particles([[1.0, 0.0]]), [[1.0, 0.0]])
    assert not boundary.proved


def test_hessian_certificate_agrees_with_floating_point_and_mpmath() -> None:
    rng = np.random.default_rng(1)
    A, D = np.array([[-1.0, 0.25], [0.25, 0.5]]), np.array([[2.0, 0.5], [0.5, 0.75]])
    metric = TwistedWasserstein(A, D=D, sign=1)
    x, v = (np.round(2**8 * rng.normal(size=(3, 2))) / 2**8 for _ in range(2))
    v = v / np.abs(v).max()
    v = np.round(2**8 * v) / 2**8
    certificate = certify_hessian(InteractionEnergy(A), metric, Particles(x, [0.25, 0.25, 0.5]), v)
    hessian = riemannian_hessian(InteractionEnergy(A), metric, Particles(x, [0.25, 0.25, 0.5]))
    low, high = certificate.enclosure
    assert low == pytest.approx(float(hessian.quadratic_form(v)), rel=1e-12)
    assert high == pytest.approx(low)


def test_displacement_certificate_encloses_the_second_derivative() -> None:
    rng = np.random.default_rng(0)
    mu = Particles(np.round(2**8 * 0.4 * rng.normal(size=(4, 2))) / 2**8)
    nu = Particles(np.round(2**8 * 0.4 * rng.normal(size=(3, 2))) / 2**8, [0.25, 0.25, 0.5])
    certificate = certify_displacement(ENERGY, mu, nu, t=0.25)
    curve = DisplacementCurve(mu, nu)
    probe = probe_convexity(ENERGY, curve, ts=[0.25])
    low, high = certificate.data["enclosure"]["second_derivative"]
    assert float(Fraction(low)) == pytest.approx(
        float(probe.second_derivatives[0]), abs=float(probe.errors[0])
    )
    square = certificate.data["enclosure"]["speed_squared"]
    assert float(Fraction(square[0])) == pytest.approx(float(curve.speed_squared()), rel=1e-9)
    start, end = curve.at(0.0), curve.at(1.0)
    with mp.workdps(50):

        def value(t: Any) -> Any:
            z = [[mp.mpf(a) + t * (mp.mpf(b) - mp.mpf(a)) for a, b in zip(p, q, strict=True)]
                 for p, q in zip(start.x.tolist(), end.x.tolist(), strict=True)]  # fmt: skip
            w = [mp.mpf(Fraction(m).limit_denominator(64).numerator) / Fraction(m).limit_denominator(64).denominator
                 for m in start.weights.tolist()]  # fmt: skip
            return sum(
                w[i] * w[j] * mp.exp(-sum(a * b for a, b in zip(z[i], z[j], strict=True))) / 2
                for i in range(len(z)) for j in range(len(z))
            )  # fmt: skip

        truth = mp.diff(value, mp.mpf("0.25"), 2, h=mp.mpf(10) ** -12)
        assert mp.mpf(low) - mp.mpf(10) ** -20 <= truth <= mp.mpf(high) + mp.mpf(10) ** -20


def certificates() -> list[Certificate]:
    twisted = find_nonconvexity(ENERGY, METRIC, n=2, n_starts=1, max_iter=3, radius=0.5).certify()
    w2 = find_nonconvexity(ENERGY, Wasserstein(), n=2, n_starts=1, max_iter=3, radius=1.0).certify()
    return [twisted, w2]


def test_witnesses_are_certified_and_checked_alone(tmp_path: Path) -> None:
    for certificate in certificates():
        assert certificate.proved, certificate.reason
        assert certificate.enclosure[1] < 0
        path = certificate.save(tmp_path / "certificate.json")
        check = check_certificate(path)
        assert check.valid, check.reason
        assert check.claim == certificate.claim
        assert check.enclosure[1] < 0


def test_sums_and_multiples_are_certified_in_both_metrics(tmp_path: Path) -> None:
    """E of two matrices, one not symmetric, and a quadratic part; against the floating-point second derivatives."""
    rng = np.random.default_rng(7)
    B = np.array([[0.25, 0.5], [-0.25, -0.5]])
    potential = QuadraticPotential(np.array([[0.25, 0.125], [0.125, -0.5]]), [0.5, -0.25])
    energy = 2.0 * ENERGY - 0.5 * (InteractionEnergy(B) + potential) + ENERGY
    D = np.array([[2.0, 0.5], [0.5, 0.75]])
    metric = TwistedWasserstein(np.array([[-1.0, 0.25], [0.25, 0.5]]), D=D)
    x, v = (np.round(2**8 * 0.3 * rng.normal(size=(3, 2))) / 2**8 for _ in range(2))
    v[0, 0] = 1.0
    cloud = Particles(x, [0.25, 0.25, 0.5])
    hessian = certify_hessian(energy, metric, cloud, v)
    assert hessian.proved, hessian.reason
    expected = riemannian_hessian(energy, metric, cloud).quadratic_form(v)
    assert hessian.enclosure[0] == pytest.approx(float(expected), rel=1e-12)
    assert [t["factor"] for t in hessian.data["energy"]["interactions"]] == ["3", "-1/2"]
    assert "3 E_A1 + -1/2 E_A2 + E[x.Hx/2 + c.x]" in hessian.claim
    nu = Particles(x + 0.25 * v, [0.25, 0.25, 0.5])
    curve = certify_displacement(energy, cloud, nu, t=0.5, D=D)
    probe = probe_convexity(energy, DisplacementCurve(cloud, nu, D=D), ts=[0.5])
    assert curve.proved, curve.reason
    assert curve.enclosure[0] == pytest.approx(float(probe.second_derivatives[0]), rel=1e-12)
    for certificate in (hessian, curve):
        assert check_certificate(certificate.save(tmp_path / "sum.json")).valid


def test_what_has_no_certificate_says_why() -> None:
    cloud = Particles([[0.1, 0.2], [0.5, -0.3]])
    square = PotentialEnergy(lambda x: -x.square().sum(-1))
    target = Gaussian(np.zeros(2), np.eye(2))
    for energy, metric, measure, why in (
        (ENERGY + SelfTransportEnergy(-np.eye(2)), Wasserstein(), cloud, "found by an iteration"),
        (-square, Wasserstein(), cloud, "use QuadraticPotential"),
        (KLDivergence(target), Wasserstein(), cloud, "infinite on clouds"),
        (ENERGY, BuresWasserstein(), cloud, "need W2 or a twisted one"),
        (ENERGY, BuresWasserstein(), target, "certificates are about clouds"),
    ):
        direction = np.ones((2, 2))
        witness = Witness(energy, metric, measure, direction, -1.0, 0.0, 0, np.zeros(1))
        certificate = witness.certify()
        assert not certificate.proved
        assert why in certificate.reason
        assert np.isnan(certificate.enclosure).all()
        check = check_certificate(certificate)
        assert not check.valid
        assert "not a certificate" in check.reason


def test_a_plan_that_is_not_optimal_is_refused(tmp_path: Path) -> None:
    # the crossing matching on the line; potentials cannot exist
    crossing = certify_displacement(
        InteractionEnergy(-1.0), Particles([[0.0], [1.0]]), Particles([[1.5], [0.5]]), matching="identity"
    )
    assert not crossing.proved
    assert "not optimal" in crossing.reason
    assert not check_certificate(crossing.save(tmp_path / "crossing.json")).valid


def test_exact_transport_against_pot() -> None:
    rng = np.random.default_rng(3)
    mu, nu = Particles(rng.normal(size=(6, 2)), rng.dirichlet(np.ones(6))), Particles(rng.normal(size=(5, 2)))
    certificate = certify_displacement(ENERGY, mu, nu, bits=30)
    plan, potentials = certificate.data["plan"], certificate.data["potentials"]
    u, v = ([Fraction(q) for q in p] for p in potentials)
    w = [Fraction(q) for q in certificate.data["x_weights"]]
    dual = sum(a * b for a, b in zip(u, w, strict=True)) + sum(v) / 5
    x, y = ([[Fraction(q) for q in p] for p in certificate.data[k]] for k in "xy")
    costs = transport_costs(x, y, [[Fraction(1), Fraction(0)], [Fraction(0), Fraction(1)]])
    primal = sum(costs[i][j] * Fraction(m) for i, j, m in plan)
    assert primal == dual  # strong duality, exactly
    assert float(primal) == pytest.approx(float(Wasserstein().distance(mu, nu)) ** 2, rel=1e-7)


def test_rational_helpers() -> None:
    F = Fraction
    M = [[F(2), F(1)], [F(1), F(3)]]
    assert inverse(M) == [[F(3, 5), F(-1, 5)], [F(-1, 5), F(2, 5)]]
    assert exact_masses([(0, 0), (0, 1), (1, 1)], [F(1, 2), F(1, 2)], [F(1, 4), F(3, 4)]) == [
        (0, 0, F(1, 4)),
        (0, 1, F(1, 4)),
        (1, 1, F(1, 2)),
    ]
    assert exact_masses([(0, 0)], [F(1, 2), F(1, 2)], [F(1), F(0)]) is None
    assert dual_potentials([[F(1), F(0)], [F(0), F(1)]], [(0, 0, F(1, 2)), (1, 1, F(1, 2))]) is None


def test_without_flint_the_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    import sys

    from ot_transformers.errors import OTTransformersError

    monkeypatch.setitem(sys.modules, "flint", None)
    with pytest.raises(OTTransformersError, match=r"ot-transformers\[certify\]"):
        certify_hessian(ENERGY, METRIC, Particles([[0.0, 0.0]]), [[1.0, 0.0]])


@pytest.mark.parametrize(("scale", "sign"), [(1e-4, 1.0), (1e-5, 1.0), (40.0, -1.0)])
def test_what_is_proved_is_proved_again_at_every_size(scale: float, sign: float) -> None:
    """Numbers below 1e-6 were written with exponents that the reader refused; beyond 1e308 float() raised."""
    energy = sign * InteractionEnergy(-sign * np.eye(2))
    start, end = (
        (Particles([[scale, 0.0]]), Particles([[scale + 1, 0.0]]))
        if sign < 0
        else (Particles([[0.0, 0.0]]), Particles([[scale, 0.0]]))
    )
    found = certify_displacement(energy, start, end)
    assert found.proved
    assert found.enclosure[1] < 0
    assert check_certificate(found).valid
