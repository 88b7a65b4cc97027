"""Generalised geodesics: interpolation of two measures through a common base."""

from __future__ import annotations

import torch
from torch import Tensor

from ..arrays import common_kind, tensor_of
from ..errors import InvalidInput
from ..measures import Gaussian, Measure, Particles, as_measure, check_same_dim
from ..metrics import bures_map
from ..numerics.transport import TransportPlan, transport_plan
from ..spd import symmetrise, transfer
from ._states import CloudState, GaussianState, State
from .curves import Curve, over_times

__all__ = ["GeneralisedGeodesic"]


class GeneralisedGeodesic(Curve):
    """The curve ((1-t) T_mu + t T_nu)_# base, with T_mu, T_nu optimal from the base to mu and to nu.

    Between clouds whose optimal plans are no maps, the two plans are glued over each point of the base in the
    order in which they list their pairs (any gluing gives a generalised geodesic).

    Parameters
    ----------
    base, mu, nu : three clouds, or three Gaussians with a regular base; no batch dimensions on clouds

    Raises
    ------
    InvalidInput
        Clouds and Gaussians mixed, dimensions that differ, batches of clouds.

    Notes
    -----
    |speed|^2 = int |T_nu - T_mu|^2 dbase >= W2(mu, nu)^2, constant. Convexity along all of these curves is
    what makes a JKO step a convex problem.

    References
    ----------
    Ambrosio, Gigli, Savaré, *Gradient Flows*, definition 9.2.2.

    Examples
    --------
    >>> import numpy as np
    >>> a, b, c = (Gaussian([0.0], [[s]]) for s in (1.0, 4.0, 16.0))
    >>> float(GeneralisedGeodesic(a, b, c).at(0.5).cov[0, 0])
    9.0
    """

    family = "generalised geodesic"

    def __init__(self, base: Measure, mu: Measure, nu: Measure) -> None:
        o, a, b = as_measure(base, "base"), as_measure(mu, "mu"), as_measure(nu, "nu")
        check_same_dim(o, a, ("base", "mu"))
        check_same_dim(o, b, ("base", "nu"))
        if len({isinstance(m, Gaussian) for m in (o, a, b)}) > 1:
            raise InvalidInput(
                f"base, mu and nu must all be clouds or all Gaussians, got {o!r}, {a!r}, {b!r}"
            )
        self.kind = common_kind(o, a, b)
        if isinstance(o, Gaussian):
            assert isinstance(a, Gaussian)
            assert isinstance(b, Gaussian)
            self._of_gaussians(o, a, b)
        else:
            assert isinstance(o, Particles)
            assert isinstance(a, Particles)
            assert isinstance(b, Particles)
            self._of_clouds(o, a, b)

    def _of_gaussians(self, o: Gaussian, a: Gaussian, b: Gaussian) -> None:
        self._S: Tensor | None = o.cov_t
        self._x0, self._x1 = (tensor_of(bures_map(o.cov_t, g.cov_t)) for g in (a, b))
        self._m0, self._m1 = torch.broadcast_tensors(a.mean_t, b.mean_t)
        self._x0, self._x1 = torch.broadcast_tensors(self._x0, self._x1)
        dM = self._x1 - self._x0
        square = (self._m1 - self._m0).square().sum(-1) + (dM @ o.cov_t * dM).sum((-2, -1))
        self._finish(square)

    def _of_clouds(self, o: Particles, a: Particles, b: Particles) -> None:
        for measure, name in ((o, "base"), (a, "mu"), (b, "nu")):
            if measure.batch_shape:
                raise InvalidInput(f"{name} must be one cloud, got batch {measure.batch_shape}")
        self._S = None
        first = transport_plan(o.x_t, o.weights_t, a.x_t, a.weights_t, 2)
        second = transport_plan(o.x_t, o.weights_t, b.x_t, b.weights_t, 2)
        i, j, mass = _glued(first, second)
        self._x0, self._x1, self._weights = a.x_t[i], b.x_t[j], mass / mass.sum()
        square = (self._weights * (self._x1 - self._x0).square().sum(-1)).sum(-1)
        self._finish(square)

    def _finish(self, square: Tensor) -> None:
        self._square = square
        self.batch_shape = tuple(square.shape)
        self.dtype, self.device = self._x0.dtype, self._x0.device

    def raw_state(self, t: Tensor) -> State:
        """Images of the base under the interpolated maps."""
        x = self._x0 + over_times(t, self._x0.ndim) * (self._x1 - self._x0)
        if self._S is None:
            return CloudState(x, self._weights.expand(*x.shape[:-2], x.shape[-2]))
        m = self._m0 + over_times(t, self._m0.ndim) * (self._m1 - self._m0)
        return GaussianState(m, transfer(symmetrise(x), self._S))

    def raw_speed_squared(self, t: Tensor) -> Tensor:
        """int |T_nu - T_mu|^2 dbase at every time."""
        return self._square.expand(len(t), *self._square.shape)


def _glued(first: TransportPlan, second: TransportPlan) -> tuple[Tensor, Tensor, Tensor]:
    """Targets in mu, targets in nu and masses of a coupling of two plans that share their first marginal.

    Over each base point the masses of both plans are cut into common pieces (the north-west corner rule).
    """
    if first.permutation and second.permutation:
        return first.cols, second.cols, first.mass
    rows: list[int] = []
    cols: list[int] = []
    masses: list[float] = []
    for row in torch.unique(first.rows).tolist():
        p, q = first.rows == row, second.rows == row
        left = list(zip(first.cols[p].tolist(), first.mass[p].tolist(), strict=True))
        right = list(zip(second.cols[q].tolist(), second.mass[q].tolist(), strict=True))
        while left and right:
            (i, a), (j, b) = left[-1], right[-1]
            m = min(a, b)
            rows.append(i)
            cols.append(j)
            masses.append(m)
            left[-1], right[-1] = (i, a - m), (j, b - m)
            left = left if a > m else left[:-1]
            right = right if b > m else right[:-1]
    device = first.rows.device
    i, j = (torch.tensor(p, dtype=torch.int64, device=device) for p in (rows, cols))
    return i, j, torch.tensor(masses, dtype=first.mass.dtype, device=device)
