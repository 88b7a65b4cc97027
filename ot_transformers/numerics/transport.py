"""Exact optimal transport between weighted clouds: plans, costs and their derivatives.

A plan is sparse: rows, columns and masses of the pairs it couples. Tensors in and out, no batch dimension
unless stated; the linear programs run in float64 on the CPU (POT's network simplex, SciPy's assignment).
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from scipy.spatial.distance import cdist
from torch import Tensor
from torch._functorch.pyfunctorch import temporarily_clear_interpreter_stack

from ..arrays import layers
from ..errors import InvalidInput, NotConverged

__all__ = [
    "Pairs",
    "TransportPlan",
    "barycentric_projection",
    "pairs_norm",
    "power_cost",
    "safe_root",
    "sorted_coupling",
    "transport_cost",
    "transport_distance",
    "transport_pairs",
    "transport_plan",
]

_MAX_PIVOTS = 10_000_000
_FAINT = 1e-12
"""Largest power of a distance that a plan uses, relative to the largest one: below it, all its costs are rounding."""
_RESCALINGS = 60


@dataclass(frozen=True, eq=False)
class TransportPlan:
    """A sparse coupling: mass[k] goes from x[rows[k]] to y[cols[k]].

    Attributes
    ----------
    rows, cols : Tensor (k,) of int64
    mass : Tensor (k,)
    potentials : (u (n,), v (m,)) or None
        Optimal dual variables for the cost (|x - y| / unit)^p, where the method gives them: the derivatives
        in the weights.
    unit : float
        A distance, so large that powers of distances relative to it stay in the floating range.
    permutation : bool
        Whether it is a matching of n equal masses, with rows = 0, ..., n - 1.
    """

    rows: Tensor
    cols: Tensor
    mass: Tensor
    potentials: tuple[Tensor, Tensor] | None
    permutation: bool
    unit: float = 1.0


@dataclass(frozen=True, eq=False)
class Pairs:
    """Coupled pairs: mass (k,), gap = x - y (k, d), and the derivatives in the weights as a number of value 0.

    The transport cost is sum_k mass_k |gap_k|^p + unit^p dual.
    """

    mass: Tensor
    gap: Tensor
    dual: Tensor | None
    unit: float


def safe_root(value: Tensor, p: float) -> Tensor:
    """value^(1/p) with derivative 0 (not infinite) at 0."""
    positive = value > 0
    return torch.where(positive, torch.where(positive, value, 1.0) ** (1.0 / p), 0.0)


def power_cost(x: Tensor, y: Tensor, p: float) -> Tensor:
    """|x - y|^p along the last axis, with derivative 0 (not NaN) at x = y."""
    square = (x - y).square().sum(-1)
    if p == 2:
        return square
    apart = square > 0
    return torch.where(apart, torch.where(apart, square, 1.0) ** (p / 2), 0.0)


def transport_plan(
    x: Tensor, w: Tensor, y: Tensor, v: Tensor, p: float, *, need_potentials: bool = False
) -> TransportPlan:
    """Compute an optimal plan for the cost |x - y|^p between sum w_i delta_{x_i} and sum v_j delta_{y_j}.

    In d = 1 it is the monotone coupling (p >= 1), by sorting; n = m and equal weights give a matching (an
    assignment problem); everything else is POT's network simplex.
    """
    matching = _equal_masses(w, v)
    if x.shape[-1] == 1:
        return _line_plan(x, w, y, v, matching and not need_potentials)
    # Differences, not |x|^2 + |y|^2 - 2 x.y, which loses the cost of close pairs.
    cost, unit = _distances(*_numbers(x, y))
    masses = None if matching and not need_potentials else _numbers(w, v)
    scale = float(cost.max()) or 1.0
    powers = (cost / scale) ** p  # relative: the simplex compares with absolute tolerances
    for _ in range(_RESCALINGS):
        found = _matching(powers) if masses is None else _simplex(powers, *masses)
        longest = float(cost[found.rows, found.cols].max())
        if longest == 0 or (longest / scale) ** p >= _FAINT:
            break
        scale = longest
        # The plan found costs 1 at most now: a better one has no pair that costs more than 1 over its mass.
        lightest = 1.0 / len(cost) if masses is None else min(float(m[m > 0].min()) for m in masses)
        powers = np.minimum(cost / scale, min(10.0 / lightest, 1e12) ** (1 / p)) ** p
    rows, cols = _index(found.rows, w), _index(found.cols, w)
    if masses is None:
        return TransportPlan(rows, cols, w.detach(), None, True)
    mass, left, right = (torch.from_numpy(t).to(w) for t in (found.mass, found.left, found.right))
    return TransportPlan(rows, cols, mass, (left, right), False, scale * unit)


def _distances(a: np.ndarray, b: np.ndarray) -> tuple[np.ndarray, float]:
    """|a_i - b_j| in a unit in which their squares stay in the floating range, and that unit."""
    span = float((np.maximum(a.max(0), b.max(0)) - np.minimum(a.min(0), b.min(0))).max())
    if 1e-120 < span < 1e120 or span == 0:
        return cdist(a, b), 1.0
    unit = math.ldexp(1.0, math.frexp(min(span, 1e308))[1] - 1)
    return cdist((a - a[0]) / unit, (b - a[0]) / unit), unit


def _equal_masses(w: Tensor, v: Tensor) -> bool:
    n = w.shape[-1]
    if v.shape[-1] != n:
        return False
    slack = 8 * torch.finfo(w.dtype).eps / n
    return all(bool(((t.detach() - 1.0 / n).abs() <= slack).all()) for t in (w, v))


class _Found(NamedTuple):
    """A plan in NumPy: pairs, their masses, and dual variables."""

    rows: np.ndarray
    cols: np.ndarray
    mass: np.ndarray
    left: np.ndarray
    right: np.ndarray


def _matching(cost: np.ndarray) -> _Found:
    from scipy.optimize import linear_sum_assignment

    rows, cols = linear_sum_assignment(cost)
    none = np.empty(0)
    return _Found(rows, cols, none, none, none)


def _simplex(cost: np.ndarray, a: np.ndarray, b: np.ndarray) -> _Found:
    import ot

    b = b * (a.sum() / b.sum())  # float32 weights sum to 1 only up to 1e-7
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # POT warns by text; its flag is read below
        plan, log = ot.emd(a, b, cost, numItermax=_MAX_PIVOTS, log=True)
    if log["warning"] is not None:
        warnings.warn(f"optimal transport: {log['warning']}", NotConverged, stacklevel=4)
    rows, cols = np.nonzero(plan)
    return _Found(rows, cols, plan[rows, cols], np.asarray(log["u"]), np.asarray(log["v"]))


def _line_plan(x: Tensor, w: Tensor, y: Tensor, v: Tensor, matching: bool) -> TransportPlan:
    if matching:
        order = torch.argsort(x.detach()[:, 0], stable=True)
        cols = torch.empty_like(order)
        cols[order] = torch.argsort(y.detach()[:, 0], stable=True)
        return TransportPlan(torch.arange(len(order), device=x.device), cols, w.detach(), None, True)
    rows, cols, mass = sorted_coupling(x[:, 0], w, y[:, 0], v)
    kept = mass.detach() > 0
    return TransportPlan(rows[kept], cols[kept], mass[kept], None, False)


def sorted_coupling(x: Tensor, w: Tensor, y: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Compute the monotone coupling of two weighted clouds of the line, batched.

    Parameters
    ----------
    x, w : Tensor (..., n)
    y, v : Tensor (..., m)

    Returns
    -------
    rows, cols : Tensor (..., n + m) of int64
    mass : Tensor (..., n + m)
        Nonnegative, some 0; differentiable in the weights.
    """
    order_x, order_y = (torch.argsort(t.detach(), dim=-1, stable=True) for t in (x, y))
    a, b = torch.gather(w, -1, order_x).cumsum(-1), torch.gather(v, -1, order_y).cumsum(-1)
    # Both must end at the same number, or the last piece of one cloud has no partner.
    a, b = a / a[..., -1:], b / b[..., -1:]
    levels = torch.sort(torch.cat([a, b], -1), -1).values
    mass = torch.diff(levels, dim=-1, prepend=torch.zeros_like(levels[..., :1]))
    middle = levels.detach() - 0.5 * mass.detach()
    rows, cols = (
        torch.gather(o, -1, torch.searchsorted(c.detach().contiguous(), middle).clamp_max(c.shape[-1] - 1))
        for o, c in ((order_x, a), (order_y, b))
    )
    return rows, cols, mass


def _wrapped(t: Tensor) -> bool:
    return bool(torch._C._functorch.is_functorch_wrapped_tensor(t))


def _numbers(*tensors: Tensor) -> list[np.ndarray]:
    """The values in float64, without derivatives, also inside `torch.func.grad` and `torch.func.jvp`."""
    plain = []
    for t in tensors:
        for layer in layers(t):
            if torch._C._functorch.is_batchedtensor(layer):
                raise InvalidInput(
                    "exact transport cannot run inside torch.vmap; give it a batch of measures"
                )
        plain.append(layer)
    with temporarily_clear_interpreter_stack():  # under it, new tensors would be wrapped again
        # Copies: POT reads C-contiguous arrays, and uniform weights are one number seen n times.
        return [np.array(t.detach().double().cpu().numpy(), order="C") for t in plain]


def _index(rows: np.ndarray, like: Tensor) -> Tensor:
    return torch.from_numpy(np.ascontiguousarray(rows, dtype=np.int64)).to(like.device)


def transport_cost(x: Tensor, w: Tensor, y: Tensor, v: Tensor, p: float) -> Tensor:
    """W_p^p between clouds (..., n, d), weights (..., n), and (..., m, d), (..., m); batch dims broadcast.

    Differentiable through the optimal plan (envelope theorem): in the points with the plan fixed, in the
    weights through the dual variables; where the plan is not unique, one element of the subdifferential.
    """
    batch = torch.broadcast_shapes(x.shape[:-2], y.shape[:-2], w.shape[:-1], v.shape[:-1])
    x, y = x.expand(*batch, *x.shape[-2:]), y.expand(*batch, *y.shape[-2:])
    w, v = w.expand(*batch, w.shape[-1]), v.expand(*batch, v.shape[-1])
    if x.shape[-1] == 1:
        rows, cols, mass = sorted_coupling(x[..., 0], w, y[..., 0], v)
        pairs = power_cost(
            torch.gather(x, -2, rows.unsqueeze(-1)), torch.gather(y, -2, cols.unsqueeze(-1)), p
        )
        return (mass * pairs).sum(-1)
    members = zip(*(t.flatten(0, len(batch) - 1) if batch else t[None] for t in (x, w, y, v)), strict=True)
    values = [_one_cost(a, aw, b, bw, p) for a, aw, b, bw in members]
    return torch.stack(values).reshape(batch)


def _one_cost(x: Tensor, w: Tensor, y: Tensor, v: Tensor, p: float) -> Tensor:
    by_weights = any(t.requires_grad or _wrapped(t) for t in (w, v))
    plan = transport_plan(x, w, y, v, p, need_potentials=by_weights)
    value = (plan.mass * power_cost(x[plan.rows], y[plan.cols], p)).sum()
    dual = _dual(plan, w, v) if by_weights else None
    return value if dual is None else value + _power(plan.unit, p, value.dtype) * dual


def _dual(plan: TransportPlan, w: Tensor, v: Tensor) -> Tensor | None:
    """0, with the optimal dual variables as its derivatives in the weights."""
    if plan.potentials is None:
        return None
    u, t = plan.potentials
    return (u * (w - w.detach())).sum() + (t * (v - v.detach())).sum()


def _power(base: float, p: float, dtype: torch.dtype) -> float:
    """base^p, within the floating range."""
    return math.exp(min(p * math.log(base), _largest(dtype))) if base > 0 else 0.0


def _largest(dtype: torch.dtype) -> float:
    """A logarithm whose exponential leaves room for sums and products with weights."""
    return 0.9 * math.log(torch.finfo(dtype).max)


def transport_pairs(x: Tensor, w: Tensor, y: Tensor, v: Tensor, p: float) -> Pairs:
    """The pairs that an optimal plan couples, with what a transport cost needs of them (no batch dimensions)."""
    if x.shape[-1] == 1:
        rows, cols, mass = sorted_coupling(x[:, 0], w, y[:, 0], v)
        return Pairs(mass, x[rows] - y[cols], None, 1.0)
    by_weights = any(t.requires_grad or _wrapped(t) for t in (w, v))
    plan = transport_plan(x, w, y, v, p, need_potentials=by_weights)
    dual = _dual(plan, w, v) if by_weights else None
    return Pairs(plan.mass, x[plan.rows] - y[plan.cols], dual, plan.unit)


def transport_distance(x: Tensor, w: Tensor, y: Tensor, v: Tensor, p: float) -> Tensor:
    """W_p between clouds, batched and differentiable as `transport_cost`, where W_p^p leaves the floating range too."""
    batch = torch.broadcast_shapes(x.shape[:-2], y.shape[:-2], w.shape[:-1], v.shape[:-1])
    x, y = x.expand(*batch, *x.shape[-2:]), y.expand(*batch, *y.shape[-2:])
    w, v = w.expand(*batch, w.shape[-1]), v.expand(*batch, v.shape[-1])
    if x.shape[-1] == 1:
        rows, cols, mass = sorted_coupling(x[..., 0], w, y[..., 0], v)
        gap = torch.gather(x, -2, rows.unsqueeze(-1)) - torch.gather(y, -2, cols.unsqueeze(-1))
        return pairs_norm(mass, gap, p)
    members = zip(*(t.flatten(0, len(batch) - 1) if batch else t[None] for t in (x, w, y, v)), strict=True)
    found = [transport_pairs(a, aw, b, bw, p) for a, aw, b, bw in members]
    return torch.stack([pairs_norm(k.mass, k.gap, p, [k]) for k in found]).reshape(batch)


def pairs_norm(mass: Tensor, gap: Tensor, p: float, duals: Sequence[Pairs] = ()) -> Tensor:
    """(sum_k mass_k |gap_k|^p)^(1/p) from mass (..., k) and gap (..., k, d): its powers stay in the floating range.

    `duals` (where there are no batch dimensions) adds their unit^p dual under the root.
    """
    tiny = torch.finfo(gap.dtype).tiny
    plain = gap.detach()
    coordinate = plain.abs().amax((-2, -1)).clamp_min(tiny)
    length = torch.linalg.vector_norm(plain / coordinate[..., None, None], dim=-1)
    # The longest pair with mass: next to one without, its power may be nothing at all.
    scale = coordinate * torch.where(mass.detach() > 0, length, 0.0).amax(-1)
    scale = torch.where(scale > 0, scale, 1.0).clamp_min(tiny)
    if p <= 64:
        scale = scale / (2 * torch.frexp(scale).mantissa)  # a power of 2: no digit changes
    # Pairs without mass matter to derivatives in the weights alone.
    far = length * (coordinate / scale).unsqueeze(-1) > math.exp(_largest(gap.dtype) / p)
    ratio = torch.where(far.unsqueeze(-1), 0.0, gap / scale[..., None, None])
    power = torch.where(far, math.exp(_largest(gap.dtype)), power_cost(ratio, torch.zeros_like(ratio), p))
    total = (mass * power).sum(-1)
    for pairs in duals:
        if pairs.dual is not None:
            unit = (p * (pairs.unit / scale).log()).clamp_max(_largest(gap.dtype)).exp()
            total = total + unit * pairs.dual
    return scale * safe_root(total, p)


def barycentric_projection(plan: TransportPlan, n: int, w: Tensor, y: Tensor) -> Tensor:
    """E[y | x_i] under the plan, (n, d): the optimal map where it is one. Tokens of weight 0 get NaN."""
    if plan.permutation:
        return y[plan.cols]
    total = torch.zeros(n, dtype=y.dtype, device=y.device).index_add(0, plan.rows, plan.mass)
    moved = torch.zeros(n, y.shape[-1], dtype=y.dtype, device=y.device)
    moved = moved.index_add(0, plan.rows, plan.mass.unsqueeze(-1) * y[plan.cols])
    return moved / total.unsqueeze(-1)
