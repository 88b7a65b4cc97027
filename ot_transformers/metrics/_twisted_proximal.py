"""JKO steps in the twisted metric: over the path of a step and its end jointly."""

from __future__ import annotations

import torch
from torch import Tensor

from ..arrays import check_count, check_positive
from ..errors import InvalidInput
from ..measures import Gaussian, Measure, Particles
from ..numerics.free_end import Problem, free_end
from ..numerics.tilted import log_interaction, safe_log
from ..numerics.twisted_gaussians import gaussian_log_speed
from ._twisted_gaussians import join, split
from ._twisted_particles import flat_speed
from ._unbounded import bottomless, limit, warn_unbounded
from .base import EnergyLike, ProximalResult

__all__ = ["proximal_twisted"]


def proximal_twisted(
    energy: EnergyLike,
    mu: Measure,
    tau: float,
    *,
    A: Tensor,
    D: Tensor,
    tol: float,
    max_iter: int,
    warm_start: Measure | None,
) -> ProximalResult:
    r"""Minimise F(nu) + d(mu, nu)^2 / (2 tau), jointly over nu and the path from mu whose length d is.

    Particles keep their labels: d is then the distance of labelled clouds, an upper bound on that of clouds, and
    equal to it for near ones. A Gaussian moves its mean and factor (the restricted metric; paths end orthogonal to
    the factors of one covariance, for F does not change along them). Both are local minima over paths. F cannot
    increase, since staying costs nothing. `gradient_norm` is that of the problem in the path and its end, in
    coordinates where the metric at mu is the identity, relative to |grad F| at mu.
    """
    check_positive(tau, "tau")
    check_positive(tol, "tol")
    check_count(max_iter, "max_iter")
    if energy.dim is not None and energy.dim != mu.dim:
        raise InvalidInput(f"energy acts on dimension {energy.dim}, mu has dimension {mu.dim}")
    problem = _Clouds(energy, mu, A, D) if isinstance(mu, Particles) else _Gaussians(energy, mu, A, D)
    guess = None if warm_start is None else problem.guess(warm_start)
    before = problem.value(problem.start)
    parts = Problem(
        problem.start, problem.value_and_gradient, problem.speed, problem.unit, problem.growth, problem.far
    )
    found = free_end(parts, tau, tol=tol, max_iter=max_iter, guess=guess)
    after = problem.value(found.end)
    if found.escaped or (not found.converged and bottomless(before, after)):
        warn_unbounded("twisted", stacklevel=4)
    return ProximalResult(
        problem.measure(found.end), found.converged, found.gradient_norm, found.n_iter, before, after
    )


class _Clouds:
    """Flat coordinates of a cloud."""

    def __init__(self, energy: EnergyLike, mu: Particles, A: Tensor, D: Tensor) -> None:
        self.energy, self.mu, self.A = energy, mu, A
        self.x, self.w = mu.x_t.detach().double(), mu.weights_t.detach().double()
        self.start, self.size = self.x.reshape(-1), self.x.numel()
        self.Dinv = torch.linalg.inv(D)
        self.root = torch.linalg.cholesky(D)
        self.speed = flat_speed(self.x.shape, self.w, A, self.Dinv)
        log_g = log_interaction(self.x, self.w, A)
        self.log_g, self.limit = log_g, limit(self.x)
        half = -0.5 * (safe_log(self.w) + log_g)
        self.inverse = torch.where(torch.isfinite(half), torch.exp(half), 0.0).unsqueeze(-1)

    def unit(self, z: Tensor) -> Tensor:
        shaped = z.reshape(*z.shape[:-1], *self.x.shape)
        return (self.inverse * (shaped @ self.root.mT)).reshape(z.shape)

    def guess(self, warm: Measure) -> Tensor | None:
        if not isinstance(warm, Particles) or warm.x_t.shape != self.x.shape:
            return None
        step = (warm.x_t.detach().double() - self.x) / self.inverse.clamp_min(1e-300)
        return torch.linalg.solve_triangular(self.root, step.mT, upper=False).mT.reshape(-1)

    def growth(self, points: Tensor, slopes: Tensor) -> tuple[Tensor, Tensor]:
        shape = (-1, *self.x.shape)
        log_g = log_interaction(points.reshape(shape), self.w, self.A)
        v = slopes.reshape(shape)
        speed = torch.logsumexp(safe_log(self.w * (v @ self.Dinv * v).sum(-1)) + log_g, -1)
        return speed, torch.where(self.w > 0, log_g - self.log_g, 0.0)

    def far(self, points: Tensor) -> Tensor:
        return points.abs().amax(-1) > self.limit

    def value(self, y: Tensor) -> float:
        return float(self.energy.raw_particles(y.reshape(self.x.shape), self.w))

    def value_and_gradient(self, y: Tensor) -> tuple[float, Tensor]:
        value, g = self.energy.raw_particles_value_gradient(y.reshape(self.x.shape), self.w)
        return float(value), (g * self.w.unsqueeze(-1)).reshape(-1)

    def measure(self, y: Tensor) -> Measure:
        return self.mu.moved(y.reshape(self.x.shape).to(self.mu.dtype))


class _Gaussians:
    """Flat coordinates (mean, factor) of a Gaussian."""

    def __init__(self, energy: EnergyLike, mu: Gaussian, A: Tensor, D: Tensor) -> None:
        self.energy, self.mu, self.A = energy, mu, A
        self.m, self.L = mu.mean_t.detach().double(), mu.factor_t.detach().double()
        self.start = join(self.m, self.L)
        self.size, self.d = self.start.numel(), self.m.shape[-1]
        self.Dinv, self.root = torch.linalg.inv(D), torch.linalg.cholesky(D)
        one = torch.zeros_like(self.m)
        one[0] = self.root[0, 0]
        log_z, _ = gaussian_log_speed(self.m, self.L, one, torch.zeros_like(self.L), A, self.Dinv)
        self.log_z, self.one, self.limit = log_z, one, limit(self.start)
        self.inverse = torch.exp(-0.5 * log_z)

    def unit(self, z: Tensor) -> Tensor:
        m, L = split(z, self.d)
        return self.inverse * join(m @ self.root.mT, self.root @ L)

    def guess(self, warm: Measure) -> Tensor | None:
        if not isinstance(warm, Gaussian) or warm.factor_t.shape != self.L.shape:
            return None
        m, L = split(
            (join(warm.mean_t.detach().double(), warm.factor_t.detach().double()) - self.start)
            / self.inverse,
            self.d,
        )
        both = torch.linalg.solve_triangular(self.root, torch.cat([m.unsqueeze(-1), L], -1), upper=False)
        return join(both[:, 0], both[:, 1:])

    def speed(self, points: Tensor, steps: Tensor) -> Tensor:
        log_g, inside = gaussian_log_speed(*split(points, self.d), *split(steps, self.d), self.A, self.Dinv)
        return torch.where(inside, log_g, torch.inf)

    def growth(self, points: Tensor, slopes: Tensor) -> tuple[Tensor, Tensor]:
        log_z, inside = gaussian_log_speed(
            *split(points, self.d), self.one, torch.zeros_like(self.L), self.A, self.Dinv
        )
        growth = torch.where(inside, log_z - self.log_z, 0.0).unsqueeze(-1)
        return self.speed(points, slopes), growth

    def far(self, points: Tensor) -> Tensor:
        return points.abs().amax(-1) > self.limit

    def value(self, y: Tensor) -> float:
        m, L = split(y, self.d)
        return float(self.energy.raw_gaussian(m, L @ L.mT))

    def value_and_gradient(self, y: Tensor) -> tuple[float, Tensor]:
        m, L = split(y, self.d)
        try:
            g, H = self.energy.raw_gaussian_gradient(m, L @ L.mT)
        except InvalidInput:
            return float("inf"), torch.zeros_like(y)
        return self.value(y), join(g, 2.0 * H @ L)

    def measure(self, y: Tensor) -> Measure:
        m, L = split(y, self.d)
        m, L = m.to(self.mu.dtype), L.to(self.mu.dtype)
        return Gaussian.unchecked(m, factor=L, kind=self.mu.kind)
