"""Geodesics of the twisted metric between clouds, through the geodesic equation."""

from __future__ import annotations

import warnings
from typing import Any

import numpy as np
import torch
from scipy.integrate import solve_ivp
from torch import Tensor

from ..arrays import ArrayLike, as_tensor, cast_like, common_kind
from ..errors import InvalidInput, NotConverged
from ..measures import Measure, Particles, as_particles, check_same_dim
from ..metrics import TwistedWasserstein
from ..numerics.twisted import geodesic_acceleration, kernel_at, twisted_square
from ._states import CloudState, Path, State
from .curves import Curve, over_times

__all__ = ["TwistedGeodesic", "twisted_parameters"]

_RTOL = 1e-12


def twisted_parameters(metric: Any, like: Tensor, name: str = "metric") -> tuple[Tensor, Tensor]:
    """A and D (d, d) of a twisted metric, of the dtype of the measure."""
    if not isinstance(metric, TwistedWasserstein):
        raise InvalidInput(f"{name} must be a TwistedWasserstein, got {type(metric).__name__}")
    A, D = (cast_like(torch.as_tensor(t), like, "A") for t in (metric.A, metric.D))
    if A.shape[-1] != like.shape[-1]:
        raise InvalidInput(f"measure has dimension {like.shape[-1]}, {name} acts on dimension {A.shape[-1]}")
    return A.detach(), D.detach()


class TwistedGeodesic(Curve):
    """A geodesic of the twisted metric d_{A,V} on clouds: a solution of d2x/dt2 = -Gamma_x(v, v).

    Its start and initial velocity come from `metric.log(mu, nu)`; the geodesic equation is then integrated at
    relative tolerance 1e-12, so that (x, v, a) at any t belong to an exact geodesic, whatever the error of
    the logarithm. Second derivatives of energies use that a: d2F/dt2 = D2F(v, v) + DF(a) = Hess F(v, v).

    Parameters
    ----------
    metric : TwistedWasserstein
    mu, nu : Particles, no batch dimensions

    Attributes
    ----------
    end_gap : float
        Root mean square distance of the end of the integrated curve to the target found by the metric.
    speed_drift : float
        Largest relative change of |speed|^2 along the curve, which is conserved: an error check.

    Raises
    ------
    InvalidInput
        Not a twisted metric, Gaussians, batches.
    """

    family = "twisted geodesic"

    def __init__(self, metric: Any, mu: Measure, nu: Measure) -> None:
        a, b = as_particles(mu, "mu"), as_particles(nu, "nu")
        check_same_dim(a, b)
        for cloud, name in ((a, "mu"), (b, "nu")):
            if cloud.batch_shape:
                raise InvalidInput(f"{name} must be one cloud, got batch {cloud.batch_shape}")
        A, D = twisted_parameters(metric, a.x_t)
        velocity = torch.as_tensor(metric.log(a, b), dtype=a.dtype, device=a.device)
        self._set(a, velocity.detach(), A, D, common_kind(a, b, metric))
        end = self._integrated(np.ones(1))[0][0]
        square = (a.weights_t.unsqueeze(-1) * (end - _matched(b, end)).square()).sum()
        self.end_gap = float(square.sqrt())

    @classmethod
    def from_velocity(cls, metric: Any, measure: Measure, velocity: ArrayLike) -> TwistedGeodesic:
        """The geodesic that leaves a cloud with a velocity (n, d), followed for unit time.

        Raises
        ------
        InvalidInput
            A velocity of another shape, or a geodesic that leaves every bounded set before t = 1.
        """
        a = as_particles(measure, "measure")
        if a.batch_shape:
            raise InvalidInput(f"measure must be one cloud, got batch {a.batch_shape}")
        v, _ = as_tensor(velocity, "velocity")
        if v.shape != a.x_t.shape:
            raise InvalidInput(
                f"velocity must have the shape {tuple(a.x_t.shape)} of the tokens, got {tuple(v.shape)}"
            )
        A, D = twisted_parameters(metric, a.x_t)
        self = cls.__new__(cls)
        self._set(a, cast_like(v, a.x_t, "velocity").detach(), A, D, common_kind(a, velocity, metric))
        self.end_gap = 0.0
        return self

    def _set(self, a: Particles, v: Tensor, A: Tensor, D: Tensor, kind: Any) -> None:
        self.kind, self.dtype, self.device = kind, a.dtype, a.device
        self._weights, self._A, self._D = a.weights_t.detach(), A, D
        self._flow = _solve_geodesic(a.x_t.detach(), v, self._weights, A, D)
        square = self.raw_speed_squared(torch.linspace(0, 1, 9, dtype=self.dtype, device=self.device))
        scale = float(square[0].clamp_min(torch.finfo(self.dtype).tiny))
        self.speed_drift = float((square - square[0]).abs().max()) / scale

    def _integrated(self, t: Any) -> tuple[Tensor, Tensor]:
        """Positions and velocities (T, n, d) at times t (T,)."""
        n, d = len(self._weights), len(self._D)
        y = self._flow(np.asarray(t, dtype=np.float64)).T.reshape(-1, 2, n, d)
        out = torch.from_numpy(np.ascontiguousarray(y)).to(device=self.device, dtype=self.dtype)
        return out[:, 0], out[:, 1]

    def _jet(self, t: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        x, v = self._integrated(t.detach().cpu().double().numpy())
        kernel = kernel_at(x, self._weights, self._A)
        return x, v, geodesic_acceleration(x, v, self._A, self._D, kernel)

    def raw_path(self, t: Tensor) -> Path:
        """x + s v + s^2 a / 2 about each time, with a from the geodesic equation."""
        x, v, a = self._jet(t)
        w = self._weights.expand(len(t), -1)

        def path(s: Tensor) -> State:
            r = over_times(s, 2)
            return CloudState(x + r * (v + 0.5 * r * a), w)

        return path

    def raw_state(self, t: Tensor) -> State:
        """The integrated positions (constants to autograd; `raw_path` has the derivatives)."""
        return CloudState(
            self._integrated(t.detach().cpu().double().numpy())[0], self._weights.expand(len(t), -1)
        )

    def raw_speed_squared(self, t: Tensor) -> Tensor:
        """g_x(v, v)."""
        x, v = self._integrated(t.detach().cpu().double().numpy())
        return twisted_square(v, self._weights, self._D, kernel_at(x, self._weights, self._A).log_g)


def _solve_geodesic(x: Tensor, v: Tensor, w: Tensor, A: Tensor, D: Tensor) -> Any:
    """Dense solution [0, 1] -> (x, v) of the geodesic equation, in float64."""
    x, v, w, A, D = (t.double().cpu() for t in (x, v, w, A, D))
    shape = (2, *x.shape)

    def slope(_: float, y: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
        p, u = torch.from_numpy(y.reshape(shape))
        a = geodesic_acceleration(p, u, A, D, kernel_at(p, w, A))
        return torch.stack([u, a]).numpy().reshape(-1)

    start = torch.stack([x, v]).numpy().reshape(-1)
    scale = max(float(x.abs().max()), float(v.abs().max()), 1e-300)
    with np.errstate(over="ignore", invalid="ignore"), warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)
        out = solve_ivp(
            slope, (0.0, 1.0), start, method="DOP853", rtol=_RTOL, atol=_RTOL * scale, dense_output=True
        )
    if out.status != 0 or not np.isfinite(out.y).all():
        raise InvalidInput(
            f"velocity leads out of every bounded set: the geodesic exists up to t = {out.t[-1]:.4g} only"
        )
    return out.sol


def _matched(target: Particles, end: Tensor) -> Tensor:
    """The points of the target in the order of the end of the curve."""
    from ..numerics.transport import barycentric_projection, transport_plan

    w = target.weights_t
    if target.n != len(end):
        warnings.warn("the target has another number of points than the curve", NotConverged, stacklevel=3)
        return end
    plan = transport_plan(end, w, target.x_t, w, 2)
    return barycentric_projection(plan, len(end), w, target.x_t)
