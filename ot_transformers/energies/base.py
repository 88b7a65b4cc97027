"""Energies F(mu) on measures, their values and Wasserstein gradients; an algebra of sums and multiples."""

from __future__ import annotations

import copy
from abc import ABC
from collections.abc import Mapping
from typing import Any, ClassVar

import torch
from torch import Tensor

from ..arrays import Array, Kind, as_scalar, broadcast_batch, common_kind, own_index, to_kind
from ..errors import InvalidInput
from ..measures import AffineVelocity, Gaussian, Measure, Particles, as_measure
from ..spd import symmetrise

__all__ = ["Energy", "ScaledEnergy", "SumEnergy"]


class Energy(ABC):
    """A functional F of a probability measure.

    A new energy is one class with `raw_particles` and/or `raw_gaussian` (tensors in and out). The gradients
    default to autograd through those; a closed form overrides `raw_particles_gradient`,
    `raw_gaussian_gradient`.
    """

    kind: Kind = "numpy"
    dim: int | None = None
    batch_shape: tuple[int, ...] = ()
    """Batch dimensions of the parameters, which broadcast with those of the measure."""
    parameters: ClassVar[Mapping[str, int]] = {}
    """Names of the tensors that may be batched (`A_t`), with the number of dimensions of one of them."""
    finite_on_gaussians: bool = False
    """Whether F is known to be finite on every Gaussian: flows then need not ask at each step."""

    def raw_particles(self, x: Tensor, weights: Tensor) -> Tensor:
        """F(sum_i w_i delta_{x_i}), shape (...)."""
        raise InvalidInput(f"{type(self).__name__} is not defined on particles; give it a Gaussian")

    def raw_gaussian(self, mean: Tensor, cov: Tensor) -> Tensor:
        """F(N(m, S)), shape (...)."""
        raise InvalidInput(f"{type(self).__name__} is not defined on Gaussians; give it particles")

    def raw_particles_gradient(self, x: Tensor, weights: Tensor) -> Tensor:
        """The field grad(dF/dmu) at the tokens, (..., n, d): the gradient in x_i divided by w_i."""
        graph = torch.is_grad_enabled() and x.requires_grad
        with torch.enable_grad():
            y = x if x.requires_grad else x.detach().requires_grad_()
            (g,) = torch.autograd.grad(self.raw_particles(y, weights).sum(), y, create_graph=graph)
        return g / weights.unsqueeze(-1)

    def raw_particles_gradient_scaled(self, x: Tensor, weights: Tensor, log_scale: Tensor) -> Tensor:
        """e^{-log_scale_i} times the gradient at token i: energies of huge gradients override it to stay finite."""
        return torch.exp(-log_scale).unsqueeze(-1) * self.raw_particles_gradient(x, weights)

    def raw_particles_value_gradient(self, x: Tensor, weights: Tensor) -> tuple[Tensor, Tensor]:
        """F and its gradient field at once: energies in which they share work override it."""
        return self.raw_particles(x, weights), self.raw_particles_gradient(x, weights)

    def raw_gaussian_gradient(self, mean: Tensor, cov: Tensor) -> tuple[Tensor, Tensor]:
        """(g, H) = (dF/dm (..., d), dF/dS (..., d, d)): the Wasserstein gradient is g + 2 H (x - m)."""
        graph = torch.is_grad_enabled() and (mean.requires_grad or cov.requires_grad)
        with torch.enable_grad():
            m = mean if mean.requires_grad else mean.detach().requires_grad_()
            S = cov if cov.requires_grad else cov.detach().requires_grad_()
            value = self.raw_gaussian(m, S).sum()
            g, H = torch.autograd.grad(value, (m, S), create_graph=graph, materialize_grads=True)
        return g, symmetrise(H)

    def raw_gaussian_gradient_of_factor(self, mean: Tensor, factor: Tensor) -> tuple[Tensor, Tensor]:
        """The same at N(m, L L^T): energies that know better than to square a factor override it."""
        return self.raw_gaussian_gradient(mean, factor @ factor.mT)

    def member(self, index: tuple[int, ...], batch_shape: tuple[int, ...]) -> Energy:
        """The energy of one member of a batch of a shape that the parameters and the target broadcast with.

        Raises
        ------
        InvalidInput
            The class has a batch and does not name its `parameters`.
        """
        if not self.batch_shape:
            return self
        one: Any = copy.copy(self)
        one.batch_shape = ()
        for name, ndim in self.parameters.items():
            value: Tensor = getattr(self, name)
            setattr(one, name, value.expand(*batch_shape, *value.shape[value.ndim - ndim :])[index])
        target = getattr(self, "target", None)
        if target is not None:
            one.target = target[own_index(index, target.batch_shape)]
        elif not self.parameters:
            raise InvalidInput(
                f"energy {type(self).__name__} has a batch {self.batch_shape} and does not name its parameters: "
                "loop over the energies"
            )
        found: Energy = one
        return found

    def value(self, measure: Measure) -> Array:
        """F(mu), one number a batch member.

        Raises
        ------
        InvalidInput
            The energy is not defined on this kind of measure, or the dimension does not match.
        """
        mu = self._check(measure)
        if isinstance(mu, Gaussian):
            return to_kind(self.raw_gaussian(mu.mean_t, mu.cov_t), common_kind(mu, self))
        return to_kind(self.raw_particles(mu.x_t, mu.weights_t), common_kind(mu, self))

    def wasserstein_gradient(self, measure: Measure) -> Any:
        """The Wasserstein gradient grad(dF/dmu), the field whose negative descends F in W2.

        Returns
        -------
        array (..., n, d) on particles (values at the tokens);
        AffineVelocity on a Gaussian: x -> g + 2 H (x - m), g = dF/dm, H = dF/dS.
        """
        mu = self._check(measure)
        kind = common_kind(mu, self)
        if isinstance(mu, Gaussian):
            if mu.has_factor:
                g, H = self.raw_gaussian_gradient_of_factor(mu.mean_t, mu.factor_t)
            else:
                g, H = self.raw_gaussian_gradient(mu.mean_t, mu.cov_t)
            return AffineVelocity(g, 2.0 * H, kind)
        return to_kind(self.raw_particles_gradient(mu.x_t, mu.weights_t), kind)

    def _check(self, measure: Measure) -> Gaussian | Particles:
        mu = as_measure(measure)
        if self.dim is not None and mu.dim != self.dim:
            raise InvalidInput(
                f"measure has dimension {mu.dim}, {type(self).__name__} acts on dimension {self.dim}"
            )
        broadcast_batch([mu.batch_shape, self.batch_shape], ["measure", type(self).__name__])
        return mu

    def __add__(self, other: Energy) -> SumEnergy:
        if not isinstance(other, Energy):
            return NotImplemented
        return SumEnergy(self, other)

    def __mul__(self, factor: Any) -> ScaledEnergy:
        return ScaledEnergy(self, as_scalar(factor, "factor"))

    __rmul__ = __mul__

    def __neg__(self) -> ScaledEnergy:
        return ScaledEnergy(self, -1.0)

    def __sub__(self, other: Energy) -> SumEnergy:
        if not isinstance(other, Energy):
            return NotImplemented
        return SumEnergy(self, -other)


class ScaledEnergy(Energy):
    """c F for a number c."""

    def __init__(self, energy: Energy, factor: float) -> None:
        self.energy, self.factor = energy, factor
        self.kind, self.dim, self.batch_shape = energy.kind, energy.dim, energy.batch_shape
        self.finite_on_gaussians = energy.finite_on_gaussians

    def member(self, index: tuple[int, ...], batch_shape: tuple[int, ...]) -> Energy:
        """c times the member."""
        return ScaledEnergy(self.energy.member(index, batch_shape), self.factor)

    def raw_particles(self, x: Tensor, weights: Tensor) -> Tensor:
        """c F on particles."""
        return self.factor * self.energy.raw_particles(x, weights)

    def raw_gaussian(self, mean: Tensor, cov: Tensor) -> Tensor:
        """c F on a Gaussian."""
        return self.factor * self.energy.raw_gaussian(mean, cov)

    def raw_particles_gradient(self, x: Tensor, weights: Tensor) -> Tensor:
        """c times the gradient on particles."""
        return self.factor * self.energy.raw_particles_gradient(x, weights)

    def raw_particles_gradient_scaled(self, x: Tensor, weights: Tensor, log_scale: Tensor) -> Tensor:
        """c times the scaled gradient on particles."""
        return self.factor * self.energy.raw_particles_gradient_scaled(x, weights, log_scale)

    def raw_particles_value_gradient(self, x: Tensor, weights: Tensor) -> tuple[Tensor, Tensor]:
        """c times the value and the gradient on particles."""
        value, gradient = self.energy.raw_particles_value_gradient(x, weights)
        return self.factor * value, self.factor * gradient

    def raw_gaussian_gradient(self, mean: Tensor, cov: Tensor) -> tuple[Tensor, Tensor]:
        """c times the gradient on a Gaussian."""
        g, H = self.energy.raw_gaussian_gradient(mean, cov)
        return self.factor * g, self.factor * H

    def raw_gaussian_gradient_of_factor(self, mean: Tensor, factor: Tensor) -> tuple[Tensor, Tensor]:
        """c times the gradient on a Gaussian."""
        g, H = self.energy.raw_gaussian_gradient_of_factor(mean, factor)
        return self.factor * g, self.factor * H


class SumEnergy(Energy):
    """F + G."""

    def __init__(self, first: Energy, second: Energy) -> None:
        if first.dim is not None and second.dim is not None and first.dim != second.dim:
            raise InvalidInput(f"the energies act on dimensions {first.dim} and {second.dim}")
        self.first, self.second = first, second
        self.kind = common_kind(first, second)
        self.dim = first.dim if first.dim is not None else second.dim
        self.batch_shape = broadcast_batch([first.batch_shape, second.batch_shape], ["first", "second"])
        self.finite_on_gaussians = first.finite_on_gaussians and second.finite_on_gaussians

    def member(self, index: tuple[int, ...], batch_shape: tuple[int, ...]) -> Energy:
        """Sum of the members."""
        return SumEnergy(self.first.member(index, batch_shape), self.second.member(index, batch_shape))

    def raw_particles(self, x: Tensor, weights: Tensor) -> Tensor:
        """F + G on particles."""
        return self.first.raw_particles(x, weights) + self.second.raw_particles(x, weights)

    def raw_gaussian(self, mean: Tensor, cov: Tensor) -> Tensor:
        """F + G on a Gaussian."""
        return self.first.raw_gaussian(mean, cov) + self.second.raw_gaussian(mean, cov)

    def raw_particles_gradient(self, x: Tensor, weights: Tensor) -> Tensor:
        """Sum of the gradients on particles."""
        return self.first.raw_particles_gradient(x, weights) + self.second.raw_particles_gradient(x, weights)

    def raw_particles_gradient_scaled(self, x: Tensor, weights: Tensor, log_scale: Tensor) -> Tensor:
        """Sum of the scaled gradients on particles."""
        first = self.first.raw_particles_gradient_scaled(x, weights, log_scale)
        return first + self.second.raw_particles_gradient_scaled(x, weights, log_scale)

    def raw_particles_value_gradient(self, x: Tensor, weights: Tensor) -> tuple[Tensor, Tensor]:
        """Sums of the values and of the gradients on particles."""
        f0, g0 = self.first.raw_particles_value_gradient(x, weights)
        f1, g1 = self.second.raw_particles_value_gradient(x, weights)
        return f0 + f1, g0 + g1

    def raw_gaussian_gradient(self, mean: Tensor, cov: Tensor) -> tuple[Tensor, Tensor]:
        """Sum of the gradients on a Gaussian."""
        g0, H0 = self.first.raw_gaussian_gradient(mean, cov)
        g1, H1 = self.second.raw_gaussian_gradient(mean, cov)
        return g0 + g1, H0 + H1

    def raw_gaussian_gradient_of_factor(self, mean: Tensor, factor: Tensor) -> tuple[Tensor, Tensor]:
        """Sum of the gradients on a Gaussian."""
        g0, H0 = self.first.raw_gaussian_gradient_of_factor(mean, factor)
        g1, H1 = self.second.raw_gaussian_gradient_of_factor(mean, factor)
        return g0 + g1, H0 + H1
