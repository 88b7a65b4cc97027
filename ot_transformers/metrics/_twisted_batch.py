"""Batches for the twisted metric, whose computations are one by one: members out, results together."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor

from ..arrays import Kind, own_index, tensor_of, to_kind
from ..errors import InvalidInput
from ..measures import AffineVelocity, Gaussian, Measure, Particles
from .base import Geodesic

__all__ = ["joined_geodesic", "joined_measure", "joined_velocity", "members"]

Shape = tuple[int, ...]


def members(measure: Measure, shape: Shape) -> list[Any]:
    """The single measures of a batch broadcast to `shape`, in row-major order."""
    if not measure.batch_shape:
        return [measure] * int(np.prod(shape))
    return [measure[own_index(index, measure.batch_shape)] for index in np.ndindex(*shape)]


def _stacked(tensors: list[Tensor], shape: Shape, name: str) -> Tensor:
    if len({t.shape for t in tensors}) > 1:
        raise InvalidInput(f"{name}: the members of the batch split into different numbers of particles")
    return torch.stack(tensors).reshape(*shape, *tensors[0].shape)


def joined_measure(parts: list[Measure], shape: Shape, kind: Kind) -> Measure:
    """One batch of measures."""
    if isinstance(parts[0], Gaussian):
        gaussians = cast(list[Gaussian], parts)
        mean = _stacked([g.mean_t for g in gaussians], shape, "mu and nu")
        return Gaussian.unchecked(
            mean, factor=_stacked([g.factor_t for g in gaussians], shape, "mu and nu"), kind=kind
        )
    clouds = cast(list[Particles], parts)
    x = _stacked([c.x_t for c in clouds], shape, "mu and nu")
    uniform = all(c.uniform for c in clouds)
    w = None if uniform else _stacked([c.weights_t for c in clouds], shape, "mu and nu")
    return Particles.unchecked(x, w, kind)


def joined_velocity(parts: list[Any], shape: Shape, kind: Kind) -> Any:
    """One batch of tangents: arrays (n, d), or affine velocities."""
    if isinstance(parts[0], AffineVelocity):
        b, M = ([getattr(p, name) for p in parts] for name in ("b_t", "M_t"))
        return AffineVelocity(_stacked(b, shape, "mu"), _stacked(M, shape, "mu"), kind)
    return to_kind(_stacked([tensor_of(p) for p in parts], shape, "mu"), kind)


def joined_geodesic(parts: list[Geodesic], shape: Shape, kind: Kind) -> Geodesic:
    """One geodesic of batches; `details["members"]` has the details of each."""
    length, error = (
        to_kind(_stacked([tensor_of(getattr(g, name)) for g in parts], shape, "mu"), kind)
        for name in ("length", "error")
    )
    at: Callable[[float], Measure] = lambda t: joined_measure([g.at(t) for g in parts], shape, kind)  # noqa: E731
    return Geodesic(
        length, error, all(g.converged for g in parts), at, {"members": [g.details for g in parts]}
    )
