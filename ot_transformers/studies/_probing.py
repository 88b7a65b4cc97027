"""The measures, curves and energies that the convexity study probes."""

from __future__ import annotations

import contextlib
import math
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np

from ..convexity import (
    BuresGeodesic,
    ConvexityProbe,
    Curve,
    DisplacementCurve,
    GeneralisedGeodesic,
    MixtureCurve,
    TwistedGeodesic,
    probe_convexity,
)
from ..energies import Energy, InteractionEnergy, KLDivergence, SelfTransportEnergy
from ..errors import InvalidInput, NotAGradientFlow, NotConverged
from ..measures import AffineVelocity, Gaussian, Measure, Particles
from ..metrics import BuresWasserstein, TwistedWasserstein, Wasserstein

__all__ = ["Group", "Setting", "groups", "probe_group", "setting", "unit_size"]

Floats = np.ndarray[Any, Any]


@dataclass(frozen=True, eq=False)
class Setting:
    """Energies and the twisted metric of (A, V), as the flows of attention descend them.

    Attributes
    ----------
    A : array (d, d)
    metric : TwistedWasserstein, or None where V = sign D A has no solution D
    why_not : the reason, "" if there is a metric
    energies : by the name in tables
    target : the Gaussian of the KL divergence
    """

    A: Floats
    metric: TwistedWasserstein | None
    why_not: str
    energies: dict[str, Energy]
    target: Gaussian

    @property
    def interaction(self) -> Energy:
        """The first energy: that of unnormalised and softmax attention."""
        return next(iter(self.energies.values()))


def setting(A: Floats, V: Floats, eps: float, rng: np.random.Generator) -> Setting:
    """The energies that attention with (A, V) descends: -sign E_A and sign F, V = sign D A; E_A and F without D."""
    d = len(A)
    metric: TwistedWasserstein | None = None
    why_not = ""
    try:
        metric = TwistedWasserstein(A, V)
    except (NotAGradientFlow, InvalidInput) as err:
        why_not = str(err)
    interaction, transport = InteractionEnergy(A), SelfTransportEnergy(A, eps)
    basis, _ = np.linalg.qr(rng.standard_normal((d, d)))
    target = Gaussian(np.zeros(d), (basis * np.geomspace(0.5, 2.0, d)) @ basis.T)
    energies: dict[str, Energy]
    if metric is not None and metric.sign > 0:
        energies = {"-interaction": -interaction, "self-transport": transport}
    elif metric is not None:
        energies = {"interaction": interaction, "-self-transport": -transport}
    else:
        energies = {"interaction": interaction, "self-transport": transport}
    return Setting(A, metric, why_not, {**energies, "KL to a Gaussian": KLDivergence(target)}, target)


@dataclass
class Group:
    """One family of curves between one kind of measures, and the probes of one energy along it."""

    curve: str
    measures: str
    energy: str
    probes: list[ConvexityProbe] = field(default_factory=list)

    @property
    def worst(self) -> ConvexityProbe:
        """The probe with the lowest modulus."""
        return min(self.probes, key=lambda p: float(p.modulus))

    def count(self, verdict: str) -> int:
        """How many probes have a verdict."""
        return sum(p.verdict == verdict for p in self.probes)


@dataclass(frozen=True, eq=False)
class _Family:
    curve: str
    measures: str
    energies: tuple[str, ...]
    build: Callable[[Any, Any, Any], Curve]
    triples: list[tuple[Measure, Measure, Measure]]


def groups(
    s: Setting, tokens: Particles, *, n: int, n_curves: int, n_real: int, rng: np.random.Generator
) -> Iterator[tuple[Group, list[Curve]]]:
    """Every family of curves with its energies: random and real measures, (group, its curves) one by one."""
    clouds = tuple(name for name in s.energies if "KL" not in name)
    random_clouds = [_triple(lambda: _random_cloud(n, s.A, rng)) for _ in range(n_curves)]
    real_clouds = [_triple(lambda: _subset(tokens, n, rng)) for _ in range(n_real)]
    random_laws = [_triple(lambda: _random_gaussian(s.A, rng)) for _ in range(n_curves)]
    real_laws = [
        _triple(lambda: _inside(_subset(tokens, 4 * n, rng).to_gaussian(), s.A)) for _ in range(n_real)
    ]
    families: list[_Family] = []
    for origin, points, laws in (("random", random_clouds, random_laws), ("token", real_clouds, real_laws)):
        if not points:
            continue
        where = f"{origin} clouds"
        families += [
            _Family("W2 geodesic", where, clouds, lambda o, a, b: DisplacementCurve(a, b), points),
            _Family("generalised geodesic", where, clouds, GeneralisedGeodesic, points),
            _Family("linear mixture", where, clouds, lambda o, a, b: MixtureCurve(a, b), points),
        ]
        if s.metric is not None:
            families.append(_Family("twisted geodesic", where, clouds, partial(_twisted, s.metric), points))
        where = f"{origin} Gaussians"
        names = tuple(s.energies)
        families += [
            _Family("Bures-Wasserstein geodesic", where, names, lambda o, a, b: BuresGeodesic(a, b), laws),
            _Family("generalised geodesic", where, names, GeneralisedGeodesic, laws),
        ]
        if s.metric is not None:
            families.append(_Family("twisted geodesic", where, names, partial(_twisted, s.metric), laws))
    for family in families:
        if family.curve == "twisted geodesic" or (family.curve, family.energies) == (
            "generalised geodesic",
            clouds,
        ):
            curves = [family.build(*triple) for triple in family.triples]  # these take no batches
        else:  # the cost of a probe is in its operations, not in their size
            curves = [family.build(*(_stacked(part) for part in zip(*family.triples, strict=True)))]
        for name in family.energies:
            yield Group(family.curve, family.measures, name), curves


def probe_group(s: Setting, group: Group, curves: list[Curve], n_points: int, seed: int) -> list[str]:
    """Probe an energy along all curves of a group, single or batches; returns what could not be probed, in words."""
    missing = []
    for curve in curves:
        try:
            probe = probe_convexity(s.energies[group.energy], curve, n_points=n_points, seed=seed)
            every = [probe[k] for k in range(curve.batch_shape[0])] if curve.batch_shape else [probe]
            # A curve between equal measures stands still and has no modulus: two samples of few tokens are all of them.
            moving = [p for p in every if np.isfinite(float(p.modulus))]
            group.probes += moving
            if len(moving) < len(every):
                missing.append(
                    f"{group.energy} along {len(every) - len(moving)} of {len(every)} curves ({group.curve}) between "
                    f"{group.measures}: the two measures are equal, so that the curve stands still."
                )
        except InvalidInput as err:
            missing.append(f"{group.energy} along a {group.curve} between {group.measures}: {err}")
    return missing


def unit_size(tokens: Particles, A: Floats) -> tuple[Particles, float]:
    """The tokens about their mean, with root mean square score |A| |x|^2 = 1."""
    x = np.asarray(tokens.x_t)
    if np.all(x == x[0]):
        raise InvalidInput("tokens must not all be in one place")
    x = x - x.mean(0)
    size = float(np.sqrt((x**2).sum(1).mean() * np.linalg.norm(A, 2)))
    factor = 1.0 / size if size > 0 else 1.0
    return Particles(factor * x), factor


def _stacked(measures: Sequence[Measure]) -> Measure:
    """A batch of measures of one kind and size."""
    if all(isinstance(m, Gaussian) for m in measures):
        return Gaussian(*(np.stack([getattr(m, name) for m in measures]) for name in ("mean", "cov")))
    return Particles(*(np.stack([getattr(m, name) for m in measures]) for name in ("x", "weights")))


def _twisted(metric: TwistedWasserstein, base: Measure, mu: Measure, nu: Measure) -> Curve:
    """The twisted geodesic from mu to nu; where there is none in reach, the one that leaves mu towards nu.

    Particles go where the W2 matching sends them: better matchings are a search in itself, any gives a geodesic.
    The space need not be complete: far measures may have no shortest path. A geodesic that leaves with the W2
    velocity, shortened until it exists, is exact too.
    """
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", NotConverged)
        with contextlib.suppress(InvalidInput):
            curve = TwistedGeodesic(metric, mu, _relabelled(mu, nu), matching="identity")
            # Also one that is not the shortest (through infinity it may be shorter) is a geodesic between the two.
            if curve.end_gap <= 1e-6:
                return curve
    flat: Any = BuresWasserstein() if isinstance(mu, Gaussian) else Wasserstein()
    velocity = flat.log(mu, nu)
    for _ in range(40):
        try:
            return TwistedGeodesic.from_velocity(metric, mu, velocity)
        except InvalidInput:
            velocity = _halved(velocity)
    raise InvalidInput("measure has no twisted geodesic in reach")


def _relabelled(mu: Measure, nu: Measure) -> Measure:
    """nu with its particles in the order of those of mu that the W2 matching sends there."""
    if isinstance(nu, Gaussian):
        return nu
    assert isinstance(mu, Particles)
    return Particles(np.asarray(mu.x) + np.asarray(Wasserstein().log(mu, nu)))


def _halved(velocity: Any) -> Any:
    if isinstance(velocity, AffineVelocity):
        return AffineVelocity(0.5 * velocity.b_t, 0.5 * velocity.M_t, velocity.kind)
    return 0.5 * velocity


def _triple(draw: Callable[[], Measure]) -> tuple[Measure, Measure, Measure]:
    return draw(), draw(), draw()


def _random_cloud(n: int, A: Floats, rng: np.random.Generator) -> Particles:
    """A Gaussian sample of random size, where scores x^T A y are of order 1."""
    size = rng.uniform(0.3, 1.2) / math.sqrt(max(float(np.linalg.norm(A, 2)), 1e-300))
    return Particles(size * (rng.standard_normal((n, len(A))) + rng.standard_normal(len(A))))


def _subset(tokens: Particles, n: int, rng: np.random.Generator) -> Particles:
    chosen = rng.choice(tokens.n, size=min(n, tokens.n), replace=False)
    return Particles(np.asarray(tokens.x)[np.sort(chosen)])


def _random_gaussian(A: Floats, rng: np.random.Generator) -> Gaussian:
    d = len(A)
    L = rng.standard_normal((d, d)) / math.sqrt(d)
    size = math.sqrt(max(float(np.linalg.norm(A, 2)), 1e-300))
    mean = 0.5 * rng.standard_normal(d) / size
    return _inside(Gaussian(mean, (L @ L.T + 0.02 * np.eye(d)) * 0.5 / size**2), A)


def _inside(g: Gaussian, A: Floats) -> Gaussian:
    """Shrunk, if need be, so that |L^T A L| <= 0.7: the interaction energy is finite there and on geodesics.

    The bound |S| |A| <= 0.7 is kept by geodesics, |L^T A L| alone need not be.
    """
    top = float(np.linalg.norm(np.asarray(g.cov), 2) * np.linalg.norm(A, 2))
    factor = min(1.0, 0.7 / top) if top > 0 else 1.0
    return Gaussian(np.asarray(g.mean) * math.sqrt(factor), np.asarray(g.cov) * factor)
