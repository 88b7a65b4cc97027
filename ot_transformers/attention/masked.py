"""Masked (causal) attention on tokens with positions."""

from __future__ import annotations

import math
from functools import partial

import torch
from torch import Tensor

from ..arrays import Array, ArrayLike, broadcast_batch, common_kind, describe, readable, to_kind
from ..errors import InvalidInput
from ..measures import Particles, PositionedParticles
from ..numerics.streaming import block_rows, blockwise, stream
from .base import Attention, Field
from .multihead import MultiHeadAttention
from .schedule import Schedule

__all__ = ["MaskedAttention"]


class MaskedAttention(Attention):
    r"""Any attention with mu restricted to positions s' <= s: Gamma(s, x) = Gamma_{mu|s' <= s}(x).

    Softmax and L2 restrict numerator and denominator, so the mass of the restriction cancels; linear,
    unnormalised and sigmoid attention see the restricted measure as it is, of mass mu(s' <= s). Tokens of
    equal position attend to one another. With distinct positions, softmax is a decoder's causal attention.

    Parameters
    ----------
    attention : Attention
        Softmax, L2, linear, unnormalised, sigmoid, or a multi-head of these.

    Raises
    ------
    InvalidInput
        Sinkhorn: a causal mask has no total support (its only doubly stochastic matrix is the identity), so
        that the Sinkhorn iteration has no limit of full support and the attention is not defined.

    Notes
    -----
    The position marginal must have an atom at 0 (the attention sink of the paper): otherwise the first
    positions have nothing to attend to. Memory is O(n d): blocks of tokens against the prefix they see.

    References
    ----------
    Castin, Ablin, Carrillo, Peyré, arXiv 2501.18322, section 2 (masked attention).
    """

    _no_bounds = "its constant depends on the mass at position 0 as well"

    def __init__(self, attention: Attention) -> None:
        if not isinstance(attention, Attention) or isinstance(attention, MaskedAttention | Schedule):
            raise InvalidInput(f"attention must be one attention to mask, got {describe(attention)}")
        if not attention.maskable:
            raise InvalidInput(
                f"attention {type(attention).__name__} cannot be masked: a causal mask has no total support, "
                "its only doubly stochastic matrix is the identity"
            )
        self.attention, self.dim, self.kind = attention, attention.dim, attention.kind
        self.batch_shape = attention.batch_shape

    def raw_rows(self, points: Tensor, x: Tensor, weights: Tensor) -> Tensor:
        """Gamma of the masked kind: the mask is in the weights already."""
        return self.attention.raw_rows(points, x, weights)

    def raw_field(self, points: Tensor, x: Tensor, weights: Tensor) -> Tensor:
        """Not defined without positions."""
        raise InvalidInput("particles need positions: masked attention acts on PositionedParticles(x, s)")

    def velocity(self, particles: Particles | ArrayLike) -> Array:
        """Gamma at each token, (..., n, d), from `PositionedParticles`.

        Raises
        ------
        InvalidInput
            Tokens without positions, no mass at position 0, or a dimension that does not match.
        """
        p = self._positioned(particles)
        self._check(p, "particles")
        return to_kind(self.evaluator(p)(p.x_t, p.weights_t), common_kind(p, self))

    def field(self, particles: Particles | ArrayLike, points: ArrayLike, s: ArrayLike | None = None) -> Array:
        """Gamma at arbitrary points (..., k, d) of positions s (..., k): each sees the tokens with s_j <= s.

        Raises
        ------
        InvalidInput
            No positions, or positions outside [0, 1]; tokens as for `velocity`.
        """
        p = self._positioned(particles)
        self._check(p, "particles")
        if s is None:
            raise InvalidInput("s is missing: give the positions of the points, an array (..., k) in [0, 1]")
        z = PositionedParticles(points, s)
        if z.dim != p.dim:
            raise InvalidInput(f"points has dimension {z.dim}, particles has dimension {p.dim}")
        broadcast_batch(
            [z.batch_shape, p.batch_shape, self.batch_shape], ["points", "particles", "attention"]
        )
        row = z.s_t.to(p.dtype).unsqueeze(-1)
        rows = partial(_masked_rows, self.attention)
        value = blockwise(rows, (z.x_t.to(p.dtype), row), (p.x_t, p.s_t, p.weights_t))
        return to_kind(value, common_kind(p, points, s, self))

    def evaluator(self, particles: Particles | None = None) -> Field:
        """A velocity for tokens that keep the positions of `particles`."""
        p = self._positioned(particles)
        s, order = torch.sort(p.s_t, dim=-1, stable=True)
        back = torch.argsort(order, dim=-1)
        known = readable(s)
        ties = not known or bool((s.diff(dim=-1) == 0).any())
        in_order = known and bool((order == torch.arange(p.n, device=order.device)).all())

        def velocity(x: Tensor, weights: Tensor) -> Tensor:
            if in_order:
                return self._sorted(self.attention, x, s, weights, ties)
            y, w = _permute(x, order), _permute(weights.unsqueeze(-1), order).squeeze(-1)
            return _permute(self._sorted(self.attention, y, s, w, ties), back)

        return velocity

    def _sorted(self, kind: Attention, x: Tensor, s: Tensor, weights: Tensor, ties: bool) -> Tensor:
        """Gamma at tokens in order of position, each head of a multi-head by its own fastest way."""
        if isinstance(kind, MultiHeadAttention):
            return kind.combine([self._sorted(h, x, s, weights, ties) for h in kind.heads])
        out = kind.raw_causal(x, weights, s if ties else None) if readable(s) else None
        return self._blocks(kind, x, s, weights) if out is None else out

    @staticmethod
    def _blocks(kind: Attention, x: Tensor, s: Tensor, weights: Tensor) -> Tensor:
        """Blocks of rows against the prefix of tokens that some row of the block sees."""
        n, rows = x.shape[-2], partial(_masked_rows, kind)
        batch = torch.broadcast_shapes(x.shape[:-2], kind.batch_shape)
        step = block_rows(n, math.prod(batch) * n * n, x, weights)
        if step == n:
            return rows(x, s.unsqueeze(-1), x, s, weights)

        def block(i: int) -> tuple[Tensor, ...]:
            j = min(i + step, n)
            seen = n if not readable(s) else int((s <= s[..., j - 1 : j]).sum(-1).max())
            return x[..., i:j, :], s[..., i:j, None], x[..., :seen, :], s[..., :seen], weights[..., :seen]

        return stream(rows, (block(i) for i in range(0, n, step)), n)

    @staticmethod
    def _positioned(particles: object) -> PositionedParticles:
        if not isinstance(particles, PositionedParticles):
            raise InvalidInput(f"particles must be PositionedParticles(x, s), got {describe(particles)}")
        p = particles
        if readable(p.s_t) and readable(p.weights_t):
            # A token of weight 0 is no atom, and each member of a batch needs one of its own.
            lowest = torch.where(p.weights_t > 0, p.s_t, torch.inf).detach().amin(-1)
            bad = torch.nonzero(lowest > 0)
            if len(bad):
                index = tuple(bad[0].tolist())
                where = f"in member {index[0] if len(index) == 1 else index} " if index else ""
                raise InvalidInput(
                    f"particles must have mass at position 0 (the attention sink); {where}the smallest position "
                    f"with mass is {float(lowest[index]):g}: without it the first tokens have nothing to attend to"
                )
        return p


def _permute(x: Tensor, order: Tensor) -> Tensor:
    """Reorder rows (dimension -2) of x (..., n, r), which may have more batch dimensions than `order`."""
    order = order.reshape((1,) * (x.ndim - 1 - order.ndim) + order.shape)
    return torch.take_along_dim(x, order.unsqueeze(-1), -2)


def _masked_rows(
    kind: Attention, points: Tensor, row: Tensor, x: Tensor, s: Tensor, weights: Tensor
) -> Tensor:
    """Gamma at points of positions `row` (..., k, 1), each against the tokens with s_j <= its position."""
    visible = s.unsqueeze(-2) <= row
    return kind.raw_rows(points, x, torch.where(visible, weights.unsqueeze(-2), 0.0))
