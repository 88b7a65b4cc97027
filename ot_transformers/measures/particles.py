"""Weighted point clouds sum_i w_i delta_{x_i}, with batch dimensions in front."""

from __future__ import annotations

import torch
from torch import Tensor

from ..arrays import (
    Array,
    ArrayLike,
    Kind,
    as_tensor,
    broadcast_batch,
    common_kind,
    readable,
    view_of,
)
from ..errors import InvalidInput
from ..forward_mode import wants_derivative
from ..spd import symmetrise
from .gaussian import Gaussian

__all__ = ["Particles"]


class Particles:
    """A discrete measure sum_i w_i delta_{x_i} on R^d, or a batch of them.

    Frozen: nothing writes to it. Give it NumPy or torch; properties answer in the same kind. What is given is
    copied (tensors keep their history); NumPy properties are read-only views. Tensors cannot be read-only: do
    not write to those that properties give, or `clone()` them first.

    Parameters
    ----------
    x : array (..., n, d)
        Tokens.
    weights : array (..., n), optional
        Nonnegative, summing to 1 (renormalised if off by rounding only). Default 1/n each.

    Raises
    ------
    InvalidInput
        Weights that are negative or do not sum to 1, shapes that do not match, an empty cloud, NaN.

    Examples
    --------
    >>> import numpy as np
    >>> mu = Particles(np.array([[0.0], [2.0]]), weights=[0.75, 0.25])
    >>> float(mu.mean[0]), float(mu.cov[0, 0])
    (0.5, 0.75)
    """

    __slots__ = ("_weights", "_x", "kind", "uniform")

    _x: Tensor
    _weights: Tensor
    kind: Kind
    uniform: bool

    def __init__(self, x: ArrayLike, weights: ArrayLike | None = None) -> None:
        points, _ = as_tensor(x, "x", keep=True)
        if points.ndim < 2:
            raise InvalidInput(
                f"x must be a cloud (..., n, d), got shape {tuple(points.shape)}; "
                "for points of the line use x[:, None]"
            )
        if weights is None:
            self._freeze(points, uniform_weights(points), common_kind(x), True)
            return
        w, _ = as_tensor(weights, "weights", min_ndim=1)
        points, w = _checked_weights(points, w)
        self._freeze(points, w, common_kind(x, weights), False)

    @classmethod
    def unchecked(cls, x: Tensor, weights: Tensor | None = None, kind: Kind = "torch") -> Particles:
        """Build from tensors that are known to be right (inner loops).

        Tokens may have more batch dimensions than weights: those are then the weights of every member.
        """
        self = cls.__new__(cls)
        # Expanded, so that an index of the batch is never one of the tokens.
        w = uniform_weights(x) if weights is None else weights.expand(x.shape[:-1])
        self._freeze(x, w, kind, weights is None)
        return self

    def _freeze(self, x: Tensor, weights: Tensor, kind: Kind, uniform: bool) -> None:
        object.__setattr__(self, "_x", x)
        object.__setattr__(self, "_weights", weights)
        object.__setattr__(self, "kind", kind)
        object.__setattr__(self, "uniform", uniform)

    def __setattr__(self, name: str, value: object) -> None:
        raise AttributeError(f"{type(self).__name__} is frozen: cannot set {name!r}")

    def __getstate__(self) -> tuple[Tensor, Tensor, Kind, bool]:
        return self._x, self._weights, self.kind, self.uniform

    def __setstate__(self, state: tuple[Tensor, Tensor, Kind, bool]) -> None:
        self._freeze(*state)

    def moved(self, x: Tensor) -> Particles:
        """Return the same weights on other points: the push-forward by a map, from tensors known to be right.

        The points may have more batch dimensions: a map for each member of a batch.
        """
        return Particles.unchecked(x, None if self.uniform else self._weights, self.kind)

    @property
    def x_t(self) -> Tensor:
        """Tokens as a tensor (..., n, d)."""
        return self._x

    @property
    def weights_t(self) -> Tensor:
        """Weights as a tensor (..., n)."""
        return self._weights

    @property
    def x(self) -> Array:
        """Tokens, (..., n, d)."""
        return view_of(self._x, self.kind)

    @property
    def weights(self) -> Array:
        """Weights, (..., n)."""
        return view_of(self._weights, self.kind)

    @property
    def n(self) -> int:
        """Number of tokens."""
        return int(self._x.shape[-2])

    @property
    def dim(self) -> int:
        """Dimension d of the space."""
        return int(self._x.shape[-1])

    @property
    def batch_shape(self) -> tuple[int, ...]:
        """Batch dimensions, () for one measure."""
        return tuple(self._x.shape[:-2])

    @property
    def dtype(self) -> torch.dtype:
        """The torch dtype of the tokens."""
        return self._x.dtype

    @property
    def device(self) -> torch.device:
        """The torch device of the tokens."""
        return self._x.device

    @property
    def mean_t(self) -> Tensor:
        """Weighted mean as a tensor (..., d)."""
        return (self._weights.unsqueeze(-1) * self._x).sum(-2)

    @property
    def factor_t(self) -> Tensor:
        """The factor L = (X - m)^T diag(w)^(1/2), (..., d, n), of the covariance."""
        centred = self._x - self.mean_t.unsqueeze(-2)
        return (self._weights.sqrt().unsqueeze(-1) * centred).mT

    @property
    def cov_t(self) -> Tensor:
        """Weighted covariance (divided by sum w = 1, not by n - 1) as a tensor (..., d, d)."""
        L = self.factor_t
        return symmetrise(L @ L.mT)

    @property
    def mean(self) -> Array:
        """Weighted mean sum_i w_i x_i, (..., d)."""
        return view_of(self.mean_t, self.kind)

    @property
    def cov(self) -> Array:
        """Weighted covariance sum_i w_i (x_i - m)(x_i - m)^T, (..., d, d)."""
        return view_of(self.cov_t, self.kind)

    def to_gaussian(self) -> Gaussian:
        """Return the Gaussian of the same mean and covariance, through an exact factor: its rank is the cloud's.

        The factor is (..., d, min(n, d)), by a QR decomposition where n > d; (..., d, n) where a derivative is
        wanted, which that decomposition has not to every order.
        """
        L = self.factor_t
        if self.n > self.dim and not wants_derivative(L):
            L = torch.linalg.qr(L.mT, mode="r").R.mT
        return Gaussian.unchecked(self.mean_t, factor=L, kind=self.kind)

    def __getitem__(self, index: int | slice | tuple[int | slice, ...]) -> Particles:
        """Take members of a batch."""
        if not self.batch_shape:
            raise InvalidInput("this cloud has no batch dimensions to index")
        index = index if isinstance(index, tuple) else (index,)
        if len(index) > len(self.batch_shape):
            raise InvalidInput(f"index {index} has more entries than batch dimensions {self.batch_shape}")
        w = None if self.uniform else self._weights[index]
        return Particles.unchecked(self._x[index], w, self.kind)

    def __repr__(self) -> str:
        batch = f", batch={self.batch_shape}" if self.batch_shape else ""
        return f"{type(self).__name__}(n={self.n}, dim={self.dim}{batch}, dtype={self.dtype}, kind={self.kind!r})"


def uniform_weights(x: Tensor) -> Tensor:
    """1/n for each token, of the batch shape of x."""
    return torch.full((), 1.0 / x.shape[-2], dtype=x.dtype, device=x.device).expand(x.shape[:-1])


def _checked_weights(x: Tensor, w: Tensor) -> tuple[Tensor, Tensor]:
    """Check weights against tokens and normalise them to machine precision."""
    if w.shape[-1] != x.shape[-2]:
        raise InvalidInput(f"weights are for {w.shape[-1]} tokens, x has {x.shape[-2]}")
    if w.device != x.device:
        raise InvalidInput(f"x is on device {x.device}, weights on {w.device}: move one of them")
    if readable(w):
        low = float(w.detach().min())
        if low < 0:
            raise InvalidInput(f"weights must be nonnegative; the smallest is {low:.6g}")
        gap = float((w.detach().sum(-1) - 1).abs().max())
        slack = 1e-6 if w.dtype == torch.float64 else 1e-4
        if gap > slack:
            raise InvalidInput(f"weights must sum to 1; the sum is off by {gap:.6g}")
    w = w / w.sum(-1, keepdim=True)
    dtype = x.dtype
    batch = broadcast_batch([x.shape[:-2], w.shape[:-1]], ["x", "weights"])
    return x.expand(*batch, *x.shape[-2:]), w.to(dtype).expand(*batch, w.shape[-1])
