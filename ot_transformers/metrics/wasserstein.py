"""The Wasserstein distances W_p, and for p = 2 their Riemannian structure with an inner product D^-1."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ..arrays import (
    Array,
    ArrayLike,
    ArrayView,
    Kind,
    as_matrix,
    as_scalar,
    as_tensor,
    broadcast_batch,
    cast_like,
    check_psd,
    common_kind,
    to_kind,
)
from ..errors import InvalidInput
from ..measures import (
    AffineVelocity,
    Gaussian,
    Measure,
    Particles,
    as_measure,
    as_particles,
    check_same_dim,
)
from ..numerics.bures import bures_squared, hypotenuse
from ..numerics.transport import barycentric_projection, transport_distance, transport_plan
from ..spd import sqrt_psd, symmetrise, transfer
from ._displacement import displacement_geodesic, members
from ._wasserstein_proximal import wasserstein_proximal
from .base import EnergyLike, Geodesic, Metric, ProximalResult
from .bures_wasserstein import BuresWasserstein

__all__ = ["Wasserstein"]


class Wasserstein(Metric):
    r"""The distance W_p(mu, nu)^p = min over couplings of \int |x - y|^p dpi.

    With D (p = 2 only) the norm is |v|_D = (v^T D^-1 v)^(1/2): the inner product in which attention with
    V = sigma D A is a gradient flow. Between clouds, and for p = 2 between Gaussians.

    Parameters
    ----------
    p : float
        At least 1.
    D : array (d, d), or a scalar for d = 1, optional
        Symmetric positive definite; identity by default.

    Raises
    ------
    InvalidInput
        p < 1, a D that is not positive definite, or a D with p other than 2.

    Notes
    -----
    Not squared; W_2 is for the cost |x - y|^2, not |x - y|^2 / 2. On clouds: exact, by sorting in d = 1, as
    an assignment problem for equal weights, by POT's network simplex otherwise; differentiable in tokens and
    weights through the optimal plan. On Gaussians: the Bures-Wasserstein distance.

    References
    ----------
    Castin, Ablin, Carrillo, Peyré, arXiv 2501.18322, section 3; Peyré and Cuturi, arXiv 1803.00567.

    Examples
    --------
    >>> import numpy as np
    >>> float(Wasserstein(p=1).distance(np.array([[0.0], [1.0]]), np.array([[3.0], [2.0]])))
    2.0
    """

    D = ArrayView("The matrix D of the inner product <v, D^-1 w>, (d, d); None for the identity.")

    def __init__(self, p: float = 2, D: ArrayLike | None = None) -> None:
        self.p = as_scalar(p, "p")
        if self.p < 1:
            raise InvalidInput(f"p must be >= 1, got {self.p:g}")
        self.kind: Kind = "numpy"
        self.dim: int | None = None
        self.D_t: Tensor | None = None
        if D is not None:
            if self.p != 2:
                raise InvalidInput(f"D is an inner product, for p = 2 only; got D with p = {self.p:g}")
            self.D_t, self.kind = as_matrix(D, "D", square=True)
            check_psd(self.D_t, "D", definite=True)
            self.D_t = symmetrise(self.D_t)
            self.dim = int(self.D_t.shape[-1])

    def distance(self, mu: Measure, nu: Measure) -> Array:
        """W_p(mu, nu), not squared, (...); the derivative used at mu = nu is 0.

        Raises
        ------
        InvalidInput
            A cloud against a Gaussian, Gaussians with p other than 2, dimensions or devices that differ.
        """
        a, b = self._pair(mu, nu)
        kind = common_kind(a, b, self)
        if isinstance(a, Gaussian):
            assert isinstance(b, Gaussian)
            return to_kind(self._gaussian_distance(a, b), kind)
        assert isinstance(b, Particles)
        x, y = self._white(a.x_t), self._white(b.x_t)
        return to_kind(transport_distance(x, a.weights_t, y, b.weights_t, self.p), kind)

    def geodesic(self, mu: Measure, nu: Measure) -> Geodesic:
        """Displacement interpolation along an optimal plan.

        Between clouds of n equal masses each the states keep the n tokens of mu in their order; else they
        have one particle for each pair that the plan couples.
        """
        a, b = self._pair(mu, nu)
        if isinstance(a, Gaussian):
            return self._bures().geodesic(a, b)
        assert isinstance(b, Particles)
        return displacement_geodesic(a, b, self._white, self.p, common_kind(a, b, self))

    def exp(self, mu: Measure, v: Any) -> Measure:
        """The push-forward of mu by x -> x + v(x): the geodesic at time 1 while x + v is an optimal map.

        Parameters
        ----------
        mu : Particles or Gaussian
        v : array (..., n, d) on particles; AffineVelocity on a Gaussian
        """
        a = self._riemannian(mu)
        if isinstance(a, Gaussian):
            return self._bures().exp(a, v)
        field = self._tangent(a, v, "v")
        return Particles.unchecked(a.x_t + field, None if a.uniform else a.weights_t, common_kind(a, v))

    def log(self, mu: Measure, nu: Measure) -> Any:
        """T(x) - x at the tokens of mu, T the optimal map, or the barycentric projection of an optimal plan.

        Returns
        -------
        array (..., n, d) on particles; on Gaussians what `BuresWasserstein.log` gives.
        """
        a, b = self._pair(mu, nu)
        self._riemannian(a)
        if isinstance(a, Gaussian):
            return self._bures().log(a, b)
        assert isinstance(b, Particles)
        batch, flat = members(a, b)
        fields = []
        for x, w, y, v in flat:
            plan = transport_plan(self._white(x), w, self._white(y), v, 2)
            target = barycentric_projection(plan, len(x), w, y)
            fields.append(torch.where((w > 0).unsqueeze(-1), target - x, 0.0))
        return to_kind(torch.stack(fields).reshape(*batch, a.n, a.dim), common_kind(a, b, self))

    def inner(self, mu: Measure, v: Any, w: Any) -> Array:
        """The inner product E_mu <v, D^-1 w> of two fields, (...).

        Parameters
        ----------
        mu : Particles or Gaussian
        v, w : arrays (..., n, d) of values at the tokens; AffineVelocity on a Gaussian
        """
        a = self._riemannian(mu)
        if isinstance(a, Gaussian):
            return self._gaussian_inner(a, v, w)
        f, g = (self._white(self._tangent(a, t, name)) for t, name in ((v, "v"), (w, "w")))
        return to_kind((a.weights_t * (f * g).sum(-1)).sum(-1), common_kind(a, v, w, self))

    def raw_particles_riesz(self, x: Tensor, weights: Tensor, gradient: Tensor) -> Tensor:
        """D g at the tokens."""
        self._require_p2()
        return gradient if self.D_t is None else gradient @ cast_like(self.D_t, x, "D")

    def raw_gaussian_riesz(self, mean: Tensor, cov: Tensor, g: Tensor, H: Tensor) -> tuple[Tensor, Tensor]:
        """(b, M) = (D g, 2 D H)."""
        self._require_p2()
        if self.D_t is None:
            return g, 2.0 * H
        D = cast_like(self.D_t, mean, "D")
        return (D @ g.unsqueeze(-1)).squeeze(-1), 2.0 * D @ H

    def proximal(
        self,
        energy: EnergyLike,
        mu: Measure,
        tau: float,
        *,
        tol: float = 1e-9,
        max_iter: int = 200,
        warm_start: Measure | None = None,
    ) -> ProximalResult:
        """One JKO step argmin over nu of F(nu) + W_2(mu, nu)^2 / (2 tau), on particles or Gaussians.

        On particles nu moves the n tokens with their weights; the method is L-BFGS in the metric's own
        coordinates (displacements scaled by w_i^(1/2) D^(-1/2)), with the matching kept. If the matching
        found at the end is not optimal, it is solved for again by exact transport and the minimisation goes
        on. The objective never exceeds that of staying put; for an energy that is not convex the minimiser
        is a local one.

        Parameters
        ----------
        energy : an energy defined on mu
        mu : Particles or Gaussian
        tau : float
            Step size, > 0.
        tol : float
            On the norm of D grad F + (y - x) / tau, relative to that of D grad F at mu.
        max_iter : int
            Inner iterations in all.
        warm_start : Measure, optional
            A first guess, of the same shape as mu.

        Returns
        -------
        ProximalResult
            `gradient_norm` is relative, as `tol` is. For a batch: that of the worst member, the number of
            joint iterations, and arrays of energies.
        """
        a = self._riemannian(mu)
        if isinstance(a, Gaussian):
            return self._bures().proximal(energy, a, tau, tol=tol, max_iter=max_iter, warm_start=warm_start)
        root = None if self.D_t is None else sqrt_psd(cast_like(self.D_t, a.x_t, "D"))
        start = None if warm_start is None else as_particles(warm_start, "warm_start")
        return wasserstein_proximal(energy, a, tau, root, tol=tol, max_iter=max_iter, warm_start=start)

    def _white(self, x: Tensor) -> Tensor:
        """Coordinates D^(-1/2) x, in which the norm is Euclidean."""
        if self.D_t is None:
            return x
        return torch.linalg.solve(sqrt_psd(cast_like(self.D_t, x, "D")), x.mT).mT

    def _gaussian_distance(self, a: Gaussian, b: Gaussian) -> Tensor:
        self._require_p2("between Gaussians")
        S0, S1 = a.cov_t, b.cov_t
        if self.D_t is not None:
            inverse = torch.linalg.inv(sqrt_psd(cast_like(self.D_t, a.mean_t, "D")))
            S0, S1 = transfer(inverse, S0), transfer(inverse, S1)
        shift = self._white((a.mean_t - b.mean_t).unsqueeze(-2)).squeeze(-2)
        return hypotenuse(shift, bures_squared(*torch.broadcast_tensors(S0, S1)))

    def _gaussian_inner(self, a: Gaussian, v: Any, w: Any) -> Array:
        for t, name in ((v, "v"), (w, "w")):
            if not isinstance(t, AffineVelocity):
                raise InvalidInput(f"{name} must be an AffineVelocity at a Gaussian, got {type(t).__name__}")
        (b, M), (c, N) = ((self._white(t.b_t.unsqueeze(-2)), self._white(t.M_t.mT)) for t in (v, w))
        # E (b + M u)^T D^-1 (c + N u) = b^T D^-1 c + tr(S M^T D^-1 N), u = x - m.
        value = (b * c).sum((-2, -1)) + ((a.cov_t @ M) * N).sum((-2, -1))
        return to_kind(value, common_kind(a, v, w, self))

    def _bures(self) -> BuresWasserstein:
        self._require_p2("between Gaussians")
        return BuresWasserstein() if self.D_t is None else BuresWasserstein(D=self.D)

    def _tangent(self, a: Particles, v: Any, name: str) -> Tensor:
        field, _ = as_tensor(v, name, min_ndim=2)
        if field.shape[-2:] != a.x_t.shape[-2:]:
            raise InvalidInput(
                f"{name} must be a field (..., {a.n}, {a.dim}) at the tokens, got shape {tuple(field.shape)}"
            )
        return cast_like(field, a.x_t, name)

    def _pair(self, mu: Measure, nu: Measure) -> tuple[Measure, Measure]:
        a, b = as_measure(mu, "mu"), as_measure(nu, "nu")
        check_same_dim(a, b)
        self._check_dim(a, "mu")
        broadcast_batch([a.batch_shape, b.batch_shape], ["mu", "nu"])
        if isinstance(a, Gaussian) != isinstance(b, Gaussian):
            raise InvalidInput(f"mu and nu must both be clouds or both Gaussians, got {a!r} and {b!r}")
        return a, b

    def _check_dim(self, a: Measure, name: str) -> None:
        if self.dim is not None and a.dim != self.dim:
            raise InvalidInput(f"{name} has dimension {a.dim}, D acts on dimension {self.dim}")

    def _riemannian(self, mu: Measure) -> Measure:
        self._require_p2()
        a = as_measure(mu, "mu")
        self._check_dim(a, "mu")
        return a

    def _require_p2(self, where: str = "as a Riemannian metric") -> None:
        if self.p != 2:
            raise InvalidInput(f"p must be 2 {where}, got p = {self.p:g}")
