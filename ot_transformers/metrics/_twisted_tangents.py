"""Tangents of the twisted metric: exponential, logarithm and inner product of single measures."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ..arrays import as_tensor, describe
from ..errors import InvalidInput
from ..measures import AffineVelocity, Gaussian, Particles
from ..numerics.tilted import log_interaction
from ..numerics.twisted_gaussians import horizontal
from . import _twisted_gaussians as gaussians
from ._twisted_geodesics import square_factor
from ._twisted_particles import cloud_exp, refined_velocity
from .base import Geodesic

__all__ = ["as_affine", "as_field", "exponential", "inner_product", "logarithm", "tangent_members"]

_RTOL = 1e-11
_REFINED = 128
"""Coordinates up to which a logarithm is refined by shooting."""


def as_affine(value: Any, name: str, mu: Gaussian) -> AffineVelocity:
    """Check a tangent at Gaussians, and bring it to their dtype."""
    if not isinstance(value, AffineVelocity):
        raise InvalidInput(f"{name} must be an AffineVelocity on a Gaussian, got {describe(value)}")
    if value.b_t.shape[-1] != mu.dim or value.M_t.shape[-2:] != (mu.dim, mu.dim):
        raise InvalidInput(f"{name} has dimension {value.b_t.shape[-1]}, mu has dimension {mu.dim}")
    return AffineVelocity(value.b_t.to(mu.dtype), value.M_t.to(mu.dtype), value.kind)


def as_field(value: Any, name: str, mu: Particles) -> Tensor:
    """Check a tangent at clouds, and bring it to their dtype."""
    if isinstance(value, AffineVelocity):
        raise InvalidInput(f"{name} must be an array (..., n, d) on particles, got {describe(value)}")
    v, _ = as_tensor(value, name)
    if v.shape != mu.x_t.shape:
        raise InvalidInput(f"{name} must have the shape of x {tuple(mu.x_t.shape)}, got {tuple(v.shape)}")
    return v.to(mu.dtype)


def tangent_members(value: Any, mu: Gaussian | Particles) -> list[Any]:
    """Check the tangents at a batch of measures, and take them apart in row-major order."""
    if isinstance(mu, Particles):
        return list(as_field(value, "tangent", mu).reshape(-1, mu.n, mu.dim))
    v, shape = as_affine(value, "tangent", mu), mu.batch_shape
    b, M = (t.expand(*shape, *t.shape[-k:]).reshape(-1, *t.shape[-k:]) for t, k in ((v.b_t, 1), (v.M_t, 2)))
    return [AffineVelocity(p, q, v.kind) for p, q in zip(b, M, strict=True)]


def exponential(mu: Gaussian | Particles, tangent: Any, A: Tensor, D: Tensor) -> tuple[Any, float]:
    """The end of the geodesic, and the relative drift of its energy."""
    if isinstance(mu, Particles):
        v = tangent.detach().double()
        x, drift, _ = cloud_exp(mu.x_t.detach().double(), v, mu.weights_t.detach().double(), A, D, _RTOL)
        return mu.moved(x.to(mu.dtype)), drift
    m, L = mu.mean_t.detach().double(), square_factor(mu.factor_t.detach().double())
    gaussians.check_domain(m, L, A, "mu")
    dm, dL = tangent.b_t.detach().double(), tangent.M_t.detach().double() @ L
    end, F, drift = gaussians.gaussian_exp(m, L, dm, dL, A, torch.linalg.inv(D), _RTOL)
    return Gaussian.unchecked(end.to(mu.dtype), factor=F.to(mu.dtype), kind=mu.kind), drift


def logarithm(mu: Gaussian | Particles, path: Geodesic, A: Tensor, D: Tensor) -> Any:
    """The initial velocity of a polished geodesic, as a tensor (n, d) or an affine velocity."""
    v = path.details["initial_velocity"]()
    if isinstance(mu, Gaussian):
        m, L = path.details["start"]
        dm, dL = gaussians.split(v.double(), mu.dim)
        q, lift = gaussians.side_by_side(m, L), gaussians.side_by_side(dm, dL)
        lift = horizontal(q, lift, A, torch.linalg.inv(D))
        b, M = gaussians.affine_of(m, L, lift[:, 0], lift[:, 1:])
        return AffineVelocity(b.to(mu.dtype), M.to(mu.dtype), mu.kind)
    if v.shape != mu.x_t.shape:
        raise InvalidInput("mu and nu have different weights: their geodesic splits particles and has no log")
    refine = v.numel() <= _REFINED and "closed_form" not in path.details
    return refined_velocity(mu, v, path.details["end"], A, D) if refine else v


def inner_product(mu: Gaussian | Particles, v: Any, w: Any, A: Tensor, D: Tensor) -> Tensor:
    """The inner product (...); inf, or 0 for a zero tangent, where G is infinite."""
    Dinv = torch.linalg.inv(D)
    if isinstance(mu, Gaussian):
        return gaussians.inner(mu.mean_t, mu.factor_t, v, w, A, Dinv)
    log_g = log_interaction(mu.x_t, mu.weights_t, A)
    terms = mu.weights_t * (v @ Dinv * w).sum(-1)
    # A product 0 * inf would be NaN: a particle at rest costs nothing wherever it is.
    return (torch.where(terms != 0, torch.exp(torch.where(terms != 0, log_g, 0.0)), 0.0) * terms).sum(-1)
