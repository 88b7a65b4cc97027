"""Second derivatives of the interaction energy at rational points, enclosed by ball arithmetic (Arb).

The optional extra `certify` (python-flint) is needed. Exponents are exact rationals; only the exponentials
and what follows are balls, so that the enclosures are rigorous.
"""

from __future__ import annotations

from collections.abc import Sequence
from fractions import Fraction
from typing import Any, NamedTuple

from ..errors import OTTransformersError
from ._rational import Matrix, Vector, bilinear, inverse

__all__ = ["Enclosure", "Interval", "displacement_second_derivative", "require_flint", "twisted_hessian"]

_DIGITS = 30


class Interval(NamedTuple):
    """A closed interval with rational ends."""

    low: Fraction
    high: Fraction

    def contains(self, other: Interval) -> bool:
        """Whether the other interval lies inside."""
        return self.low <= other.low and other.high <= self.high


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
    A: Matrix, factor: Fraction, pairs: Sequence[tuple[Vector, Vector, Fraction]], Dinv: Matrix, t: Fraction,
    precision: int,
) -> Enclosure:  # fmt: skip
    """Enclose d2/dt2 of c E_A along sum_k m_k delta_{(1-t) x_k + t y_k}, pairs = (x_k, y_k, m_k).

    c/2 sum_kl m_k m_l e^f (f'^2 + f''), f = z_k^T A z_l, f' = d_k^T A z_l + z_k^T A d_l, f'' = 2 d_k^T A d_l,
    with z = (1-t) x + t y and d = y - x.
    """
    flint = require_flint()
    d = [[b - a for a, b in zip(x, y, strict=True)] for x, y, _ in pairs]
    z = [[a + t * g for a, g in zip(x, gap, strict=True)] for (x, _, _), gap in zip(pairs, d, strict=True)]
    masses = [m for _, _, m in pairs]
    speed = sum((m * bilinear(g, Dinv, g) for m, g in zip(masses, d, strict=True)), Fraction(0))
    with flint.ctx.workprec(precision):
        second = _interaction_second(flint, A, z, d, masses) * _arb(flint, factor)
        square = _arb(flint, speed)
        return _enclosure(flint, second, square)


def twisted_hessian(
    A: Matrix, factor: Fraction, D: Matrix, x: Matrix, w: Vector, v: Matrix, precision: int
) -> Enclosure:
    """Enclose Hess(c E_A)(v, v) and g(v, v) at sum_i w_i delta_{x_i} in the twisted metric of (A, D).

    Hess E(v, v) = D2E(v, v) + DE(a), with K_ij = e^{x_i^T A x_j}, G_i = sum_j w_j K_ij, P_ij = w_j K_ij /
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
        K = [[_exp(flint, bilinear(x[i], A, x[j])) for j in range(n)] for i in range(n)]
        weight = [_arb(flint, value) for value in w]
        G = [sum((weight[j] * K[i][j] for j in range(n)), flint.arb(0)) for i in range(n)]
        second = _interaction_second(flint, A, x, v, w, K)
        for i in range(n):
            slope = [
                sum((weight[j] * K[i][j] * _arb(flint, Ax[j][c]) for j in range(n)), flint.arb(0))
                for c in range(d)
            ]
            P = [weight[k] * K[i][k] / G[i] for k in range(n)]
            rates = (P[k] * _arb(flint, _dot(v[i], Ax[k]) + _dot(Ax[i], v[k])) for k in range(n))
            rate = sum(rates, flint.arb(0))
            for c in range(d):
                pulls = (P[k] * _arb(flint, (q[i] + q[k]) * DAx[k][c] / 2) for k in range(n))
                a = sum(pulls, flint.arb(0)) - rate * _arb(flint, v[i][c])
                second += weight[i] * slope[c] * a
        square = sum((weight[i] * G[i] * _arb(flint, q[i]) for i in range(n)), flint.arb(0))
        return _enclosure(flint, second * _arb(flint, factor), square)


def _interaction_second(
    flint: Any, A: Matrix, x: Matrix, v: Matrix, w: Vector, K: list[list[Any]] | None = None
) -> Any:
    """1/2 sum_ij w_i w_j e^f (f'^2 + f'') along x + s v at s = 0."""
    total = flint.arb(0)
    for i in range(len(x)):
        for j in range(len(x)):
            slope = bilinear(v[i], A, x[j]) + bilinear(x[i], A, v[j])
            coefficient = w[i] * w[j] / 2 * (slope * slope + 2 * bilinear(v[i], A, v[j]))
            kernel = _exp(flint, bilinear(x[i], A, x[j])) if K is None else K[i][j]
            total += _arb(flint, coefficient) * kernel
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
        return Interval(Fraction(-(10**400)), Fraction(10**400))
    low, high = (
        Fraction(int(m)) * Fraction(2) ** int(e)
        for m, e in (b.man_exp() for b in (ball.lower(), ball.upper()))
    )
    size = max(abs(low), abs(high))
    shift = _DIGITS
    if size:
        while size * Fraction(10) ** shift < 10 ** (_DIGITS - 1):
            shift += 1
        while size * Fraction(10) ** shift >= 10**_DIGITS:
            shift -= 1
    scale = Fraction(10) ** shift
    return Interval(Fraction((low * scale).__floor__()) / scale, Fraction((high * scale).__ceil__()) / scale)
