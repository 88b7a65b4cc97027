"""Exact rational arithmetic of certificates: rounding, definiteness, optimality of transport plans."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from fractions import Fraction
from typing import Any, TypeAlias

__all__ = [
    "Matrix",
    "Vector",
    "bilinear",
    "dual_potentials",
    "exact_masses",
    "inverse",
    "is_positive_definite",
    "is_symmetric",
    "optimality_defect",
    "rounded",
    "transport_costs",
]

Vector: TypeAlias = list[Fraction]
Matrix: TypeAlias = list[list[Fraction]]
Plan: TypeAlias = list[tuple[int, int, Fraction]]


def rounded(value: Any, bits: int) -> Fraction:
    """The nearest multiple of 2^-bits to a float."""
    return Fraction(round(Fraction(float(value)) * (1 << bits)), 1 << bits)


def bilinear(x: Sequence[Fraction], A: Matrix, y: Sequence[Fraction]) -> Fraction:
    """x^T A y."""
    total = Fraction(0)
    for xi, row in zip(x, A, strict=True):
        if xi:
            total += xi * sum((a * b for a, b in zip(row, y, strict=True)), Fraction(0))
    return total


def is_symmetric(A: Matrix) -> bool:
    """Whether A = A^T exactly."""
    return all(A[i][j] == A[j][i] for i in range(len(A)) for j in range(i))


def is_positive_definite(A: Matrix) -> bool:
    """Whether a symmetric matrix is positive definite: all pivots of exact elimination are positive."""
    M = [row[:] for row in A]
    n = len(M)
    for k in range(n):
        if M[k][k] <= 0:
            return False
        for i in range(k + 1, n):
            f = M[i][k] / M[k][k]
            for j in range(k, n):
                M[i][j] -= f * M[k][j]
    return True


def inverse(A: Matrix) -> Matrix:
    """The inverse of a positive definite matrix (no pivoting is needed)."""
    n = len(A)
    M = [row[:] + [Fraction(int(i == j)) for j in range(n)] for i, row in enumerate(A)]
    for k in range(n):
        pivot = M[k][k]
        M[k] = [v / pivot for v in M[k]]
        for i in range(n):
            if i != k and M[i][k]:
                f = M[i][k]
                M[i] = [v - f * w for v, w in zip(M[i], M[k], strict=True)]
    return [row[n:] for row in M]


def transport_costs(x: Iterable[Vector], y: Sequence[Vector], Dinv: Matrix) -> Matrix:
    """c_ij = (x_i - y_j)^T D^-1 (x_i - y_j)."""
    costs = []
    for p in x:
        gaps = [[a - b for a, b in zip(p, q, strict=True)] for q in y]
        costs.append([bilinear(g, Dinv, g) for g in gaps])
    return costs


def exact_masses(pairs: Sequence[tuple[int, int]], w: Vector, v: Vector) -> Plan | None:
    """The plan with given marginals on a support without cycles; None if there is none.

    Masses are read off the leaves of the forest, one after another, so that marginals hold exactly.
    """
    rest: tuple[dict[int, Fraction], dict[int, Fraction]] = (dict(enumerate(w)), dict(enumerate(v)))
    left = list(dict.fromkeys(pairs))
    plan: Plan = []
    while left:
        degree: tuple[dict[int, int], dict[int, int]] = ({}, {})
        for pair in left:
            for side in (0, 1):
                degree[side][pair[side]] = degree[side].get(pair[side], 0) + 1
        leaf = next(((p, s) for p in left for s in (0, 1) if degree[s][p[s]] == 1), None)
        if leaf is None:
            return None
        (i, j), side = leaf
        mass = rest[side][(i, j)[side]]
        if mass < 0:
            return None
        if mass:
            plan.append((i, j, mass))
        rest[0][i] -= mass
        rest[1][j] -= mass
        left.remove((i, j))
    return plan if not any(rest[0].values()) and not any(rest[1].values()) else None


def dual_potentials(costs: Matrix, plan: Plan) -> tuple[Vector, Vector] | None:
    """Rational u, v with u_i + v_j <= c_ij, and equality on the plan; None if the plan is not optimal.

    Shortest distances in the residual graph (Bellman-Ford): rows to columns at cost c_ij, columns back to
    rows at -c_ij along the plan. A negative cycle is a way to improve the plan.
    """
    n, m = len(costs), len(costs[0])
    row, col = [Fraction(0)] * n, [Fraction(0)] * m
    for _ in range(n + m + 1):
        changed = False
        for i in range(n):
            for j in range(m):
                if (step := row[i] + costs[i][j]) < col[j]:
                    col[j], changed = step, True
        for i, j, _mass in plan:
            if (step := col[j] - costs[i][j]) < row[i]:
                row[i], changed = step, True
        if not changed:
            return [-r for r in row], col
    return None


def optimality_defect(
    costs: Matrix, w: Vector, v: Vector, plan: Plan, potentials: tuple[Vector, Vector]
) -> str:
    """What keeps (plan, potentials) from proving that the plan is optimal; "" if it does."""
    rows, cols = [Fraction(0)] * len(w), [Fraction(0)] * len(v)
    for i, j, mass in plan:
        if mass <= 0:
            return f"the plan has a mass that is not positive at ({i}, {j})"
        rows[i] += mass
        cols[j] += mass
    if rows != w or cols != v:
        return "the plan does not have the marginals of the two measures"
    a, b = potentials
    for i, line in enumerate(costs):
        for j, c in enumerate(line):
            if a[i] + b[j] > c:
                return f"the dual potentials exceed the cost at ({i}, {j})"
    if any(a[i] + b[j] != costs[i][j] for i, j, _ in plan):
        return "the dual potentials are not tight on the plan: it is not proved optimal"
    return ""
