"""Geodesics of the twisted metric between clouds or Gaussians, through the geodesic equation."""

from __future__ import annotations

import warnings
from typing import Any

import torch
from torch import Tensor

from ..arrays import as_tensor, cast_like, common_kind
from ..errors import InvalidInput, NotConverged
from ..measures import AffineVelocity, Gaussian, Measure, Particles, as_measure, check_same_dim
from ..metrics import BuresWasserstein, TwistedWasserstein, Wasserstein
from ..numerics.twisted import geodesic_acceleration, kernel_at, log_speed
from ..numerics.twisted_flow import cloud_acceleration, follow_geodesic, gaussian_factor_acceleration
from ..numerics.twisted_gaussians import gaussian_acceleration, gaussian_log_speed, horizontal
from ..spd import numerical_rank_psd, sqrt_psd
from ._states import CloudState, GaussianState, Path, State, affine_parts
from .curves import Curve, over_times

__all__ = ["TwistedGeodesic", "regular_factor", "twisted_parameters"]

_RTOL = 1e-12
_ARRIVED = 1e-5
"""Miss of the target, relative to its distance in W2, up to which a geodesic counts as one that arrives."""


def twisted_parameters(metric: Any, like: Tensor, name: str = "metric") -> tuple[Tensor, Tensor]:
    """A and D (d, d) of a twisted metric, of the dtype of the measure."""
    if not isinstance(metric, TwistedWasserstein):
        raise InvalidInput(f"{name} must be a TwistedWasserstein, got {type(metric).__name__}")
    A, D = (cast_like(t, like, "A") for t in (metric.A_t, metric.D_t))
    if A.shape[-1] != like.shape[-1]:
        raise InvalidInput(f"measure has dimension {like.shape[-1]}, {name} acts on dimension {A.shape[-1]}")
    return A.detach(), D.detach()


def regular_factor(gaussian: Gaussian, A: Tensor) -> Tensor:
    """[m L] (d, 1 + d) with L the root of the covariance of a regular Gaussian in the domain of the metric.

    Raises
    ------
    InvalidInput
        A singular covariance, or a metric that is infinite or out of the floating range there.
    """
    m, S = gaussian.mean_t.detach(), gaussian.cov_t.detach()
    if int(numerical_rank_psd(S)) < gaussian.dim:
        raise InvalidInput(
            "measure must be a regular Gaussian in the twisted metric, its covariance is singular"
        )
    L, eye = sqrt_psd(S), torch.eye(gaussian.dim, dtype=m.dtype, device=m.device)
    log_g, inside = gaussian_log_speed(m, L, eye[0], torch.zeros_like(L), A, eye)
    if not bool(inside) or not bool(torch.isfinite(torch.exp(log_g))):
        raise InvalidInput(
            "measure is outside the domain of the twisted metric: E e^(x^T A y) is not finite there"
        )
    return torch.cat([m.unsqueeze(-1), L], -1)


class _Clouds:
    """Positions (n, d) with fixed weights."""

    def __init__(self, cloud: Particles, A: Tensor, D: Tensor) -> None:
        self.start, self.w, self.A, self.D = cloud.x_t.detach(), cloud.weights_t.detach(), A, D
        self.Dinv = torch.linalg.inv(D)
        self.equation = cloud_acceleration(self.start.shape, self.w, A, D)

    def velocity(self, tangent: Any, name: str) -> Tensor:
        """A field (n, d) at the tokens."""
        if isinstance(tangent, AffineVelocity):
            raise InvalidInput(f"{name} must be an array (n, d) at a cloud, got an AffineVelocity")
        v, _ = as_tensor(tangent, name)
        if v.shape != self.start.shape:
            raise InvalidInput(
                f"{name} must have the shape {tuple(self.start.shape)} of the tokens, got {tuple(v.shape)}"
            )
        return cast_like(v, self.start, name).detach()

    def acceleration(self, q: Tensor, v: Tensor) -> Tensor:
        """By the geodesic equation, (T, n, d)."""
        return geodesic_acceleration(q, v, self.A, self.D, kernel_at(q, self.w, self.A))

    def log_square(self, q: Tensor, v: Tensor) -> Tensor:
        """log g(v, v), (T,)."""
        return log_speed(q, v, self.w, self.A, self.Dinv)

    def state(self, q: Tensor) -> State:
        """The clouds (T, n, d)."""
        return CloudState(q, self.w.expand(q.shape[0], -1))

    def gap(self, end: Tensor, target: Measure) -> Tensor:
        """W2 distance of an end to the target."""
        assert isinstance(target, Particles)
        return torch.as_tensor(Wasserstein().distance(Particles.unchecked(end, self.w, "torch"), target))


class _Gaussians:
    """Mean and square factor side by side, (d, 1 + d), in the metric restricted to affine velocities."""

    def __init__(self, gaussian: Gaussian, A: Tensor, D: Tensor) -> None:
        self.A, self.D, self.Dinv = A, D, torch.linalg.inv(D)
        self.start = regular_factor(gaussian, A)
        self.equation = gaussian_factor_acceleration(A, D)

    def velocity(self, tangent: Any, name: str) -> Tensor:
        """The horizontal lift of an AffineVelocity, (d, 1 + d)."""
        b, M = affine_parts(tangent, self.start[:, 0], name)
        L = self.start[:, 1:]
        return horizontal(self.start, torch.cat([b.unsqueeze(-1), M @ L], -1), self.A, self.Dinv)

    def acceleration(self, q: Tensor, v: Tensor) -> Tensor:
        """By the geodesic equation, (T, d, 1 + d)."""
        return gaussian_acceleration(q, v, self.A, self.D, self.Dinv)

    def log_square(self, q: Tensor, v: Tensor) -> Tensor:
        """log g(v, v), (T,)."""
        parts = (q[..., 0], q[..., 1:], v[..., 0], v[..., 1:])
        value, inside = gaussian_log_speed(*parts, self.A, self.Dinv)
        return torch.where(inside, value, torch.inf)

    def state(self, q: Tensor) -> State:
        """N(m, L L^T)."""
        return GaussianState(q[..., 0], q[..., 1:] @ q[..., 1:].mT)

    def gap(self, end: Tensor, target: Measure) -> Tensor:
        """Bures-Wasserstein distance of an end to the target."""
        found = Gaussian.unchecked(end[:, 0], factor=end[:, 1:], kind="torch")
        return torch.as_tensor(BuresWasserstein().distance(found, target))


class TwistedGeodesic(Curve):
    """A geodesic of the twisted metric d_{A,V}: a solution of d2x/dt2 = -Gamma_x(v, v).

    Between clouds, or between regular Gaussians in the metric restricted to affine velocities (in coordinates
    mean and factor). Start and initial velocity come from `metric.log(mu, nu)`; the geodesic equation is then
    integrated at relative tolerance 1e-12, so that (x, v, a) at any t belong to an exact geodesic, whatever the
    error of the logarithm. Second derivatives of energies use that a: d2F/dt2 = D2F(v, v) + DF(a) = Hess F(v, v).

    Parameters
    ----------
    metric : TwistedWasserstein
    mu, nu : two clouds or two Gaussians, no batch dimensions
    matching : "optimal" or "identity"
        Clouds: find the matching, or keep the labels, which is quicker (`TwistedWasserstein.geodesic`).

    Attributes
    ----------
    end_gap : float
        Distance (W2; Bures-Wasserstein) of the end of the integrated curve to nu.
    converged : bool
        Whether the metric found the logarithm (else a `NotConverged` warning says why) and the curve arrives:
        end_gap at most 1e-5 of the W2 distance of mu and nu. If not, the curve is still a geodesic, with exact
        second derivatives, but one that ends elsewhere.
    speed_drift : float
        Largest relative change of |speed|^2 along the curve, which is conserved: an error check.

    Raises
    ------
    InvalidInput
        Not a twisted metric, batches, measures of two kinds, clouds of different weights, singular Gaussians or
        ones outside the domain of the metric.
    """

    family = "twisted geodesic"

    def __init__(self, metric: Any, mu: Measure, nu: Measure, *, matching: str = "optimal") -> None:
        a, b = (_single(measure, name) for measure, name in ((mu, "mu"), (nu, "nu")))
        check_same_dim(a, b)
        if isinstance(a, Gaussian) != isinstance(b, Gaussian):
            raise InvalidInput("mu and nu must be both Gaussians or both Particles")
        space = _space(metric, a)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            tangent = metric.log(a, b, matching=matching)
        for warning in caught:
            warnings.warn(warning.message, stacklevel=2)
        self._set(space, space.velocity(tangent, "velocity"), common_kind(a, b, metric))
        self.end_gap = float(space.gap(self._run.at(1.0)[0], b))
        found = not any(issubclass(warning.category, NotConverged) for warning in caught)
        self.converged = found and self.end_gap <= _ARRIVED * float(space.gap(space.start, b))

    @classmethod
    def from_velocity(cls, metric: Any, measure: Measure, velocity: Any) -> TwistedGeodesic:
        """The geodesic that leaves a measure with a velocity, followed for unit time.

        Parameters
        ----------
        metric : TwistedWasserstein
        measure : Particles or a regular Gaussian
        velocity : array (n, d) at a cloud; `AffineVelocity` at a Gaussian

        Raises
        ------
        InvalidInput
            A velocity of another kind or shape, or a geodesic that leaves every bounded set before t = 1.
        """
        a = _single(measure, "measure")
        space = _space(metric, a)
        self = cls.__new__(cls)
        self._set(space, space.velocity(velocity, "velocity"), common_kind(a, velocity, metric))
        self.end_gap, self.converged = 0.0, True
        return self

    def _set(self, space: _Clouds | _Gaussians, v: Tensor, kind: Any) -> None:
        self.kind, self.dtype, self.device = kind, space.start.dtype, space.start.device
        self._space = space
        self._run = follow_geodesic(space.equation, space.start, v, rtol=_RTOL, dense=True)
        if self._run.reached < 1.0:
            raise InvalidInput(
                "velocity leads out of every bounded set: the geodesic exists up to "
                f"t = {self._run.reached:.4g} only"
            )
        t = torch.linspace(0, 1, 9, dtype=self.dtype, device=self.device)
        square = space.log_square(*self._integrated(t))
        drift = torch.expm1(square - square[0]).abs().amax()
        self.speed_drift = 0.0 if bool(torch.isneginf(square).all()) else float(drift)

    def _integrated(self, t: Tensor) -> tuple[Tensor, Tensor]:
        """Positions and velocities at times t (T,)."""
        return self._run.at(t.detach().cpu().double().numpy())

    def raw_path(self, t: Tensor) -> Path:
        """x + s v + s^2 a / 2 about each time, with a from the geodesic equation."""
        x, v = self._integrated(t)
        a = self._space.acceleration(x, v)

        def path(s: Tensor) -> State:
            r = over_times(s, 2)
            return self._space.state(x + r * (v + 0.5 * r * a))

        return path

    def raw_state(self, t: Tensor) -> State:
        """The integrated positions (constants to autograd; `raw_path` has the derivatives)."""
        return self._space.state(self._integrated(t)[0])

    def raw_speed_squared(self, t: Tensor) -> Tensor:
        """g_x(v, v)."""
        return torch.exp(self._space.log_square(*self._integrated(t)))


def _single(measure: Measure, name: str) -> Gaussian | Particles:
    mu = as_measure(measure, name)
    if mu.batch_shape:
        raise InvalidInput(f"{name} must be one measure, got batch {mu.batch_shape}")
    return mu


def _space(metric: Any, measure: Gaussian | Particles) -> _Clouds | _Gaussians:
    A, D = twisted_parameters(metric, measure.mean_t)
    return _Gaussians(measure, A, D) if isinstance(measure, Gaussian) else _Clouds(measure, A, D)
