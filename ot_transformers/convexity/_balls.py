"""Second derivatives of energies at rational points, enclosed by ball arithmetic (Arb).

The optional extra `certify` (python-flint) is needed. Exponents are exact rationals; only the exponentials
and what follows are balls, so that the enclosures are rigorous.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from fractions import Fraction
from typing import Any, NamedTuple

from ..errors import OTTransformersError
from ._rational import Matrix, Vector, bilinear, inverse

__all__ = [
    "Enclosure",
    "EnergyTerms",
    "Interval",
    "OutOfRange",
    "displacement_second_derivative",
    "require_flint",
    "twisted_hessian",
]

_DIGITS = 30
_EXPONENT = 4_000
"""Binary exponents that are written out: beyond, the rationals of the file would be monsters."""


class Interval(NamedTuple):
    """A closed interval with rational ends."""

    low: Fraction
    high: Fraction

    def contains(self, other: Interval) -> bool:
        """Whether the other interval lies inside."""
        return self.low <= other.low and other.high <= self.high


class EnergyTerms(NamedTuple):
    """F = sum_k factor_k E_{A_k} + E[x^T H x / 2 + c^T x], H symmetric; H None: no quadratic part."""

    interactions: list[tuple[Fraction, Matrix]]
    H: Matrix | None
    c: Vector


class OutOfRange(ArithmeticError):
    """An enclosure whose ends are too large or too small to be written down."""


class Enclosure(NamedTuple):
    """Enclosures of the second derivative, of |speed|^2, and of their quotient."""

    second_derivative: Interval
    speed_squared: Interval
    modulus: Interval


def require_flint() -> Any:
    """The module `flint`, or a clear error.

    Raises
    ------
    OTTransformersError
        The extra `certify` is not installed.
    """
    try:
        import flint
    except ImportError as err:
        raise OTTransformersError(
            "certificates need the extra `certify`: pip install 'ot-transformers[certify]'"
        ) from err
    return flint


def displacement_second_derivative(
    energy: EnergyTerms,
    pairs: Sequence[tuple[Vector, Vector, Fraction]],
    Dinv: Matrix,
    t: Fraction,
    precision: int,
) -> Enclosure:
    """Enclose d2F/dt2 along sum_k m_k delta_{(1-t) x_k + t y_k}, pairs = (x_k, y_k, m_k).

    For E_A it is 1/2 sum_kl m_k m_l e^f (f'^2 + f''), f = z_k^T A z_l, f' = d_k^T A z_l + z_k^T A d_l,
    f'' = 2 d_k^T A d_l, with z = (1-t) x + t y and d = y - x; for the quadratic part sum_k m_k d_k^T H d_k.
    """
    flint = require_flint()
    d = [[b - a for a, b in zip(x, y, strict=True)] for x, y, _ in pairs]
    z = [[a + t * g for a, g in zip(x, gap, strict=True)] for (x, _, _), gap in zip(pairs, d, strict=True)]
    masses = [m for _, _, m in pairs]
    speed = sum((m * bilinear(g, Dinv, g) for m, g in zip(masses, d, strict=True)), Fraction(0))
    with flint.ctx.workprec(precision):
        second = _arb(flint, _quadratic_second(energy, d, masses))
        for factor, A in energy.interactions:
            kernel = _kernel(flint, A, z)
            second += _arb(flint, factor) * _interaction_second(flint, A, z, d, masses, kernel)
        return _enclosure(flint, second, _arb(flint, speed))


def twisted_hessian(
    energy: EnergyTerms, A: Matrix, D: Matrix, x: Matrix, w: Vector, v: Matrix, precision: int
) -> Enclosure:
    """Enclose Hess F(v, v) and g(v, v) at sum_i w_i delta_{x_i} in the twisted metric of (A, D), A symmetric.

    Hess F(v, v) = D2F(v, v) + DF(a), with K_ij = e^{x_i^T A x_j}, G_i = sum_j w_j K_ij, P_ij = w_j K_ij /
    G_i, q_i = v_i^T D^-1 v_i and the acceleration of geodesics

        a_i = 1/2 D A sum_k P_ik (q_i + q_k) x_k - (sum_k P_ik (v_i^T A x_k + x_i^T A v_k)) v_i.
    """
    flint = require_flint()
    n, d = len(x), len(A)
    Dinv = inverse(D)
    q = [bilinear(u, Dinv, u) for u in v]
    Ax = [_times(A, p) for p in x]
    DAx = [_times(D, p) for p in Ax]
    with flint.ctx.workprec(precision):
        K = _kernel(flint, A, x)
        weight = [_arb(flint, value) for value in w]
        G = [_total(flint, (weight[j] * K[i][j] for j in range(n))) for i in range(n)]
        a = []
        for i in range(n):
            P = [weight[k] * K[i][k] / G[i] for k in range(n)]
            rate = _total(
                flint, (P[k] * _arb(flint, _dot(v[i], Ax[k]) + _dot(Ax[i], v[k])) for k in range(n))
            )
            pull = [
                _total(flint, (P[k] * _arb(flint, (q[i] + q[k]) * DAx[k][c] / 2) for k in range(n)))
                for c in range(d)
            ]
            a.append([pull[c] - rate * _arb(flint, v[i][c]) for c in range(d)])
        second = _arb(flint, _quadratic_second(energy, v, w))
        for i in range(n):
            for c, value in enumerate(_quadratic_slope(energy, x[i])):
                second += _arb(flint, w[i] * value) * a[i][c]
        for factor, B in energy.interactions:
            kernel = K if B == A else _kernel(flint, B, x)
            part = _interaction_second(flint, B, x, v, w, kernel)
            for i in range(n):
                for c, value in enumerate(_interaction_slope(flint, B, x, weight, kernel, i)):
                    part += weight[i] * value * a[i][c]
            second += _arb(flint, factor) * part
        square = _total(flint, (weight[i] * G[i] * _arb(flint, q[i]) for i in range(n)))
        return _enclosure(flint, second, square)


def _quadratic_second(energy: EnergyTerms, v: Matrix, w: Vector) -> Fraction:
    """sum_i w_i v_i^T H v_i."""
    if energy.H is None:
        return Fraction(0)
    return sum((m * bilinear(u, energy.H, u) for m, u in zip(w, v, strict=True)), Fraction(0))


def _quadratic_slope(energy: EnergyTerms, x: Vector) -> Vector:
    """H x + c."""
    if energy.H is None:
        return []
    return [h + c for h, c in zip(_times(energy.H, x), energy.c, strict=True)]


def _interaction_slope(
    flint: Any, A: Matrix, x: Matrix, w: list[Any], K: list[list[Any]], i: int
) -> list[Any]:
    """The gradient field of E_A at x_i, 1/2 sum_j w_j (K_ij A + K_ji A^T) x_j."""
    forward = [_times(A, p) for p in x]
    backward = [_times([list(row) for row in zip(*A, strict=True)], p) for p in x]
    return [
        _total(
            flint,
            (
                w[j] * (K[i][j] * _arb(flint, forward[j][c] / 2) + K[j][i] * _arb(flint, backward[j][c] / 2))
                for j in range(len(x))
            ),
        )
        for c in range(len(A))
    ]


def _kernel(flint: Any, A: Matrix, x: Matrix) -> list[list[Any]]:
    """e^{x_i^T A x_j}."""
    return [[_exp(flint, bilinear(p, A, q)) for q in x] for p in x]


def _total(flint: Any, values: Iterable[Any]) -> Any:
    return sum(values, flint.arb(0))


def _interaction_second(flint: Any, A: Matrix, x: Matrix, v: Matrix, w: Vector, K: list[list[Any]]) -> Any:
    """1/2 sum_ij w_i w_j e^f (f'^2 + f'') along x + s v at s = 0."""
    total = flint.arb(0)
    for i in range(len(x)):
        for j in range(len(x)):
            slope = bilinear(v[i], A, x[j]) + bilinear(x[i], A, v[j])
            coefficient = w[i] * w[j] / 2 * (slope * slope + 2 * bilinear(v[i], A, v[j]))
            total += _arb(flint, coefficient) * K[i][j]
    return total


def _times(A: Matrix, x: Vector) -> Vector:
    return [_dot(row, x) for row in A]


def _dot(x: Vector, y: Vector) -> Fraction:
    return sum((a * b for a, b in zip(x, y, strict=True)), Fraction(0))


def _arb(flint: Any, value: Fraction) -> Any:
    return flint.arb(flint.fmpq(value.numerator, value.denominator))


def _exp(flint: Any, value: Fraction) -> Any:
    return _arb(flint, value).exp()


def _enclosure(flint: Any, second: Any, square: Any) -> Enclosure:
    return Enclosure(_interval(second), _interval(square), _interval(second / square))


def _interval(ball: Any) -> Interval:
    """An interval around a ball, ends rounded outwards to 30 significant decimals."""
    if not ball.is_finite():
        raise OutOfRange("an enclosure is not finite at this precision")
    ends = [b.man_exp() for b in (ball.lower(), ball.upper())]
    if any(abs(int(e)) > _EXPONENT for _, e in ends):
        raise OutOfRange("an enclosure is too large or too small to be written down")
    low, high = (Fraction(int(m)) * Fraction(2) ** int(e) for m, e in ends)
    size = max(abs(low), abs(high))
    shift = _DIGITS
    if size:
        while size * Fraction(10) ** shift < 10 ** (_DIGITS - 1):
            shift += 1
        while size * Fraction(10) ** shift >= 10**_DIGITS:
            shift -= 1
    scale = Fraction(10) ** shift
    return Interval(Fraction((low * scale).__floor__()) / scale, Fraction((high * scale).__ceil__()) / scale)
