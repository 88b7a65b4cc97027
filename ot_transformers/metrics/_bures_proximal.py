"""The JKO step of a Gaussian energy in the Bures-Wasserstein metric, solved on covariance factors."""

from __future__ import annotations

import torch
from torch import Tensor

from ..arrays import check_count, check_positive
from ..errors import InvalidInput
from ..measures import Gaussian
from ..numerics.minimise import lbfgs
from .base import EnergyLike, ProximalResult

__all__ = ["exact_rank", "proximal_gaussian"]

_MEMORY = 6
_FAR = 1e6
"""Points this many times further out than measure and force explain count as outside: the objective is unbounded."""


def proximal_gaussian(
    energy: EnergyLike,
    mu: Gaussian,
    tau: float,
    *,
    D: Tensor | None,
    tol: float,
    max_iter: int,
    warm_start: Gaussian | None,
) -> ProximalResult:
    r"""Minimise F(m, X X^T) + (|m - m0|_D^2 + |X - L0|_D^2) / (2 tau) over the mean m and a factor X (d, r).

    |.|_D is the norm of D^{-1}. Minimising over the factor includes the alignment of X with L0, so this is
    the JKO step argmin F + W_2^2 / (2 tau) over Gaussians nu = T_# mu, without a constraint. With g = dF/dm
    and H = dF/dS at the minimiser,

        m = m0 - tau D g,   X = (I + 2 tau D H)^{-1} L0:

    the backward map from the new measure to the old one is I + 2 tau D H. Solved by this fixed point with
    Anderson acceleration; where that fails to converge, by L-BFGS on (m, X), whose objective never increases.
    `gradient_norm` is the residual of the two equations, |.|_D, relative to the size of (m0 - m, L0, tau g); a mean
    is solved for to two ulp of m0.
    """
    check_positive(tau, "tau")
    check_positive(tol, "tol")
    check_count(max_iter, "max_iter")
    if mu.batch_shape:
        raise InvalidInput(f"measure must be a single Gaussian for a JKO step, got batch {mu.batch_shape}")
    m0, L0 = mu.mean_t.detach(), exact_rank(mu.factor_t.detach())
    floor = max(tol, 64 * torch.finfo(m0.dtype).eps)
    problem = _Problem(energy, m0, L0, float(tau), D, floor)
    before = float(energy.raw_gaussian(m0, L0 @ L0.mT))
    start = problem.pack(m0, L0)
    if warm_start is not None and warm_start.factor_t.shape == L0.shape:
        start = problem.pack(warm_start.mean_t.detach(), warm_start.factor_t.detach())
    y, residual, n_iter = problem.fixed_point(start, floor, max_iter)
    if not (residual <= floor and problem.objective(y) <= before + problem.slack(before)):
        best = start if problem.objective(start) <= before else problem.pack(m0, L0)
        if problem.objective(y) <= problem.objective(best):
            best = y
        found = problem.minimise(best, floor, max_iter)
        y, n_iter = found[0], n_iter + found[1]
        # A few fixed-point steps polish what line searches leave at rounding level of the objective.
        polished, residual, more = problem.fixed_point(y, floor, min(50, max_iter))
        if problem.residual(polished) < problem.residual(y) and (
            problem.objective(polished) <= problem.objective(y) + problem.slack(before)
        ):
            y = polished
        residual, n_iter = problem.residual(y), n_iter + more
    m, X = problem.unpack(y)
    measure = Gaussian.unchecked(m, factor=X, kind=mu.kind)
    after = float(energy.raw_gaussian(m, X @ X.mT))
    return ProximalResult(measure, bool(residual <= floor), residual, n_iter, before, after)


def exact_rank(L: Tensor) -> Tensor:
    """L times a rotation, of the same shape, with columns that are exactly 0 where its rank is below its width.

    The root of a singular covariance has columns of rounding off the range. An energy that falls without bound of its
    slope there (W_2^2 to a regular Gaussian) would make them a direction of their own; zero columns stay zero.
    """
    U, s, _ = torch.linalg.svd(L, full_matrices=False)
    kept = s > max(L.shape[-2:]) * torch.finfo(s.dtype).eps * s[..., :1]
    if bool(kept.all()):
        return L
    turned = U * torch.where(kept, s, 0.0).unsqueeze(-2)
    return torch.nn.functional.pad(turned, (0, L.shape[-1] - turned.shape[-1]))


class _Problem:
    """The inner problem in the flat variable y = (m, X)."""

    def __init__(
        self, energy: EnergyLike, m0: Tensor, L0: Tensor, tau: float, D: Tensor | None, floor: float
    ) -> None:
        self.energy, self.m0, self.L0, self.tau = energy, m0, L0, tau
        d = L0.shape[0]
        self.eye = torch.eye(d, dtype=L0.dtype, device=L0.device)
        self.D = self.eye if D is None else D
        self.inverse = None if D is None else torch.linalg.inv(D)
        # A mean carries no step below its ulp, which beside a small covariance, or none, is more than tol of the step.
        self.size2 = (2 * torch.finfo(m0.dtype).eps / floor) ** 2 * self._norm2(m0.unsqueeze(-1))
        self._last: tuple[Tensor, tuple[Tensor, Tensor]] | None = None
        g, H = self._gradient(y0 := self.pack(m0, L0))
        force = tau * self.D @ self.pack(g, 2.0 * H @ L0)
        reach = torch.linalg.matrix_norm(y0) + torch.linalg.matrix_norm(force).nan_to_num(0.0, 0.0, 0.0)
        self.limit = _FAR * float(reach) if float(reach) > 0 else float("inf")

    def pack(self, m: Tensor, X: Tensor) -> Tensor:
        return torch.cat([m.unsqueeze(-1), X], -1)

    def unpack(self, y: Tensor) -> tuple[Tensor, Tensor]:
        return y[:, 0], y[:, 1:]

    def slack(self, value: float) -> float:
        return 64 * torch.finfo(self.m0.dtype).eps * (1 + abs(value))

    def _norm2(self, z: Tensor) -> float:
        return float((z * (z if self.inverse is None else self.inverse @ z)).sum())

    def _within(self, y: Tensor) -> bool:
        return bool(torch.isfinite(y).all()) and float(torch.linalg.matrix_norm(y)) <= self.limit

    def objective(self, y: Tensor) -> float:
        if not self._within(y):
            return float("inf")
        m, X = self.unpack(y)
        value = float(self.energy.raw_gaussian(m, X @ X.mT))
        value += self._norm2(y - self.pack(self.m0, self.L0)) / (2 * self.tau)
        return value if value == value else float("inf")

    def _gradient(self, y: Tensor) -> tuple[Tensor, Tensor]:
        if self._last is not None and self._last[0] is y:
            return self._last[1]
        m, X = self.unpack(y)
        try:
            value = self.energy.raw_gaussian_gradient_of_factor(m, X)
        except InvalidInput:
            # A trial point where the energy is infinite has no gradient; the iteration steps back from NaN.
            value = torch.full_like(m, torch.nan), torch.full_like(self.eye, torch.nan)
        self._last = y, value
        return value

    def residual(self, y: Tensor) -> float:
        """Size of (m - m0 + tau D g, X - L0 + 2 tau D H X), relative to what it is made of."""
        g, H = self._gradient(y)
        _, X = self.unpack(y)
        force = self.tau * self.D @ self.pack(g, 2.0 * H @ X)
        moved = y - self.pack(self.m0, self.L0)
        scale = self._norm2(self.L0) + self._norm2(moved) + self._norm2(force)
        if not scale < float("inf"):  # NaN too: outside the domain of the energy nothing is solved
            return float("inf")
        left = moved + force
        mean, factor = self._norm2(left[:, :1]), self._norm2(left[:, 1:])
        mean, factor = (
            (mean / max(scale, self.size2) if mean > 0 else 0.0),
            (factor / scale if factor > 0 else 0.0),
        )
        return float((mean + factor) ** 0.5)

    def step(self, y: Tensor) -> Tensor:
        """One application of the fixed-point map."""
        g, H = self._gradient(y)
        backward = self.eye + 2.0 * self.tau * self.D @ H
        X = torch.linalg.solve_ex(backward, self.L0)[0]
        return self.pack(self.m0 - self.tau * (self.D @ g), X)

    def fixed_point(self, y: Tensor, tol: float, max_iter: int) -> tuple[Tensor, float, int]:
        """Anderson-accelerated fixed point; stops where it converges, diverges or stalls."""
        best, best_residual = y, self.residual(y)
        ys: list[Tensor] = []
        fs: list[Tensor] = []
        bad = 0
        for k in range(max_iter):
            # Once at least: where tau is tiny not to move at all is within tol of the size, and no step.
            if (best_residual <= tol and k > 0) or bad >= 8:
                return best, best_residual, k
            new = self.step(y)
            if not self._within(new):
                return best, best_residual, k
            ys, fs = [*ys[-_MEMORY:], new.reshape(-1)], [*fs[-_MEMORY:], (new - y).reshape(-1)]
            y = self._mix(ys, fs).reshape(y.shape)
            y = y if self._within(y) else new
            r = self.residual(y)
            if not r < 2 * best_residual and len(ys) > 1:
                y, ys, fs = new, ys[-1:], fs[-1:]
                r = self.residual(y)
            bad = 0 if r < 0.9 * best_residual else bad + 1
            if r < best_residual:
                best, best_residual = y, r
        return best, best_residual, max_iter

    @staticmethod
    def _mix(ys: list[Tensor], fs: list[Tensor]) -> Tensor:
        if len(ys) == 1:
            return ys[0]
        f = fs[-1]
        dF = torch.stack([f - q for q in fs[:-1]], -1)
        dY = torch.stack([ys[-1] - q for q in ys[:-1]], -1)
        gram = dF.mT @ dF
        ridge = (
            1e-14 * gram.diagonal().sum() * torch.eye(gram.shape[-1], dtype=gram.dtype, device=gram.device)
        )
        coefficients = torch.linalg.solve_ex(gram + ridge, dF.mT @ f)[0]
        mixed = ys[-1] - dY @ coefficients
        return mixed if bool(torch.isfinite(mixed).all()) else ys[-1]

    def minimise(self, y: Tensor, tol: float, max_iter: int) -> tuple[Tensor, int]:
        """L-BFGS on z = D^{-1/2} y, in which the quadratic part is |z - z0|^2 / (2 tau)."""
        w, U = torch.linalg.eigh(self.D)
        root, unroot = (U * w.sqrt()) @ U.mT, (U / w.sqrt()) @ U.mT
        shape = y.shape
        z0 = unroot @ self.pack(self.m0, self.L0)

        def evaluate(flat: Tensor) -> tuple[Tensor, Tensor]:
            z = flat.reshape(shape)
            if not self._within(root @ z):
                return torch.full_like(flat[:, 0], torch.inf), torch.full_like(flat, torch.nan)
            m, X = self.unpack(root @ z)
            value = self.energy.raw_gaussian(m, X @ X.mT) + (z - z0).square().sum() / (2 * self.tau)
            g, H = self._gradient(root @ z)
            gradient = root @ self.pack(g, 2.0 * H @ X) + (z - z0) / self.tau
            return value.reshape(1), gradient.reshape(1, -1)

        size = max(self._norm2(self.L0), torch.finfo(y.dtype).tiny) ** 0.5
        tolerance = torch.full((1,), tol * size / self.tau, dtype=y.dtype, device=y.device)
        found = lbfgs(
            evaluate, (unroot @ y).reshape(1, -1), scale=self.tau, tolerance=tolerance, max_iter=max_iter
        )
        return root @ found.y.reshape(shape), found.n_iter
