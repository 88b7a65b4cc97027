"""The JKO step in W_2 on particles."""

from __future__ import annotations

import torch
from torch import Tensor

from ..arrays import check_count, check_nonnegative, check_positive, to_kind
from ..errors import InvalidInput
from ..measures import Particles
from ..numerics.minimise import Minimum, lbfgs
from ..numerics.transport import barycentric_projection, transport_plan
from ._unbounded import bottomless, limit, warn_unbounded
from .base import EnergyLike, ProximalResult

__all__ = ["wasserstein_proximal"]

_MATCHINGS = 10


def wasserstein_proximal(
    energy: EnergyLike,
    mu: Particles,
    tau: float,
    root: Tensor | None,
    *,
    tol: float,
    max_iter: int,
    warm_start: Particles | None,
) -> ProximalResult:
    """Minimise F(y) + sum_i w_i |y_i - x_i|_D^2 / (2 tau) over tokens y; `root` is D^(1/2).

    Unknown: u_i = w_i^(1/2) D^(-1/2) (y_i - x_i), in which the transport term is |u|^2 / (2 tau) and the
    Euclidean norm of the gradient is the metric's. Tokens of weight 0 stay.
    """
    step = check_positive(tau, "tau")
    check_nonnegative(tol, "tol")
    check_count(max_iter, "max_iter")
    if energy.dim is not None and energy.dim != mu.dim:
        raise InvalidInput(f"energy acts on dimension {energy.dim}, mu has dimension {mu.dim}")
    if warm_start is not None and warm_start.x_t.shape != mu.x_t.shape:
        raise InvalidInput(
            f"warm_start has shape {tuple(warm_start.x_t.shape)}, expected that of mu, {tuple(mu.x_t.shape)}"
        )
    problem = _Problem(energy, mu, step, root)
    energy_before, slope = problem.start()
    floor = 16 * torch.finfo(mu.dtype).eps * problem.size() / step
    tolerance = tol * slope + floor
    u = torch.zeros_like(problem.x).flatten(1)
    if warm_start is not None:
        u = problem.better_start(u, warm_start.x_t.detach().reshape(problem.x.shape))
    n_iter = 0
    for _ in range(_MATCHINGS):
        found = lbfgs(
            problem.evaluate,
            u,
            scale=step,
            tolerance=tolerance,
            max_iter=max_iter - n_iter,
            far=problem.far,
        )
        n_iter, u = n_iter + found.n_iter, found.y
        if found.escaped or n_iter >= max_iter or not problem.rematch(u):
            break
    return _result(problem, mu, found, n_iter, energy_before, slope)


def _result(
    problem: _Problem, mu: Particles, found: Minimum, n_iter: int, before: Tensor, slope: Tensor
) -> ProximalResult:
    y = problem.tokens(found.y).reshape(mu.x_t.shape)
    relative = found.gradient_norm / torch.where(slope > 0, slope, 1.0)
    after = problem.value(problem.tokens(found.y))
    one = not mu.batch_shape
    failed = zip(before[~found.converged].tolist(), after[~found.converged].tolist(), strict=True)
    if found.escaped or any(bottomless(*pair) for pair in failed):
        warn_unbounded("W_2", stacklevel=4)
    energies = [float(e) if one else to_kind(e.reshape(mu.batch_shape), mu.kind) for e in (before, after)]
    return ProximalResult(
        measure=mu.moved(y),
        converged=bool(found.converged.all()),
        gradient_norm=float(relative.max()),
        n_iter=n_iter,
        energy_before=energies[0],
        energy_after=energies[1],
    )


class _Problem:
    """The inner problem of one step, all members of the batch at once (one leading axis)."""

    def __init__(self, energy: EnergyLike, mu: Particles, step: float, root: Tensor | None) -> None:
        self.energy, self.mu, self.step = energy, mu, step
        self.x = mu.x_t.detach().reshape(-1, mu.n, mu.dim)
        self.w = mu.weights_t.detach().reshape(-1, mu.n)
        self.scale = self.w.sqrt().unsqueeze(-1)
        self.root = None if root is None else root.detach()
        self.inverse = None if root is None else torch.linalg.inv(root.detach())
        self.centre = torch.zeros_like(self.x).flatten(1)
        self.limit = limit(self.x)

    def _apply(self, matrix: Tensor | None, x: Tensor) -> Tensor:
        return x if matrix is None else x @ matrix

    def tokens(self, u: Tensor) -> Tensor:
        """y of u."""
        moved = self._apply(self.root, u.unflatten(1, self.x.shape[1:]))
        present = self.scale > 0
        return self.x + torch.where(present, moved / torch.where(present, self.scale, 1.0), 0.0)

    def scaled(self, displacement: Tensor) -> Tensor:
        """u of a displacement y - x."""
        return (self.scale * self._apply(self.inverse, displacement)).flatten(1)

    def value(self, y: Tensor) -> Tensor:
        """F at tokens."""
        with torch.no_grad():
            return self._per_member(self.energy.raw_particles(self._shaped(y), self.mu.weights_t.detach()))

    def value_and_gradient(self, y: Tensor) -> tuple[Tensor, Tensor]:
        """F and its gradient in u, w_i^(1/2) D^(1/2) grad F."""
        with torch.no_grad():
            value, g = self.energy.raw_particles_value_gradient(self._shaped(y), self.mu.weights_t.detach())
        g = torch.where(self.scale > 0, g.detach().reshape(self.x.shape), 0.0)  # 0 / 0 at weight 0
        return self._per_member(value.detach()), (self.scale * self._apply(self.root, g)).flatten(1)

    def _shaped(self, y: Tensor) -> Tensor:
        return y.reshape(self.mu.x_t.shape)

    def _per_member(self, value: Tensor) -> Tensor:
        return value.expand(self.mu.batch_shape).reshape(-1)

    def evaluate(self, u: Tensor) -> tuple[Tensor, Tensor]:
        """The objective and its gradient in u."""
        gap = u - self.centre
        value, gradient = self.value_and_gradient(self.tokens(u))
        return value + gap.square().sum(-1) / (2 * self.step), gradient + gap / self.step

    def far(self, u: Tensor) -> Tensor:
        """Where a member has run off."""
        return self.tokens(u).abs().amax((-2, -1)) > self.limit

    def start(self) -> tuple[Tensor, Tensor]:
        """F(mu) and the metric norm of its gradient there."""
        value, gradient = self.value_and_gradient(self.x)
        return value, torch.linalg.vector_norm(gradient, dim=-1)

    def size(self) -> Tensor:
        """The norm of the tokens: rounding of y - x is an ulp of it."""
        return torch.linalg.vector_norm(self.scaled(self.x), dim=-1)

    def better_start(self, u: Tensor, y: Tensor) -> Tensor:
        """The scaled displacement to y for the members in which it is better than `u`."""
        guess = self.scaled(y - self.x)
        return torch.where((self.evaluate(guess)[0] < self.evaluate(u)[0]).unsqueeze(-1), guess, u)

    def rematch(self, u: Tensor) -> bool:
        """Couple each token to where an optimal plan takes its mass from; whether any member changed.

        The plan's cost is sum w_i |y_i - c_i|^2 plus a constant, c_i the barycentre of the sources of y_i:
        only the centre of the quadratic term moves.
        """
        y, changed = self.tokens(u), False
        white_x, white_y = self._apply(self.inverse, self.x), self._apply(self.inverse, y)
        centres = self.centre.clone()
        for k in range(len(self.x)):
            if _keeps_nearest(white_x[k], white_y[k]):
                centres[k] = 0.0
                continue
            plan = transport_plan(white_y[k], self.w[k], white_x[k], self.w[k], 2)
            source = barycentric_projection(plan, len(y[k]), self.w[k], self.x[k])
            source = torch.where(self.scale[k] > 0, source, self.x[k])
            centres[k] = (self.scale[k] * self._apply(self.inverse, source - self.x[k])).flatten()
        if not torch.equal(centres, self.centre):
            gap = torch.linalg.vector_norm(centres - self.centre, dim=-1)
            changed = bool((gap > 1e-12 * self.size()).any())
            self.centre = centres
        return changed


def _keeps_nearest(x: Tensor, y: Tensor) -> bool:
    """Whether every y_i is as near to x_i as to any other x_j: the identity matching is then optimal."""
    square = torch.cdist(y, x, compute_mode="donot_use_mm_for_euclid_dist")
    return bool((square.diagonal() <= square.amin(-1)).all())
