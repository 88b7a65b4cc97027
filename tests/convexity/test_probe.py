"""Second derivatives along curves against closed forms and 60-digit arithmetic; honest errors and verdicts."""

from __future__ import annotations

from typing import Any

import mpmath as mp
import numpy as np
import pytest
import torch

from ot_transformers import (
    BuresGeodesic,
    DisplacementCurve,
    Gaussian,
    GaussianFunctional,
    GeneralisedGeodesic,
    InteractionEnergy,
    KLDivergence,
    MixtureCurve,
    Particles,
    PotentialEnergy,
    SelfTransportEnergy,
    Wasserstein,
    probe_convexity,
)

RNG = np.random.default_rng(7)


def gaussian(d: int, seed: int, scale: float = 0.4) -> Gaussian:
    rng = np.random.default_rng(seed)
    L = scale * rng.normal(size=(d, d))
    return Gaussian(0.3 * rng.normal(size=d), L @ L.T + 0.05 * np.eye(d))


def test_dirac_along_w2_geodesics_has_the_closed_form() -> None:
    # E(delta_x) = e^{-x^2} / 2 for A = -1, so its second derivative in x is (2 x^2 - 1) e^{-x^2}.
    line = DisplacementCurve(Particles([[-2.0]]), Particles([[1.5]]))
    probe = probe_convexity(InteractionEnergy(-1.0), line, n_points=15)
    x = -2.0 + 3.5 * probe.t
    truth = (2 * x**2 - 1) * np.exp(-(x**2)) * 3.5**2
    assert np.abs(probe.second_derivatives - truth).max() < 1e-13
    assert (np.abs(probe.second_derivatives - truth) <= probe.errors).all()
    assert probe.speed_squared == pytest.approx(3.5**2)
    assert probe.verdict == "not convex"
    assert probe.consistent


def interaction_second(A: Any, x0: Any, x1: Any, w: Any, t: float) -> mp.mpf:
    """d2/dt2 of E_A along sum w delta_{(1-t) x0 + t x1}, in mpmath."""
    n, d = x0.shape

    def value(s: Any) -> Any:
        z = [
            [mp.mpf(x0[i, a]) + s * (mp.mpf(x1[i, a]) - mp.mpf(x0[i, a])) for a in range(d)] for i in range(n)
        ]
        total = mp.mpf(0)
        for i in range(n):
            for j in range(n):
                score = sum(z[i][a] * mp.mpf(A[a, b]) * z[j][b] for a in range(d) for b in range(d))
                total += mp.mpf(w[i]) * mp.mpf(w[j]) * mp.exp(score)
        return total / 2

    with mp.workdps(60):
        return mp.diff(value, mp.mpf(t), 2, h=mp.mpf(10) ** -15)


@pytest.mark.parametrize("size", [0.3, 1.0, 3.0, 6.0])
def test_errors_bound_the_true_error_of_clouds(size: float) -> None:
    rng = np.random.default_rng(int(10 * size))
    A = rng.normal(size=(2, 2))
    mu, nu = (Particles(size * rng.normal(size=(4, 2)), rng.dirichlet(np.ones(4))) for _ in range(2))
    curve = DisplacementCurve(mu, nu)
    start, end = curve.at(0.0), curve.at(1.0)
    assert isinstance(start, Particles)
    assert isinstance(end, Particles)
    probe = probe_convexity(InteractionEnergy(A), curve, ts=[0.0, 0.25, 0.5, 1.0])
    for t, d2, error in zip(probe.t, probe.second_derivatives, probe.errors, strict=True):
        truth = interaction_second(A, start.x, end.x, start.weights, float(t))
        assert abs(float(truth - mp.mpf(float(d2)))) <= error
        # an error estimate that is always true by being huge says nothing
        assert error <= 1e-11 * max(
            abs(float(truth)), 1e-3 * float(probe.values.max()) * float(probe.speed_squared.max()) * size**2
        )


def bures_functional(name: str) -> tuple[Any, Any]:
    """An energy, and the same as a function of mpmath mean (2) and covariance (2 x 2)."""
    if name == "kl":
        T = np.array([[0.6, 0.1], [0.1, 1.2]])
        inverse = mp.matrix(T.tolist()) ** -1

        def kl(m: Any, S: Any) -> Any:
            P = inverse * S
            return (P[0, 0] + P[1, 1] - 2 - mp.log(mp.det(P)) + (m.T * inverse * m)[0]) / 2

        return KLDivergence(Gaussian(np.zeros(2), T)), kl
    A = np.array([[-0.7, 0.2], [0.2, 0.3]])
    B = mp.matrix(A.tolist())

    def interaction(m: Any, S: Any) -> Any:
        P = S**-1
        R, u = P - B.T * S * B, P * m + B.T * m
        exponent = (u.T * R**-1 * u)[0] / 2 - (m.T * P * m)[0] / 2
        return mp.exp(exponent) / mp.sqrt(mp.det(S) * mp.det(R)) / 2

    def transport(m: Any, S: Any) -> Any:
        # eigenvalues of S A S A: h = (1 + sqrt(1 + 4 w)) / 2
        M = S * B * S * B.T
        trace, det = M[0, 0] + M[1, 1], mp.det(M)
        root = mp.sqrt(trace**2 / 4 - det)
        h = [(1 + mp.sqrt(1 + 4 * w)) / 2 for w in (trace / 2 + root, trace / 2 - root)]
        return (sum(1 - k + mp.log(k) / 2 for k in h) - (m.T * B * m)[0]) / 2

    if name == "interaction":
        return InteractionEnergy(A), interaction
    return SelfTransportEnergy(A), transport


@pytest.mark.parametrize("name", ["kl", "interaction", "transport"])
def test_bures_second_derivatives_against_sixty_digits(name: str) -> None:
    """Also guards a fault met here: nested forward mode through solves and custom rules, silently wrong."""
    energy, exact = bures_functional(name)
    mu, nu = gaussian(2, 1), gaussian(2, 2)
    probe = probe_convexity(energy, BuresGeodesic(mu, nu), ts=[0.0, 0.4, 1.0])
    with mp.workdps(60):
        S0, S1 = (mp.matrix(g.cov.tolist()) for g in (mu, nu))
        m0, m1 = (mp.matrix(g.mean.tolist()) for g in (mu, nu))
        # T = S0^{-1/2} (S0^{1/2} S1 S0^{1/2})^{1/2} S0^{-1/2}
        R = mp.sqrtm(S0)
        T = R**-1 * mp.sqrtm(R * S1 * R) * R**-1

        def value(t: Any) -> Any:
            M = (1 - t) * mp.eye(2) + t * T
            return exact((1 - t) * m0 + t * m1, M * S0 * M.T)

        truth = [mp.diff(value, mp.mpf(float(t)), 2, h=mp.mpf(10) ** -15) for t in probe.t]
    for d2, error, true in zip(probe.second_derivatives, probe.errors, truth, strict=True):
        assert abs(float(true) - d2) <= error
        assert error <= 1e-10 * max(1.0, abs(d2))
    assert probe.consistent


@pytest.mark.parametrize("seed", range(4))
def test_kl_to_a_log_concave_gaussian_is_convex_with_the_modulus_of_its_precision(seed: int) -> None:
    target = Gaussian(np.ones(3), np.diag([0.5, 1.0, 2.0]))
    probe = probe_convexity(KLDivergence(target), BuresGeodesic(gaussian(3, seed), gaussian(3, seed + 50)))
    assert probe.verdict == "convex"
    assert float(probe.modulus + probe.modulus_error) >= 0.5  # lambda_min of the precision diag(2, 1, 1/2)
    along_base = GeneralisedGeodesic(gaussian(3, 9), gaussian(3, seed), gaussian(3, seed + 50))
    assert probe_convexity(KLDivergence(target), along_base, threshold=0.5).verdict == "convex"


def test_an_affine_functional_is_undecided() -> None:
    linear = PotentialEnergy(lambda x: (x * torch.tensor([1.0, -2.0], dtype=x.dtype)).sum(-1))
    clouds = [Particles(RNG.normal(size=(5, 2))) for _ in range(2)]
    for curve in (DisplacementCurve(*clouds), MixtureCurve(*clouds)):
        probe = probe_convexity(linear, curve)
        assert probe.verdict == "undecided"
        assert np.abs(probe.second_derivatives).max() <= probe.errors.max() < 1e-12
    trace = GaussianFunctional(lambda m, S: m.sum(-1))
    assert probe_convexity(trace, BuresGeodesic(gaussian(2, 3), gaussian(2, 4))).verdict == "undecided"


def test_quadratic_functional_is_decided_by_its_margin() -> None:
    square = PotentialEnergy(lambda x: 0.5 * x.square().sum(-1))
    curve = DisplacementCurve(*(Particles(RNG.normal(size=(5, 2))) for _ in range(2)))
    probe = probe_convexity(square, curve, threshold=1.0)
    assert float(probe.modulus) == pytest.approx(1.0, rel=1e-13)
    assert probe.verdict == "undecided"  # the modulus is the threshold: inside the error
    assert probe_convexity(square, curve, threshold=1.0 - 1e-9).verdict == "convex"
    assert probe_convexity(square, curve, threshold=1.0 + 1e-9).verdict == "not convex"


def test_a_functional_whose_nested_forward_mode_is_wrong_is_caught() -> None:
    """A user's slogdet: nested forward mode gives another number, without an error; reverse mode is believed."""
    user = GaussianFunctional(lambda m, S: -0.5 * torch.linalg.slogdet(S).logabsdet)
    probe = probe_convexity(user, BuresGeodesic(gaussian(2, 1), gaussian(2, 2)), ts=[0.3, 0.6])
    ours = probe_convexity(
        KLDivergence(Gaussian(np.zeros(2), np.eye(2))),
        BuresGeodesic(gaussian(2, 1), gaussian(2, 2)),
        ts=[0.3, 0.6],
    )
    # KL to N(0, I) = (tr S + |m|^2 - d) / 2 - log det S / 2, and (tr S + |m|^2) / 2 has second derivative |speed|^2.
    truth = ours.second_derivatives - ours.speed_squared
    assert (np.abs(probe.second_derivatives - truth) <= probe.errors).all()


def test_self_transport_error_covers_the_tolerance_of_its_solver() -> None:
    mu, nu = (Particles(RNG.normal(size=(12, 2))) for _ in range(2))
    curve = DisplacementCurve(mu, nu)
    loose = probe_convexity(SelfTransportEnergy(-np.eye(2), tol=1e-4), curve, n_points=5)
    tight = probe_convexity(SelfTransportEnergy(-np.eye(2), tol=1e-13), curve, n_points=5)
    gap = np.abs(loose.second_derivatives - tight.second_derivatives)
    assert (gap <= loose.errors + tight.errors).all()
    assert loose.consistent
    assert tight.consistent


def test_curves_hit_their_ends_and_move_at_their_speed() -> None:
    base, mu, nu = (Particles(RNG.normal(size=(6, 2))) for _ in range(3))
    heavy = Particles(RNG.normal(size=(4, 2)), [0.1, 0.2, 0.3, 0.4])
    for a, b in ((mu, nu), (mu, heavy), (heavy, mu)):
        w2 = float(Wasserstein().distance(a, b))
        displacement, general = DisplacementCurve(a, b), GeneralisedGeodesic(base, a, b)
        assert float(displacement.speed_squared()) == pytest.approx(w2**2)
        assert float(general.speed_squared()) >= w2**2 - 1e-12
        for curve in (displacement, general, MixtureCurve(a, b)):
            for t, end in ((0.0, a), (1.0, b)):
                assert float(Wasserstein().distance(curve.at(t), end)) < 1e-7
        middle = float(Wasserstein().distance(displacement.at(0.25), displacement.at(0.75)))
        assert middle == pytest.approx(0.5 * w2)
    g = [gaussian(2, s) for s in (1, 2, 3)]
    for curve in (BuresGeodesic(g[0], g[1]), GeneralisedGeodesic(g[2], g[0], g[1])):
        assert np.abs(curve.at(1.0).cov - g[1].cov).max() < 1e-13  # type: ignore[union-attr]
    # with the base at one end it is the geodesic
    assert float(GeneralisedGeodesic(g[0], g[0], g[1]).speed_squared()) == pytest.approx(
        float(BuresGeodesic(g[0], g[1]).speed_squared())
    )


def test_mixture_of_interaction_energies_has_a_closed_form() -> None:
    # E is quadratic in mu: along a mixture E'' = 2 E_A(nu - mu), a constant.
    A = np.array([[0.5, 0.1], [0.1, -0.4]])
    mu, nu = (Particles(RNG.normal(size=(5, 2))) for _ in range(2))
    x = np.concatenate([mu.x, nu.x])
    d = np.concatenate([-mu.weights, nu.weights])
    truth = d @ np.exp(x @ A @ x.T) @ d
    probe = probe_convexity(InteractionEnergy(A), MixtureCurve(mu, nu))
    assert np.abs(probe.second_derivatives - truth).max() < 1e-12
    assert float(probe.speed_squared[0]) == pytest.approx(4.0)
    shared = MixtureCurve(mu, Particles(mu.x, [0.2, 0.2, 0.2, 0.1, 0.3]))
    assert float(shared.speed_squared()) == pytest.approx(0.2**2)


def test_batch_is_the_loop_and_numpy_is_torch() -> None:
    means, factors = RNG.normal(size=(3, 2)) * 0.2, RNG.normal(size=(3, 2, 2)) * 0.4
    mu, nu = Gaussian(means, factors @ factors.transpose(0, 2, 1)), gaussian(2, 5)
    energy = KLDivergence(gaussian(2, 6))
    batch = probe_convexity(energy, BuresGeodesic(mu, nu), n_points=5)
    assert batch.second_derivatives.shape == (3, 5)
    for k in range(3):
        one = probe_convexity(energy, BuresGeodesic(mu[k], nu), n_points=5)
        np.testing.assert_allclose(batch.second_derivatives[k], one.second_derivatives, rtol=1e-11)
        assert batch.verdict[k] == one.verdict
    torched = Gaussian(torch.tensor(mu[0].mean), torch.tensor(mu[0].cov))
    other = probe_convexity(energy, BuresGeodesic(torched, nu), n_points=5)
    assert isinstance(other.modulus, torch.Tensor)
    plain = probe_convexity(energy, BuresGeodesic(mu[0], nu), n_points=5)
    gap = np.abs(other.second_derivatives.numpy() - plain.second_derivatives)
    assert (gap <= plain.errors).all()


def test_float32_error_covers_the_distance_to_float64() -> None:
    x, y = (RNG.normal(size=(6, 2)).astype(np.float32) for _ in range(2))
    single = probe_convexity(
        InteractionEnergy(-np.eye(2)), DisplacementCurve(Particles(x), Particles(y)), n_points=5
    )
    double = probe_convexity(
        InteractionEnergy(-np.eye(2)),
        DisplacementCurve(Particles(x.astype(float)), Particles(y.astype(float))),
        n_points=5,
    )
    assert single.second_derivatives.dtype == np.float32
    gap = np.abs(single.second_derivatives.astype(float) - double.second_derivatives)
    assert (gap <= single.errors).all()
    assert gap.max() > double.errors.max()


def test_displacement_with_an_inner_product_is_the_whitened_one() -> None:
    D = np.array([[2.0, 0.3], [0.3, 0.5]])
    mu, nu = (Particles(RNG.normal(size=(5, 2))) for _ in range(2))
    curve = DisplacementCurve(mu, nu, D=D)
    assert float(curve.speed_squared()) == pytest.approx(float(Wasserstein(D=D).distance(mu, nu)) ** 2)
    g = [gaussian(2, s) for s in (1, 2)]
    square = float(BuresGeodesic(*g, D=D).speed_squared())
    root = np.linalg.cholesky(np.linalg.inv(D)).T
    white = [Gaussian(root @ m.mean, root @ m.cov @ root.T) for m in g]
    assert square == pytest.approx(float(BuresGeodesic(*white).speed_squared()))


def test_same_seed_same_numbers() -> None:
    curve = DisplacementCurve(*(Particles(RNG.normal(size=(5, 2))) for _ in range(2)))
    a, b = (probe_convexity(InteractionEnergy(-np.eye(2)), curve, seed=3) for _ in range(2))
    assert (a.errors == b.errors).all()
    assert (a.second_derivatives == b.second_derivatives).all()
