"""What a metric on measures provides, and the result types of geodesics and proximal steps."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass, field, fields, is_dataclass, replace
from typing import Any, Protocol

import torch
from torch import Tensor

from ..arrays import Array, Kind, to_kind, view_of
from ..errors import InvalidInput
from ..measures import Measure

__all__ = ["EnergyLike", "Geodesic", "Metric", "ProximalResult", "joined_step", "shown"]


class EnergyLike(Protocol):
    """What a metric needs of an energy (floor 2 rooms do not import one another)."""

    dim: int | None

    def raw_particles(self, x: Tensor, weights: Tensor) -> Tensor:
        """F on particles."""
        ...

    def raw_gaussian(self, mean: Tensor, cov: Tensor) -> Tensor:
        """F on a Gaussian."""
        ...

    def raw_particles_gradient(self, x: Tensor, weights: Tensor) -> Tensor:
        """Wasserstein gradient at the tokens."""
        ...

    def raw_particles_gradient_scaled(self, x: Tensor, weights: Tensor, log_scale: Tensor) -> Tensor:
        """The same times e^{-log_scale_i}."""
        ...

    def raw_particles_value_gradient(self, x: Tensor, weights: Tensor) -> tuple[Tensor, Tensor]:
        """F and its Wasserstein gradient at once."""
        ...

    def raw_gaussian_gradient(self, mean: Tensor, cov: Tensor) -> tuple[Tensor, Tensor]:
        """(dF/dm, dF/dS)."""
        ...

    def raw_gaussian_gradient_of_factor(self, mean: Tensor, factor: Tensor) -> tuple[Tensor, Tensor]:
        """The same at N(m, L L^T)."""
        ...


@dataclass(frozen=True, eq=False)
class Geodesic:
    """A constant-speed minimising (or, `converged` False, merely computed) geodesic between two measures.

    Attributes
    ----------
    length : array (...)
        Its length, the distance where it is minimising (not squared).
    error : array (...)
        Estimated error of the length; rounding level for closed forms.
    converged : bool
        Whether the computation met its tolerance.
    at : callable
        t in [0, 1] -> the measure at t.
    details : dict
        What the method has to add (iterations, energy drift, matching, ...).
    """

    length: Array
    error: Array
    converged: bool
    at: Callable[[float], Measure]
    details: dict[str, Any] = field(default_factory=dict)


def shown(value: Any, kind: Kind) -> Any:
    """The tensors in `details`, however deep, in the kind of the measures (functions give theirs so, too)."""
    if isinstance(value, Tensor):
        return view_of(value, kind)
    if isinstance(value, dict):
        return {k: shown(v, kind) for k, v in value.items()}
    if isinstance(value, list | tuple):
        return type(value)(shown(v, kind) for v in value)
    if is_dataclass(value) and not isinstance(value, type):
        return replace(value, **{f.name: shown(getattr(value, f.name), kind) for f in fields(value)})
    if callable(value):
        return lambda *args: shown(value(*args), kind)
    return value


@dataclass(frozen=True, eq=False)
class ProximalResult:
    """One JKO (proximal) step argmin F(nu) + d(mu, nu)^2 / (2 tau).

    Attributes
    ----------
    measure : the minimiser found
    converged : whether the first-order condition is met within tolerance
    gradient_norm : norm of the gradient of the inner problem at `measure`, relative as the method states
    n_iter : inner iterations
    energy_before, energy_after : F(mu), F(measure)
    """

    measure: Measure
    converged: bool
    gradient_norm: float
    n_iter: int
    energy_before: float
    energy_after: float


def joined_step(parts: list[ProximalResult], measure: Measure) -> ProximalResult:
    """One JKO step of a batch from those of its members: the worst gradient norm, arrays of energies.

    `measure` is the batch of the measures found.
    """
    before, after = (
        to_kind(
            torch.tensor([getattr(p, name) for p in parts], dtype=torch.float64).reshape(measure.batch_shape),
            measure.kind,
        )
        for name in ("energy_before", "energy_after")
    )
    return ProximalResult(
        measure=measure,
        converged=all(p.converged for p in parts),
        gradient_norm=max(p.gradient_norm for p in parts),
        n_iter=max(p.n_iter for p in parts),
        energy_before=before,
        energy_after=after,
    )


class Metric(ABC):
    """A distance on measures; a Riemannian one also turns Wasserstein gradients into its own gradients."""

    @abstractmethod
    def distance(self, mu: Measure, nu: Measure) -> Array:
        """d(mu, nu), not squared, one number a batch member."""

    def geodesic(self, mu: Measure, nu: Measure) -> Geodesic:
        """The geodesic from mu to nu."""
        raise InvalidInput(f"{type(self).__name__} has no geodesics here")

    def inner(self, mu: Measure, v: Any, w: Any) -> Array:
        """The inner product of two tangents at mu."""
        raise InvalidInput(f"{type(self).__name__} has no inner product here")

    def raw_particles_riesz(self, x: Tensor, weights: Tensor, gradient: Tensor) -> Tensor:
        """Turn a Wasserstein gradient field at the tokens (..., n, d) into the gradient in this metric."""
        raise InvalidInput(f"{type(self).__name__} is not a Riemannian metric on particles")

    def raw_particles_steepest(self, energy: EnergyLike, x: Tensor, weights: Tensor) -> Tensor:
        """The gradient field of an energy in this metric at the tokens, (..., n, d)."""
        return self.raw_particles_riesz(x, weights, energy.raw_particles_gradient(x, weights))

    def raw_gaussian_riesz(self, mean: Tensor, cov: Tensor, g: Tensor, H: Tensor) -> tuple[Tensor, Tensor]:
        """Turn (dF/dm, dF/dS) into the gradient (b, M), the field x -> b + M (x - m), in this metric."""
        raise InvalidInput(f"{type(self).__name__} is not a Riemannian metric on Gaussians")

    def proximal(
        self,
        energy: EnergyLike,
        mu: Measure,
        tau: float,
        *,
        tol: float = 1e-9,
        max_iter: int = 200,
        warm_start: Measure | None = None,
    ) -> ProximalResult:
        """One JKO step argmin over nu of F(nu) + d(mu, nu)^2 / (2 tau)."""
        raise InvalidInput(f"{type(self).__name__} has no JKO step here")
