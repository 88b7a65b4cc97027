"""The attention map Gamma_mu: what every kind provides."""

from __future__ import annotations

import copy
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from typing import Any, ClassVar

import torch
from torch import Tensor

from ..arrays import (
    Array,
    ArrayLike,
    Kind,
    as_matrix,
    as_scalar,
    as_tensor,
    broadcast_batch,
    common_kind,
    to_kind,
)
from ..errors import InvalidInput, NotGaussianPreserving
from ..measures import AffineVelocity, Gaussian, Measure, Particles, as_gaussian, as_particles
from ..numerics.streaming import blockwise
from .bounds import AttentionBounds

__all__ = ["Attention", "Field", "parameter", "score_matrix", "spectral_norm"]

Field = Callable[[Tensor, Tensor], Tensor]
"""(x (..., n, d), weights (..., n)) -> velocity (..., n, d)."""


class Attention(ABC):
    """A map mu -> Gamma_mu, the velocity field of the Transformer PDE d/dt mu + div(mu Gamma_mu) = 0.

    A new kind is one class with `raw_rows` (the formula on a block of points, tensors in and out) and, where
    it keeps Gaussian laws Gaussian, `raw_affine`. Kinds with a faster way override `raw_velocity`. Parameters are
    kept as tensors `A_t`; `A = ArrayView("...")` in the class shows them in the kind they were given.
    """

    kind: Kind = "numpy"
    dim: int | None = None
    """Dimension of the tokens it acts on; None where any will do."""
    batch_shape: tuple[int, ...] = ()
    """Batch dimensions of the parameters, which broadcast with those of the measure."""
    parameters: ClassVar[Mapping[str, int]] = {"A": 2, "V": 2}
    """Names of the parameters that may be batched, with the number of dimensions of one of them."""
    maskable: ClassVar[bool] = True
    """Whether Gamma makes sense on a measure that depends on the point (`MaskedAttention`)."""

    @abstractmethod
    def raw_rows(self, points: Tensor, x: Tensor, weights: Tensor) -> Tensor:
        """Gamma at points (..., k, d) of measures sum_j w_ij delta_{x_j} that may differ from row to row.

        `weights` is (..., 1, n) or (..., k, n), 0 for absent tokens; the weights of a row may sum to less
        than 1 (masking restricts the measure without renormalising it). Returns (..., k, d).
        """

    def raw_velocity(self, x: Tensor, weights: Tensor) -> Tensor:
        """Gamma_mu at the tokens of mu = sum_i w_i delta_{x_i}, (..., n, d); trusts its caller."""
        return self.raw_field(x, x, weights)

    def raw_field(self, points: Tensor, x: Tensor, weights: Tensor) -> Tensor:
        """Gamma_mu at other points (..., k, d), streaming over blocks of points."""
        return blockwise(self.raw_rows, (points,), (x, weights.unsqueeze(-2)))

    def raw_affine(self, mean: Tensor, factor: Tensor) -> tuple[Tensor, Tensor]:
        """(b, M) with Gamma_N(m, L L^T)(x) = b + M (x - m), from mean (..., d) and factor L (..., d, r)."""
        raise NotGaussianPreserving(
            f"{type(self).__name__} does not keep Gaussian laws Gaussian: it has no affine closure. "
            "Use its velocity on particles"
        )

    def bounds(self, radius: float) -> AttentionBounds:
        """Bounds on the ball of a radius, the ingredients of `stability_constant`.

        Raises
        ------
        InvalidInput
            The kind has no explicit constants.
        """
        raise InvalidInput(
            f"attention {type(self).__name__} has no explicit stability constant ({self._no_bounds})"
        )

    _no_bounds: ClassVar[str] = "its class does not give `bounds`"

    def member(self, index: tuple[int, ...], batch_shape: tuple[int, ...]) -> Attention:
        """The attention of one member of a batch of a shape that the parameters broadcast with."""
        one = copy.copy(self)
        one.batch_shape = ()
        for name, ndim in self.parameters.items():
            name = f"{name}_t" if hasattr(self, f"{name}_t") else name
            value: Tensor = getattr(self, name)
            setattr(one, name, value.expand(*batch_shape, *value.shape[value.ndim - ndim :])[index])
        return one

    @property
    def preserves_gaussians(self) -> bool:
        """Whether the flow keeps Gaussian laws Gaussian, so that `affine` exists."""
        return type(self).raw_affine is not Attention.raw_affine

    def raw_causal(self, x: Tensor, weights: Tensor, s: Tensor | None = None) -> Tensor | None:
        """Gamma at token i of the measure restricted to tokens 0..i, where there is a faster way; else None.

        With positions s (..., n), ascending: restricted to s_j <= s_i. Some token of the first position has
        positive weight.
        """
        return None

    def evaluator(self, particles: Particles | None = None) -> Field:
        """A velocity function to be called along one flow that starts at `particles`.

        Kinds that iterate carry a warm start in it; masked ones take the positions from `particles`.
        """
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
        self._check(p, "particles")
        return to_kind(self.evaluator(p)(p.x_t, p.weights_t), common_kind(p, self))

    def field(self, particles: Particles | ArrayLike, points: ArrayLike) -> Array:
        """Gamma_mu at arbitrary points (..., k, d).

        Raises
        ------
        InvalidInput
            Dimension or device that does not match, or a kind that is defined at the tokens alone.
        """
        p = as_particles(particles)
        self._check(p, "particles")
        z, _ = as_tensor(points, "points", min_ndim=2)
        if z.shape[-1] != p.dim:
            raise InvalidInput(f"points has dimension {z.shape[-1]}, particles has dimension {p.dim}")
        broadcast_batch([z.shape[:-2], p.batch_shape, self.batch_shape], ["points", "particles", "attention"])
        if z.device != p.device:
            raise InvalidInput(f"points is on device {z.device}, the measure on {p.device}: move one of them")
        value = self.raw_field(z.to(p.dtype), p.x_t, p.weights_t)
        return to_kind(value, common_kind(p, points, self))

    def affine(self, gaussian: Gaussian) -> AffineVelocity:
        """Gamma_N(m, S)(x) = b + M (x - m) as an `AffineVelocity`.

        Raises
        ------
        NotGaussianPreserving
            The kind does not keep Gaussian laws Gaussian.
        InvalidInput
            Dimension or device that does not match the parameters.
        """
        if not self.preserves_gaussians:
            Attention.raw_affine(self, torch.empty(0), torch.empty(0))
        g = as_gaussian(gaussian)
        self._check(g, "gaussian")
        b, M = self.raw_affine(g.mean_t, g.factor_t)
        return AffineVelocity(b, M, common_kind(g, self))

    def _check(self, measure: Measure, name: str) -> None:
        self._check_dim(measure.dim, name)
        broadcast_batch([measure.batch_shape, self.batch_shape], [name, type(self).__name__])

    def _check_dim(self, d: int, name: str) -> None:
        if self.dim is not None and self.dim != d:
            raise InvalidInput(
                f"{name} has dimension {d}, {type(self).__name__} acts on dimension {self.dim}"
            )


def parameter(value: ArrayLike, name: str, *, square: bool = True) -> tuple[Tensor, Kind]:
    """Validate one parameter matrix of an attention, (..., d, d) (or (..., k, d) where not square)."""
    return as_matrix(value, name, square=square, keep=True)


def score_matrix(Q: ArrayLike, K: ArrayLike, scale: Any = 1.0) -> Tensor:
    """A = scale K^T Q from query and key matrices (..., k, d), validated."""
    q, k = query_key(Q, K)
    return as_scalar(scale, "scale") * k.mT @ q


def query_key(Q: ArrayLike, K: ArrayLike) -> tuple[Tensor, Tensor]:
    """Validate query and key matrices (..., k, d) and bring them to one dtype."""
    q, _ = parameter(Q, "Q", square=False)
    k, _ = parameter(K, "K", square=False)
    if q.shape[-2:] != k.shape[-2:]:
        raise InvalidInput(
            f"Q and K must have equal shapes (..., k, d), got {tuple(q.shape)}, {tuple(k.shape)}"
        )
    broadcast_batch([q.shape[:-2], k.shape[:-2]], ["Q", "K"])
    dtype = torch.promote_types(q.dtype, k.dtype)
    return q.to(dtype), k.to(dtype)


def check_pair(A: Tensor, V: Tensor, name: str = "A") -> tuple[int, tuple[int, ...]]:
    """Check that the score matrix and V act on one dimension; return it and the common batch shape."""
    d = int(A.shape[-1])
    if V.shape[-1] != d:
        raise InvalidInput(f"{name} acts on dimension {d}, V on dimension {V.shape[-1]}")
    return d, broadcast_batch([A.shape[:-2], V.shape[:-2]], [name, "V"])


def spectral_norm(t: Tensor, name: str) -> float:
    """Largest singular value of one matrix; a batch of parameters has no single constant."""
    if t.ndim != 2:
        raise InvalidInput(f"attention has a batch of {name} {tuple(t.shape)}: bounds are for one at a time")
    return float(torch.linalg.matrix_norm(t.detach().double(), 2))
