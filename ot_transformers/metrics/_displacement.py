"""Displacement interpolation between clouds, shared by the Wasserstein metrics."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from ..arrays import Kind, as_scalar, broadcast_batch, to_kind
from ..errors import InvalidInput
from ..measures import Particles
from ..numerics.transport import TransportPlan, pairs_norm, transport_plan
from .base import Geodesic, shown

__all__ = ["check_time", "displacement_geodesic", "length_error", "members"]

Member = tuple[Tensor, Tensor, Tensor, Tensor]


def length_error(length: Tensor, size: Tensor, p: float, matching: bool) -> Tensor:
    """Rounding error of a length between clouds of that size.

    Masses are rounded: an ulp of mass over the diameter costs its p-th root, which is all that matters for
    near-equal clouds. A matching has no masses to round.
    """
    ulp = 8 * torch.finfo(length.dtype).eps
    length, size = length.detach(), size.detach()
    if matching:
        return ulp * (length + size)
    unit = torch.maximum(length, 2 * size).clamp_min(torch.finfo(length.dtype).tiny)  # keeps powers in range
    share = ((length / unit) ** p + ulp * (2 * size / unit) ** p) ** (1 / p)
    return unit * (share - length / unit) + ulp * length


def check_time(t: float) -> float:
    """Return t if it lies in [0, 1]."""
    time = as_scalar(t, "t")
    if not 0.0 <= time <= 1.0:
        raise InvalidInput(f"t must lie in [0, 1], got {time:g}")
    return time


def members(a: Particles, b: Particles) -> tuple[tuple[int, ...], list[Member]]:
    """The joint batch shape of two clouds, and their members (x, w, y, v) one by one."""
    batch = broadcast_batch([a.batch_shape, b.batch_shape], ["mu", "nu"])
    flat = [
        t.expand(*batch, *t.shape[-k:]).reshape(-1, *t.shape[-k:])
        for t, k in ((a.x_t, 2), (a.weights_t, 1), (b.x_t, 2), (b.weights_t, 1))
    ]
    return batch, list(zip(*flat, strict=True))


def displacement_geodesic(
    a: Particles, b: Particles, white: Callable[[Tensor], Tensor], p: float, kind: Kind
) -> Geodesic:
    """Move mass along the pairs of an optimal plan, at constant speed."""
    batch, flat = members(a, b)
    plans = [transport_plan(white(x), w, white(y), v, p) for x, w, y, v in flat]
    matching = all(plan.permutation for plan in plans)
    starts, ends, masses = _supports(plans, flat)
    length = pairs_norm(masses, white(starts) - white(ends), p).reshape(batch)
    starts, ends = (t.reshape(*batch, *t.shape[-2:]) for t in (starts, ends))
    masses = masses.reshape(*batch, masses.shape[-1])
    size = torch.maximum(white(a.x_t).abs().amax((-2, -1)), white(b.x_t).abs().amax((-2, -1)))
    error = length_error(length, size, p, matching)

    def at(t: float) -> Particles:
        time = check_time(t)
        x = starts + time * (ends - starts) if time < 1.0 else ends
        return Particles.unchecked(x, None if matching else masses, kind)

    details = shown({"plans": plans, "matching": matching}, kind)
    return Geodesic(to_kind(length, kind), to_kind(error, kind), True, at, details)


def _supports(plans: list[TransportPlan], flat: list[Member]) -> tuple[Tensor, Tensor, Tensor]:
    """Coupled pairs and masses, padded to one length by pairs of mass 0."""
    size = max(len(plan.rows) for plan in plans)
    starts, ends, masses = [], [], []
    for plan, (x, _, y, _) in zip(plans, flat, strict=True):
        missing = size - len(plan.rows)
        rows, cols = (torch.cat([i, i[-1:].expand(missing)]) for i in (plan.rows, plan.cols))
        starts.append(x[rows])
        ends.append(y[cols])
        masses.append(torch.cat([plan.mass, plan.mass.new_zeros(missing)]))
    return torch.stack(starts), torch.stack(ends), torch.stack(masses)
