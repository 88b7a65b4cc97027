"""Bad inputs of curves, probes, Hessians, searches and certificates."""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from pathlib import Path

import numpy as np

from ot_transformers import (
    AffineVelocity,
    BuresGeodesic,
    BuresWasserstein,
    DisplacementCurve,
    Gaussian,
    GeneralisedGeodesic,
    InteractionEnergy,
    KLDivergence,
    MixtureCurve,
    Particles,
    SelfTransportEnergy,
    TwistedGeodesic,
    TwistedWasserstein,
    Wasserstein,
    check_certificate,
    find_nonconvexity,
    load_witness,
    probe_convexity,
    riemannian_hessian,
)
from ot_transformers.convexity import certify_displacement, certify_hessian

X = Particles([[0.0, 0.0], [1.0, 0.5]])
Y = Particles([[1.0, 0.0], [2.0, -0.5]])
B = Particles(np.zeros((3, 2, 2)))
G = Gaussian(np.zeros(2), 0.1 * np.eye(2))
G3 = Gaussian(np.zeros(3), np.eye(3))
E = InteractionEnergy(-np.eye(2))
M = TwistedWasserstein(-np.eye(2), np.eye(2))
LINE = DisplacementCurve(X, Y)
HESSIAN = riemannian_hessian(E, Wasserstein(), X)
BURES = riemannian_hessian(E, BuresWasserstein(), G)
SKEW = AffineVelocity(G.mean_t, Gaussian(np.zeros(2), np.eye(2)).cov_t.roll(1, 0).tril(), "numpy")


def _file(text: str) -> str:
    path = Path(tempfile.mkdtemp()) / "certificate.json"
    path.write_text(text)
    return str(path)


ROWS: list[tuple[str, Callable[[], object], str]] = [
    ("cloud against Gaussian", lambda: DisplacementCurve(X, G), "mu and nu must both be clouds"),
    (
        "curve dimension",
        lambda: DisplacementCurve(X, Particles([[0.0]])),
        "mu has dimension 2, nu has dimension 1",
    ),
    ("curve nan", lambda: DisplacementCurve(np.array([[np.nan, 0.0]]), X), "NaN"),
    ("curve word", lambda: DisplacementCurve("x", X), "mu must be a Gaussian, Particles"),  # type: ignore[arg-type]
    ("curve D", lambda: DisplacementCurve(X, Y, D=-np.eye(2)), "D must be positive definite"),
    ("curve time", lambda: LINE.at(1.5), r"t must lie in \[0, 1\], got float 1.5"),
    ("curve time word", lambda: LINE.at("now"), "t must be a number"),  # type: ignore[arg-type]
    ("curve time nan", lambda: LINE.at(float("nan")), r"t must lie in \[0, 1\]"),
    ("Bures of clouds", lambda: BuresGeodesic(X, Y), "mu must be a Gaussian"),  # type: ignore[arg-type]
    ("Bures dimension", lambda: BuresGeodesic(G, G3), "mu has dimension 2, nu has dimension 3"),
    ("mixture of Gaussians", lambda: MixtureCurve(G, G), "mu must be a cloud: a mixture of Gaussians is not"),
    ("base of another kind", lambda: GeneralisedGeodesic(G, X, Y), "base, mu and nu must all be"),
    ("base dimension", lambda: GeneralisedGeodesic(G3, G, G), "base has dimension 3, mu has dimension 2"),
    ("base batch", lambda: GeneralisedGeodesic(B, X, Y), "base must be one cloud, got batch"),
    (
        "twisted geodesic metric",
        lambda: TwistedGeodesic(Wasserstein(), X, Y),
        "metric must be a TwistedWasserstein",
    ),
    (
        "twisted geodesic of two kinds",
        lambda: TwistedGeodesic(M, G, X),
        "mu and nu must be both Gaussians or",
    ),
    ("twisted geodesic batch", lambda: TwistedGeodesic(M, B, B), "mu must be one measure, got batch"),
    (
        "velocity shape",
        lambda: TwistedGeodesic.from_velocity(M, X, np.zeros(2)),
        "velocity must have the shape",
    ),
    (
        "velocity too far",
        lambda: TwistedGeodesic.from_velocity(M, np.zeros((1, 2)), [[5.0, 0.0]]),
        "velocity leads out",
    ),
    ("probe curve", lambda: probe_convexity(E, X), "curve must be a curve"),  # type: ignore[arg-type]
    ("probe energy", lambda: probe_convexity(1.0, LINE), "energy must be an Energy"),  # type: ignore[arg-type]
    ("probe points", lambda: probe_convexity(E, LINE, n_points=1), "n_points must be at least 2"),
    ("probe times", lambda: probe_convexity(E, LINE, ts=[0.5, 2.0]), r"ts must lie in \[0, 1\]"),
    (
        "probe mixture end",
        lambda: probe_convexity(E, MixtureCurve(X, Y), ts=[0.0]),
        "ts must lie strictly inside",
    ),
    ("probe threshold", lambda: probe_convexity(E, LINE, threshold=np.inf), "threshold must be finite"),
    (
        "probe KL of clouds",
        lambda: probe_convexity(KLDivergence(G), LINE),
        "KLDivergence is not defined on particles",
    ),
    (
        "probe infinite energy",
        lambda: probe_convexity(E, BuresGeodesic(G, Gaussian(np.zeros(2), 9 * np.eye(2)))),
        "energy is not finite along the curve",
    ),
    ("Hessian energy", lambda: riemannian_hessian("E", M, X), "energy must be an Energy"),  # type: ignore[arg-type]
    ("Hessian metric", lambda: riemannian_hessian(E, "W2", X), "metric must be a TwistedWasserstein"),
    ("Hessian p", lambda: riemannian_hessian(E, Wasserstein(p=1), X), "metric must have p = 2"),
    ("Hessian batch", lambda: riemannian_hessian(E, M, B), "measure must be one measure, got batch"),
    (
        "Hessian Bures cloud",
        lambda: riemannian_hessian(E, BuresWasserstein(), X),
        "measure must be a Gaussian",
    ),
    ("Hessian dimension", lambda: riemannian_hessian(E, M, G3), "measure has dimension 3"),
    (
        "Hessian infinite",
        lambda: riemannian_hessian(E, BuresWasserstein(), Gaussian(np.zeros(2), 2 * np.eye(2))),
        "energy is not finite at measure",
    ),
    (
        "Hessian twisted overflow",
        lambda: riemannian_hessian(E, M, Particles([[40.0, 0.0]])),
        "measure has log G between",
    ),
    (
        "Hessian twisted singular",
        lambda: riemannian_hessian(E, M, Gaussian(np.zeros(2), np.diag([0.1, 0.0]))),
        "measure must be a regular Gaussian",
    ),
    (
        "Hessian twisted domain",
        lambda: riemannian_hessian(E, M, Gaussian(np.zeros(2), 2 * np.eye(2))),
        "measure is outside the domain",
    ),
    ("matvec shape", lambda: HESSIAN.matvec(np.ones(3)), "v must be a field"),
    ("matvec at Gaussian", lambda: BURES.matvec(np.ones((2, 2))), "v must be an AffineVelocity"),
    ("matvec not a gradient", lambda: BURES.matvec(SKEW), "v must be a gradient field"),
    ("eigenpair tol", lambda: HESSIAN.min_eigenpair(tol=0.0), "tol must be > 0"),
    ("search dim", lambda: find_nonconvexity(E, M, dim=3), "dim must be 2"),
    ("search n", lambda: find_nonconvexity(E, M, n=0), "n must be at least 1"),
    ("search radius", lambda: find_nonconvexity(E, M, radius=-1.0), "radius must be > 0"),
    ("search starts", lambda: find_nonconvexity(E, M, n_starts=0), "n_starts must be at least 1"),
    ("search kind", lambda: find_nonconvexity(E, M, kind="grid"), "kind must be one of"),  # type: ignore[arg-type]
    (
        "search twisted Gaussians, radius of none in the domain",
        lambda: find_nonconvexity(E, M, kind="gaussian", radius=1e4, n_starts=2),
        "energy has no usable start among 2",
    ),
    (
        "search Bures clouds",
        lambda: find_nonconvexity(E, BuresWasserstein(), kind="particles"),
        "kind must be 'gaussian'",
    ),
    ("search metric", lambda: find_nonconvexity(E, "W2"), "metric must be Wasserstein"),
    ("search seed", lambda: find_nonconvexity(E, M, seed=-1), "seed must be at least 0"),
    (
        "witness file",
        lambda: load_witness("/nowhere/witness.npz"),
        "path cannot be read: /nowhere/witness.npz",
    ),
    (
        "certificate energy",
        lambda: certify_displacement(SelfTransportEnergy(-np.eye(2)), X, Y),
        "energy cannot be certified: SelfTransportEnergy is found by an iteration",
    ),
    ("certificate of Gaussians", lambda: certify_displacement(E, G, G), "mu must be Particles"),
    ("certificate time", lambda: certify_displacement(E, X, Y, t=2.0), r"t must lie in \[0, 1\]"),
    (
        "certificate matching",
        lambda: certify_displacement(E, X, Y, matching="best"),
        "matching must be one of",
    ),
    ("certificate bits", lambda: certify_displacement(E, X, Y, bits=0), "bits must be at least 1"),
    (
        "certificate precision",
        lambda: certify_displacement(E, X, Y, precision=8),
        "precision must be at least 53",
    ),
    ("certificate direction", lambda: certify_hessian(E, M, X, np.ones(2)), "direction must have shape"),
    ("certificate zero", lambda: certify_hessian(E, M, X, np.zeros((2, 2))), "direction must not be 0"),
    ("certificate metric", lambda: certify_hessian(E, Wasserstein(), X, X.x), "metric must be a Twisted"),  # type: ignore[arg-type]
    ("check no file", lambda: check_certificate("/nowhere/c.json"), "certificate cannot be read"),
    ("check no JSON", lambda: check_certificate(_file("{")), "certificate is not JSON"),
    ("check other JSON", lambda: check_certificate(_file("[1]")), "certificate must have format"),
]
