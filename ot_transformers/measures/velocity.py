"""Affine velocity fields: what a Gaussian-preserving dynamics does to a Gaussian."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from ..arrays import Array, ArrayLike, Kind, as_tensor, common_kind, to_kind, view_of
from ..errors import InvalidInput
from ..spd import symmetrise
from .gaussian import Gaussian

__all__ = ["AffineVelocity"]


@dataclass(frozen=True, eq=False)
class AffineVelocity:
    """The field x -> b + M (x - m) on a Gaussian N(m, S): dm/dt = b, dS/dt = M S + S M^T.

    Attributes
    ----------
    b_t : Tensor (..., d), kept as it is, or an array, which becomes one
        Velocity of the mean.
    M_t : Tensor (..., d, d)
        Linear part, acting on x - m.
    kind : "numpy" or "torch"
        What `.b` and `.M` are given as.
    """

    b_t: Tensor
    M_t: Tensor
    kind: Kind = "torch"

    def __post_init__(self) -> None:
        for name in ("b_t", "M_t"):
            value = getattr(self, name)
            if not isinstance(value, Tensor):  # built by a user, from NumPy arrays
                tensor, kind = as_tensor(value, name)
                object.__setattr__(self, name, tensor)
                object.__setattr__(self, "kind", kind)

    @property
    def b(self) -> Array:
        """Velocity of the mean, (..., d)."""
        return view_of(self.b_t, self.kind)

    @property
    def M(self) -> Array:
        """Linear part, (..., d, d)."""
        return view_of(self.M_t, self.kind)

    def at(self, x: ArrayLike, gaussian: Gaussian) -> Array:
        """Evaluate b + M (x - m) at points x (..., n, d)."""
        t, _ = as_tensor(x, "x", min_ndim=1)
        if t.shape[-1] != gaussian.dim:
            raise InvalidInput(f"x must have last dimension {gaussian.dim}, got shape {tuple(t.shape)}")
        centred = t - gaussian.mean_t.unsqueeze(-2)
        value = self.b_t.unsqueeze(-2) + centred @ self.M_t.mT
        return to_kind(value, common_kind(x, self))

    def cov_velocity(self, gaussian: Gaussian) -> Array:
        """dS/dt = M S + S M^T, (..., d, d)."""
        return to_kind(2.0 * symmetrise(self.M_t @ gaussian.cov_t), self.kind)
