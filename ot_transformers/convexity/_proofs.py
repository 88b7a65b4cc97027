"""The proof behind a certificate, from the rationals of its data alone."""

from __future__ import annotations

import re
from collections.abc import Mapping
from decimal import Context, Decimal
from fractions import Fraction
from typing import Any, NamedTuple

from ._balls import (
    Enclosure,
    EnergyTerms,
    Interval,
    OutOfRange,
    displacement_second_derivative,
    twisted_hessian,
)
from ._rational import (
    Matrix,
    Vector,
    inverse,
    is_positive_definite,
    is_symmetric,
    optimality_defect,
    transport_costs,
)

__all__ = ["FORMAT", "Proof", "decimal", "interval", "prove"]

FORMAT = "ot_transformers certificate 2"
_PRECISION = range(53, 1 << 16)
_RATIONAL = re.compile(r"-?[0-9]+(?:/[0-9]+|\.[0-9]+)?")
_LENGTH, _DIMENSIONS, _POINTS, _TERMS = 4_000, 64, 2_000, 16
_COMMON = (
    "format", "version", "precision", "kind", "claim", "proved", "reason", "enclosure", "digest",
    "energy", "D", "x", "x_weights",
)  # fmt: skip


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
    except OutOfRange as err:
        return Proof(str(err), "", None)


def decimal(value: Fraction) -> str:
    """A rational with a finite decimal expansion, exactly."""
    context = Context(prec=2000)
    # "f": the reader of certificates knows no exponents, which str writes for numbers below 1e-6.
    return format(context.divide(Decimal(value.numerator), Decimal(value.denominator)), "f")


def _displacement(data: Mapping[str, Any], extra_bits: int) -> Proof:
    _keys(data, "t", "y", "y_weights", "plan", "potentials")
    D = _mobility(data)
    d = len(D)
    energy = _energy(data, d)
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
    ends = displacement_second_derivative(energy, triples, Dinv, t, bits)
    claim = (
        f"Along the W2 geodesic of the file (inner product D^-1, {len(x)} to {len(y)} points of R^{d}, "
        "plan proved optimal by dual potentials) the second derivative of "
        f"F = {_formula(energy)} at t = {t} is negative: F is not displacement convex."
    )
    return _concluded(ends, claim)


def _twisted(data: Mapping[str, Any], extra_bits: int) -> Proof:
    _keys(data, "A", "v")
    D = _mobility(data)
    d = len(D)
    energy = _energy(data, d)
    A = _square(data.get("A"), "A", d)
    _require(is_symmetric(A), "A is not symmetric")
    x, v = _cloud(data, "x", d), _cloud(data, "v", d)
    _require(len(x) == len(v), "x and v have different lengths")
    w = _weights(data, "x_weights", len(x))
    _require(all(p > 0 for p in w), "a weight is 0")
    _require(
        len({tuple(p) for p in x}) == len(x),
        "two points coincide: the cloud has fewer particles",
    )
    _require(any(any(p) for p in v), "the direction is 0")
    ends = twisted_hessian(energy, A, D, x, w, v, _precision(data) + extra_bits)
    claim = (
        f"In the twisted metric of (A, D) on R^{d}, at the cloud of {len(x)} point(s) of the file, the "
        f"Riemannian Hessian of F = {_formula(energy)} is negative in the direction of the file: F is not "
        "geodesically convex."
    )
    return _concluded(ends, claim)


def _formula(energy: EnergyTerms) -> str:
    """The energy in words; its matrices are those of the file."""
    many = len(energy.interactions) > 1
    parts = []
    for k, (factor, _) in enumerate(energy.interactions, 1):
        name = f"E_A{k}" if many else "E_A"
        parts.append(name if factor == 1 else f"{factor} {name}")
    if energy.H is not None:
        parts.append("E[x.Hx/2 + c.x]")
    where = " (E_A = 1/2 int int exp(x.Ay))" if energy.interactions else ""
    return " + ".join(parts) + where


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
    if type(bits) is not int or bits not in _PRECISION:
        raise _Bad("precision must be an integer of bits, from 53 to 65535")
    return bits


def _keys(data: Mapping[str, Any], *own: str) -> None:
    """Refuse what a proof does not read: it would pass as part of what is proved."""
    unknown = sorted(set(data) - {*_COMMON, *own})
    _require(not unknown, f"it holds {', '.join(map(repr, unknown[:3]))}, of which nothing is known")


def _mobility(data: Mapping[str, Any]) -> Matrix:
    rows = _list(data, "D")
    _require(0 < len(rows) <= _DIMENSIONS, f"D must have 1 to {_DIMENSIONS} rows")
    D = _square(rows, "D", len(rows))
    _require(is_symmetric(D) and is_positive_definite(D), "D is not symmetric positive definite")
    return D


def _energy(data: Mapping[str, Any], d: int) -> EnergyTerms:
    record = data.get("energy")
    if not isinstance(record, dict) or set(record) != {"interactions", "quadratic"}:
        raise _Bad("energy must hold interactions and quadratic, and nothing else")
    interactions = []
    for term in _list(record, "interactions"):
        if not isinstance(term, dict) or set(term) != {"factor", "A"}:
            raise _Bad("an interaction must hold factor and A, and nothing else")
        interactions.append((_rational(term, "factor"), _square(term["A"], "A of the energy", d)))
    _require(len(interactions) <= _TERMS, f"there are more than {_TERMS} interactions")
    quadratic = record["quadratic"]
    if quadratic is None:
        _require(bool(interactions), "the energy has no term")
        return EnergyTerms(interactions, None, [])
    if not isinstance(quadratic, dict) or set(quadratic) != {"H", "c"}:
        raise _Bad("quadratic must be null or hold H and c, and nothing else")
    H = _square(quadratic["H"], "H", d)
    _require(is_symmetric(H), "H is not symmetric")
    return EnergyTerms(interactions, H, _vector(quadratic["c"], d))


def _square(value: Any, name: str, d: int) -> Matrix:
    if not isinstance(value, list) or len(value) != d:
        raise _Bad(f"{name} must be a list of {d} lists")
    return [_vector(row, d) for row in value]


def _list(data: Mapping[str, Any], name: str) -> list[Any]:
    value = data.get(name)
    if not isinstance(value, list):
        raise _Bad(f"{name} must be a list")
    return value


def _number(value: Any) -> Fraction:
    if not isinstance(value, str):
        raise _Bad("rationals must be strings")
    if len(value) > _LENGTH:
        raise _Bad(f"a rational has more than {_LENGTH} characters")
    # No exponents: "1e999999999" is short and fills the memory.
    if not _RATIONAL.fullmatch(value):
        raise _Bad(f"not a rational: {value[:40]!r}")
    try:
        return Fraction(value)
    except ZeroDivisionError:
        raise _Bad(f"not a rational: {value[:40]!r}") from None


def interval(value: Any) -> Interval | None:
    """A stored enclosure, None if it is not two rationals in order."""
    try:
        low, high = _vector(value, 2)
    except _Bad:
        return None
    return Interval(low, high) if low <= high else None


def _rational(data: Mapping[str, Any], name: str) -> Fraction:
    return _number(data.get(name))


def _vector(value: Any, size: int) -> Vector:
    if not isinstance(value, list) or len(value) != size:
        raise _Bad(f"a list of {size} rationals is missing")
    return [_number(v) for v in value]


def _cloud(data: Mapping[str, Any], name: str, d: int) -> Matrix:
    rows = _list(data, name)
    _require(0 < len(rows) <= _POINTS, f"{name} must have 1 to {_POINTS} points")
    return [_vector(row, d) for row in rows]


def _weights(data: Mapping[str, Any], name: str, n: int) -> Vector:
    w = _vector(data.get(name), n)
    _require(all(p >= 0 for p in w) and sum(w) == 1, f"{name} must be nonnegative and sum to 1")
    return w


def _entry(entry: Any, n: int, m: int) -> tuple[int, int, Fraction]:
    good = isinstance(entry, list) and len(entry) == 3 and all(type(k) is int for k in entry[:2])
    if not good or not (0 <= entry[0] < n and 0 <= entry[1] < m):
        raise _Bad("an entry of the plan is not [row, column, mass]")
    return entry[0], entry[1], _number(entry[2])
