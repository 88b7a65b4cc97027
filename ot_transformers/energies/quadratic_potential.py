"""Quadratic potentials, in closed form on every measure."""

from __future__ import annotations

from torch import Tensor

from ..arrays import Array, ArrayLike, as_matrix, as_tensor, cast_like, common_kind, to_kind
from ..errors import InvalidInput
from ..spd import symmetrise
from .base import Energy

__all__ = ["QuadraticPotential"]


class QuadraticPotential(Energy):
    """F(mu) = E[x^T H x / 2 + c^T x]; on a Gaussian (tr(H S) + m^T H m) / 2 + c^T m, in any dimension.

    Parameters
    ----------
    H : array (d, d)
        Only its symmetric part acts.
    c : array (d,), optional

    Raises
    ------
    InvalidInput
        H not square, c of another dimension.
    """

    def __init__(self, H: ArrayLike, c: ArrayLike | None = None) -> None:
        matrix, _ = as_matrix(H, "H", square=True)
        self._H = symmetrise(matrix)
        self.dim = int(self._H.shape[-1])
        shift = self._H.new_zeros(self.dim) if c is None else as_tensor(c, "c")[0]
        self._c = shift.reshape(1) if shift.ndim == 0 else shift
        if self._c.shape[-1] != self.dim:
            raise InvalidInput(f"c has dimension {self._c.shape[-1]}, H acts on dimension {self.dim}")
        self.kind = common_kind(H, c)

    @property
    def H(self) -> Array:
        """The symmetric matrix, (d, d)."""
        return to_kind(self._H, self.kind)

    @property
    def c(self) -> Array:
        """The linear part, (d,)."""
        return to_kind(self._c, self.kind)

    def raw_particles(self, x: Tensor, weights: Tensor) -> Tensor:
        """sum_i w_i (x_i^T H x_i / 2 + c^T x_i)."""
        H, c = cast_like(self._H, x, "H"), cast_like(self._c, x, "c")
        return (weights * (x * (0.5 * x @ H + c)).sum(-1)).sum(-1)

    def raw_particles_gradient(self, x: Tensor, weights: Tensor) -> Tensor:
        """H x + c at the tokens."""
        return x @ cast_like(self._H, x, "H") + cast_like(self._c, x, "c")

    def raw_gaussian(self, mean: Tensor, cov: Tensor) -> Tensor:
        """(tr(H S) + m^T H m) / 2 + c^T m."""
        H, c = cast_like(self._H, mean, "H"), cast_like(self._c, mean, "c")
        bilinear = (mean.unsqueeze(-2) @ H).squeeze(-2)
        return 0.5 * (H * cov).sum((-2, -1)) + (mean * (0.5 * bilinear + c)).sum(-1)

    def raw_gaussian_gradient(self, mean: Tensor, cov: Tensor) -> tuple[Tensor, Tensor]:
        """(H m + c, H / 2)."""
        H, c = cast_like(self._H, mean, "H"), cast_like(self._c, mean, "c")
        return (mean.unsqueeze(-2) @ H).squeeze(-2) + c, (0.5 * H).expand(cov.shape)
