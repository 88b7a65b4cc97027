"""The proof behind a certificate, from the rationals of its data alone."""

from __future__ import annotations

from collections.abc import Mapping
from decimal import Context, Decimal
from fractions import Fraction
from typing import Any, NamedTuple

from ._balls import Enclosure, displacement_second_derivative, twisted_hessian
from ._rational import (
    Matrix,
    Vector,
    inverse,
    is_positive_definite,
    is_symmetric,
    optimality_defect,
    transport_costs,
)

__all__ = ["FORMAT", "Proof", "decimal", "prove"]

FORMAT = "ot_transformers certificate 1"
_PRECISION = range(53, 1 << 16)


class Proof(NamedTuple):
    """`reason` is "" if the claim is proved; `enclosure` None where the data do not even define a number."""

    reason: str
    claim: str
    enclosure: Enclosure | None


class _Bad(Exception):
    """Data that do not make a certificate."""


def prove(data: Mapping[str, Any], extra_bits: int = 0) -> Proof:
    """Prove that the second derivative is negative, using nothing but the rationals in `data`."""
    try:
        kind = data.get("kind")
        if kind == "w2-displacement":
            return _displacement(data, extra_bits)
        if kind == "twisted-hessian":
            return _twisted(data, extra_bits)
        raise _Bad(f"unknown kind {kind!r}")
    except _Bad as err:
        return Proof(f"the file is not a certificate: {err}", "", None)


def decimal(value: Fraction) -> str:
    """A rational with a finite decimal expansion, exactly."""
    context = Context(prec=2000)
    return str(context.divide(Decimal(value.numerator), Decimal(value.denominator)))


def _displacement(data: Mapping[str, Any], extra_bits: int) -> Proof:
    A, factor, D = _matrix(data, "A"), _rational(data, "factor"), _matrix(data, "D")
    d = len(A)
    _require(_is_square(A) and _is_square(D) and len(D) == d, "A and D must be square, of one size")
    _require(is_symmetric(D) and is_positive_definite(D), "D is not symmetric positive definite")
    x, y = _cloud(data, "x", d), _cloud(data, "y", d)
    w, v = _weights(data, "x_weights", len(x)), _weights(data, "y_weights", len(y))
    t = _rational(data, "t")
    _require(0 <= t <= 1, "t is outside [0, 1]")
    plan = [_entry(e, len(x), len(y)) for e in _list(data, "plan")]
    pair = _list(data, "potentials")
    _require(len(pair) == 2, "potentials must be two lists")
    potentials = _vector(pair[0], len(x)), _vector(pair[1], len(y))
    Dinv = inverse(D)
    defect = optimality_defect(transport_costs(x, y, Dinv), w, v, plan, potentials)
    if defect:
        return Proof(defect, "", None)
    triples = [(x[i], y[j], m) for i, j, m in plan]
    _require(any(a != b for a, b, _ in triples), "the two measures are the same")
    bits = _precision(data) + extra_bits
    ends = displacement_second_derivative(A, factor, triples, Dinv, t, bits)
    claim = (
        f"Along the W2 geodesic of the file (inner product D^-1, {len(x)} to {len(y)} points of R^{d}, "
        "plan proved optimal by dual potentials) the second derivative of "
        f"F = {_multiple(factor)}, E_A = 1/2 int int exp(x.Ay), at t = {t} is negative: F is not displacement convex."
    )
    return _concluded(ends, claim)


def _twisted(data: Mapping[str, Any], extra_bits: int) -> Proof:
    A, factor, D = _matrix(data, "A"), _rational(data, "factor"), _matrix(data, "D")
    d = len(A)
    _require(_is_square(A) and _is_square(D) and len(D) == d, "A and D must be square, of one size")
    _require(_matrix(data, "metric_A") == A, "the energy and the metric have different A")
    _require(is_symmetric(A), "A is not symmetric")
    _require(is_symmetric(D) and is_positive_definite(D), "D is not symmetric positive definite")
    x, v = _cloud(data, "x", d), _cloud(data, "v", d)
    _require(len(x) == len(v), "x and v have different lengths")
    w = _weights(data, "x_weights", len(x))
    _require(all(p > 0 for p in w), "a weight is 0")
    _require(
        len({tuple(p) for p in x}) == len(x),
        "two points coincide: the cloud has fewer particles",
    )
    _require(any(any(p) for p in v), "the direction is 0")
    ends = twisted_hessian(A, factor, D, x, w, v, _precision(data) + extra_bits)
    claim = (
        f"In the twisted metric of (A, D) on R^{d}, at the cloud of {len(x)} point(s) of the file, the "
        f"Riemannian Hessian of F = {_multiple(factor)}, E_A = 1/2 int int exp(x.Ay), is negative in the "
        "direction of the file: F is not geodesically convex."
    )
    return _concluded(ends, claim)


def _multiple(factor: Fraction) -> str:
    return "E_A" if factor == 1 else f"{factor} E_A"


def _concluded(ends: Enclosure, claim: str) -> Proof:
    second, square = ends.second_derivative, ends.speed_squared
    if square.low <= 0:
        return Proof("|speed|^2 is not enclosed above 0 at this precision", claim, ends)
    if second.low >= 0:
        return Proof("the second derivative is not negative there", claim, ends)
    if second.high >= 0:
        return Proof(
            "the enclosure of the second derivative reaches 0: undecided at this precision", claim, ends
        )
    return Proof("", claim, ends)


def _require(condition: bool, message: str) -> None:
    if not condition:
        raise _Bad(message)


def _precision(data: Mapping[str, Any]) -> int:
    bits = data.get("precision")
    _require(
        isinstance(bits, int) and bits in _PRECISION, "precision must be an integer of bits, at least 53"
    )
    assert isinstance(bits, int)
    return bits


def _list(data: Mapping[str, Any], name: str) -> list[Any]:
    value = data.get(name)
    if not isinstance(value, list):
        raise _Bad(f"{name} must be a list")
    return value


def _number(value: Any) -> Fraction:
    if not isinstance(value, str):
        raise _Bad("rationals must be strings")
    try:
        return Fraction(value)
    except (ValueError, ZeroDivisionError):
        raise _Bad(f"not a rational: {value[:40]!r}") from None


def _rational(data: Mapping[str, Any], name: str) -> Fraction:
    return _number(data.get(name))


def _vector(value: Any, size: int) -> Vector:
    if not isinstance(value, list) or len(value) != size:
        raise _Bad(f"a list of {size} rationals is missing")
    return [_number(v) for v in value]


def _matrix(data: Mapping[str, Any], name: str) -> Matrix:
    rows = _list(data, name)
    _require(bool(rows) and all(isinstance(r, list) for r in rows), f"{name} must be a list of lists")
    return [_vector(r, len(rows[0])) for r in rows]


def _is_square(M: Matrix) -> bool:
    return len(M) == len(M[0])


def _cloud(data: Mapping[str, Any], name: str, d: int) -> Matrix:
    points = _matrix(data, name)
    _require(len(points[0]) == d, f"{name} has another dimension than A")
    return points


def _weights(data: Mapping[str, Any], name: str, n: int) -> Vector:
    w = _vector(data.get(name), n)
    _require(all(p >= 0 for p in w) and sum(w) == 1, f"{name} must be nonnegative and sum to 1")
    return w


def _entry(entry: Any, n: int, m: int) -> tuple[int, int, Fraction]:
    good = isinstance(entry, list) and len(entry) == 3 and all(type(k) is int for k in entry[:2])
    if not good or not (0 <= entry[0] < n and 0 <= entry[1] < m):
        raise _Bad("an entry of the plan is not [row, column, mass]")
    return entry[0], entry[1], _number(entry[2])
