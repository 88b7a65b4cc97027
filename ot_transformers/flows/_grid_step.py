"""One entropic JKO step on a grid that never raises the energy."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from ..numerics.sinkhorn_accelerate import Anderson

__all__ = ["GridStep", "grid_step"]

_PATIENCE = 40
"""Mixed iterations without progress after which the plain ones take over until there is some."""

_SHRINK = 0.25
_LOCKED = 1.0 / 80.0
"""At eps = h^2 / 80 neighbours at distance h get e^{-40} of a mass: the blur is below rounding."""

_HALVINGS = 50
_ARMIJO, _HALF = 1e-4, 0.3
_OUTER = 100
"""Iterations of the implicit first variation: where they have not converged by then, more rarely help."""


class Terms(Protocol):
    """An energy taken apart: sigma times the entropy, a potential and the rest."""

    sigma: float

    def value(self, mass: Tensor) -> Tensor:
        """F, (...)."""
        ...

    def potential(self, mass: Tensor) -> Tensor:
        """The first variation of all but the entropy, (..., n1[, n2])."""
        ...


@dataclass(frozen=True, eq=False)
class GridStep:
    """A step: masses, log b for the next one, F, the eps of each member, the error and the iterations."""

    mass: Tensor
    log_b: Tensor
    value: Tensor
    eps: Tensor
    error: float
    count: int
    stayed: Tensor


@dataclass(frozen=True, eq=False)
class _Trial:
    mass: Tensor
    log_b: Tensor
    value: Tensor
    error: Tensor
    count: int


def grid_step(
    terms: Terms,
    q: Tensor,
    value: Tensor,
    log_b: Tensor,
    axes: tuple[Tensor, ...],
    *,
    tau: float,
    eps: float,
    compensate: bool,
    implicit: bool,
    tol: float,
    max_iter: int,
) -> GridStep:
    """The step of `grid_jko` from masses q of energy `value`, with the smaller eps where it would raise F.

    With p the minimiser, K q the blur of q by the Gibbs kernel and J = tau F + W_eps(q, .): J(p) <= J(K q), and
    K q is where W_eps(q, .) is least, so F(p) <= F(K q). As eps falls below the square of the grid step, K q
    tends to q: some eps does not raise F. The semi-implicit step is no such minimiser; where it raises F the
    implicit one follows, by a descent of J that starts at K q and so keeps to the same bound.
    """
    dim = len(axes)
    spacing = min(float(line[-1] - line[0]) / (len(line) - 1) for line in axes)
    slack = tol + 64 * torch.finfo(q.dtype).eps * value.abs()
    stayed = torch.ones_like(value, dtype=torch.bool)
    mass, best, used = q, value, torch.full_like(value, eps)
    error, count, next_b = torch.zeros_like(value), 0, torch.zeros_like(log_b)
    last, given = torch.zeros_like(value), eps
    while True:
        problem = _Problem(terms, q, axes, tau, eps, compensate, tol, max_iter)
        trials = [problem.semi_implicit(log_b)]
        if implicit and bool((stayed & ~(trials[0].value <= value + slack)).any()):
            trials.append(problem.implicit())
        for trial in trials:
            count, last = count + trial.count, torch.where(stayed, trial.error, 0.0)
            good = stayed & (trial.value <= value + slack)
            wide = good.reshape(*good.shape, *([1] * dim))
            mass = torch.where(wide, trial.mass, mass)
            next_b = torch.where(wide, eps / given * trial.log_b, next_b)  # eps log b is the potential
            best, used = torch.where(good, trial.value, best), torch.where(good, eps, used)
            error, stayed = torch.where(good, trial.error, error), stayed & ~good
        hopeless = bool((last > tol).any()) or eps <= _LOCKED * spacing**2  # smaller eps converge slower
        if not bool(stayed.any()) or hopeless:
            break
        # Blur far below the grid step is none that could be compensated.
        eps, log_b, compensate = _SHRINK * eps, torch.zeros_like(log_b), False
    error, used = torch.where(stayed, torch.inf, error), torch.where(stayed, 0.0, used)
    return GridStep(mass, next_b, best, used, float(error.max()), count, stayed)


class _Problem:
    """The entropic step from q at one eps: p(U) for a linear potential U, and the descent of J in U."""

    def __init__(
        self,
        terms: Terms,
        q: Tensor,
        axes: tuple[Tensor, ...],
        tau: float,
        eps: float,
        compensate: bool,
        tol: float,
        max_iter: int,
    ) -> None:
        self.terms, self.q, self.tau, self.eps, self.tol, self.max_iter = terms, q, tau, eps, tol, max_iter
        self.kernels = [-(line[:, None] - line[None, :]).square() / (2 * eps) for line in axes]
        self.sigma = terms.sigma - (eps / (2 * tau) if compensate else 0.0)
        self.taken = terms.sigma - self.sigma
        self.over = tuple(range(-len(axes), 0))

    def solve(self, potential: Tensor, log_b: Tensor) -> _Trial:
        """Argmin of tau (<U, p> + sigma Ent(p)) + W_eps(q, p)."""
        ratio = self.tau * self.sigma / self.eps
        p, b, error, count = scaling(
            self.q,
            log_b,
            self.kernels,
            (self.tau / self.eps) * potential,
            ratio,
            tol=self.tol,
            max_iter=self.max_iter,
        )
        return _Trial(p, b, self.terms.value(p), error, count)

    def semi_implicit(self, log_b: Tensor) -> _Trial:
        """With the first variation at q."""
        return self.solve(self.terms.potential(self.q), log_b)

    def objective(self, trial: _Trial) -> Tensor:
        """J = tau F(p) + W_eps(q, p), the blur that is compensated taken off the entropy as in the step."""
        log_a = torch.log(self.q) - _apply(self.kernels, trial.log_b)
        cost = torch.where(self.q > 0, self.q * log_a, 0.0) + torch.where(
            trial.mass > 0, trial.mass * trial.log_b, 0.0
        )
        entropy = self.taken * torch.special.xlogy(trial.mass, trial.mass)
        return self.tau * trial.value + (self.eps * cost - self.tau * entropy).sum(self.over)

    def implicit(self) -> _Trial:
        """Minimise J by damped iteration of U <- F'(p(U)), Anderson mixed; J never increases.

        dJ = tau <F'(p) - U, dp>, as p(U) is stationary, and U -> p(U) is monotone decreasing: the direction
        r = F'(p) - U descends. It starts at U = -sigma log(K q), where p = K q. The error is the larger of that
        of the scaling and of the p-mean of |r - mean r| relative to 1 + that of |U|.
        """
        zero = torch.zeros_like(self.q)
        U = -self.sigma * _apply(self.kernels, torch.log(self.q) - _apply(self.kernels, zero))
        now = self.solve(U, torch.zeros_like(U))
        J, r = self.objective(now), self._residual(now, U)
        count, step = now.count, torch.ones_like(J)
        flat = self.q.flatten(-len(self.over)).reshape(-1, self.q[(0,) * J.ndim].numel())
        mixing = Anderson(0.9 * flat + 0.1 / flat.shape[-1])
        plain = torch.ones_like(J, dtype=torch.bool)
        for _ in range(_OUTER):
            error = torch.maximum(now.error, self._mismatch(now, U, r))
            if bool((error <= self.tol).all()) or count >= self.max_iter:
                break
            damped = self._wide(step) * r
            proposal = mixing.propose(U.reshape(flat.shape), damped.reshape(flat.shape), plain.flatten())
            candidate, mixed = proposal.reshape(U.shape), ~plain
            waiting = torch.ones_like(plain)
            new, new_U, new_J = now, U, J
            for _ in range(_HALVINGS):
                trial = self.solve(candidate, now.log_b)
                count += trial.count
                value = self.objective(trial)
                # <dU, dp> <= 0. The best damping gains half of this slope, twice that none and oscillates.
                slope = self.tau * ((candidate - U) * (trial.mass - now.mass)).sum(self.over).clamp_max(0.0)
                level = 64 * torch.finfo(J.dtype).eps * J.abs()  # differences within rounding say nothing
                good = waiting & (value <= J + torch.where(mixed, _ARMIJO, _HALF) * slope + level)
                new, new_U = _chosen(self._wide(good), trial, new, good), self._where(good, candidate, new_U)
                new_J, waiting = torch.where(good, value, new_J), waiting & ~good
                if not bool(waiting.any()):
                    break
                step = torch.where(waiting & ~mixed, 0.5 * step, step)
                plain, mixed = plain | waiting, mixed & ~waiting
                candidate = self._where(waiting, U + self._wide(step) * r, candidate)
            if bool(waiting.all()):
                break
            plain = waiting
            now, U, J = new, new_U, new_J
            r = self._residual(now, U)
        error = torch.maximum(now.error, self._mismatch(now, U, r))
        return _Trial(now.mass, now.log_b, now.value, error, count)

    def _residual(self, trial: _Trial, U: Tensor) -> Tensor:
        r = self.terms.potential(trial.mass) - U
        return r - (trial.mass * r).sum(self.over, keepdim=True)

    def _mismatch(self, trial: _Trial, U: Tensor, r: Tensor) -> Tensor:
        return (trial.mass * r.abs()).sum(self.over) / (1 + (trial.mass * U.abs()).sum(self.over))

    def _wide(self, v: Tensor) -> Tensor:
        return v.reshape(*v.shape, *([1] * len(self.over)))

    def _where(self, which: Tensor, a: Tensor, b: Tensor) -> Tensor:
        return torch.where(self._wide(which), a, b)


def _chosen(wide: Tensor, a: _Trial, b: _Trial, which: Tensor) -> _Trial:
    return _Trial(
        torch.where(wide, a.mass, b.mass),
        torch.where(wide, a.log_b, b.log_b),
        torch.where(which, a.value, b.value),
        torch.where(which, a.error, b.error),
        b.count,
    )


def scaling(
    q: Tensor,
    log_b: Tensor,
    kernels: list[Tensor],
    potential: Tensor,
    ratio: float,
    *,
    tol: float,
    max_iter: int,
) -> tuple[Tensor, Tensor, Tensor, int]:
    """Masses, log b, errors of the members, iterations; `potential` is tau U / eps, `ratio` tau sigma / eps.

    The fixed point in log b, a contraction of factor ratio / (1 + ratio), is found by Anderson mixing; a
    member whose error grows takes the plain iteration again.
    """
    batch, shape = q.shape[: q.ndim - len(kernels)], q.shape[q.ndim - len(kernels) :]
    q, log_b = q.reshape(-1, *shape), log_b.reshape(-1, *shape)
    log_q = torch.log(q)  # -inf where there is no mass: those rows of the coupling are empty
    # The least squares see every node: by the present masses alone, nodes that fill up later would not count.
    mixing = Anderson((0.9 * q + 0.1 / q[0].numel()).flatten(1))
    last = best = q.new_full((len(q),), torch.inf)
    stalled = torch.zeros(len(q), dtype=torch.long, device=q.device)
    for count in range(1, max_iter + 1):
        log_s = _apply(kernels, log_q - _apply(kernels, log_b))  # first marginal exact
        log_p = (log_s - potential.reshape(-1, *shape)) / (1 + ratio)
        change = log_p - log_s - log_b
        # The second marginal is b s: its L1 distance to what the proximal map asks for.
        errors = (torch.exp(log_p) * torch.expm1(-change)).abs().flatten(1).sum(-1)
        if bool((errors <= tol).all()) or count == max_iter:
            break
        stalled = torch.where(errors < 0.9 * best, 0, stalled + 1)
        best = torch.minimum(best, errors)
        # Mixing can lose its way far from the solution (tau sigma >> eps): the plain map contracts always.
        plain = ~(errors < last) | (stalled > _PATIENCE)
        proposal = mixing.propose(log_b.flatten(1), change.flatten(1), plain)
        log_b, last = proposal.reshape(log_b.shape), errors
    p = torch.exp(log_s + log_b)
    p = p / p.flatten(1).sum(-1).reshape(-1, *([1] * len(shape)))
    return p.reshape(*batch, *shape), log_b.reshape(*batch, *shape), errors.reshape(batch), count


def _apply(kernels: list[Tensor], v: Tensor) -> Tensor:
    """log K e^v, axis by axis."""
    for axis, kernel in zip(range(-len(kernels), 0), kernels, strict=True):
        v = _log_product(kernel, v.movedim(axis, -1)).movedim(-1, axis)
    return v


def _log_product(kernel: Tensor, v: Tensor) -> Tensor:
    """log sum_j e^{kernel_ij + v_j}, along the last axis."""
    top = v.amax(-1, keepdim=True)
    if bool(torch.isfinite(top).all()):
        product = torch.exp(v - top) @ kernel.exp().mT
        info = torch.finfo(v.dtype)
        # Terms lost to underflow are below `tiny`: where every sum is far above it, they do not count.
        if bool((product > info.tiny / info.eps**1.5).all()):
            return top + torch.log(product)
    return torch.logsumexp(v.unsqueeze(-2) + kernel, -1)
