"""Quadratic potentials, in closed form on every measure."""

from __future__ import annotations

from torch import Tensor

from ..arrays import ArrayLike, ArrayView, as_matrix, as_tensor, cast_like, common_kind
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

    H = ArrayView("The symmetric matrix, (d, d).")
    c = ArrayView("The linear part, (d,).")

    def __init__(self, H: ArrayLike, c: ArrayLike | None = None) -> None:
        matrix, _ = as_matrix(H, "H", square=True)
        self.H_t = symmetrise(matrix)
        self.dim = int(self.H_t.shape[-1])
        shift = self.H_t.new_zeros(self.dim) if c is None else as_tensor(c, "c", keep=True)[0]
        self.c_t = shift.reshape(1) if shift.ndim == 0 else shift
        if self.c_t.shape[-1] != self.dim:
            raise InvalidInput(f"c has dimension {self.c_t.shape[-1]}, H acts on dimension {self.dim}")
        self.kind = common_kind(H, c)

    def raw_particles(self, x: Tensor, weights: Tensor) -> Tensor:
        """sum_i w_i (x_i^T H x_i / 2 + c^T x_i)."""
        H, c = cast_like(self.H_t, x, "H"), cast_like(self.c_t, x, "c")
        return (weights * (x * (0.5 * x @ H + c)).sum(-1)).sum(-1)

    def raw_particles_gradient(self, x: Tensor, weights: Tensor) -> Tensor:
        """H x + c at the tokens."""
        return x @ cast_like(self.H_t, x, "H") + cast_like(self.c_t, x, "c")

    def raw_gaussian(self, mean: Tensor, cov: Tensor) -> Tensor:
        """(tr(H S) + m^T H m) / 2 + c^T m."""
        H, c = cast_like(self.H_t, mean, "H"), cast_like(self.c_t, mean, "c")
        bilinear = (mean.unsqueeze(-2) @ H).squeeze(-2)
        return 0.5 * (H * cov).sum((-2, -1)) + (mean * (0.5 * bilinear + c)).sum(-1)

    def raw_gaussian_gradient(self, mean: Tensor, cov: Tensor) -> tuple[Tensor, Tensor]:
        """(H m + c, H / 2)."""
        H, c = cast_like(self.H_t, mean, "H"), cast_like(self.c_t, mean, "c")
        return (mean.unsqueeze(-2) @ H).squeeze(-2) + c, (0.5 * H).expand(cov.shape)
