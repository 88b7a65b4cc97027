"""Raw states of curves: the tensors of a measure, and the second derivative of an energy along a path."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple, TypeAlias

import torch
from torch import Tensor

from ..arrays import Kind, cast_like
from ..energies import Energy
from ..errors import InvalidInput
from ..measures import AffineVelocity, Gaussian, Measure, Particles
from ..spd import symmetrise

__all__ = [
    "CloudState",
    "GaussianState",
    "Jet",
    "Path",
    "State",
    "affine_parts",
    "energy_jet",
    "energy_of",
    "energy_second_reverse",
    "measure_of",
    "perturbed",
    "state_of",
]


class CloudState(NamedTuple):
    """Points (..., n, d) and weights (..., n)."""

    x: Tensor
    weights: Tensor


class GaussianState(NamedTuple):
    """Mean (..., d) and covariance (..., d, d)."""

    mean: Tensor
    cov: Tensor


State: TypeAlias = CloudState | GaussianState
Path: TypeAlias = Callable[[Tensor], State]
"""From times (T,) to states with a leading dimension T, differentiable in the times."""


class Jet(NamedTuple):
    """An energy along a path: value, first and second derivative, each (T, ...)."""

    value: Tensor
    first: Tensor
    second: Tensor


def state_of(measure: Measure) -> State:
    """The tensors of a measure."""
    if isinstance(measure, Gaussian):
        return GaussianState(measure.mean_t, measure.cov_t)
    return CloudState(measure.x_t, measure.weights_t)


def measure_of(state: State, kind: Kind) -> Measure:
    """The measure with these tensors."""
    if isinstance(state, GaussianState):
        return Gaussian.unchecked(state.mean, state.cov, kind=kind)
    return Particles.unchecked(state.x, state.weights, kind)


def energy_of(energy: Energy, state: State) -> Tensor:
    """F(mu), (...)."""
    if isinstance(state, GaussianState):
        return energy.raw_gaussian(state.mean, state.cov)
    return energy.raw_particles(state.x, state.weights)


def affine_parts(tangent: Any, mean: Tensor, name: str = "v") -> tuple[Tensor, Tensor]:
    """b (d,) and M (d, d) of an affine field at a Gaussian of that mean, checked and without history."""
    if not isinstance(tangent, AffineVelocity):
        raise InvalidInput(f"{name} must be an AffineVelocity at a Gaussian, got {type(tangent).__name__}")
    d = len(mean)
    if tangent.b_t.shape != (d,) or tangent.M_t.shape != (d, d):
        raise InvalidInput(
            f"{name} must be a field on R^{d}, got b {tuple(tangent.b_t.shape)} and M {tuple(tangent.M_t.shape)}"
        )
    b, M = (cast_like(t.detach(), mean, name) for t in (tangent.b_t, tangent.M_t))
    return b, M


def energy_jet(energy: Energy, path: Path, s: Tensor) -> Jet:
    """F, dF/ds and d2F/ds2 along a path by nested forward mode: exact up to rounding, no step size.

    All times run at once: each output depends on its own time alone.
    """

    def value(r: Tensor) -> Tensor:
        return energy_of(energy, path(r))

    def with_slope(r: Tensor) -> tuple[Tensor, Tensor]:
        value_slope: Any = torch.func.jvp(value, (r,), (torch.ones_like(r),))
        return value_slope[0], value_slope[1]

    jet: Any = torch.func.jvp(with_slope, (s,), (torch.ones_like(s),))
    (f, df), (_, ddf) = jet
    return Jet(f.detach(), df.detach(), ddf.detach())


def energy_second_reverse(energy: Energy, path: Path, s: Tensor) -> Tensor:
    """d2F/ds2 (T, ...) along a path by two reverse sweeps: an independent check of `energy_jet`.

    Forward-mode rules of other people's functions are wrong when nested more often than one would like (those
    of `torch.linalg.solve` and `slogdet` are, without an error); reverse over reverse is another road.
    """
    with torch.enable_grad():
        r = s.detach().clone().requires_grad_()
        f = energy_of(energy, path(r))
        columns = f.reshape(len(s), -1)
        seconds = []
        for k in range(columns.shape[1]):
            (df,) = torch.autograd.grad(columns[:, k].sum(), r, create_graph=True, materialize_grads=True)
            if not df.requires_grad:  # affine in s: the slope is a constant
                seconds.append(torch.zeros_like(s))
                continue
            (ddf,) = torch.autograd.grad(df.sum(), r, retain_graph=True, materialize_grads=True)
            seconds.append(ddf)
    return torch.stack(seconds, -1).reshape(f.shape).detach()


def perturbed(path: Path, blocks: int, size: float, generator: torch.Generator) -> Path:
    """The same path with every number of its states off by a relative +-size.

    The times come in `blocks` equal blocks: the first is left as it is, each other one has its own signs, the same
    for all its times.
    """
    signs: dict[int, Tensor] = {}

    def factor(t: Tensor, slot: int, matrix: bool) -> Tensor:
        if slot not in signs:
            bits = torch.randint(0, 2, (blocks, *t.shape[1:]), generator=generator).to(t.device)
            f = 2.0 * bits.to(t.dtype) - 1.0
            f[0] = 0.0
            f = torch.triu(f) + torch.triu(f, 1).mT if matrix else f
            signs[slot] = 1.0 + size * f.repeat_interleave(t.shape[0] // blocks, 0)
        return signs[slot]

    def moved(s: Tensor) -> State:
        state = path(s)
        if isinstance(state, GaussianState):
            cov = symmetrise(state.cov * factor(state.cov, 1, True))
            return GaussianState(state.mean * factor(state.mean, 0, False), cov)
        return CloudState(
            state.x * factor(state.x, 0, False), state.weights * factor(state.weights, 1, False)
        )

    return moved
