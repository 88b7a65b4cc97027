"""JKO steps in the twisted metric: the squared distance of a step by the length of its straight chord."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from ..arrays import check_count, check_positive
from ..errors import InvalidInput
from ..measures import Gaussian, Measure, Particles
from ..numerics.minimise import lbfgs
from ..numerics.tilted import log_interaction, safe_log
from ..numerics.twisted import log_speed
from ..numerics.twisted_gaussians import gaussian_log_speed
from ._twisted_gaussians import join, split
from .base import EnergyLike, ProximalResult

__all__ = ["proximal_twisted"]

_POINTS = 4


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
    r"""Minimise F(nu) + c(mu, nu)^2 / (2 tau), c the twisted length of the straight chord from mu to nu.

    c is an upper bound on the distance with c = d (1 + O(d^2)) for near measures, so a step is a JKO step up to
    O(tau^2) of its length: the order in tau is 1, and F cannot increase. Particles keep their labels; a
    Gaussian moves its mean and factor (the restricted metric). `gradient_norm` is relative to |grad F| at mu.
    """
    check_positive(tau, "tau")
    check_positive(tol, "tol")
    check_count(max_iter, "max_iter")
    if energy.dim is not None and energy.dim != mu.dim:
        raise InvalidInput(f"energy acts on dimension {energy.dim}, mu has dimension {mu.dim}")
    s, w = np.polynomial.legendre.leggauss(_POINTS)
    times = torch.from_numpy(0.5 * (s + 1)).to(A)
    log_weights = torch.from_numpy(np.log(0.5 * w)).to(A)
    problem = _Clouds(energy, mu, A, D) if isinstance(mu, Particles) else _Gaussians(energy, mu, A, D)
    start = problem.start
    before = problem.value(start)
    # The step is found in coordinates where the metric at mu is the identity: Hessian about 1/tau.
    unit = problem.unit

    def evaluate(batch: Tensor) -> tuple[Tensor, Tensor]:
        value, gradient = problem.value_and_gradient(start + unit(batch[0]))
        with torch.enable_grad():
            z = batch[0].detach().requires_grad_()
            step = unit(z)
            total_and_chord = (gradient.detach() * step).sum()
            chord = torch.zeros((), dtype=A.dtype, device=A.device)
            if bool((step.detach() != 0).any()):  # at rest the chord and its gradient are 0, its log is not
                points = start + times.unsqueeze(-1) * step
                log_c = torch.logsumexp(log_weights + problem.speed(points, step.expand_as(points)), -1)
                chord = torch.exp(log_c)
            (g,) = torch.autograd.grad(total_and_chord + chord / (2 * tau), z)
        total = value + float(chord.detach()) / (2 * tau)
        total = total if np.isfinite(total) else np.inf
        return torch.full((1,), total, dtype=A.dtype), torch.nan_to_num(g, nan=torch.inf).reshape(1, -1)

    z0 = torch.zeros(1, problem.size, dtype=A.dtype, device=A.device)
    _, g0 = evaluate(z0)
    reference = float(g0.norm())
    if warm_start is not None:
        guess = problem.guess(warm_start, z0)
        # A guess that is worse than staying would let the energy increase.
        z0 = guess if float(evaluate(guess)[0]) < before else z0
    goal = torch.full((1,), max(tol, 1e-13) * max(reference, 1e-300), dtype=A.dtype, device=A.device)
    found = lbfgs(evaluate, z0, scale=tau, tolerance=goal, max_iter=max_iter)
    end = start + unit(found.y[0])
    after = problem.value(end)
    relative = float(found.gradient_norm) / reference if reference > 0 else 0.0
    return ProximalResult(problem.measure(end), bool(found.converged), relative, found.n_iter, before, after)


class _Clouds:
    """Flat coordinates of a cloud."""

    def __init__(self, energy: EnergyLike, mu: Particles, A: Tensor, D: Tensor) -> None:
        self.energy, self.mu, self.A = energy, mu, A
        self.x, self.w = mu.x_t.detach().double(), mu.weights_t.detach().double()
        self.start, self.size = self.x.reshape(-1), self.x.numel()
        self.Dinv = torch.linalg.inv(D)
        self.root = torch.linalg.cholesky(D)
        log_g = log_interaction(self.x, self.w, A)
        half = -0.5 * (safe_log(self.w) + log_g)
        self.inverse = torch.where(torch.isfinite(half), torch.exp(half), 0.0).unsqueeze(-1)

    def unit(self, z: Tensor) -> Tensor:
        return (self.inverse * (z.reshape(self.x.shape) @ self.root.mT)).reshape(-1)

    def guess(self, warm: Measure, z0: Tensor) -> Tensor:
        if not isinstance(warm, Particles) or warm.x_t.shape != self.x.shape:
            return z0
        step = (warm.x_t.detach().double() - self.x) / self.inverse.clamp_min(1e-300)
        return torch.linalg.solve_triangular(self.root, step.mT, upper=False).mT.reshape(1, -1)

    def speed(self, points: Tensor, steps: Tensor) -> Tensor:
        shape = (-1, *self.x.shape)
        return log_speed(points.reshape(shape), steps.reshape(shape), self.w, self.A, self.Dinv)

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
        self.inverse = torch.exp(-0.5 * log_z)

    def unit(self, z: Tensor) -> Tensor:
        m, L = split(z, self.d)
        return self.inverse * join((self.root @ m.unsqueeze(-1)).squeeze(-1), self.root @ L)

    def guess(self, warm: Measure, z0: Tensor) -> Tensor:
        if not isinstance(warm, Gaussian) or warm.factor_t.shape != self.L.shape:
            return z0
        m, L = split(
            (join(warm.mean_t.detach().double(), warm.factor_t.detach().double()) - self.start)
            / self.inverse,
            self.d,
        )
        both = torch.linalg.solve_triangular(self.root, torch.cat([m.unsqueeze(-1), L], -1), upper=False)
        return join(both[:, 0], both[:, 1:]).reshape(1, -1)

    def speed(self, points: Tensor, steps: Tensor) -> Tensor:
        log_g, inside = gaussian_log_speed(*split(points, self.d), *split(steps, self.d), self.A, self.Dinv)
        return torch.where(inside, log_g, torch.inf)

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
