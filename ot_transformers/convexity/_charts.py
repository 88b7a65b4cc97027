"""Second-order normal coordinates of a metric at a measure.

A chart maps tangents, in coordinates u (N,) in which the metric is Euclidean, to the states
exp(u) + O(|u|^3). The Riemannian Hessian of an energy is then the ordinary Hessian of u -> F(exp(u)) at 0.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from typing import Any

import torch
from torch import Tensor

from ..arrays import Kind, as_tensor, cast_like, common_kind, to_kind
from ..errors import InvalidInput
from ..measures import AffineVelocity, Gaussian, Measure, Particles, as_measure
from ..metrics import BuresWasserstein, Wasserstein
from ..numerics.twisted import Kernel, geodesic_acceleration, kernel_at
from ..spd import eigh_psd, sqrt_psd, symmetrise, transfer
from ._states import CloudState, GaussianState, State, affine_parts
from .twisted import twisted_parameters

__all__ = ["Chart", "GaussianChart", "TwistedChart", "WassersteinChart", "chart_at"]


class Chart(ABC):
    """Coordinates u (N,) of the tangent space, orthonormal in the metric.

    Attributes
    ----------
    size : int
        N, the dimension of the tangent space.
    dtype, device : of the measure
    """

    size: int
    dtype: torch.dtype
    device: torch.device

    @abstractmethod
    def state(self, u: Tensor) -> State:
        """The exponential of u (N,), right to second order, differentiable at u = 0."""

    @abstractmethod
    def tangent(self, u: Tensor) -> Any:
        """The tangent with coordinates u: (n, d) on clouds, (b, X) on Gaussians."""

    @abstractmethod
    def coordinates(self, tangent: Any) -> Tensor:
        """The coordinates of a tangent given by the user."""

    @abstractmethod
    def wrap(self, tangent: Any, kind: Kind) -> Any:
        """The tangent as users see it."""


class WassersteinChart(Chart):
    """W2 on a cloud: v_i = w_i^(-1/2) D^(1/2) u_i, geodesics are straight lines. Weights 0 do not move."""

    def __init__(self, cloud: Particles, D: Tensor | None) -> None:
        self.x, self.weights = cloud.x_t.detach(), cloud.weights_t.detach()
        self.dtype, self.device = self.x.dtype, self.x.device
        self.moving = torch.nonzero(self.weights > 0)[:, 0]
        eye = torch.eye(cloud.dim, dtype=self.dtype, device=self.device)
        self.D = eye if D is None else cast_like(D, self.x, "D").detach()
        self.root = eye if D is None else sqrt_psd(self.D)
        self.size = len(self.moving) * cloud.dim
        self.scale = self._scale().unsqueeze(-1)

    def _scale(self) -> Tensor:
        return self.weights[self.moving].rsqrt()

    def tangent(self, u: Tensor) -> Tensor:
        """v (n, d)."""
        v = (u.reshape(-1, self.x.shape[-1]) * self.scale) @ self.root
        return torch.zeros_like(self.x).index_put((self.moving,), v)

    def coordinates(self, tangent: Any) -> Tensor:
        """u from v (n, d)."""
        v, _ = as_tensor(tangent, "v")
        if v.shape != self.x.shape:
            raise InvalidInput(f"v must be a field {tuple(self.x.shape)} at the tokens, got {tuple(v.shape)}")
        moved = cast_like(v.detach(), self.x, "v")[self.moving]
        return (torch.linalg.solve(self.root, moved.mT).mT / self.scale).reshape(-1)

    def state(self, u: Tensor) -> State:
        """x + v."""
        return CloudState(self.x + self.tangent(u), self.weights)

    def wrap(self, tangent: Any, kind: Kind) -> Any:
        """An array (n, d)."""
        return to_kind(tangent, kind)


class TwistedChart(WassersteinChart):
    """The twisted metric on a cloud: v_i = (w_i G_i)^(-1/2) D^(1/2) u_i, states x + v + a(v, v) / 2."""

    def __init__(self, cloud: Particles, A: Tensor, D: Tensor) -> None:
        self.A = A
        self.kernel: Kernel = kernel_at(cloud.x_t.detach(), cloud.weights_t.detach(), A)
        super().__init__(cloud, D)

    def _scale(self) -> Tensor:
        half = 0.5 * self.kernel.log_g[self.moving]
        if float(half.abs().max()) > 0.49 * math.log(torch.finfo(self.dtype).max):
            low, high = (float(v) for v in (2.0 * half).aminmax())
            raise InvalidInput(
                f"measure has log G between {low:.4g} and {high:.4g}: the metric is out of the range of "
                f"{str(self.dtype).removeprefix('torch.')}"
            )
        return self.weights[self.moving].rsqrt() * torch.exp(-half)

    def state(self, u: Tensor) -> State:
        """x + v + a(v, v) / 2, a the acceleration of the geodesic."""
        v = self.tangent(u)
        a = geodesic_acceleration(self.x, v, self.A, self.D, self.kernel)
        return CloudState(self.x + v + 0.5 * a, self.weights)


class GaussianChart(Chart):
    """Bures-Wasserstein at N(m, S): fields x -> b + X (x - m), states N(m + b, (I + X) S (I + X)).

    In coordinates where D is the identity X is symmetric; in the eigenbasis of S, u_ij = X_ij (s_i +
    s_j)^(1/2) for i < j and X_ii s_i^(1/2) are orthonormal. Directions of length 0 (both eigenvalues 0) are
    left out.
    """

    def __init__(self, gaussian: Gaussian, D: Tensor | None) -> None:
        m, S = gaussian.mean_t.detach(), gaussian.cov_t.detach()
        self.dtype, self.device = m.dtype, m.device
        d = gaussian.dim
        eye = torch.eye(d, dtype=self.dtype, device=self.device)
        self.root = eye if D is None else sqrt_psd(cast_like(D, m, "D").detach())
        self.unroot = torch.linalg.inv(self.root)
        self.mean, self.cov = m, transfer(self.unroot, S)
        w, self.basis = eigh_psd(self.cov)
        i, j = torch.triu_indices(d, d, device=self.device)
        square = torch.where(i == j, w[i], w[i] + w[j])
        keep = square > 0
        self.i, self.j, self.length = i[keep], j[keep], square[keep].sqrt()
        self.size = d + len(self.i)

    def _map(self, u: Tensor) -> tuple[Tensor, Tensor]:
        """b and symmetric X in coordinates where D is the identity."""
        d = self.mean.shape[-1]
        entries = u[d:] / self.length
        X = torch.zeros((d, d), dtype=self.dtype, device=self.device).index_put((self.i, self.j), entries)
        X = torch.triu(X) + torch.triu(X, 1).mT
        return u[:d], self.basis @ X @ self.basis.mT

    def state(self, u: Tensor) -> State:
        """N(m + b, (I + X) S (I + X))."""
        b, X = self._map(u)
        moved = X + torch.eye(len(b), dtype=self.dtype, device=self.device)
        return GaussianState(self.mean + self.root @ b, transfer(self.root @ moved, self.cov))

    def tangent(self, u: Tensor) -> tuple[Tensor, Tensor]:
        """(b, X) of the field, X the map on the space as given: D^(1/2) X D^(-1/2)."""
        b, X = self._map(u)
        return self.root @ b, self.root @ X @ self.unroot

    def coordinates(self, tangent: Any) -> Tensor:
        """u of an AffineVelocity whose D^-1 M is symmetric (a gradient field)."""
        b, M = affine_parts(tangent, self.mean)
        X = self.unroot @ M @ self.root
        gap, size = float((X - X.mT).abs().max()), float(X.abs().max())
        if gap > 1e3 * torch.finfo(self.dtype).eps * size:
            raise InvalidInput(
                f"v must be a gradient field: D^-1 M is off symmetric by {gap / size:.2e} relative"
            )
        X = self.basis.mT @ symmetrise(X) @ self.basis
        return torch.cat([self.unroot @ b, X[self.i, self.j] * self.length])

    def wrap(self, tangent: Any, kind: Kind) -> AffineVelocity:
        """An AffineVelocity."""
        return AffineVelocity(tangent[0], tangent[1], kind)


def chart_at(metric: Any, measure: Measure) -> tuple[Chart, Kind]:
    """The chart of a metric at one measure, and the kind of array to answer with.

    Raises
    ------
    InvalidInput
        A metric that is not Riemannian on this kind of measure, a batch.
    """
    mu = as_measure(measure)
    kind = common_kind(mu, metric)
    if mu.batch_shape:
        raise InvalidInput(
            f"measure must be one measure, got batch {mu.batch_shape}: take members one by one"
        )
    if isinstance(metric, BuresWasserstein) and not isinstance(mu, Gaussian):
        raise InvalidInput(f"measure must be a Gaussian for BuresWasserstein, got {mu!r}")
    if isinstance(metric, Wasserstein | BuresWasserstein):
        if isinstance(metric, Wasserstein) and metric.p != 2:
            raise InvalidInput(f"metric must have p = 2 to be Riemannian, got p = {metric.p:g}")
        D = metric.D_t
        if D is not None and D.shape[-1] != mu.dim:
            raise InvalidInput(f"measure has dimension {mu.dim}, metric acts on dimension {D.shape[-1]}")
        return (GaussianChart(mu, D) if isinstance(mu, Gaussian) else WassersteinChart(mu, D)), kind
    A, D = twisted_parameters(metric, mu.mean_t if isinstance(mu, Gaussian) else mu.x_t)
    if isinstance(mu, Gaussian):
        from ._twisted_gaussian_chart import TwistedGaussianChart

        return TwistedGaussianChart(mu, A, D), kind
    return TwistedChart(mu, A, D), kind
