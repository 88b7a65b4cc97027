"""Parameters that depend on time: layers, or a callable."""

from __future__ import annotations

import bisect
import itertools
from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor

from ..arrays import as_scalar, broadcast_batch, common_kind, describe
from ..errors import InvalidInput
from ..measures import Particles
from .base import Attention, Field
from .bounds import AttentionBounds

__all__ = ["Schedule"]


class Schedule(Attention):
    """An attention whose parameters depend on time: piecewise constant layers, or any callable.

    Parameters
    ----------
    attentions : sequence of Attention
        One a layer, all on one dimension.
    times : sequence of floats, strictly increasing
        Start of each layer (the last one then lasts for ever), or one more: the end of the last layer.

    Raises
    ------
    InvalidInput
        Times that do not increase or do not fit the number of layers, layers on different dimensions.

    Examples
    --------
    >>> from ot_transformers import AffineBlock
    >>> layers = Schedule([AffineBlock(-1.0), AffineBlock(2.0)], times=[0.0, 0.5, 1.0])
    >>> from ot_transformers import AffineBlock
    >>> layers.jumps, float(layers.at(0.7).W[0, 0])
    ((0.5,), 2.0)
    """

    def __init__(self, attentions: Sequence[Attention], times: Sequence[float]) -> None:
        if not isinstance(attentions, list | tuple) or not attentions:
            raise InvalidInput(f"attentions must be a non-empty list, got {describe(attentions)}")
        for layer in attentions:
            if not isinstance(layer, Attention) or isinstance(layer, Schedule):
                raise InvalidInput(f"attentions must hold attentions, got {describe(layer)}")
        bounds = _numbers(times, "times")
        if len(bounds) not in (len(attentions), len(attentions) + 1):
            raise InvalidInput(
                f"times has {len(bounds)} entries for {len(attentions)} layers: give the starts, or one more"
            )
        if any(b <= a for a, b in itertools.pairwise(bounds)):
            raise InvalidInput(f"times must be strictly increasing, got {bounds}")
        dims = {layer.dim for layer in attentions if layer.dim is not None}
        if len(dims) > 1:
            raise InvalidInput(f"attentions must act on one dimension, got {sorted(dims)}")
        n = len(attentions)
        self._layers: tuple[Attention, ...] | None = tuple(attentions)
        self._starts = tuple(bounds[:n])
        self._end = bounds[n] if len(bounds) > n else None
        self._function: Callable[[float], Attention] | None = None
        self.dim, self.kind = next(iter(dims), None), common_kind(*attentions)
        names = [f"attentions[{i}]" for i in range(n)]
        self.batch_shape = broadcast_batch([layer.batch_shape for layer in attentions], names)

    @classmethod
    def from_function(cls, f: Callable[[float], Attention], jumps: Sequence[float] = ()) -> Schedule:
        """Parameters from a callable t -> Attention, smooth except at the times `jumps`."""
        if not callable(f):
            raise InvalidInput(f"f must be a callable t -> Attention, got {describe(f)}")
        self = cls.__new__(cls)
        self._layers, self._function, self._end = None, f, None
        self._starts = tuple(sorted(set(_numbers(jumps, "jumps"))))
        first = self.at(0.0)
        self.dim, self.kind, self.batch_shape = first.dim, first.kind, first.batch_shape
        return self

    @property
    def jumps(self) -> tuple[float, ...]:
        """Times at which the parameters jump: an integrator must stop there."""
        return self._starts if self._function is not None else self._starts[1:]

    def at(self, t: float) -> Attention:
        """The attention at time t; at a jump, that of the layer which starts there.

        Raises
        ------
        InvalidInput
            t before the first layer, or after the end of the last.
        """
        t = as_scalar(t, "t")
        if self._function is not None:
            now = self._function(t)
            if not isinstance(now, Attention) or isinstance(now, Schedule):
                raise InvalidInput(f"f must return an Attention, got {describe(now)} at t = {t:g}")
            if self.dim is not None and now.dim not in (None, self.dim):
                raise InvalidInput(f"f must keep its dimension {self.dim}, got {now.dim} at t = {t:g}")
            return now
        assert self._layers is not None
        if t < self._starts[0] or (self._end is not None and t > self._end):
            end = "inf" if self._end is None else f"{self._end:g}"
            raise InvalidInput(f"t = {t:g} lies outside the schedule [{self._starts[0]:g}, {end}]")
        return self._layers[bisect.bisect_right(self._starts, t) - 1]

    @property
    def is_callable(self) -> bool:
        """Whether the parameters vary continuously (`from_function`)."""
        return self._function is not None

    @property
    def preserves_gaussians(self) -> bool:
        """Whether every layer does (for a callable: the one at time 0)."""
        if self._layers is not None:
            return all(layer.preserves_gaussians for layer in self._layers)
        return self.at(0.0).preserves_gaussians

    def _first(self) -> Attention:
        return self.at(self._starts[0] if self._layers is not None else 0.0)

    def raw_rows(self, points: Tensor, x: Tensor, weights: Tensor) -> Tensor:
        """Those of the first layer: a schedule has a velocity only at a time, `schedule.at(t)`."""
        return self._first().raw_rows(points, x, weights)

    def raw_field(self, points: Tensor, x: Tensor, weights: Tensor) -> Tensor:
        """That of the first layer."""
        return self._first().raw_field(points, x, weights)

    def raw_affine(self, mean: Tensor, factor: Tensor) -> tuple[Tensor, Tensor]:
        """That of the first layer."""
        return self._first().raw_affine(mean, factor)

    def evaluator(self, particles: Particles | None = None) -> Field:
        """That of the first layer."""
        return self._first().evaluator(particles)

    def bounds(self, radius: float) -> AttentionBounds:
        """Bounds of the first layer; `stability_constant` asks each layer in its time."""
        return self._first().bounds(radius)

    def velocity(self, particles: Any) -> Any:
        """Velocity at the initial time."""
        return self._first().velocity(particles)


def _numbers(values: Any, name: str) -> list[float]:
    if isinstance(values, str) or not hasattr(values, "__iter__"):
        raise InvalidInput(f"{name} must be a sequence of numbers, got {describe(values)}")
    return [as_scalar(t, name) for t in values]
