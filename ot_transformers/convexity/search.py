"""Search for the measure and direction in which an energy is least convex."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal

import numpy as np
import torch
from scipy.optimize import minimize
from torch import Tensor

from ..arrays import (
    Array,
    check_choice,
    check_count,
    check_positive,
    common_kind,
    describe,
    make_generator,
    tensor_of,
    to_kind,
)
from ..energies import Energy
from ..errors import InvalidInput, OTTransformersError
from ..measures import Gaussian, Measure, Particles
from ..metrics import BuresWasserstein, TwistedWasserstein, Wasserstein
from ..numerics.twisted import geodesic_acceleration, kernel_at
from ..numerics.twisted_gaussians import gaussian_acceleration, gaussian_log_speed, horizontal
from ..spd import symmetrise
from ._states import CloudState, GaussianState, State, energy_of
from .hessian import EigenPair, riemannian_hessian
from .twisted import twisted_parameters
from .witness import Witness

__all__ = ["find_nonconvexity"]

Floats = np.ndarray[Any, Any]
_TRUST = 1e6
"""Where |modulus| exceeds that many times |F| the measure is at the edge of the domain: digits are gone."""
_FLOOR = 0.05
"""Smallest diagonal entry of a covariance factor, as a part of the radius: keeps the Gaussians regular."""


def find_nonconvexity(
    energy: Energy,
    metric: Any,
    *,
    kind: Literal["particles", "gaussian"] | None = None,
    n: int = 3,
    dim: int | None = None,
    radius: float = 2.0,
    n_starts: int = 12,
    max_iter: int = 100,
    seed: int = 0,
) -> Witness:
    """Search measures and directions for the most negative modulus Hess F(v, v) / |v|^2.

    Multi-start: random measures in the ball; at each the direction of the smallest eigenvalue; then L-BFGS on
    the modulus as a function of the measure and the direction together; at its end the eigenpair again. The
    best of all starts is the witness. Not finding a negative modulus proves nothing.

    Parameters
    ----------
    energy : Energy
    metric : Wasserstein, BuresWasserstein or TwistedWasserstein
    kind : "particles" or "gaussian", optional
        Where to search; by default Gaussians for BuresWasserstein and for energies of Gaussians alone. In the
        twisted metric Gaussians are searched in the metric restricted to affine velocities.
    n : int
        Particles of equal weight; 1 searches Dirac masses.
    dim : int, optional
        Dimension, where the energy does not fix it.
    radius : float
        Points and means stay in [-radius, radius]^d, covariance factors within radius.
    n_starts, max_iter : int
        Starts, and L-BFGS iterations of each.
    seed : int
        The same seed gives the same witness.

    Returns
    -------
    Witness

    Raises
    ------
    InvalidInput
        No dimension, an energy or metric that is not defined there, an energy infinite at every start.

    Examples
    --------
    >>> import numpy as np
    >>> from ot_transformers import InteractionEnergy, TwistedWasserstein
    >>> metric = TwistedWasserstein(A=-np.eye(2), V=np.eye(2))
    >>> witness = find_nonconvexity(InteractionEnergy(-np.eye(2)), metric, n=1, n_starts=2)
    >>> round(witness.modulus, 9)
    -1.0
    """
    if not isinstance(energy, Energy):
        raise InvalidInput(f"energy must be an Energy, got {type(energy).__name__}")
    d = energy.dim or getattr(metric, "dim", None) or dim
    if d is None:
        raise InvalidInput("dim must be given: neither the energy nor the metric has a dimension")
    if dim is not None and check_count(dim, "dim") != d:
        raise InvalidInput(f"dim must be {d}, the dimension of the energy, got {dim}")
    check_count(n, "n")
    check_positive(radius, "radius")
    check_count(n_starts, "n_starts")
    check_count(max_iter, "max_iter")
    where = check_choice(kind or _default_kind(energy, metric), "kind", ("particles", "gaussian"))
    if where == "particles" and isinstance(metric, BuresWasserstein):
        raise InvalidInput("kind must be 'gaussian' for BuresWasserstein, got 'particles'")
    gaussians = _TwistedGaussians if isinstance(metric, TwistedWasserstein) else _Gaussians
    problem = (_Clouds if where == "particles" else gaussians)(energy, metric, d, n, radius)
    generator = make_generator(check_count(seed, "seed", 0))
    best: tuple[Measure, EigenPair] | None = None
    trace: list[float] = []
    last: OTTransformersError | None = None
    for _ in range(n_starts):
        try:
            found = _one_start(problem, problem.draw(generator), max_iter)
        except InvalidInput as err:  # outside the domain of the energy: another start
            last = err
            continue
        # Near the edge of the domain of an energy numbers are large and worth little: their errors count.
        if best is None or _score(found[1]) < _score(best[1]):
            best = found
        trace.append(best[1].value)
    if best is None:
        raise InvalidInput(f"energy has no usable start among {n_starts}: {last}")
    measure, pair = best
    return Witness(
        energy, metric, measure, pair.direction, pair.value, pair.error, int(seed), np.array(trace)
    )


def _default_kind(energy: Energy, metric: Any) -> str:
    only_gaussian = type(energy).raw_particles is Energy.raw_particles
    return "gaussian" if isinstance(metric, BuresWasserstein) or only_gaussian else "particles"


def _one_start(problem: _Problem, theta: Floats, max_iter: int) -> tuple[Measure, EigenPair]:
    """The eigenpair at a start, and at the end of a descent from it; the lower of the two."""
    measure = problem.measure(theta)
    pair = riemannian_hessian(problem.energy, problem.metric, measure).min_eigenpair()
    best = measure, pair
    z = np.concatenate([theta, problem.direction(pair.direction)])
    bounds = [*problem.bounds(), *[(None, None)] * (len(z) - len(theta))]
    run = minimize(
        problem.quotient, z, jac=True, method="L-BFGS-B", bounds=bounds, options={"maxiter": max_iter}
    )
    try:
        measure = problem.measure(run.x[: len(theta)])
        pair = riemannian_hessian(problem.energy, problem.metric, measure).min_eigenpair()
    except InvalidInput:
        return best
    return (measure, pair) if _score(pair) < _score(best[1]) else best


def _score(pair: EigenPair) -> float:
    return pair.value + 10.0 * pair.error


class _Problem:
    """Measures as vectors theta, directions as vectors, and the modulus as a function of both."""

    def __init__(self, energy: Energy, metric: Any, d: int, n: int, radius: float) -> None:
        self.energy, self.metric, self.d, self.n, self.radius = energy, metric, d, n, radius
        D = getattr(metric, "D_t", None)
        eye = torch.eye(d, dtype=torch.float64)
        self.D = eye if D is None else D.detach().double()
        self.Dinv = torch.linalg.inv(self.D)
        self.twisted = isinstance(metric, TwistedWasserstein)
        if not isinstance(metric, Wasserstein | BuresWasserstein | TwistedWasserstein):
            raise InvalidInput(
                f"metric must be Wasserstein, BuresWasserstein or TwistedWasserstein, got {describe(metric)}"
            )

    def shown(self, t: Tensor) -> Array:
        """In the kind of the energy and the metric."""
        return to_kind(t, common_kind(self.energy, self.metric))

    def draw(self, generator: torch.Generator) -> Floats:
        raise AssertionError

    def measure(self, theta: Floats) -> Measure:
        raise AssertionError

    def direction(self, tangent: Any) -> Floats:
        raise AssertionError

    def bounds(self) -> list[tuple[float, float]]:
        raise AssertionError

    def path(self, z: Tensor) -> tuple[Callable[[Tensor], State], Tensor]:
        """The geodesic to second order and |v|^2, differentiable in the measure and the direction."""
        raise AssertionError

    def inside(self, z: Floats) -> bool:
        """Whether the measure lies in the domain of the metric."""
        return True

    def quotient(self, z: Floats) -> tuple[float, Floats]:
        """Hess F(v, v) / |v|^2 and its gradient: three reverse sweeps."""
        if not self.inside(z):
            return 1e300, np.zeros_like(z)
        with torch.enable_grad():
            y = torch.from_numpy(z.copy()).requires_grad_()
            s = torch.zeros((), dtype=torch.float64, requires_grad=True)
            path, square = self.path(y)
            value = energy_of(self.energy, path(s))
            (first,) = torch.autograd.grad(value, s, create_graph=True)
            (second,) = torch.autograd.grad(first, s, create_graph=True)
            modulus = second / square
            (slope,) = torch.autograd.grad(modulus, y)
        trusted = bool(modulus.abs() <= _TRUST * value.abs()) if bool(torch.isfinite(value)) else False
        if not trusted or not bool(torch.isfinite(slope).all()):
            return 1e300, np.zeros_like(z)
        return float(modulus.detach()), slope.numpy()


class _Clouds(_Problem):
    """n points of equal weight."""

    def draw(self, generator: torch.Generator) -> Floats:
        spread = torch.rand((), generator=generator, dtype=torch.float64)  # clouds of all sizes
        x = spread * (2.0 * torch.rand(self.n * self.d, generator=generator, dtype=torch.float64) - 1.0)
        return (self.radius * x).numpy()

    def measure(self, theta: Floats) -> Measure:
        return Particles(self.shown(torch.from_numpy(theta.reshape(self.n, self.d).copy())))

    def direction(self, tangent: Any) -> Floats:
        return np.asarray(tensor_of(tangent).detach().double()).reshape(-1)

    def bounds(self) -> list[tuple[float, float]]:
        return [(-self.radius, self.radius)] * (self.n * self.d)

    def path(self, z: Tensor) -> tuple[Callable[[Tensor], State], Tensor]:
        x, v = z.reshape(2, self.n, self.d)
        w = torch.full((self.n,), 1.0 / self.n, dtype=torch.float64)
        q = ((v @ self.Dinv) * v).sum(-1)
        if not self.twisted:
            return (lambda s: CloudState(x + s * v, w)), (w * q).sum()
        A, D = twisted_parameters(self.metric, x)
        kernel = kernel_at(x, w, A)
        a = geodesic_acceleration(x, v, A, D, kernel)
        return (lambda s: CloudState(x + s * v + 0.5 * s * s * a, w)), (w * torch.exp(kernel.log_g) * q).sum()


class _Gaussians(_Problem):
    """Regular Gaussians N(m, L L^T), L lower triangular; directions (b, X), X symmetric."""

    def __init__(self, energy: Energy, metric: Any, d: int, n: int, radius: float) -> None:
        super().__init__(energy, metric, d, n, radius)
        self.rows, self.cols = torch.tril_indices(d, d)
        w, U = torch.linalg.eigh(self.D)
        self.root, self.unroot = (U * w.sqrt()) @ U.mT, (U / w.sqrt()) @ U.mT

    def draw(self, generator: torch.Generator) -> Floats:
        d, k = self.d, len(self.rows)
        spread = torch.rand(2, generator=generator, dtype=torch.float64)
        m = spread[0] * (2.0 * torch.rand(d, generator=generator, dtype=torch.float64) - 1.0)
        L = 0.5 * spread[1] * (2.0 * torch.rand(k, generator=generator, dtype=torch.float64) - 1.0)
        L = torch.where(self.rows == self.cols, L.abs() + _FLOOR, L)
        return (self.radius * torch.cat([m, L])).numpy()

    def _factor(self, entries: Tensor) -> Tensor:
        return torch.zeros((self.d, self.d), dtype=torch.float64).index_put((self.rows, self.cols), entries)

    def measure(self, theta: Floats) -> Measure:
        z = torch.from_numpy(theta.copy())
        L = self._factor(z[self.d :])
        return Gaussian(self.shown(z[: self.d]), self.shown(L @ L.mT))

    def direction(self, tangent: Any) -> Floats:
        b, M = (t.detach().double() for t in (tangent.b_t, tangent.M_t))
        X = self.unroot @ M @ self.root
        return torch.cat([self.unroot @ b, X[self.rows, self.cols]]).numpy()

    def bounds(self) -> list[tuple[float, float]]:
        r = self.radius
        diagonal = (self.rows == self.cols).tolist()
        return [(-r, r)] * self.d + [(_FLOOR * r, r) if on else (-r, r) for on in diagonal]

    def path(self, z: Tensor) -> tuple[Callable[[Tensor], State], Tensor]:
        d, k = self.d, len(self.rows)
        m, L, b = z[:d], self._factor(z[d : d + k]), z[d + k : 2 * d + k]
        half = self._factor(z[2 * d + k :])
        X = half + torch.tril(half, -1).mT
        white = self.unroot @ L
        square = b.square().sum() + (X @ white).square().sum()
        eye = torch.eye(d, dtype=torch.float64)

        def path(s: Tensor) -> State:
            moved = self.root @ (eye + s * X) @ white
            return GaussianState(m + s * (self.root @ b), symmetrise(moved @ moved.mT))

        return path, square


class _TwistedGaussians(_Gaussians):
    """Regular Gaussians in the restricted twisted metric; directions (b, M), M any matrix: M L is made horizontal."""

    def direction(self, tangent: Any) -> Floats:
        return torch.cat([t.detach().double().reshape(-1) for t in (tangent.b_t, tangent.M_t)]).numpy()

    def inside(self, z: Floats) -> bool:
        L = self._factor(torch.from_numpy(z[self.d : self.d + len(self.rows)].copy()))
        A, _ = twisted_parameters(self.metric, L)
        return float(torch.linalg.matrix_norm(L.mT @ A @ L, 2)) < 1.0

    def path(self, z: Tensor) -> tuple[Callable[[Tensor], State], Tensor]:
        d, k = self.d, len(self.rows)
        m, L, b = z[:d], self._factor(z[d : d + k]), z[d + k : 2 * d + k]
        A, D = twisted_parameters(self.metric, m)
        Dinv = torch.linalg.inv(D)
        q = torch.cat([m.unsqueeze(-1), L], -1)
        v = horizontal(q, torch.cat([b.unsqueeze(-1), z[2 * d + k :].reshape(d, d) @ L], -1), A, Dinv)
        a = gaussian_acceleration(q, v, A, D, Dinv)
        log_square, _ = gaussian_log_speed(m, L, v[:, 0], v[:, 1:], A, Dinv)

        def path(s: Tensor) -> State:
            moved = q + s * v + 0.5 * s * s * a
            return GaussianState(moved[:, 0], symmetrise(moved[:, 1:] @ moved[:, 1:].mT))

        return path, torch.exp(log_square)
