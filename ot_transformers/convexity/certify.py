"""Make certificates: round a witness to rationals, find the proof of optimality, enclose, write down."""

from __future__ import annotations

from fractions import Fraction
from typing import Any

import numpy as np
import torch

from ..arrays import as_scalar, check_choice, check_count, tensor_of
from ..energies import (
    Energy,
    Entropy,
    InteractionEnergy,
    KLDivergence,
    PotentialEnergy,
    QuadraticPotential,
    ScaledEnergy,
    SelfTransportEnergy,
    SinkhornDivergence,
    SumEnergy,
)
from ..errors import InvalidInput
from ..measures import Gaussian, Measure, Particles, as_particles, check_same_dim
from ..metrics import TwistedWasserstein, Wasserstein
from ..numerics.transport import transport_plan
from ._rational import Vector, dual_potentials, exact_masses, inverse, rounded, transport_costs
from .certificate import Certificate, cannot, sealed
from .witness import Witness

__all__ = ["certify_displacement", "certify_hessian", "certify_witness"]

_HALVINGS = 20


def certify_witness(witness: Witness, *, bits: int = 20, precision: int = 128) -> Certificate:
    """Prove that an energy is not convex at a witness: points become multiples of 2^-bits.

    In the twisted metric: the Riemannian Hessian at the rounded cloud and direction. In W2: the displacement
    curve from x - r v to x + r v, with r halved until the matching is proved optimal.

    Parameters
    ----------
    witness : Witness
        On a cloud, for sums and multiples of InteractionEnergy and QuadraticPotential. For another energy, a
        Gaussian or another metric the result is not proved, and its `reason` says why.
    bits : int
        Of the rounding; the theorem is about the rounded points.
    precision : int
        Of the ball arithmetic, in bits.

    Raises
    ------
    InvalidInput
        bits or precision out of range.
    OTTransformersError
        The extra `certify` is not installed.
    """
    try:
        return _certified(witness, bits, precision)
    except _Cannot as err:
        return cannot(str(err))


def _certified(witness: Witness, bits: int, precision: int) -> Certificate:
    if isinstance(witness.measure, Gaussian):
        raise _Cannot("witness is a Gaussian: certificates are about clouds, whose points can be rational")
    cloud = as_particles(witness.measure, "witness.measure")
    direction = tensor_of(witness.direction)
    if isinstance(witness.metric, TwistedWasserstein):
        return certify_hessian(
            witness.energy, witness.metric, cloud, direction, bits=bits, precision=precision
        )
    if not isinstance(witness.metric, Wasserstein):
        raise _Cannot(
            f"witness has metric {type(witness.metric).__name__}, certificates need W2 or a twisted one"
        )
    x, v = cloud.x_t.double(), direction.double()
    v = v / v.abs().max()
    reach = 1.0
    certificate: Certificate | None = None
    for _ in range(_HALVINGS):
        ends = [cloud.moved(x + s * v) for s in (-reach, reach)]
        certificate = certify_displacement(
            witness.energy,
            ends[0],
            ends[1],
            t=0.5,
            D=witness.metric.D,
            matching="identity",
            bits=bits,
            precision=precision,
        )
        if certificate.proved or bits < 2:
            return certificate
        reach *= 0.5
    assert certificate is not None
    return certificate


def certify_displacement(
    energy: Energy,
    mu: Measure,
    nu: Measure,
    *,
    t: float = 0.5,
    D: Any = None,
    matching: str = "optimal",
    bits: int = 20,
    precision: int = 128,
) -> Certificate:
    """Prove that an energy has F''(t) < 0 along the W2 geodesic from mu to nu.

    Points and weights are rounded to rationals; the optimal plan, found in floating point, is proved optimal
    by dual potentials in exact arithmetic; the second derivative is enclosed by balls.

    Parameters
    ----------
    energy : InteractionEnergy, QuadraticPotential, sums and multiples of them
    mu, nu : clouds
    t : float
        Time in [0, 1], rounded too.
    D : array (d, d), optional
        W2 with the inner product D^-1.
    matching : "optimal" or "identity"
    bits, precision : int

    Raises
    ------
    InvalidInput
        Another energy, batches, clouds that do not fit.
    """
    a, b = _cloud(mu, "mu"), _cloud(nu, "nu")
    check_same_dim(a, b)
    terms = _terms(energy, a.dim)
    _check_options(bits, precision)
    if not 0 <= as_scalar(t, "t") <= 1:
        raise InvalidInput(f"t must lie in [0, 1], got {t}")
    check_choice(matching, "matching", ("optimal", "identity"))
    mobility = _exact(np.eye(a.dim) if D is None else _numpy(D))
    x, y = (_points(c.x_t, bits) for c in (a, b))
    w, v = (_weights(c.weights_t, bits) for c in (a, b))
    costs = transport_costs(x, y, inverse(mobility))
    if matching == "identity":
        pairs = [(i, i) for i in range(a.n)]
    else:
        root = torch.linalg.cholesky(torch.linalg.inv(torch.from_numpy(np.array(_floats(mobility)))))
        clouds = [torch.tensor(_floats(p), dtype=torch.float64) @ root for p in (x, y)]
        masses = [torch.tensor([float(q) for q in p], dtype=torch.float64) for p in (w, v)]
        plan_found = transport_plan(clouds[0], masses[0], clouds[1], masses[1], 2)
        pairs = list(zip(plan_found.rows.tolist(), plan_found.cols.tolist(), strict=True))
    plan = exact_masses(pairs, w, v)
    potentials = None if plan is None else dual_potentials(costs, plan)
    data = {
        "kind": "w2-displacement",
        "energy": terms,
        "D": _text(mobility),
        "t": str(rounded(t, bits)),
        "x": _text(x),
        "x_weights": [str(q) for q in w],
        "y": _text(y),
        "y_weights": [str(q) for q in v],
        "plan": [[i, j, str(m)] for i, j, m in plan or []],
        "potentials": [[str(q) for q in p] for p in potentials or ([], [])],
    }
    if plan is None or potentials is None:
        return sealed(data, precision, "the plan is not optimal for the rounded points")
    return sealed(data, precision)


def certify_hessian(
    energy: Energy,
    metric: TwistedWasserstein,
    measure: Measure,
    direction: Any,
    *,
    bits: int = 20,
    precision: int = 128,
) -> Certificate:
    """Prove that Hess F(v, v) < 0 in the twisted metric.

    Parameters
    ----------
    energy : InteractionEnergy (of any A), QuadraticPotential, sums and multiples of them
    metric : TwistedWasserstein
    measure : one cloud; one particle is a Dirac mass
    direction : array (n, d)
    bits, precision : int
        Rounding of points and directions; precision of the balls.

    Raises
    ------
    InvalidInput
        Another energy or metric, a direction of another shape.
    """
    cloud = _cloud(measure, "measure")
    if not isinstance(metric, TwistedWasserstein):
        raise InvalidInput(f"metric must be a TwistedWasserstein, got {type(metric).__name__}")
    terms = _terms(energy, cloud.dim)
    _check_options(bits, precision)
    v = tensor_of(direction).detach().double()
    if v.shape != cloud.x_t.shape:
        raise InvalidInput(f"direction must have shape {tuple(cloud.x_t.shape)}, got {tuple(v.shape)}")
    if not float(v.abs().max()) > 0:
        raise InvalidInput("direction must not be 0")
    points, field, weights = _merged(
        _points(cloud.x_t, bits), _points(v / v.abs().max(), bits), _weights(cloud.weights_t, bits)
    )
    data = {
        "kind": "twisted-hessian",
        "energy": terms,
        "A": _text(_exact(_numpy(metric.A))),
        "D": _text(_exact(_numpy(metric.D))),
        "x": _text(points),
        "x_weights": [str(q) for q in weights],
        "v": _text(field),
    }
    return sealed(data, precision)


def _check_options(bits: int, precision: int) -> None:
    check_count(bits, "bits", 1)
    check_count(precision, "precision", 53)


class _Cannot(InvalidInput):
    """An energy or a measure that has no certificate."""


def _terms(energy: Energy, dim: int) -> dict[str, Any]:
    """The energy as rationals: sums and multiples of interaction energies and quadratic potentials."""
    interactions: list[tuple[Fraction, list[Vector]]] = []
    H = [[Fraction(0)] * dim for _ in range(dim)]
    c = [Fraction(0)] * dim
    quadratic = False

    def add(part: Energy, factor: Fraction) -> None:
        nonlocal quadratic
        if isinstance(part, ScaledEnergy):
            add(part.energy, factor * Fraction(float(part.factor)))
        elif isinstance(part, SumEnergy):
            add(part.first, factor)
            add(part.second, factor)
        elif isinstance(part, InteractionEnergy):
            A = _square(part.A, "A", dim)
            known = next((k for k, (_, other) in enumerate(interactions) if other == A), None)
            if known is None:
                interactions.append((factor, A))
            else:
                interactions[known] = (interactions[known][0] + factor, A)
        elif isinstance(part, QuadraticPotential):
            quadratic = True
            for i, row in enumerate(_square(part.H, "H", dim)):
                for j, value in enumerate(row):
                    H[i][j] += factor * value
            for i, value in enumerate(_numpy(part.c)):
                c[i] += factor * Fraction(float(value))
        else:
            raise _Cannot(f"energy cannot be certified: {_why_not(part)}")

    add(energy, Fraction(1))
    return {
        "interactions": [{"factor": str(f), "A": _text(A)} for f, A in interactions],
        "quadratic": {"H": _text(H), "c": [str(v) for v in c]} if quadratic else None,
    }


def _why_not(energy: Energy) -> str:
    if isinstance(energy, SelfTransportEnergy | SinkhornDivergence):
        return f"{type(energy).__name__} is found by an iteration, it is no closed form of rational points"
    if isinstance(energy, KLDivergence | Entropy):
        return f"{type(energy).__name__} is infinite on clouds, and certificates are about clouds"
    if isinstance(energy, PotentialEnergy):
        return "PotentialEnergy holds a function that balls cannot evaluate; use QuadraticPotential where it is one"
    return (
        f"{type(energy).__name__} has no ball arithmetic; InteractionEnergy, QuadraticPotential, their sums and "
        "multiples have"
    )


def _square(value: Any, name: str, dim: int) -> list[Vector]:
    matrix = _numpy(value)
    if matrix.ndim != 2 or matrix.shape[-1] != dim:
        raise InvalidInput(
            f"energy must act on dimension {dim} with one matrix {name}, got shape {matrix.shape}"
        )
    return _exact(matrix)


def _cloud(measure: Measure, name: str) -> Particles:
    cloud = as_particles(measure, name)
    if cloud.batch_shape:
        raise InvalidInput(f"{name} must be one cloud, got batch {cloud.batch_shape}")
    return cloud


def _numpy(value: Any) -> np.ndarray[Any, Any]:
    return np.asarray(tensor_of(value).detach().cpu().double())


def _exact(M: np.ndarray[Any, Any]) -> list[Vector]:
    """Floats are rationals: these are exactly the given numbers."""
    return [[Fraction(float(v)) for v in row] for row in M]


def _points(x: torch.Tensor, bits: int) -> list[Vector]:
    return [[rounded(v, bits) for v in row] for row in x.detach().cpu().double().tolist()]


def _weights(w: torch.Tensor, bits: int) -> Vector:
    """Weights that sum to 1 exactly; equal ones are 1/n."""
    n = len(w)
    if bool(((w.detach().double() - 1.0 / n).abs() <= 1e-6 / n).all()):
        return [Fraction(1, n)] * n
    parts = [rounded(v, bits) for v in w.detach().cpu().double().tolist()]
    total = sum(parts, Fraction(0))
    return [p / total for p in parts]


def _merged(x: list[Vector], v: list[Vector], w: Vector) -> tuple[list[Vector], list[Vector], Vector]:
    """Points that coincide and move alike are one particle; those of weight 0 are none."""
    together: dict[tuple[Fraction, ...], Fraction] = {}
    for p, u, mass in zip(x, v, w, strict=True):
        if mass:
            key = (*p, *u)
            together[key] = together.get(key, Fraction(0)) + mass
    d = len(x[0])
    return [list(k[:d]) for k in together], [list(k[d:]) for k in together], list(together.values())


def _floats(M: list[Vector]) -> list[list[float]]:
    return [[float(v) for v in row] for row in M]


def _text(M: list[Vector]) -> list[list[str]]:
    return [[str(v) for v in row] for row in M]
