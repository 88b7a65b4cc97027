"""The Wasserstein-2 metric on Gaussians."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ..arrays import (
    Array,
    ArrayLike,
    ArrayView,
    as_matrix,
    broadcast_batch,
    cast_like,
    check_psd,
    check_symmetric,
    common_kind,
    describe,
    to_kind,
)
from ..errors import InvalidInput
from ..measures import AffineVelocity, Gaussian, Measure, as_gaussian, check_same_dim
from ..numerics.bures import align, bures_squared, bures_squared_factors, hypotenuse
from ..spd import eigh_psd, symmetrise
from ._bures_proximal import proximal_gaussian
from .barycenter import barycenter_weights, bures_barycenter
from .base import EnergyLike, Geodesic, Metric, ProximalResult
from .bures import bures_log, bures_transport

__all__ = ["BuresWasserstein"]


class BuresWasserstein(Metric):
    r"""W_2 between Gaussians: W_2^2 = |m0 - m1|^2 + BW^2(S0, S1), with the inner product D^{-1} on R^d.

    A tangent at N(m, S) is a field x -> b + X (x - m) (an `AffineVelocity`); with mobility D the gradient
    fields have D^{-1} X symmetric, and <u, v> = E <D^{-1} u, v>. The metric with D is that of the measures
    pushed by D^{-1/2}.

    Parameters
    ----------
    D : array (d, d), optional
        Symmetric positive definite mobility; the inner product is D^{-1}. Default: the identity.

    Raises
    ------
    InvalidInput
        D not symmetric positive definite.

    References
    ----------
    Takatsu, *Wasserstein geometry of Gaussian measures*, 2011; Malago, Montrucchio, Pistone 2018.

    Examples
    --------
    >>> from ot_transformers import Gaussian
    >>> float(BuresWasserstein().distance(Gaussian([0.0], [[1.0]]), Gaussian([3.0], [[25.0]])))
    5.0
    """

    D = ArrayView("The mobility, (d, d); None for the identity.")

    def __init__(self, D: ArrayLike | None = None) -> None:
        self.D_t: Tensor | None = None
        if D is not None:
            self.D_t, _ = as_matrix(D, "D", square=True, keep=True)
            check_psd(self.D_t, "D", definite=True)
            w, U = eigh_psd(self.D_t)
            self._root = (U * w.sqrt().unsqueeze(-2)) @ U.mT
            self._unroot = (U / w.sqrt().unsqueeze(-2)) @ U.mT
        self.kind = common_kind(D)

    def _pair(self, mu: Measure, nu: Measure) -> tuple[Gaussian, Gaussian]:
        a, b = as_gaussian(mu, "mu"), as_gaussian(nu, "nu")
        check_same_dim(a, b)
        broadcast_batch([a.batch_shape, b.batch_shape], ["mu", "nu"])
        self._check_dim(a)
        return self._whiten(a), self._whiten(b)

    def _check_dim(self, g: Gaussian) -> None:
        if self.D_t is not None and self.D_t.shape[-1] != g.dim:
            raise InvalidInput(f"mu has dimension {g.dim}, D acts on dimension {self.D_t.shape[-1]}")

    def _whiten(self, g: Gaussian) -> Gaussian:
        return g if self.D_t is None else _pushed(g, cast_like(self._unroot, g.mean_t, "D"))

    def _unwhiten(self, g: Gaussian) -> Gaussian:
        return g if self.D_t is None else _pushed(g, cast_like(self._root, g.mean_t, "D"))

    def distance(self, mu: Measure, nu: Measure) -> Array:
        """W_2(mu, nu), not squared, (...); through the factors where the Gaussians have them.

        Differentiable; at equal measures the derivative is taken as 0.
        """
        a, b = self._pair(mu, nu)
        if a.has_factor or b.has_factor:
            spread = bures_squared_factors(a.factor_t, b.factor_t)
        else:
            spread = bures_squared(a.cov_t, b.cov_t)
        return to_kind(hypotenuse(a.mean_t - b.mean_t, spread), common_kind(mu, nu, self))

    def geodesic(self, mu: Measure, nu: Measure) -> Geodesic:
        """The geodesic ((1 - t) L0 + t L1 O), means on a line; exact for singular covariances."""
        a, b = self._pair(mu, nu)
        L0, L1 = a.factor_t, b.factor_t
        turned = align(L0, L1)
        L0 = torch.nn.functional.pad(L0, (0, turned.shape[-1] - L0.shape[-1]))
        kind = common_kind(mu, nu, self)
        length = self.distance(mu, nu)

        def at(t: float) -> Gaussian:
            if not 0 <= t <= 1:
                raise InvalidInput(f"t must lie in [0, 1], got {t}")
            m = (1 - t) * a.mean_t + t * b.mean_t
            return _as_kind(self._unwhiten(Gaussian.unchecked(m, factor=(1 - t) * L0 + t * turned)), kind)

        scale = torch.linalg.matrix_norm(L0.detach()) + torch.linalg.matrix_norm(turned.detach())
        error = 8 * a.dim * torch.finfo(L0.dtype).eps * scale
        return Geodesic(length, to_kind(error, kind), True, at, {"kind": "Bures-Wasserstein"})

    def log(self, mu: Measure, nu: Measure) -> AffineVelocity:
        """The tangent at mu of the geodesic to nu: x -> (m1 - m0) + (T - I)(x - m0).

        Raises
        ------
        InvalidInput
            mu is singular and no map sends it to nu.
        """
        a, b = self._pair(mu, nu)
        return self._field(b.mean_t - a.mean_t, bures_log(a.cov_t, b.cov_t), common_kind(mu, nu, self))

    def exp(self, mu: Measure, tangent: AffineVelocity) -> Gaussian:
        """The Gaussian N(m + b, (I + X) S (I + X)^T) that the tangent b + X (x - m) leads to in unit time."""
        g = as_gaussian(mu, "mu")
        self._check_dim(g)
        b, X = _checked_field(tangent, g, "tangent")
        eye = torch.eye(g.dim, dtype=g.dtype, device=g.device)
        moved = Gaussian.unchecked(g.mean_t + b, factor=(eye + X) @ g.factor_t)
        return _as_kind(moved, common_kind(mu, tangent, self))

    def inner(self, mu: Measure, v: Any, w: Any) -> Array:
        """<v, w> = <D^{-1} b_v, b_w> + tr(D^{-1} X_v S X_w^T) of two affine fields, (...)."""
        g = as_gaussian(mu, "mu")
        self._check_dim(g)
        L = g.factor_t
        (bv, Xv), (bw, Xw) = _checked_field(v, g, "v"), _checked_field(w, g, "w")
        Xv, Xw = Xv @ L, Xw @ L
        if self.D_t is not None:
            inverse = cast_like(self._unroot, L, "D")
            bv, bw = bv @ inverse.mT, bw @ inverse.mT
            Xv, Xw = inverse @ Xv, inverse @ Xw
        return to_kind((bv * bw).sum(-1) + (Xv * Xw).sum((-2, -1)), common_kind(mu, v, w, self))

    def parallel_transport(self, mu: Measure, nu: Measure, tangent: AffineVelocity) -> AffineVelocity:
        """Transport a tangent along the geodesic from mu to nu (`bures_transport`; the mean part is constant)."""
        a, b = self._pair(mu, nu)
        shift, X = _checked_field(tangent, a, "tangent")
        if self.D_t is not None:
            root, unroot = (cast_like(t, a.mean_t, "D") for t in (self._root, self._unroot))
            X, shift = unroot @ X @ root, (unroot @ shift.unsqueeze(-1)).squeeze(-1)
        check_symmetric(X, "tangent.M" if self.D_t is None else "D^{-1} tangent.M")
        Y = bures_transport(a.cov_t, b.cov_t, X)
        return self._field(shift, Y, common_kind(mu, nu, tangent, self))

    def barycenter(self, measures: Gaussian, weights: ArrayLike | None = None) -> Gaussian:
        """Barycentre of Gaussians along the last batch dimension, (..., k) of them; see `bures_barycenter`."""
        g = as_gaussian(measures, "measures")
        if not g.batch_shape:
            raise InvalidInput("measures must be a batch (..., k) of Gaussians, got one")
        self._check_dim(g)
        white = self._whiten(g)
        w = barycenter_weights(white.cov_t, weights)
        S = bures_barycenter(white.cov_t, w)
        m = (w.unsqueeze(-1) * white.mean_t).sum(-2)
        return _as_kind(self._unwhiten(Gaussian.unchecked(m, S)), common_kind(measures, weights, self))

    def _field(self, b: Tensor, X: Tensor, kind: Any) -> AffineVelocity:
        """An affine field from whitened coordinates."""
        if self.D_t is not None:
            root, unroot = (cast_like(t, b, "D") for t in (self._root, self._unroot))
            b, X = (root @ b.unsqueeze(-1)).squeeze(-1), root @ X @ unroot
        return AffineVelocity(b, X, kind)

    def raw_gaussian_riesz(self, mean: Tensor, cov: Tensor, g: Tensor, H: Tensor) -> tuple[Tensor, Tensor]:
        """The gradient field (D g, 2 D H)."""
        if self.D_t is None:
            return g, 2.0 * H
        D = cast_like(self.D_t, g, "D")
        return (D @ g.unsqueeze(-1)).squeeze(-1), 2.0 * D @ H

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
        """One JKO step over Gaussians; see `ot_transformers.metrics._bures_proximal`."""
        g = as_gaussian(mu, "mu")
        self._check_dim(g)
        D = None if self.D_t is None else cast_like(self.D_t, g.mean_t, "D")
        start = None if warm_start is None else as_gaussian(warm_start, "warm_start")
        return proximal_gaussian(energy, g, tau, D=D, tol=tol, max_iter=max_iter, warm_start=start)


def _checked_field(tangent: Any, g: Gaussian, name: str) -> tuple[Tensor, Tensor]:
    """(b, X) of a tangent b + X (x - m) at g."""
    if not isinstance(tangent, AffineVelocity):
        raise InvalidInput(
            f"{name} must be an AffineVelocity (a tangent of a Gaussian), got {describe(tangent)}"
        )
    b, X = cast_like(tangent.b_t, g.mean_t, name), cast_like(tangent.M_t, g.mean_t, name)
    if b.shape[-1] != g.dim:
        raise InvalidInput(f"{name} has dimension {b.shape[-1]}, mu has dimension {g.dim}")
    broadcast_batch([b.shape[:-1], g.batch_shape], [name, "mu"])
    return b, X


def _pushed(g: Gaussian, R: Tensor) -> Gaussian:
    mean = (R @ g.mean_t.unsqueeze(-1)).squeeze(-1)
    if g.has_factor:
        return Gaussian.unchecked(mean, factor=R @ g.factor_t, kind=g.kind)
    return Gaussian.unchecked(mean, cov=symmetrise(R @ g.cov_t @ R.mT), kind=g.kind)


def _as_kind(g: Gaussian, kind: Any) -> Gaussian:
    if g.kind == kind:
        return g
    cov = None if g.has_factor else g.cov_t
    return Gaussian.unchecked(g.mean_t, cov, g.factor_t if g.has_factor else None, kind)
