"""Implicit Euler steps in a metric frozen at the start of the step."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from ..arrays import to_kind
from ..energies import Energy
from ..measures import Gaussian, Measure, Particles
from ..metrics import Metric, ProximalResult
from ..numerics.minimise import Minimum, lbfgs

__all__ = ["frozen_step"]


def frozen_step(
    energy: Energy, mu: Measure, tau: float, metric: Metric, *, tol: float, max_iter: int
) -> ProximalResult:
    """Minimise F(nu) + |nu - mu|_mu^2 / (2 tau), |.|_mu the metric's norm at mu of the displacement.

    The metric is known through its Riesz operator alone. Coordinates: those in which |.|_mu is Euclidean.
    """
    with torch.no_grad():
        if isinstance(mu, Gaussian):
            return _gaussian(energy, mu, tau, metric, tol, max_iter)
        return _particles(energy, mu, tau, metric, tol, max_iter)


def _particles(
    energy: Energy, mu: Particles, tau: float, metric: Metric, tol: float, max_iter: int
) -> ProximalResult:
    """Tokens y_i = x_i + w_i^(-1/2) R_i^(1/2) u_i, R_i (d, d) the Riesz operator at token i."""
    x, w, d = mu.x_t.detach(), mu.weights_t.detach(), mu.dim
    basis = torch.eye(d, dtype=x.dtype, device=x.device)
    columns = [metric.raw_particles_riesz(x, w, e.expand(x.shape)) for e in basis]
    values, vectors = torch.linalg.eigh(torch.stack(columns, -1))
    root = (vectors * values.clamp_min(0.0).sqrt().unsqueeze(-2)) @ vectors.mT
    scale = w.sqrt().unsqueeze(-1)

    def push(v: Tensor) -> Tensor:
        return (root @ v.unsqueeze(-1)).squeeze(-1)

    def tokens(u: Tensor) -> Tensor:
        moved = push(u.reshape(x.shape))
        return x + torch.where(scale > 0, moved / torch.where(scale > 0, scale, 1.0), 0.0)

    def gradient(y: Tensor) -> Tensor:
        g = torch.where(scale > 0, energy.raw_particles_gradient(y, w), 0.0)
        return (scale * push(g)).reshape(-1, x.shape[-2] * d)

    def value(y: Tensor) -> Tensor:
        return energy.raw_particles(y, w).expand(mu.batch_shape).reshape(-1)

    start = x.new_zeros(x[..., 0, 0].numel(), x.shape[-2] * d)
    found, slope = _minimise(
        lambda u: value(tokens(u)), lambda u: gradient(tokens(u)), start, tau, tol, max_iter
    )
    return _result(mu, mu.moved(tokens(found.y)), value(x), value(tokens(found.y)), found, slope)


def _gaussian(
    energy: Energy, mu: Gaussian, tau: float, metric: Metric, tol: float, max_iter: int
) -> ProximalResult:
    """Affine displacements in the span of the gradients at mu, nu = (id + v)_# mu."""
    m, L = mu.mean_t.detach(), mu.factor_t.detach()
    shape, (d, r) = mu.batch_shape, L.shape[-2:]
    m, L = m.reshape(-1, d), L.reshape(-1, d, r)
    S = L @ L.mT
    g, H = _covectors(d, m)
    K = len(g)
    b, M = metric.raw_gaussian_riesz(
        m.unsqueeze(-2).expand(-1, K, d),
        S.unsqueeze(-3).expand(-1, K, d, d),
        g.expand(len(m), K, d),
        H.expand(len(m), K, d, d),
    )
    b, M = b.expand(len(m), K, d), M.expand(len(m), K, d, d)

    def pair(g: Tensor, H: Tensor, factor: Tensor) -> Tensor:
        """dF(v_k) for dF = (g, H) at a state of this factor, (B, K)."""
        moved = M @ L.unsqueeze(-3)  # v_k moves L by M_k L
        return (b * g.unsqueeze(-2)).sum(-1) + 2.0 * (moved * (H @ factor).unsqueeze(-3)).sum((-2, -1))

    gram = torch.stack(
        [pair(gk.expand(len(m), d), Hk.expand(len(m), d, d), L) for gk, Hk in zip(g, H, strict=True)], -1
    )
    w, U = torch.linalg.eigh(0.5 * (gram + gram.mT))
    keep = w > 1e-13 * w.amax(-1, keepdim=True)
    white = U * torch.where(keep, 1 / torch.where(keep, w, 1.0).sqrt(), 0.0).unsqueeze(-2)

    def state(u: Tensor) -> tuple[Tensor, Tensor]:
        c = (white @ u.unsqueeze(-1)).squeeze(-1)
        return m + torch.einsum("bk,bki->bi", c, b), L + torch.einsum("bk,bkij->bij", c, M) @ L

    def value(u: Tensor) -> Tensor:
        mean, factor = state(u)
        return energy.raw_gaussian(mean, factor @ factor.mT)

    def gradient(u: Tensor) -> Tensor:
        mean, factor = state(u)
        slope = pair(*energy.raw_gaussian_gradient(mean, factor @ factor.mT), factor)
        return (white.mT @ slope.unsqueeze(-1)).squeeze(-1)

    start = m.new_zeros(len(m), K)
    found, slope = _minimise(value, gradient, start, tau, tol, max_iter)
    mean, factor = state(found.y)
    nu = Gaussian.unchecked(mean.reshape(*shape, d), factor=factor.reshape(*shape, d, r), kind=mu.kind)
    return _result(mu, nu, value(start), value(found.y), found, slope)


def _covectors(d: int, like: Tensor) -> tuple[Tensor, Tensor]:
    """A basis of (dF/dm, dF/dS): g (K, d), H (K, d, d) symmetric, K = d + d (d + 1) / 2."""
    eye = torch.eye(d, dtype=like.dtype, device=like.device)
    rows, columns = torch.triu_indices(d, d)
    H = eye[rows].unsqueeze(-1) * eye[columns].unsqueeze(-2)
    H = 0.5 * (H + H.mT)
    g = torch.cat([eye, eye.new_zeros(len(H), d)])
    return g, torch.cat([eye.new_zeros(d, d, d), H])


def _minimise(
    value: Callable[[Tensor], Tensor],
    gradient: Callable[[Tensor], Tensor],
    start: Tensor,
    tau: float,
    tol: float,
    max_iter: int,
) -> tuple[Minimum, Tensor]:
    """L-BFGS on value(u) + |u|^2 / (2 tau); also the norm of the gradient at the start."""
    slope = torch.linalg.vector_norm(gradient(start), dim=-1)
    # The objective is known to an ulp of its value, u to that of the displacement it stands for.
    floor = 16 * torch.finfo(start.dtype).eps
    tolerance = max(tol, floor) * slope + torch.finfo(start.dtype).tiny
    found = lbfgs(
        lambda u: (value(u) + u.square().sum(-1) / (2 * tau), gradient(u) + u / tau),
        start,
        scale=tau,
        tolerance=tolerance,
        max_iter=max_iter,
    )
    return found, slope


def _result(
    mu: Measure, nu: Measure, before: Tensor, after: Tensor, found: Minimum, slope: Tensor
) -> ProximalResult:
    def numbers(t: Tensor) -> Any:
        return to_kind(t.reshape(mu.batch_shape), mu.kind) if mu.batch_shape else float(t)

    relative = found.gradient_norm / torch.where(slope > 0, slope, 1.0)
    return ProximalResult(
        nu, bool(found.converged.all()), float(relative.max()), found.n_iter, numbers(before), numbers(after)
    )
