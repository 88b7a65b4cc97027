"""The twisted Wasserstein distance d_{A,V}, in which softmax attention is a gradient flow."""

from __future__ import annotations

import math
import warnings
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from ..arrays import (
    Array,
    ArrayLike,
    ArrayView,
    as_tensor,
    broadcast_batch,
    cast_like,
    check_choice,
    check_count,
    check_positive,
    common_kind,
    to_kind,
    view_of,
)
from ..errors import InvalidInput, NotConverged
from ..measures import Gaussian, Measure, Particles, as_measure, check_same_dim
from ..numerics.tilted import log_interaction
from . import _twisted_gaussians as gaussians
from ._twisted_batch import joined_geodesic, joined_measure, joined_velocity, members
from ._twisted_derivative import attached, cloud_length, gaussian_length, line_length, wanted
from ._twisted_geodesics import Found, between_clouds, between_gaussians, segment_count, square_factor, warn
from ._twisted_line import line_lengths
from ._twisted_particles import polygon_action
from ._twisted_proximal import proximal_twisted
from ._twisted_quadrature import quadrature_geodesic
from ._twisted_structure import parameters
from ._twisted_tangents import as_affine, as_field, exponential, inner_product, logarithm, tangent_members
from .base import EnergyLike, Geodesic, Metric, ProximalResult, joined_step, shown

__all__ = ["TwistedWasserstein"]

_DRIFT = 1e-8
_POLISH = 1e-9


class TwistedWasserstein(Metric):
    r"""The twisted distance of the paper, for V = sign D A with A symmetric and D symmetric positive definite.

    d(mu0, mu1)^2 = inf int_0^1 int <D^{-1} v_t, v_t> G_{mu_t} dmu_t dt over d/dt mu + div(mu v) = 0, with
    G_mu(x) = E_y e^{x^T A y}.

    On clouds, g_x(v, v) = sum_i w_i G_i <D^{-1} v_i, v_i>: empirical measures are totally geodesic. On
    Gaussians velocities are restricted to affine ones, which gives an upper bound on the distance
    (`quadrature_geodesic` gives the full one in d = 1 and 2).

    Parameters
    ----------
    A, V : array (d, d)
        As in `SoftmaxAttention`. D and the sign are found from them.
    D : array (d, d), optional
        Instead of V: the mobility, symmetric positive definite.
    sign : +1 or -1
        With D: V = sign D A.
    tol : float
        Relative error of lengths to reach. Lengths are computed in float64 whatever the dtype of the measures.

    Raises
    ------
    NotAGradientFlow
        No such D exists; `.residual` says by how much.
    InvalidInput
        D not symmetric positive definite, A not symmetric where D is given, both V and D, or neither.

    Notes
    -----
    Where x^T A x < 0 for some x the space is not complete: infinity is at a finite distance (`line_diameter`: in
    d = 1 the line of Dirac masses has length sqrt(2 pi / |a|) / sqrt(D)). Two measures may then be closer through
    infinity than by any path between them: `distance` takes that way into account, `geodesic` warns that no
    shortest path exists. Both find local minima over paths: upper bounds on the distance. Gaussians outside
    I - S^{1/2} A S A S^{1/2} > 0 have infinite G and are rejected. Sums run in the log domain; a length beyond
    the floating range is inf, and `geodesic(...).details["log_length"]` still tells it.

    References
    ----------
    Castin, Ablin, Carrillo, Peyré, arXiv 2501.18322, section 3.

    Examples
    --------
    >>> metric = TwistedWasserstein(A=-1.0, V=-1.0)
    >>> round(float(metric.distance(Particles([[-0.5]]), Particles([[2.0]]))), 10)
    1.6762132323
    """

    A = ArrayView("The interaction matrix, (d, d).")
    D = ArrayView("The mobility, (d, d): V = sign D A.")

    def __init__(
        self,
        A: ArrayLike,
        V: ArrayLike | None = None,
        *,
        D: ArrayLike | None = None,
        sign: int = 1,
        tol: float = 1e-8,
    ) -> None:
        self.A_t, self.D_t, self.sign, self.residual = parameters(A, V, D, sign)
        self.tol = check_positive(tol, "tol")
        self.dim = int(self.A_t.shape[-1])
        self.kind = common_kind(A, V, D)

    @property
    def line_diameter(self) -> Array:
        """Length sqrt(2 pi / |a|) of each eigenline of D^{1/2} A D^{1/2} through Dirac masses; inf for a >= 0.

        In d = 1 this is the length of the line: sqrt(2 pi / |a|) / sqrt(D) for the scalars a and D.
        """
        return view_of(line_lengths(self.A_t, self.D_t), self.kind)

    def _at(self, like: Tensor) -> tuple[Tensor, Tensor]:
        return cast_like(self.A_t, like, "A"), cast_like(self.D_t, like, "D")

    def _doubles(self, like: Tensor) -> tuple[Tensor, Tensor]:
        self._at(like)  # the device must match
        return self.A_t.detach().double(), self.D_t.detach().double()

    def _one(self, mu: Measure, name: str) -> Gaussian | Particles:
        a = as_measure(mu, name)
        if a.dim != self.dim:
            raise InvalidInput(f"{name} has dimension {a.dim}, the metric acts on dimension {self.dim}")
        return a

    def _pair(self, mu: Measure, nu: Measure) -> tuple[Any, Any, tuple[int, ...]]:
        a, b = as_measure(mu, "mu"), as_measure(nu, "nu")
        check_same_dim(a, b)
        self._one(a, "mu")
        if isinstance(a, Gaussian) != isinstance(b, Gaussian):
            raise InvalidInput("mu and nu must be both Gaussians or both Particles")
        return a, b, broadcast_batch([a.batch_shape, b.batch_shape], ["mu", "nu"])

    def distance(self, mu: Measure, nu: Measure) -> Array:
        """d(mu, nu), not squared, (...); on Gaussians the restricted distance (an upper bound).

        Members of a batch one after another. First derivatives in the tokens, means, covariances, A and D flow
        (a second one is an error); not those in weights, nor where the way runs through infinity (a warning).
        """
        a, b, shape = self._pair(mu, nu)
        kind = common_kind(mu, nu, self)
        pairs = zip(members(a, shape), members(b, shape), strict=True)
        values = torch.stack([self._distance(p, q) for p, q in pairs])
        return to_kind(values.reshape(shape), kind)

    def _distance(self, a: Any, b: Any) -> Tensor:
        parts = ("mean_t", "factor_t") if isinstance(a, Gaussian) else ("x_t",)
        inputs = wanted(*(getattr(c, name) for c in (a, b) for name in parts), self.A_t, self.D_t)
        found = self._found(a, b, polish=_POLISH if inputs else None)
        warn(found.geodesic, self.tol, of_distance=True, stacklevel=3)
        value = torch.as_tensor(found.geodesic.length)
        infinity = found.geodesic.details["through_infinity"]
        if infinity is not None and infinity < float(value):
            if inputs:
                warnings.warn(
                    "twisted distance through infinity: without derivatives", NotConverged, stacklevel=3
                )
            return torch.full_like(value, infinity)
        if not inputs or float(value) == 0:
            return value
        A, D = self.A_t.double(), self.D_t.double()

        def length() -> Tensor:
            if isinstance(a, Gaussian):
                assert found.path is not None
                factors = tuple(square_factor(c.factor_t.double()) for c in (a, b))
                return gaussian_length(found.path, (factors[0], factors[1]), a, b, A, D)
            if found.path is None:
                return line_length(a, b, A, D)
            assert found.labels is not None
            return cloud_length(found.path, found.labels, a, b, A, D)

        return attached(value, length, inputs)

    def geodesic(
        self,
        mu: Measure,
        nu: Measure,
        *,
        matching: str = "optimal",
        method: str = "polynomial",
        max_degree: int = 64,
        segments: int = 16,
    ) -> Geodesic:
        """Shortest path from mu to nu, its length with an error estimate.

        "polynomial": polynomials of doubling degree (`numerics.paths`); as the error of a degree falls
        exponentially, the difference of the last two is that of the length. "segments": polygons of N/4, N/2 and N
        segments (`numerics.polygons`); their lengths are those of the geodesic up to even powers of 1/N, so
        Richardson extrapolation gives the length and its error.

        Parameters
        ----------
        mu, nu : two clouds or two Gaussians, also batches
        matching : "optimal" or "identity"
            Clouds: "identity" keeps labels; "optimal" finds the matching (monotone in d = 1; up to 6 particles
            the best of all n! by rough lengths; beyond, from assignments, improved by exchanges under the field
            of the path and of two targets while they pay, a limited number of them, for up to 256 particles).
            Clouds of different weights move along the pieces of a plan, improved likewise. The error of the length
            is that of the path with this matching: a better one may exist.
        method : "polynomial" or "segments"
            Gaussians have the first only.
        max_degree : int, largest degree of the path
        segments : int, a multiple of 4 from 8 on

        Returns
        -------
        Geodesic
            `details`: "log_length" (finite where the length overflows), "matching", "exchanges", "degrees" (or
            "segments" and "lengths", of the polygons; `at` runs along the last), "through_infinity" (length of the
            best way through infinity, None where there is none near).
        """
        a, b, shape = self._pair(mu, nu)
        check_choice(matching, "matching", ("optimal", "identity"))
        check_count(max_degree, "max_degree", 8)
        count = segment_count(method, segments, a)
        pairs = zip(members(a, shape), members(b, shape), strict=True)
        parts = [self._found(p, q, matching, max_degree, segments=count).geodesic for p, q in pairs]
        for g in parts:
            warn(g, self.tol, of_distance=False, stacklevel=2)
        kind = common_kind(mu, nu, self)
        path = joined_geodesic(parts, shape, kind) if shape else parts[0]
        return replace(path, details=shown(path.details, kind))

    def _found(
        self,
        a: Any,
        b: Any,
        matching: str = "optimal",
        max_degree: int = 64,
        polish: float | None = None,
        segments: int | None = None,
    ) -> Found:
        degrees = tuple(n for n in (4, 8, 16, 32, 64, 128) if n <= max_degree)
        kind = common_kind(a, b, self)
        A, D = self._doubles(a.mean_t)
        if isinstance(a, Gaussian):
            return between_gaussians(a, b, A, D, tol=self.tol, degrees=degrees, kind=kind, polish=polish)
        rest: dict[str, Any] = {"degrees": degrees, "kind": kind, "polish": polish, "segments": segments}
        return between_clouds(a, b, A, D, tol=self.tol, matching=matching, **rest)

    def quadrature_geodesic(
        self, mu: Gaussian, nu: Gaussian, *, nodes: tuple[int, ...] = (8, 12, 16)
    ) -> Geodesic:
        """The full (not restricted) distance of two Gaussians in d = 1 or 2, through Gauss-Hermite particles.

        Both are replaced by the same n (or n x n) weighted nodes m + L z, matched by z with the end factor of
        the restricted geodesic. In d = 1 (monotone matching) the distance of these clouds tends to that of the
        Gaussians as n grows; in d = 2 to the infimum over paths with this matching, between the full and the
        restricted distance. The error is the difference of the last two n plus that of the path.
        `details["lengths"]` has all of them.

        Raises
        ------
        InvalidInput
            d > 2, batches, fewer than two node counts, or Gaussians outside the domain.
        """
        a, b, shape = self._pair(mu, nu)
        if not isinstance(a, Gaussian) or self.dim > 2 or shape:
            raise InvalidInput("mu and nu must be single Gaussians in dimension 1 or 2")
        if len(nodes) < 2:
            raise InvalidInput(f"nodes must hold at least two counts, got {nodes}")
        return quadrature_geodesic(self.geodesic, a, b, nodes)

    def exp(self, mu: Measure, tangent: Any) -> Measure:
        """Follow the geodesic from mu with an initial velocity for unit time (Hamiltonian flow).

        Parameters
        ----------
        mu : Particles or Gaussian, also batches
        tangent : array (..., n, d) of velocities, or an `AffineVelocity` on a Gaussian

        Raises
        ------
        InvalidInput
            The geodesic leaves the space before unit time (it is not complete).

        Notes
        -----
        The energy is conserved to 1e-8 relative, or a `NotConverged` warning says by how much it drifted.
        """
        a = self._one(mu, "mu")
        A, D = self._doubles(a.mean_t)
        shape, kind = a.batch_shape, common_kind(mu, self)
        tangents = tangent_members(tangent, a)
        ends = [exponential(p, t, A, D) for p, t in zip(members(a, shape), tangents, strict=True)]
        drift = max(end[1] for end in ends)
        if drift > _DRIFT:
            warnings.warn(
                f"twisted geodesic: energy drifted by {drift:.2e} relative", NotConverged, stacklevel=2
            )
        return joined_measure([end[0] for end in ends], shape, kind)

    def log(self, mu: Measure, nu: Measure, *, matching: str = "optimal") -> Any:
        """Initial velocity of the shortest path: array (..., n, d), or an `AffineVelocity` for Gaussians.

        Its exponential is nu (to 1e-10 up to 128 coordinates, by shooting; beyond, to about 1e-6 of the
        displacement); |log|^2 in `inner` is the squared length of the path. Where the exponential is too sensitive
        to shoot, between far clouds, a `NotConverged` warning says by how much it misses.

        Raises
        ------
        InvalidInput
            Clouds of different weights (their path splits particles), or singular Gaussians.
        """
        a, b, shape = self._pair(mu, nu)
        check_choice(matching, "matching", ("optimal", "identity"))
        A, D = self._doubles(a.mean_t)
        velocities = []
        for p, q in zip(members(a, shape), members(b, shape), strict=True):
            path = self._found(p, q, matching, polish=_POLISH).geodesic
            warn(path, self.tol, of_distance=False, stacklevel=2)
            velocities.append(logarithm(p, path, A, D))
        return joined_velocity(velocities, shape, common_kind(mu, nu, self))

    def inner(self, mu: Measure, v: Any, w: Any) -> Array:
        """<v, w> at mu: sum_i w_i G_i <D^{-1} v_i, w_i>, or Z E<D^{-1} v, w> of affine fields on a Gaussian.

        Raises
        ------
        InvalidInput
            Tangents of another shape or kind, a Gaussian outside the domain (its G is infinite).
        """
        a = self._one(mu, "mu")
        check = as_affine if isinstance(a, Gaussian) else as_field
        p, q = check(v, "v", a), check(w, "w", a)  # type: ignore[arg-type]
        A, D = self._at(a.mean_t)
        if isinstance(a, Gaussian):
            gaussians.check_domain(a.mean_t, a.factor_t, A, "mu")
        return to_kind(inner_product(a, p, q, A, D), common_kind(mu, v, w, self))

    def action(self, points: ArrayLike, weights: ArrayLike | None = None, *, n_quadrature: int = 4) -> Array:
        """Action int_0^1 g(x', x') dt of the piecewise linear path through clouds (k + 1, n, d) at equal times.

        By Gauss-Legendre quadrature on each of the k segments. Differentiable in the points.
        """
        x, kind = as_tensor(points, "points", ndim=3)
        if x.shape[0] < 2 or x.shape[-1] != self.dim:
            raise InvalidInput(
                f"points must be (k + 1, n, {self.dim}) with k >= 1, got shape {tuple(x.shape)}"
            )
        w = Particles(x[0], weights).weights_t
        A, D = self._at(x)
        total = polygon_action(x, w, A, torch.linalg.inv(D), n_quadrature)
        return to_kind(total, kind)

    def raw_particles_riesz(self, x: Tensor, weights: Tensor, gradient: Tensor) -> Tensor:
        """D gradient_i / G_i."""
        A, D = self._at(x)
        return torch.exp(-log_interaction(x, weights, A)).unsqueeze(-1) * (gradient @ D)

    def raw_particles_steepest(self, energy: EnergyLike, x: Tensor, weights: Tensor) -> Tensor:
        """D grad / G, the quotient taken before either overflows."""
        A, D = self._at(x)
        log_g = log_interaction(x, weights, A)
        return energy.raw_particles_gradient_scaled(x, weights, log_g) @ D

    def raw_gaussian_riesz(self, mean: Tensor, cov: Tensor, g: Tensor, H: Tensor) -> tuple[Tensor, Tensor]:
        """The gradient among affine fields; of -sign E_A it is minus the softmax closure."""
        A, D = self._at(mean)
        return gaussians.riesz(mean, cov, g, H, A, D)

    def proximal(
        self,
        energy: EnergyLike,
        mu: Measure,
        tau: float,
        *,
        tol: float = 1e-9,
        max_iter: int = 500,
        warm_start: Measure | None = None,
    ) -> ProximalResult:
        """One JKO step, argmin F(nu) + d(mu, nu)^2 / (2 tau), over nu and the path to it; F never increases.

        Particles keep their labels, as in `geodesic(..., matching="identity")`: an upper bound on d, equal to it for
        near clouds. Gaussians: the restricted metric. `gradient_norm` is that of the inner problem relative to its
        start. Where the objective falls without bound a `NotConverged` warning says so.
        """
        a = self._one(mu, "mu")
        A, D = self._doubles(a.mean_t)
        shape = a.batch_shape
        guesses = members(warm_start, shape) if warm_start is not None else [None] * math.prod(shape)
        steps = [
            proximal_twisted(energy, p, tau, A=A, D=D, tol=tol, max_iter=max_iter, warm_start=guess)
            for p, guess in zip(members(a, shape), guesses, strict=True)
        ]
        return (
            joined_step(steps, joined_measure([s.measure for s in steps], shape, a.kind))
            if shape
            else steps[0]
        )
