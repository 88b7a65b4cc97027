"""Half the squared Wasserstein distance to a target."""

from __future__ import annotations

import torch
from torch import Tensor

from ..arrays import cast_like
from ..errors import InvalidInput
from ..forward_mode import wants_derivative
from ..measures import Gaussian, Measure, Particles, as_measure
from ..numerics.bures import bures_squared
from ..numerics.bures_singular import map_of_factor
from ..numerics.transport import barycentric_projection, transport_cost, transport_plan
from .base import Energy

__all__ = ["SquaredWasserstein"]


class SquaredWasserstein(Energy):
    """F(mu) = W_2(mu, target)^2 / 2, between clouds (exact transport) or between Gaussians (closed form).

    Its Wasserstein gradient is x - T(x), T the optimal map to the target; on clouds T(x_i) is the barycentric
    projection E[y | x_i] of an optimal plan.

    Parameters
    ----------
    target : Particles, Gaussian, or an array (..., m, d)
        Of the same kind (cloud or Gaussian) as the measures it will be given. Batch dimensions broadcast.

    Raises
    ------
    InvalidInput
        A cloud against a Gaussian (take samples or `to_gaussian`), or dimensions that differ.

    Notes
    -----
    In d = 1 by sorting; otherwise POT's network simplex, or an assignment problem for equal weights. Where
    the optimal plan is not unique the gradient is one element of the subdifferential.

    On a Gaussian of singular covariance T is the map on its range; off the range W_2^2 has no derivative (its
    slope is -infinity where the target has mass there). Flows and JKO steps from it keep the rank and descend to
    the Gaussian of that rank nearest to the target, or to a critical one.

    Examples
    --------
    >>> import numpy as np
    >>> energy = SquaredWasserstein(np.array([[0.0, 0.0], [2.0, 0.0]]))
    >>> energy.wasserstein_gradient(np.array([[2.0, 1.0], [0.0, 1.0]]))
    array([[0., 1.],
           [0., 1.]])
    """

    def __init__(self, target: Measure) -> None:
        self.target = as_measure(target, "target")
        self.kind, self.dim = self.target.kind, self.target.dim
        self.batch_shape = self.target.batch_shape

    def raw_particles(self, x: Tensor, weights: Tensor) -> Tensor:
        """W_2^2 / 2 to the target cloud, (...)."""
        y, v = self._cloud(x)
        return 0.5 * transport_cost(x, weights, y, v, 2)

    def raw_particles_gradient(self, x: Tensor, weights: Tensor) -> Tensor:
        """x - E[y | x] under the optimal plan; 0 at tokens of weight 0."""
        y, v = self._cloud(x)
        batch = torch.broadcast_shapes(x.shape[:-2], weights.shape[:-1], y.shape[:-2], v.shape[:-1])
        flat = [
            t.expand(*batch, *t.shape[-k:]).reshape(-1, *t.shape[-k:])
            for t, k in ((x, 2), (weights, 1), (y, 2), (v, 1))
        ]
        rows = []
        for a, w, b, u in zip(*flat, strict=True):
            plan = transport_plan(a, w, b, u, 2)
            target = barycentric_projection(plan, len(a), w, b)
            rows.append(torch.where((w > 0).unsqueeze(-1), a - target, 0.0))
        return torch.stack(rows).reshape(*batch, *x.shape[-2:])

    def raw_gaussian(self, mean: Tensor, cov: Tensor) -> Tensor:
        """(|m - n|^2 + BW(S, T)^2) / 2, (...)."""
        if not isinstance(self.target, Gaussian):
            raise InvalidInput(
                "target is a cloud, measure a Gaussian: take SquaredWasserstein(target.to_gaussian())"
            )
        n = cast_like(self.target.mean_t, mean, "target")
        T = cast_like(self.target.cov_t, cov, "target")
        S, T = torch.broadcast_tensors(cov, T)
        return 0.5 * ((mean - n).square().sum(-1) + bures_squared(S, T))

    def raw_gaussian_gradient_of_factor(self, mean: Tensor, factor: Tensor) -> tuple[Tensor, Tensor]:
        """(m - n, (I - K) / 2) with K L = X1, x1 = n + X1 z the optimal partner of x = m + L z.

        For a singular S = L L^T this is the gradient along the covariances of its rank (`bures_singular`).
        """
        if not isinstance(self.target, Gaussian) or wants_derivative(mean, factor, self.target.mean_t):
            return super().raw_gaussian_gradient_of_factor(mean, factor)
        n = cast_like(self.target.mean_t, mean, "target")
        K = map_of_factor(factor, cast_like(self.target.factor_t, factor, "target"))
        eye = torch.eye(K.shape[-1], dtype=K.dtype, device=K.device)
        return mean - n, 0.5 * (eye - K)

    def _cloud(self, x: Tensor) -> tuple[Tensor, Tensor]:
        if not isinstance(self.target, Particles):
            raise InvalidInput(
                "target is a Gaussian, measure a cloud: give measure.to_gaussian() or sample target"
            )
        return cast_like(self.target.x_t, x, "target"), cast_like(self.target.weights_t, x, "target")
