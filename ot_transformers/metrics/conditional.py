"""The conditional Wasserstein distance between token clouds with positions."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..arrays import Array, as_scalar, broadcast_batch, check_positive, common_kind, describe, to_kind
from ..errors import InvalidInput
from ..measures import PositionedParticles, check_same_dim
from ..measures.particles import uniform_weights
from ..numerics.transport import pairs_norm, transport_pairs, transport_plan
from ._displacement import check_time, length_error
from .base import Geodesic, Metric

__all__ = ["ConditionalWasserstein"]


class ConditionalWasserstein(Metric):
    r"""W_{p,cond}(mu, nu)^p = \int W_p(mu(.|s), nu(.|s))^p dtheta(s), theta the common law of positions.

    Transport keeps every position: it is at least W_p on the product space [0, 1] x R^d.

    Parameters
    ----------
    p : float
        At least 1.
    tol : float
        Positions closer than `tol` are one position; the masses of a position may differ by `tol`. In float32
        at least 1e-6 is used.

    Raises
    ------
    InvalidInput
        p < 1 or tol <= 0.

    References
    ----------
    Castin, Ablin, Carrillo, Peyré, arXiv 2501.18322, on masked attention.

    Examples
    --------
    >>> import numpy as np
    >>> s = np.array([0.0, 1.0])
    >>> mu = PositionedParticles(np.array([[0.0], [1.0]]), s)
    >>> nu = PositionedParticles(np.array([[1.0], [0.0]]), s)
    >>> float(ConditionalWasserstein(p=1).distance(mu, nu))
    1.0
    """

    def __init__(self, p: float = 2, *, tol: float = 1e-9) -> None:
        self.p = as_scalar(p, "p")
        if self.p < 1:
            raise InvalidInput(f"p must be >= 1, got {self.p:g}")
        self.tol = check_positive(tol, "tol")

    def distance(self, mu: Any, nu: Any) -> Array:
        """W_{p,cond}(mu, nu), not squared, (...); exact transport at each position, differentiable.

        Raises
        ------
        InvalidInput
            Measures without positions, of other dimensions, or with different position marginals.
        """
        a, b, slack = self._pair(mu, nu)
        return to_kind(self._distance(a, b, slack), common_kind(a, b))

    def geodesic(self, mu: Any, nu: Any) -> Geodesic:
        """Displacement interpolation at every position (measures without batch dimensions).

        Where all positions are distinct the states keep the tokens of mu in their order.
        """
        a, b, slack = self._pair(mu, nu)
        if a.batch_shape or b.batch_shape:
            raise InvalidInput(
                "mu and nu must have no batch dimensions for a geodesic: index the batch first"
            )
        kind = common_kind(a, b)
        rows, cols, mass, positions, matching = self._plan(a, b, slack)
        start, end = a.x_t[rows], b.x_t[cols]
        length = pairs_norm(mass, start - end, self.p)
        size = torch.maximum(a.x_t.abs().amax(), b.x_t.abs().amax())
        error = length_error(length, size, self.p, matching)

        def at(t: float) -> PositionedParticles:
            time = check_time(t)
            x = start + time * (end - start) if time < 1.0 else end
            return PositionedParticles._trusted(x, mass, positions, kind, matching and a.uniform)

        return Geodesic(to_kind(length, kind), to_kind(error, kind), True, at, {"matching": matching})

    def _pair(self, mu: Any, nu: Any) -> tuple[PositionedParticles, PositionedParticles, float]:
        """Both measures in the higher of their precisions, and the slack of the lower one."""
        for value, name in ((mu, "mu"), (nu, "nu")):
            if not isinstance(value, PositionedParticles):
                raise InvalidInput(f"{name} must be PositionedParticles, got {describe(value)}")
        check_same_dim(mu, nu)
        double = mu.dtype == nu.dtype == torch.float64
        dtype = torch.promote_types(mu.dtype, nu.dtype)
        return _promoted(mu, dtype), _promoted(nu, dtype), self.tol if double else max(self.tol, 1e-6)

    def _distance(self, a: PositionedParticles, b: PositionedParticles, slack: float) -> Tensor:
        batch = broadcast_batch([a.batch_shape, b.batch_shape], ["mu", "nu"])
        if _aligned_already(a, b, slack):
            # Distinct positions in one order (decoder sequences): every conditional law is a Dirac mass.
            return pairs_norm(a.weights_t, a.x_t - b.x_t, self.p)
        flat = [
            t.expand(*batch, *t.shape[-k:]).reshape(-1, *t.shape[-k:]) for t, k in _tensors(a) + _tensors(b)
        ]
        values = []
        for x, w, s, y, v, r in zip(*flat, strict=True):
            pairs = []
            for level in _levels(w, s, v, r, slack):
                mass, other = w[level.rows].sum(), v[level.cols].sum()
                found = transport_pairs(
                    x[level.rows], w[level.rows] / mass, y[level.cols], v[level.cols] / other, self.p
                )
                dual = None if found.dual is None else mass * found.dual
                pairs.append(replace(found, mass=mass * found.mass, dual=dual))
            masses, gaps = torch.cat([k.mass for k in pairs]), torch.cat([k.gap for k in pairs])
            values.append(pairs_norm(masses, gaps, self.p, pairs))
        return torch.stack(values).reshape(batch)

    def _plan(
        self, a: PositionedParticles, b: PositionedParticles, slack: float
    ) -> tuple[Tensor, Tensor, Tensor, Tensor, bool]:
        rows, cols, mass = [], [], []
        levels = _levels(a.weights_t, a.s_t, b.weights_t, b.s_t, slack)
        matching = True
        for level in levels:
            w, v = a.weights_t[level.rows], b.weights_t[level.cols]
            plan = transport_plan(a.x_t[level.rows], w / w.sum(), b.x_t[level.cols], v / v.sum(), self.p)
            matching = matching and plan.permutation
            rows.append(level.rows[plan.rows])
            cols.append(level.cols[plan.cols])
            mass.append(plan.mass * w.sum())
        i, j, m = torch.cat(rows), torch.cat(cols), torch.cat(mass)
        matching = matching and len(i) == a.n
        if matching:  # back to the order of the tokens of mu
            order = torch.argsort(i)
            i, j, m = i[order], j[order], m[order]
        # Positions of a mass within tol, in one measure alone, are left out: the rest is a probability again.
        return i, j, m if matching else m / m.sum(), a.s_t[i], matching


class _Level(NamedTuple):
    """The tokens of two clouds at one position."""

    rows: Tensor
    cols: Tensor


def _levels(w: Tensor, s: Tensor, v: Tensor, r: Tensor, tol: float) -> list[_Level]:
    """Split two clouds by position, or say where their position marginals differ."""
    everything = torch.cat([s, r]).detach()
    order = torch.argsort(everything, stable=True)
    jumps = torch.diff(everything[order]) > tol
    label = torch.zeros_like(order)
    label[order] = torch.cat([jumps.new_zeros(1), jumps]).long().cumsum(0)
    n, count = len(s), int(label.max()) + 1
    left = torch.zeros(count, dtype=w.dtype, device=w.device).index_add(0, label[:n], w.detach())
    right = torch.zeros(count, dtype=w.dtype, device=w.device).index_add(0, label[n:], v.detach())
    gap, worst = (left - right).abs().max(0)
    if float(gap) > tol + 4 * count * torch.finfo(w.dtype).eps:
        at = float(everything[label == worst][0])
        raise InvalidInput(
            f"mu and nu must have the same position marginal; at s = {at:g} "
            f"mu has mass {float(left[worst]):g}, nu {float(right[worst]):g}"
        )
    present = (left > 0) & (right > 0)  # a mass within tol may be in one measure alone
    return [
        _Level(torch.nonzero(label[:n] == k)[:, 0], torch.nonzero(label[n:] == k)[:, 0])
        for k in range(count)
        if bool(present[k])
    ]


def _aligned_already(a: PositionedParticles, b: PositionedParticles, tol: float) -> bool:
    """Whether token i of mu and token i of nu share a position of their own and a mass, for all i."""
    if a.n != b.n:
        return False
    s, r = a.s_t.detach(), b.s_t.detach()
    apart = torch.diff(torch.sort(s, -1).values, dim=-1) > 2 * tol
    same = ((s - r).abs() <= tol).all() & ((a.weights_t - b.weights_t).detach().abs() <= tol).all()
    return bool(apart.all() & same)


def _tensors(a: PositionedParticles) -> list[tuple[Tensor, int]]:
    return [(a.x_t, 2), (a.weights_t, 1), (a.s_t, 1)]


def _promoted(a: PositionedParticles, dtype: torch.dtype) -> PositionedParticles:
    if a.dtype == dtype:
        return a
    x, w = a.x_t.to(dtype), a.weights_t.to(dtype)
    w = uniform_weights(x) if a.uniform else w / w.sum(-1, keepdim=True)
    return PositionedParticles._trusted(x, w, a.s_t.to(dtype), a.kind, a.uniform)
