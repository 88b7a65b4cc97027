"""Multi-head attention: a sum of heads of any kinds."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor

from ..arrays import Array, ArrayLike, broadcast_batch, cast_like, common_kind, describe, view_of
from ..errors import InvalidInput
from ..measures import Particles
from .base import Attention, Field, parameter, spectral_norm
from .bounds import AttentionBounds
from .schedule import Schedule

__all__ = ["MultiHeadAttention"]


class MultiHeadAttention(Attention):
    r"""Gamma_mu = sum_h W_h Gamma_mu^{(h)}, heads of any mix of kinds.

    Parameters
    ----------
    heads : sequence of Attention
        All on one dimension d.
    outputs : sequence of arrays (..., d, d), optional
        The matrices W_h. Default: the identity for each (V already carries the output matrix).

    Raises
    ------
    InvalidInput
        No heads, dimensions that differ, or another number of outputs than of heads.

    Notes
    -----
    On Gaussians M = sum_h W_h M_h and b = sum_h W_h b_h, if every head preserves Gaussians.
    """

    def __init__(self, heads: Sequence[Attention], outputs: Sequence[ArrayLike] | None = None) -> None:
        if not isinstance(heads, list | tuple) or not heads:
            raise InvalidInput(f"heads must be a non-empty list of attentions, got {describe(heads)}")
        for h in heads:
            if not isinstance(h, Attention):
                raise InvalidInput(f"heads must be attentions, got {describe(h)}")
            if isinstance(h, Schedule):
                raise InvalidInput("heads must not be schedules: make a Schedule of multi-head attentions")
        dims = {h.dim for h in heads if h.dim is not None}
        if len(dims) > 1:
            raise InvalidInput(f"heads must act on one dimension, got {sorted(dims)}")
        self.heads = tuple(heads)
        self.dim = next(iter(dims), None)
        self.outputs_t: tuple[Tensor, ...] | None = None
        if outputs is not None:
            if not hasattr(outputs, "__len__") or len(outputs) != len(heads):
                raise InvalidInput(
                    f"outputs must be {len(heads)} matrices, one a head, got {describe(outputs)}"
                )
            self.outputs_t = tuple(parameter(W, "outputs")[0] for W in outputs)
            self.dim = int(self.outputs_t[0].shape[-1]) if self.dim is None else self.dim
            wrong = {int(W.shape[-1]) for W in self.outputs_t} - {self.dim}
            if wrong:
                raise InvalidInput(f"outputs act on dimension {sorted(wrong)}, heads on {self.dim}")
        batches = [h.batch_shape for h in heads] + [tuple(W.shape[:-2]) for W in self.outputs_t or ()]
        names = [f"heads[{i}]" for i in range(len(heads))] + [f"outputs[{i}]" for i in range(len(heads))]
        self.batch_shape = broadcast_batch(batches, names[: len(batches)])
        self.kind = common_kind(*heads, *(() if outputs is None else outputs))
        self.maskable = all(h.maskable for h in heads)  # type: ignore[misc]

    @property
    def outputs(self) -> tuple[Array, ...] | None:
        """The matrices W_h, (..., d, d) each; None for the identity."""
        return None if self.outputs_t is None else tuple(view_of(W, self.kind) for W in self.outputs_t)

    def raw_velocity(self, x: Tensor, weights: Tensor) -> Tensor:
        """Sum over heads, each by its own fastest way."""
        return self.combine([h.raw_velocity(x, weights) for h in self.heads])

    def raw_field(self, points: Tensor, x: Tensor, weights: Tensor) -> Tensor:
        """Sum over heads."""
        return self.combine([h.raw_field(points, x, weights) for h in self.heads])

    def raw_rows(self, points: Tensor, x: Tensor, weights: Tensor) -> Tensor:
        """Sum over heads."""
        return self.combine([h.raw_rows(points, x, weights) for h in self.heads])

    def raw_affine(self, mean: Tensor, factor: Tensor) -> tuple[Tensor, Tensor]:
        """(sum_h W_h b_h, sum_h W_h M_h)."""
        pairs = [h.raw_affine(mean, factor) for h in self.heads]
        b = self.combine([p[0].unsqueeze(-2) for p in pairs]).squeeze(-2)
        # On transposes, W_h M_h is the combination of velocities.
        return b, self.combine([p[1].mT for p in pairs]).mT

    def member(self, index: tuple[int, ...], batch_shape: tuple[int, ...]) -> MultiHeadAttention:
        """The heads and outputs of one member of a batch."""
        outputs = self.outputs_t and [W.expand(*batch_shape, *W.shape[-2:])[index] for W in self.outputs_t]
        return MultiHeadAttention([h.member(index, batch_shape) for h in self.heads], outputs)

    @property
    def preserves_gaussians(self) -> bool:
        """Whether every head does."""
        return all(h.preserves_gaussians for h in self.heads)

    def evaluator(self, particles: Particles | None = None) -> Field:
        """The heads' evaluators, summed: each head keeps its own warm start."""
        fields = [h.evaluator(particles) for h in self.heads]
        return lambda x, weights: self.combine([f(x, weights) for f in fields])

    def bounds(self, radius: float) -> AttentionBounds:
        """Sum of the heads' bounds, scaled by |W_h|."""
        total = AttentionBounds(0.0, 0.0, 0.0)
        for i, h in enumerate(self.heads):
            norm = 1.0 if self.outputs_t is None else spectral_norm(self.outputs_t[i], "outputs")
            total = total + h.bounds(radius).scaled(norm)
        return total

    def combine(self, parts: list[Any]) -> Tensor:
        """sum_h W_h v_h of the heads' velocities (..., n, d)."""
        total = None
        for i, part in enumerate(parts):
            if self.outputs_t is not None:
                part = part @ cast_like(self.outputs_t[i], part, "outputs").mT
            total = part if total is None else total + part
        assert total is not None
        return total
