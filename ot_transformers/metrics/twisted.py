"""The twisted Wasserstein distance d_{A,V}, in which softmax attention is a gradient flow."""

from __future__ import annotations

import math
import warnings
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ..arrays import (
    Array,
    ArrayLike,
    as_matrix,
    as_scalar,
    as_tensor,
    cast_like,
    check_choice,
    check_positive,
    check_psd,
    check_symmetric,
    common_kind,
    describe,
    to_kind,
)
from ..errors import InvalidInput, NotAGradientFlow, NotConverged
from ..measures import AffineVelocity, Gaussian, Measure, Particles, as_measure, check_same_dim
from ..numerics.structure import find_mobility
from ..numerics.tilted import log_interaction
from ..spd import symmetrise
from . import _twisted_gaussians as gaussians
from . import _twisted_particles as clouds
from ._twisted_geodesics import (
    between_clouds,
    between_gaussians,
    member,
    polygon_action,
    quadrature_geodesic,
    refined_velocity,
    square_factor,
)
from ._twisted_proximal import proximal_twisted
from .base import EnergyLike, Geodesic, Metric, ProximalResult

__all__ = ["TwistedWasserstein"]

_DRIFT = 1e-8
_REFINED = 128
"""Coordinates up to which `log` is refined by shooting."""


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
        Relative error of lengths to reach.

    Raises
    ------
    NotAGradientFlow
        No such D exists; `.residual` says by how much.
    InvalidInput
        D not symmetric positive definite, A not symmetric where D is given, both V and D, or neither.

    Notes
    -----
    The space is not complete for A < 0: infinity is at a finite distance (`line_diameter`: in d = 1 the line of
    Dirac masses has length sqrt(2 pi / |a|) / sqrt(D)). Gaussians outside I - S^{1/2} A S A S^{1/2} > 0 have
    infinite G and are rejected. Sums run in the log domain; a length beyond the floating range is inf, and
    `geodesic(...).details["log_length"]` still tells it.

    References
    ----------
    Castin, Ablin, Carrillo, Peyré, arXiv 2501.18322, section 3.

    Examples
    --------
    >>> metric = TwistedWasserstein(A=-1.0, V=-1.0)
    >>> round(float(metric.distance(Particles([[-0.5]]), Particles([[2.0]]))), 10)
    1.6762132323
    """

    def __init__(
        self,
        A: ArrayLike,
        V: ArrayLike | None = None,
        *,
        D: ArrayLike | None = None,
        sign: int = 1,
        tol: float = 1e-8,
    ) -> None:
        self._A, _ = as_matrix(A, "A", square=True)
        if self._A.ndim != 2:
            raise InvalidInput(f"A must be one matrix (d, d), got shape {tuple(self._A.shape)}")
        if (V is None) == (D is None):
            raise InvalidInput("give V or D, one of them")
        self.tol = check_positive(tol, "tol")
        self.dim = int(self._A.shape[-1])
        self.kind = common_kind(A, V, D)
        if D is not None:
            check_symmetric(self._A, "A")
            self._D, _ = as_matrix(D, "D", square=True)
            check_psd(self._D, "D", definite=True)
            if as_scalar(sign, "sign") not in (1.0, -1.0):
                raise InvalidInput(f"sign must be +1 or -1, got {describe(sign)}")
            self.sign, self.residual = int(sign), 0.0
        else:
            assert V is not None
            v, _ = as_matrix(V, "V", square=True)
            if v.shape != self._A.shape:
                raise InvalidInput(f"V must have the shape of A {tuple(self._A.shape)}, got {tuple(v.shape)}")
            dtype = torch.promote_types(v.dtype, self._A.dtype)
            found = find_mobility(self._A.detach().to(dtype), v.detach().to(dtype))
            if not found.residual <= torch.finfo(dtype).eps ** 0.5:
                raise NotAGradientFlow(
                    f"no symmetric positive definite D has V = sign D A with A symmetric: {found.reason}",
                    found.residual,
                )
            self._D, self.sign, self.residual = found.D, found.sign, found.residual
        if self._D.shape != self._A.shape:
            raise InvalidInput(
                f"D must have the shape of A {tuple(self._A.shape)}, got {tuple(self._D.shape)}"
            )
        self._A, self._D = symmetrise(self._A), symmetrise(self._D)

    @property
    def A(self) -> Array:
        """The interaction matrix."""
        return to_kind(self._A, self.kind)

    @property
    def D(self) -> Array:
        """The mobility: V = sign D A."""
        return to_kind(self._D, self.kind)

    @property
    def line_diameter(self) -> Array:
        """Length sqrt(2 pi / |a|) of each eigenline of D^{1/2} A D^{1/2} through Dirac masses; inf for a >= 0.

        In d = 1 this is the length of the line: sqrt(2 pi / |a|) / sqrt(D) for the scalars a and D.
        """
        w, U = torch.linalg.eigh(self._D)
        root = (U * w.sqrt()) @ U.mT
        a = torch.linalg.eigvalsh(root @ self._A @ root)
        # Along e in coordinates D^{1/2} e: int e^{a s^2 / 2} ds, s the D^{-1} length.
        length = torch.where(a < 0, (2 * math.pi / torch.where(a < 0, -a, 1.0)).sqrt(), torch.inf)
        return to_kind(length, self.kind)

    def _at(self, like: Tensor) -> tuple[Tensor, Tensor]:
        return cast_like(self._A, like, "A"), cast_like(self._D, like, "D")

    def _pair(self, mu: Measure, nu: Measure) -> tuple[Measure, Measure]:
        a, b = as_measure(mu, "mu"), as_measure(nu, "nu")
        check_same_dim(a, b)
        if a.dim != self.dim:
            raise InvalidInput(f"mu has dimension {a.dim}, the metric acts on dimension {self.dim}")
        if isinstance(a, Gaussian) != isinstance(b, Gaussian):
            raise InvalidInput("mu and nu must be both Gaussians or both Particles")
        return a, b

    def distance(self, mu: Measure, nu: Measure) -> Array:
        """d(mu, nu), not squared, (...); on Gaussians the restricted distance (an upper bound).

        Members of a batch one after another; detached (no derivatives).
        """
        a, b = self._pair(mu, nu)
        shape = torch.broadcast_shapes(a.batch_shape, b.batch_shape)
        kind = common_kind(mu, nu, self)
        if not shape:
            return to_kind(torch.as_tensor(float(self._single(a, b).length), dtype=a.dtype), kind)
        values = torch.empty(shape, dtype=a.dtype)
        for index in np.ndindex(*shape):
            values[index] = float(self._single(member(a, index, shape), member(b, index, shape)).length)
        return to_kind(values.to(a.device), kind)

    def geodesic(
        self, mu: Measure, nu: Measure, *, matching: str = "optimal", max_degree: int = 64
    ) -> Geodesic:
        """Shortest path from mu to nu, its length with an error estimate.

        Polynomial paths of doubling degree (`numerics.paths`); the error is the difference of the last two.

        Parameters
        ----------
        mu, nu : two clouds or two Gaussians, no batch
        matching : "optimal" or "identity"
            Clouds: "identity" keeps labels; "optimal" finds the matching (monotone in d = 1; else from an
            assignment, improved by exchanges under the field of the path while they pay: a local minimum over
            matchings). Clouds of different weights move along the pieces of the optimal W_2 plan.
        max_degree : int, largest degree of the path
        """
        a, b = self._pair(mu, nu)
        check_choice(matching, "matching", ("optimal", "identity"))
        if a.batch_shape or b.batch_shape:
            raise InvalidInput("mu and nu must be single measures for a geodesic, without batch dimensions")
        return self._single(a, b, matching, max_degree)

    def _single(self, a: Measure, b: Measure, matching: str = "optimal", max_degree: int = 64) -> Geodesic:
        degrees = tuple(n for n in (4, 8, 16, 32, 64, 128) if n <= max(8, max_degree))
        kind = common_kind(a, b, self)
        A, D = self._A.detach().double(), self._D.detach().double()
        if isinstance(a, Gaussian) and isinstance(b, Gaussian):
            return between_gaussians(a, b, A, D, tol=self.tol, degrees=degrees, kind=kind)
        assert isinstance(a, Particles)
        assert isinstance(b, Particles)
        return between_clouds(a, b, A, D, tol=self.tol, matching=matching, degrees=degrees, kind=kind)

    def quadrature_geodesic(
        self, mu: Gaussian, nu: Gaussian, *, nodes: tuple[int, ...] = (8, 12, 16)
    ) -> Geodesic:
        """The full (not restricted) distance of two Gaussians in d = 1 or 2, through Gauss-Hermite particles.

        Both are replaced by the same n (or n x n) weighted nodes m + L z, matched by z with the end factor of
        the restricted geodesic. In d = 1 (monotone matching) the distance of these clouds tends to that of the
        Gaussians as n grows; in d = 2 to the infimum over paths with this matching, between the full and the
        restricted distance. The error is the difference of the last two n plus that
        of the path. `details["lengths"]` has all of them.

        Raises
        ------
        InvalidInput
            d > 2, fewer than two node counts, or Gaussians outside the domain.
        """
        a, b = self._pair(mu, nu)
        if not (isinstance(a, Gaussian) and isinstance(b, Gaussian)) or self.dim > 2 or a.batch_shape:
            raise InvalidInput("mu and nu must be single Gaussians in dimension 1 or 2")
        if len(nodes) < 2:
            raise InvalidInput(f"nodes must hold at least two counts, got {nodes}")
        return quadrature_geodesic(self.geodesic, a, b, nodes)

    def exp(self, mu: Measure, tangent: Any) -> Measure:
        """Follow the geodesic from mu with an initial velocity for unit time (Hamiltonian flow).

        Parameters
        ----------
        mu : Particles or Gaussian, no batch
        tangent : array (n, d) of velocities, or an `AffineVelocity` on a Gaussian

        Raises
        ------
        InvalidInput
            The geodesic leaves the space before unit time (it is not complete).

        Notes
        -----
        The energy is conserved to 1e-8 relative, or a `NotConverged` warning says by how much it drifted.
        """
        a = as_measure(mu, "mu")
        if a.batch_shape:
            raise InvalidInput("mu must be a single measure, without batch dimensions")
        if a.dim != self.dim:
            raise InvalidInput(f"mu has dimension {a.dim}, the metric acts on dimension {self.dim}")
        A, D = self._A.detach().double(), self._D.detach().double()
        if isinstance(a, Gaussian):
            if not isinstance(tangent, AffineVelocity):
                raise InvalidInput(
                    f"tangent must be an AffineVelocity on a Gaussian, got {describe(tangent)}"
                )
            m, L = a.mean_t.detach().double(), square_factor(a.factor_t.detach().double())
            gaussians.check_domain(m, L, A, "mu")
            dL = tangent.M_t.detach().double() @ L
            end, F, drift = gaussians.gaussian_exp(
                m, L, tangent.b_t.detach().double(), dL, A, torch.linalg.inv(D), 1e-11
            )
            out: Measure = Gaussian.unchecked(
                end.to(a.dtype), factor=F.to(a.dtype), kind=common_kind(mu, self)
            )
        else:
            v, _ = as_tensor(tangent, "tangent")
            if v.shape != a.x_t.shape:
                raise InvalidInput(
                    f"tangent must have the shape of x {tuple(a.x_t.shape)}, got {tuple(v.shape)}"
                )
            x, drift = clouds.cloud_exp(
                a.x_t.detach().double(), v.detach().double(), a.weights_t.double(), A, D, 1e-11
            )
            out = a.moved(x.to(a.dtype))
        if drift > _DRIFT:
            warnings.warn(
                f"twisted geodesic: energy drifted by {drift:.2e} relative", NotConverged, stacklevel=2
            )
        return out

    def log(self, mu: Measure, nu: Measure, *, matching: str = "optimal") -> Any:
        """Initial velocity of the shortest path: array (n, d), or an `AffineVelocity` for Gaussians.

        Its exponential is nu (to 1e-10 up to 128 coordinates, by shooting; beyond, to about 1e-4 of the
        displacement); |log|^2 in `inner` is the squared distance.

        Raises
        ------
        InvalidInput
            Clouds of different weights (their path splits particles), or singular Gaussians.
        """
        # The length is exact to second order in the path, a velocity to first: ask for more of the path.
        finer = TwistedWasserstein(self._A, D=self._D, sign=self.sign, tol=max(1e-3 * self.tol**1.5, 1e-14))
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", NotConverged)
            path = finer.geodesic(mu, nu, matching=matching)
        v = path.details["initial_velocity"]()
        kind = common_kind(mu, nu, self)
        a = as_measure(mu, "mu")
        if isinstance(a, Gaussian):
            m, L = path.details["start"]
            dm, dL = gaussians.horizontal(
                m,
                L,
                *gaussians.split(v.double(), self.dim),
                self._A.double(),
                torch.linalg.inv(self._D.double()),
            )
            b, M = gaussians.affine_of(m, L, dm, dL)
            return AffineVelocity(b.to(a.dtype), M.to(a.dtype), kind)
        if v.shape != a.x_t.shape:
            raise InvalidInput(
                "mu and nu have different weights: their geodesic splits particles and has no log"
            )
        assert isinstance(a, Particles)
        if v.numel() <= _REFINED and "closed_form" not in path.details:
            v = refined_velocity(
                a, v, path.details["end"], self._A.detach().double(), self._D.detach().double()
            )
        return to_kind(v, kind)

    def inner(self, mu: Measure, v: Any, w: Any) -> Array:
        """<v, w> at mu: sum_i w_i G_i <D^{-1} v_i, w_i>, or Z E<D^{-1} v, w> of affine fields on a Gaussian."""
        a = as_measure(mu, "mu")
        kind = common_kind(mu, v, w, self)
        A, D = self._at(a.mean_t)
        Dinv = torch.linalg.inv(D)
        if isinstance(a, Gaussian):
            return to_kind(gaussians.inner(a.mean_t, a.factor_t, v, w, A, Dinv), kind)
        p, q = (as_tensor(t, name)[0].to(a.dtype) for t, name in ((v, "v"), (w, "w")))
        log_g = log_interaction(a.x_t, a.weights_t, A)
        return to_kind((a.weights_t * torch.exp(log_g) * (p @ Dinv * q).sum(-1)).sum(-1), kind)

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
        """One JKO step; see `ot_transformers.metrics._twisted_proximal`."""
        a = as_measure(mu, "mu")
        if a.dim != self.dim:
            raise InvalidInput(f"mu has dimension {a.dim}, the metric acts on dimension {self.dim}")
        A, D = self._at(a.mean_t)
        return proximal_twisted(energy, a, tau, A=A, D=D, tol=tol, max_iter=max_iter, warm_start=warm_start)
