"""Make certificates: round a witness to rationals, find the proof of optimality, enclose, write down."""

from __future__ import annotations

from fractions import Fraction
from typing import Any

import numpy as np
import torch

from ..arrays import as_scalar, check_choice, check_count
from ..energies import Energy, InteractionEnergy
from ..errors import InvalidInput
from ..measures import Measure, Particles, as_particles, check_same_dim
from ..metrics import TwistedWasserstein, Wasserstein
from ..numerics.transport import transport_plan
from ._rational import Vector, dual_potentials, exact_masses, inverse, rounded, transport_costs
from ._records import unscaled
from .certificate import Certificate, sealed
from .witness import Witness

__all__ = ["certify_displacement", "certify_hessian", "certify_witness"]

_HALVINGS = 20


def certify_witness(witness: Witness, *, bits: int = 20, precision: int = 128) -> Certificate:
    """Prove that the interaction energy is not convex at a witness: points become multiples of 2^-bits.

    In the twisted metric: the Riemannian Hessian at the rounded cloud and direction. In W2: the displacement
    curve from x - r v to x + r v, with r halved until the matching is proved optimal.

    Parameters
    ----------
    witness : Witness
        On a cloud, for InteractionEnergy or a multiple of it.
    bits : int
        Of the rounding; the theorem is about the rounded points.
    precision : int
        Of the ball arithmetic, in bits.

    Raises
    ------
    InvalidInput
        Another energy, a Gaussian, a metric without certificates.
    OTTransformersError
        The extra `certify` is not installed.
    """
    cloud = as_particles(witness.measure, "witness.measure")
    direction = torch.as_tensor(witness.direction)
    if isinstance(witness.metric, TwistedWasserstein):
        return certify_hessian(
            witness.energy, witness.metric, cloud, direction, bits=bits, precision=precision
        )
    if not isinstance(witness.metric, Wasserstein):
        raise InvalidInput(
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
    """Prove that an interaction energy has F''(t) < 0 along the W2 geodesic from mu to nu.

    Points and weights are rounded to rationals; the optimal plan, found in floating point, is proved optimal
    by dual potentials in exact arithmetic; the second derivative is enclosed by balls.

    Parameters
    ----------
    energy : InteractionEnergy, or a multiple of it
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
    A, factor = _interaction(energy, a.dim)
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
        "A": _text(A),
        "factor": str(factor),
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
    """Prove that Hess F(v, v) < 0 in the twisted metric, for F a multiple of the interaction energy.

    Parameters
    ----------
    energy : InteractionEnergy, or a multiple of it
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
    A, factor = _interaction(energy, cloud.dim)
    _check_options(bits, precision)
    v = torch.as_tensor(direction).detach().double()
    if v.shape != cloud.x_t.shape:
        raise InvalidInput(f"direction must have shape {tuple(cloud.x_t.shape)}, got {tuple(v.shape)}")
    if not float(v.abs().max()) > 0:
        raise InvalidInput("direction must not be 0")
    points, field, weights = _merged(
        _points(cloud.x_t, bits), _points(v / v.abs().max(), bits), _weights(cloud.weights_t, bits)
    )
    data = {
        "kind": "twisted-hessian",
        "A": _text(A),
        "factor": str(factor),
        "metric_A": _text(_exact(_numpy(metric.A))),
        "D": _text(_exact(_numpy(metric.D))),
        "x": _text(points),
        "x_weights": [str(q) for q in weights],
        "v": _text(field),
    }
    return sealed(data, precision)


def _check_options(bits: int, precision: int) -> None:
    check_count(bits, "bits", 1)
    check_count(precision, "precision", 53)


def _interaction(energy: Energy, dim: int) -> tuple[list[Vector], Fraction]:
    base, factor = unscaled(energy)
    if not isinstance(base, InteractionEnergy):
        raise InvalidInput(
            f"energy must be an InteractionEnergy or a multiple of it, got {type(base).__name__}"
        )
    A = _numpy(base.A)
    if A.ndim != 2 or A.shape[-1] != dim:
        raise InvalidInput(f"energy must act on dimension {dim} with one matrix A, got shape {A.shape}")
    return _exact(A), Fraction(factor)


def _cloud(measure: Measure, name: str) -> Particles:
    cloud = as_particles(measure, name)
    if cloud.batch_shape:
        raise InvalidInput(f"{name} must be one cloud, got batch {cloud.batch_shape}")
    return cloud


def _numpy(value: Any) -> np.ndarray[Any, Any]:
    return np.asarray(torch.as_tensor(value).detach().cpu().double())


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
