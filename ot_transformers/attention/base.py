"""The attention map Gamma_mu: what every kind provides."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any

from torch import Tensor

from ..arrays import Array, ArrayLike, Kind, as_matrix, cast_like, common_kind, to_kind
from ..errors import InvalidInput, NotGaussianPreserving
from ..measures import AffineVelocity, Gaussian, Particles, as_gaussian, as_particles

__all__ = ["Attention", "Field", "parameter"]

Field = Callable[[Tensor, Tensor], Tensor]
"""(x (..., n, d), weights (..., n)) -> velocity (..., n, d)."""


class Attention(ABC):
    """A map mu -> Gamma_mu, the velocity field of the Transformer PDE d/dt mu + div(mu Gamma_mu) = 0.

    A new kind is one class with `raw_velocity` (tensors in, tensors out, trusting its caller) and, where it
    keeps Gaussian laws Gaussian, `raw_affine`.
    """

    kind: Kind = "numpy"
    dim: int | None = None
    """Dimension of the tokens it acts on; None where any will do."""

    @abstractmethod
    def raw_velocity(self, x: Tensor, weights: Tensor) -> Tensor:
        """Gamma_mu at the tokens of mu = sum_i w_i delta_{x_i}: (..., n, d), tensors that are known to be right."""

    def raw_affine(self, mean: Tensor, factor: Tensor) -> tuple[Tensor, Tensor]:
        """(b, M) with Gamma_N(m, L L^T)(x) = b + M (x - m), from mean (..., d) and factor L (..., d, r)."""
        raise NotGaussianPreserving(
            f"{type(self).__name__} does not keep Gaussian laws Gaussian: it has no affine closure. "
            "Use its velocity on particles"
        )

    @property
    def preserves_gaussians(self) -> bool:
        """Whether the flow keeps Gaussian laws Gaussian, so that `affine` exists."""
        return type(self).raw_affine is not Attention.raw_affine

    def evaluator(self) -> Field:
        """A velocity function to be called along one flow; kinds that iterate carry a warm start in it."""
        return self.raw_velocity

    def velocity(self, particles: Particles | ArrayLike) -> Array:
        """Gamma_mu at the tokens of mu, (..., n, d).

        Parameters
        ----------
        particles : Particles, or an array (..., n, d) read as an unweighted cloud

        Raises
        ------
        InvalidInput
            Dimension or device that does not match the parameters.
        """
        p = as_particles(particles)
        self._check_dim(p.dim, "particles")
        return to_kind(self.raw_velocity(p.x_t, p.weights_t), common_kind(p, self))

    def affine(self, gaussian: Gaussian) -> AffineVelocity:
        """Gamma_N(m, S)(x) = b + M (x - m) as an `AffineVelocity`.

        Raises
        ------
        NotGaussianPreserving
            The kind does not keep Gaussian laws Gaussian.
        InvalidInput
            Dimension or device that does not match the parameters.
        """
        g = as_gaussian(gaussian)
        self._check_dim(g.dim, "gaussian")
        b, M = self.raw_affine(g.mean_t, g.factor_t)
        return AffineVelocity(b, M, common_kind(g, self))

    def _check_dim(self, d: int, name: str) -> None:
        if self.dim is not None and self.dim != d:
            raise InvalidInput(
                f"{name} has dimension {d}, {type(self).__name__} acts on dimension {self.dim}"
            )


def parameter(value: ArrayLike, name: str, *, square: bool = True) -> tuple[Tensor, Kind]:
    """Validate one parameter matrix of an attention, (..., d, d) (or (..., k, d) where not square)."""
    return as_matrix(value, name, square=square)


def cast_parameters(like: Tensor, **parameters: Tensor) -> tuple[Any, ...]:
    """Bring parameters to the dtype of the data; with particles, give them one more axis to broadcast over."""
    return tuple(cast_like(p, like, name) for name, p in parameters.items())
