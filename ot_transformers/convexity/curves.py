"""Curves of measures along which convexity is asked for: the base class, displacement and Bures geodesics."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any

import torch
from torch import Tensor

from ..arrays import Array, ArrayLike, Kind, common_kind, describe, to_kind
from ..errors import InvalidInput
from ..measures import Gaussian, Measure, Particles, as_gaussian, as_measure, check_same_dim
from ..metrics import Wasserstein
from ..spd import symmetrise
from ._states import CloudState, GaussianState, Path, State, measure_of

__all__ = ["BuresGeodesic", "Curve", "DisplacementCurve", "over_times"]


def over_times(t: Tensor, ndim: int) -> Tensor:
    """Times (T,) as (T, 1, ..., 1), to multiply tensors of `ndim` dimensions."""
    return t.reshape(-1, *([1] * ndim))


class Curve(ABC):
    """A curve t in [0, 1] -> measure with a speed.

    A new curve is one class with `raw_state` (times (T,) to tensors with a leading dimension T, twice
    differentiable in the times) and `raw_speed_squared`.

    Attributes
    ----------
    kind : "numpy" or "torch"
    family : str
        What the curve is, in words.
    batch_shape : tuple
    dtype, device : of the measures
    """

    kind: Kind = "numpy"
    family: str = "curve"
    batch_shape: tuple[int, ...] = ()
    dtype: torch.dtype = torch.float64
    device: torch.device = torch.device("cpu")

    @abstractmethod
    def raw_state(self, t: Tensor) -> State:
        """The states at times (T,): tensors with a leading dimension T."""

    @abstractmethod
    def raw_speed_squared(self, t: Tensor) -> Tensor:
        """|speed|^2 at times (T,), shape (T, ...)."""

    def raw_path(self, t: Tensor) -> Path:
        """The curve about fixed times t (T,), as a function of s (T,), right to second order at s = 0."""
        return lambda s: self.raw_state(t + s)

    def default_times(self, n_points: int) -> Tensor:
        """Times (T,) to probe at: evenly over [0, 1], ends included."""
        return torch.linspace(0.0, 1.0, n_points, dtype=self.dtype, device=self.device)

    def at(self, t: float) -> Measure:
        """The measure at time t in [0, 1].

        Raises
        ------
        InvalidInput
            t outside [0, 1].
        """
        state = self.raw_state(self._times(t)[:1])
        first, second = state[0][0], state[1][0]
        squeezed = (
            GaussianState(first, second) if isinstance(state, GaussianState) else CloudState(first, second)
        )
        return measure_of(squeezed, self.kind)

    def speed_squared(self, t: float = 0.0) -> Array:
        """|speed|^2 at time t, (...): constant along a geodesic."""
        return to_kind(self.raw_speed_squared(self._times(t)[:1])[0], self.kind)

    def _times(self, t: Any) -> Tensor:
        return check_times(t, self)

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.family}, batch={self.batch_shape}, dtype={self.dtype})"


def check_times(t: Any, curve: Curve, name: str = "t") -> Tensor:
    """Times as a tensor (T,) in [0, 1], of the dtype and device of a curve."""
    try:
        times = torch.as_tensor(t, dtype=curve.dtype, device=curve.device).reshape(-1)
    except (TypeError, ValueError, RuntimeError) as err:
        raise InvalidInput(f"{name} must be a number or numbers in [0, 1], got {describe(t)}") from err
    if times.numel() == 0 or not bool(((times >= 0) & (times <= 1)).all()):
        raise InvalidInput(f"{name} must lie in [0, 1], got {describe(t)}")
    return times


class DisplacementCurve(Curve):
    """The W2 geodesic between two clouds or Gaussians: mass moves on straight lines along an optimal plan.

    mu_t = sum_k mass_k delta_{(1-t) x_k + t y_k} on clouds; N((1-t) m0 + t m1, L_t L_t^T) with
    L_t = (1-t) L0 + t L1 O on Gaussians (O aligns the factors, see `BuresGeodesic`).

    Parameters
    ----------
    mu, nu : two clouds, or two Gaussians; batch dimensions broadcast
    D : array (d, d), optional
        W2 with the inner product <v, D^-1 w>.

    Raises
    ------
    InvalidInput
        A cloud against a Gaussian, dimensions that differ, a D that is not positive definite.

    Notes
    -----
    |speed|^2 = W2(mu, nu)^2. Where several plans are optimal this follows one of them.

    Examples
    --------
    >>> import numpy as np
    >>> curve = DisplacementCurve(Particles(np.zeros((1, 1))), Particles(np.full((1, 1), 2.0)))
    >>> float(curve.at(0.25).x[0, 0]), float(curve.speed_squared())
    (0.5, 4.0)
    """

    family = "W2 displacement interpolation"

    def __init__(self, mu: Measure, nu: Measure, *, D: ArrayLike | None = None) -> None:
        a, b = as_measure(mu, "mu"), as_measure(nu, "nu")
        geodesic = Wasserstein(D=D).geodesic(a, b)
        self.kind = common_kind(a, b, D)
        start, end = geodesic.at(0.0), geodesic.at(1.0)
        self._gaussian = isinstance(start, Gaussian)
        if isinstance(start, Gaussian):
            assert isinstance(end, Gaussian)
            self._x0, self._x1 = torch.broadcast_tensors(start.factor_t, end.factor_t)
            self._m0, self._m1 = torch.broadcast_tensors(start.mean_t, end.mean_t)
        else:
            assert isinstance(end, Particles)
            # Both ends list the coupled pairs in one order.
            self._x0, self._x1 = start.x_t, end.x_t
            self._weights = start.weights_t
        self.batch_shape = tuple(self._x0.shape[:-2])
        self.dtype, self.device = self._x0.dtype, self._x0.device
        length, _ = _tensor(geodesic.length, self._x0)
        self._square = length.square()

    def raw_state(self, t: Tensor) -> State:
        """Straight lines of points, or of factors and means."""
        s = over_times(t, self._x0.ndim)
        x = self._x0 + s * (self._x1 - self._x0)
        if not self._gaussian:
            return CloudState(x, self._weights.expand(*x.shape[:-2], x.shape[-2]))
        m = self._m0 + over_times(t, self._m0.ndim) * (self._m1 - self._m0)
        return GaussianState(m, symmetrise(x @ x.mT))

    def raw_speed_squared(self, t: Tensor) -> Tensor:
        """W2^2 at every time."""
        return self._square.expand(len(t), *self._square.shape)


def _tensor(value: Any, like: Tensor) -> tuple[Tensor, None]:
    return torch.as_tensor(value, dtype=like.dtype, device=like.device), None


class BuresGeodesic(DisplacementCurve):
    """The Bures-Wasserstein geodesic between two Gaussians, singular ones included.

    N((1-t) m0 + t m1, L_t L_t^T), L_t = (1-t) L0 + t L1 O with O the orthogonal matrix that brings the
    factors closest: the W2 geodesic of the two Gaussians.

    Parameters
    ----------
    mu, nu : Gaussian
        Batch dimensions broadcast.
    D : array (d, d), optional
        With the inner product <v, D^-1 w>.

    Raises
    ------
    InvalidInput
        A measure that is not Gaussian, dimensions that differ.

    Examples
    --------
    >>> import numpy as np
    >>> curve = BuresGeodesic(Gaussian([0.0], [[1.0]]), Gaussian([0.0], [[9.0]]))
    >>> float(curve.at(0.5).cov[0, 0])
    4.0
    """

    family = "Bures-Wasserstein geodesic"

    def __init__(self, mu: Gaussian, nu: Gaussian, *, D: ArrayLike | None = None) -> None:
        a, b = as_gaussian(mu, "mu"), as_gaussian(nu, "nu")
        check_same_dim(a, b)
        super().__init__(a, b, D=D)
