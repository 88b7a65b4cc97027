"""Exact optimal transport between weighted clouds: plans, costs and their derivatives.

A plan is sparse: rows, columns and masses of the pairs it couples. Tensors in and out, no batch dimension
unless stated; the linear programs run in float64 on the CPU (POT's network simplex, SciPy's assignment).
"""

from __future__ import annotations

import warnings
from dataclasses import dataclass

import numpy as np
import torch
from scipy.spatial.distance import cdist
from torch import Tensor
from torch._functorch.pyfunctorch import temporarily_clear_interpreter_stack

from ..errors import InvalidInput, NotConverged

__all__ = [
    "TransportPlan",
    "barycentric_projection",
    "power_cost",
    "sorted_coupling",
    "transport_cost",
    "transport_plan",
]

_MAX_PIVOTS = 10_000_000


@dataclass(frozen=True, eq=False)
class TransportPlan:
    """A sparse coupling: mass[k] goes from x[rows[k]] to y[cols[k]].

    Attributes
    ----------
    rows, cols : Tensor (k,) of int64
    mass : Tensor (k,)
    potentials : (u (n,), v (m,)) or None
        Optimal dual variables, where the method gives them: the derivatives in the weights.
    permutation : bool
        Whether it is a matching of n equal masses, with rows = 0, ..., n - 1.
    """

    rows: Tensor
    cols: Tensor
    mass: Tensor
    potentials: tuple[Tensor, Tensor] | None
    permutation: bool


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
    a, b = _numbers(x, y)
    cost = cdist(a, b)
    scale = float(cost.max())
    cost = (cost / scale) ** p if scale > 0 else cost  # the simplex compares with absolute tolerances
    if matching and not need_potentials:
        return _matching(cost, w)
    return _simplex(cost, scale**p, w, v)


def _equal_masses(w: Tensor, v: Tensor) -> bool:
    n = w.shape[-1]
    if v.shape[-1] != n:
        return False
    slack = 8 * torch.finfo(w.dtype).eps / n
    return all(bool(((t.detach() - 1.0 / n).abs() <= slack).all()) for t in (w, v))


def _matching(cost: np.ndarray, w: Tensor) -> TransportPlan:
    from scipy.optimize import linear_sum_assignment

    rows, cols = linear_sum_assignment(cost)
    return TransportPlan(_index(rows, w), _index(cols, w), w.detach(), None, True)


def _simplex(cost: np.ndarray, scale: float, w: Tensor, v: Tensor) -> TransportPlan:
    import ot

    a, b = _numbers(w, v)
    b = b * (a.sum() / b.sum())  # float32 weights sum to 1 only up to 1e-7
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # POT warns by text; its flag is read below
        plan, log = ot.emd(a, b, cost, numItermax=_MAX_PIVOTS, log=True)
    if log["warning"] is not None:
        warnings.warn(f"optimal transport: {log['warning']}", NotConverged, stacklevel=4)
    rows, cols = np.nonzero(plan)
    mass = torch.from_numpy(plan[rows, cols]).to(w)
    potentials = tuple(torch.from_numpy(np.asarray(log[k]) * scale).to(w) for k in "uv")
    return TransportPlan(_index(rows, w), _index(cols, w), mass, (potentials[0], potentials[1]), False)


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
    functorch, plain = torch._C._functorch, []
    for t in tensors:
        while _wrapped(t):
            if functorch.is_batchedtensor(t):
                raise InvalidInput(
                    "exact transport cannot run inside torch.vmap; give it a batch of measures"
                )
            t = functorch.get_unwrapped(t)
        plain.append(t)
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
    if plan.potentials is not None and by_weights:
        u, t = plan.potentials
        value = value + (u * (w - w.detach())).sum() + (t * (v - v.detach())).sum()
    return value


def barycentric_projection(plan: TransportPlan, n: int, w: Tensor, y: Tensor) -> Tensor:
    """E[y | x_i] under the plan, (n, d): the optimal map where it is one. Tokens of weight 0 get NaN."""
    if plan.permutation:
        return y[plan.cols]
    total = torch.zeros(n, dtype=y.dtype, device=y.device).index_add(0, plan.rows, plan.mass)
    moved = torch.zeros(n, y.shape[-1], dtype=y.dtype, device=y.device)
    moved = moved.index_add(0, plan.rows, plan.mass.unsqueeze(-1) * y[plan.cols])
    return moved / total.unsqueeze(-1)
