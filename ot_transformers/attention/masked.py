"""Masked (causal) attention on tokens with positions."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from ..arrays import Array, ArrayLike, common_kind, describe, readable, to_kind
from ..errors import InvalidInput
from ..measures import Particles, PositionedParticles
from ..numerics.streaming import BLOCK, wants_derivative
from ..numerics.tilted import safe_log
from .base import Attention, Field

__all__ = ["MaskedAttention"]


class MaskedAttention(Attention):
    r"""Any attention with mu restricted to the positions s' <= s of the token: Gamma(s, x) = Gamma_{mu|s' <= s}(x).

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
        if not isinstance(attention, Attention) or isinstance(attention, MaskedAttention):
            raise InvalidInput(f"attention must be an attention to mask, got {describe(attention)}")
        if not attention.maskable:
            raise InvalidInput(
                f"attention {type(attention).__name__} cannot be masked: a causal mask has no total support, its "
                "only doubly stochastic matrix is the identity"
            )
        self.attention, self.dim, self.kind = attention, attention.dim, attention.kind

    def raw_rows(self, points: Tensor, x: Tensor, log_weights: Tensor) -> Tensor:
        """Gamma of the masked kind: the mask is in the weights already."""
        return self.attention.raw_rows(points, x, log_weights)

    def raw_field(self, points: Tensor, x: Tensor, weights: Tensor) -> Tensor:
        """Not defined without positions."""
        raise InvalidInput(
            "points need positions: masked attention is defined at the tokens of PositionedParticles"
        )

    def velocity(self, particles: Particles | ArrayLike) -> Array:
        """Gamma at each token, (..., n, d), from `PositionedParticles`.

        Raises
        ------
        InvalidInput
            Tokens without positions, no mass at position 0, or a dimension that does not match.
        """
        p = self._positioned(particles)
        self._check_dim(p.dim, "particles")
        return to_kind(self.evaluator(p)(p.x_t, p.weights_t), common_kind(p, self))

    def evaluator(self, particles: Particles | None = None) -> Field:
        """A velocity for tokens that keep the positions of `particles`."""
        p = self._positioned(particles)
        s, order = torch.sort(p.s_t, dim=-1, stable=True)
        back = torch.argsort(order, dim=-1)
        ties = bool((s.diff(dim=-1) == 0).any()) if readable(s) else True

        def velocity(x: Tensor, weights: Tensor) -> Tensor:
            y = torch.take_along_dim(x, order.unsqueeze(-1), -2)
            w = torch.take_along_dim(weights, order, -1)
            out = None if ties else self.attention.raw_causal(y, w)
            if out is None:
                out = self._blocks(y, s, w)
            return torch.take_along_dim(out, back.unsqueeze(-1), -2)

        return velocity

    def _blocks(self, x: Tensor, s: Tensor, weights: Tensor) -> Tensor:
        """Blocks of rows against the prefix of tokens that some row of the block sees."""
        n, log_w = x.shape[-2], safe_log(weights).unsqueeze(-2)
        step = max(1, min(n, BLOCK // max(1, x.shape[:-2].numel() * n)))
        recompute = wants_derivative(x) and x.requires_grad and n > step
        parts = []
        for i in range(0, n, step):
            j = min(i + step, n)
            seen = n if not readable(s) else int((s <= s[..., j - 1 : j]).sum(-1).max())
            hidden = s[..., None, :seen] > s[..., i:j, None]
            rows = torch.where(hidden, -torch.inf, log_w[..., :seen])
            block = (x[..., i:j, :], x[..., :seen, :], rows)
            if recompute:
                parts.append(checkpoint(self.attention.raw_rows, *block, use_reentrant=False))
            else:
                parts.append(self.attention.raw_rows(*block))
        return torch.cat(parts, -2)

    @staticmethod
    def _positioned(particles: object) -> PositionedParticles:
        if not isinstance(particles, PositionedParticles):
            raise InvalidInput(f"particles must be PositionedParticles(x, s), got {describe(particles)}")
        p = particles
        if readable(p.s_t):
            mass = torch.where(p.s_t == 0, p.weights_t, 0.0).detach().sum(-1)
            if bool((mass <= 0).any()):
                raise InvalidInput(
                    f"particles must have mass at position 0 (the attention sink); the smallest position is "
                    f"{float(p.s_t.min()):g}: without it the first tokens have nothing to attend to"
                )
        return p
