"""Token clouds with positions in [0, 1], for masked attention."""

from __future__ import annotations

from torch import Tensor

from ..arrays import Array, ArrayLike, Kind, as_tensor, broadcast_batch, common_kind, readable, view_of
from ..errors import InvalidInput
from .particles import Particles

__all__ = ["PositionedParticles"]


class PositionedParticles(Particles):
    """A discrete measure sum_i w_i delta_{(s_i, x_i)} on [0, 1] x R^d: tokens with positions.

    Masked attention lets token i see the tokens with s_j <= s_i. The position marginal must have an atom at
    0 (the attention sink); tokens of equal position see one another.

    Parameters
    ----------
    x : array (..., n, d)
        Tokens.
    s : array (..., n)
        Positions in [0, 1].
    weights : array (..., n), optional
        As in `Particles`.

    Raises
    ------
    InvalidInput
        Positions outside [0, 1] or of the wrong shape, and whatever `Particles` rejects.
    """

    __slots__ = ("_s",)

    _s: Tensor

    def __init__(self, x: ArrayLike, s: ArrayLike, weights: ArrayLike | None = None) -> None:
        super().__init__(x, weights)
        t, _ = as_tensor(s, "s", min_ndim=1, keep=True)
        if t.shape[-1] != self.n:
            raise InvalidInput(f"s has {t.shape[-1]} positions, x has {self.n} tokens")
        if t.device != self.device:
            raise InvalidInput(f"x is on device {self.device}, s on {t.device}: move one of them")
        if readable(t) and bool(((t < 0) | (t > 1)).any()):
            raise InvalidInput(
                f"s must lie in [0, 1], got values from {float(t.min()):g} to {float(t.max()):g}"
            )
        batch = broadcast_batch([self.batch_shape, t.shape[:-1]], ["x", "s"])
        object.__setattr__(self, "_x", self._x.expand(*batch, self.n, self.dim))
        object.__setattr__(self, "_weights", self._weights.expand(*batch, self.n))
        object.__setattr__(self, "_s", t.to(self.dtype).expand(*batch, self.n))
        object.__setattr__(self, "kind", common_kind(x, s, weights))

    def moved(self, x: Tensor) -> PositionedParticles:
        """Return the same positions and weights on other tokens, from tensors known to be right.

        The tokens may have more batch dimensions: the positions and weights are then those of every member.
        """
        return self._trusted(x, self._weights, self._s, self.kind, self.uniform)

    @classmethod
    def _trusted(cls, x: Tensor, w: Tensor, s: Tensor, kind: Kind, uniform: bool) -> PositionedParticles:
        self = cls.__new__(cls)
        # Expanded, so that an index of the batch is never one of the tokens.
        self._freeze(x, w.expand(x.shape[:-1]), kind, uniform)
        object.__setattr__(self, "_s", s.expand(x.shape[:-1]))
        return self

    def __getstate__(self) -> tuple[Tensor, Tensor, Kind, bool, Tensor]:  # type: ignore[override]
        return (*super().__getstate__(), self._s)

    def __setstate__(self, state: tuple[Tensor, Tensor, Kind, bool, Tensor]) -> None:  # type: ignore[override]
        super().__setstate__(state[:4])
        object.__setattr__(self, "_s", state[4])

    @property
    def s_t(self) -> Tensor:
        """Positions as a tensor (..., n)."""
        return self._s

    @property
    def s(self) -> Array:
        """Positions, (..., n)."""
        return view_of(self._s, self.kind)

    def __getitem__(self, index: int | slice | tuple[int | slice, ...]) -> PositionedParticles:
        """Take members of a batch."""
        index = index if isinstance(index, tuple) else (index,)
        plain = super().__getitem__(index)
        return self._trusted(plain.x_t, plain.weights_t, self._s[index], self.kind, self.uniform)
