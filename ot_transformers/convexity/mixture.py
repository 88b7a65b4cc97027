"""Linear mixtures of measures: convexity in the flat sense."""

from __future__ import annotations

import torch
from torch import Tensor

from ..arrays import broadcast_batch, common_kind
from ..errors import InvalidInput
from ..measures import Gaussian, Measure, Particles, as_measure, check_same_dim
from ._states import CloudState, State
from .curves import Curve

__all__ = ["MixtureCurve"]


class MixtureCurve(Curve):
    """The mixture (1 - t) mu + t nu of two clouds: their points stay, the weights change.

    Parameters
    ----------
    mu, nu : Particles
        Batch dimensions broadcast.

    Raises
    ------
    InvalidInput
        Gaussians (a mixture of two is not a Gaussian), dimensions that differ.

    Notes
    -----
    Nothing moves, so there is no transport speed; the norm is total variation, |speed|^2 = |nu - mu|_1^2 (4
    for clouds without common points), the norm of Pinsker's inequality. Probed at interior times: at t = 0
    and 1 some weights vanish, and one-sided derivatives in a weight are not what automatic differentiation
    gives.

    Examples
    --------
    >>> import numpy as np
    >>> curve = MixtureCurve(Particles(np.zeros((1, 1))), Particles(np.ones((1, 1))))
    >>> curve.at(0.25).weights
    array([0.75, 0.25])
    """

    family = "linear mixture"

    def __init__(self, mu: Measure, nu: Measure) -> None:
        a, b = as_measure(mu, "mu"), as_measure(nu, "nu")
        for measure, name in ((a, "mu"), (b, "nu")):
            if isinstance(measure, Gaussian):
                raise InvalidInput(
                    f"{name} must be a cloud: a mixture of Gaussians is not a Gaussian, and the closed forms "
                    "of energies hold for Gaussians alone. Draw a cloud with sample"
                )
        assert isinstance(a, Particles)
        assert isinstance(b, Particles)
        check_same_dim(a, b)
        batch = broadcast_batch([a.batch_shape, b.batch_shape], ["mu", "nu"])
        x, y = (t.x_t.expand(*batch, *t.x_t.shape[-2:]) for t in (a, b))
        w, v = (t.weights_t.expand(*batch, t.n) for t in (a, b))
        self.dtype, self.device = torch.promote_types(x.dtype, y.dtype), x.device
        self._x = torch.cat([x, y], -2).to(self.dtype)
        self._w0 = torch.cat([w, torch.zeros_like(v)], -1).to(self.dtype)
        self._w1 = torch.cat([torch.zeros_like(w), v], -1).to(self.dtype)
        self.batch_shape, self.kind = batch, common_kind(a, b)

    def raw_state(self, t: Tensor) -> State:
        """The points of both, with weights (1-t) w and t v."""
        s = t.reshape(-1, *([1] * self._w0.ndim))
        w = (1.0 - s) * self._w0 + s * self._w1
        return CloudState(self._x.expand(*w.shape[:-1], *self._x.shape[-2:]), w)

    def raw_speed_squared(self, t: Tensor) -> Tensor:
        """|nu - mu|_1^2, points that coincide counted once."""
        d = self._w1 - self._w0
        same = (self._x.unsqueeze(-2) == self._x.unsqueeze(-3)).all(-1).to(d.dtype)
        # Each point carries the net mass of its class, shared among the members of the class.
        net = ((same @ d.unsqueeze(-1)).squeeze(-1) / same.sum(-1)).abs().sum(-1)
        return net.square().expand(len(t), *net.shape)

    def default_times(self, n_points: int) -> Tensor:
        """Midpoints of n_points equal intervals: interior times."""
        k = torch.arange(n_points, dtype=self.dtype, device=self.device)
        return (k + 0.5) / n_points
