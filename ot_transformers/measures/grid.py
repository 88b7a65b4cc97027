"""Measures on a fixed uniform grid of the line or the plane."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from ..arrays import Array, ArrayLike, Kind, as_tensor, common_kind, describe, readable, to_kind, view_of
from ..errors import InvalidInput
from .checks import as_gaussian
from .gaussian import Gaussian
from .particles import Particles

__all__ = ["GridMeasure"]


class GridMeasure:
    """A probability on the nodes of a uniform grid in dimension 1 or 2, or a batch of them. Frozen.

    Parameters
    ----------
    axes : array (n1,), or a list of 1 or 2 such arrays
        Increasing, equally spaced coordinates.
    mass : array (..., n1) or (..., n1, n2)
        Nonnegative, summing to 1 over the grid (renormalised if off by rounding only).

    Raises
    ------
    InvalidInput
        Axes that are not uniform, shapes that do not match, masses that are negative or do not sum to 1.

    Examples
    --------
    >>> import numpy as np
    >>> mu = GridMeasure.from_gaussian(Gaussian(np.zeros(1), np.eye(1)), np.linspace(-8, 8, 101))
    >>> round(float(mu.cov[0, 0]), 10)
    1.0
    """

    __slots__ = ("_axes", "_mass", "kind")

    _axes: tuple[Tensor, ...]
    _mass: Tensor
    kind: Kind

    def __init__(self, axes: ArrayLike | Sequence[ArrayLike], mass: ArrayLike) -> None:
        lines, axes_kind = _checked_axes(axes)
        m, mass_kind = as_tensor(mass, "mass", min_ndim=len(lines))
        shape = tuple(len(line) for line in lines)
        if tuple(m.shape[m.ndim - len(lines) :]) != shape:
            raise InvalidInput(f"mass must end in the grid's shape {shape}, got shape {tuple(m.shape)}")
        over = tuple(range(-len(lines), 0))
        if readable(m):
            if bool((m < 0).any()):
                raise InvalidInput(f"mass must be nonnegative; the smallest entry is {float(m.min()):.6g}")
            gap = float((m.detach().sum(over) - 1).abs().max())
            if gap > (1e-6 if m.dtype == torch.float64 else 1e-4):
                raise InvalidInput(f"mass must sum to 1; the sum is off by {gap:.6g}")
        m = m / m.sum(over, keepdim=True)
        kind: Kind = "torch" if "torch" in (axes_kind, mass_kind) else "numpy"
        self._freeze(tuple(line.to(m) for line in lines), m, kind)

    def _freeze(self, axes: tuple[Tensor, ...], mass: Tensor, kind: Kind) -> None:
        object.__setattr__(self, "_axes", axes)
        object.__setattr__(self, "_mass", mass)
        object.__setattr__(self, "kind", kind)

    def __setattr__(self, name: str, value: object) -> None:
        raise AttributeError(f"GridMeasure is frozen: cannot set {name!r}")

    def __getstate__(self) -> tuple[tuple[Tensor, ...], Tensor, Kind]:
        return self._axes, self._mass, self.kind

    def __setstate__(self, state: tuple[tuple[Tensor, ...], Tensor, Kind]) -> None:
        self._freeze(*state)

    @classmethod
    def from_density(
        cls, density: Callable[[Tensor], Tensor], axes: ArrayLike | Sequence[ArrayLike]
    ) -> GridMeasure:
        """Sample a nonnegative density (..., d) -> (...), up to a factor, at the nodes."""
        if not callable(density):
            raise InvalidInput(f"density must be callable, (..., d) -> (...), got {describe(density)}")
        lines, kind = _checked_axes(axes)
        value = density(torch.stack(torch.meshgrid(*lines, indexing="ij"), -1))
        shape = tuple(len(line) for line in lines)
        if not isinstance(value, Tensor) or tuple(value.shape) != shape:
            raise InvalidInput(f"density must give a tensor of shape {shape}, it gave {describe(value)}")
        total = float(value.detach().sum())
        if not total > 0:
            raise InvalidInput(f"density must have a positive sum over the grid, got {total:g}")
        return cls(list(lines), to_kind(value / total, kind))

    @classmethod
    def from_gaussian(cls, gaussian: Gaussian, axes: ArrayLike | Sequence[ArrayLike]) -> GridMeasure:
        """Sample the density of one Gaussian of regular covariance at the nodes, normalised."""
        g = as_gaussian(gaussian)
        lines, _ = _checked_axes(axes)
        if g.batch_shape or g.dim != len(lines):
            raise InvalidInput(f"gaussian must be one Gaussian in dimension {len(lines)}, got {g!r}")
        nodes = torch.stack(torch.meshgrid(*lines, indexing="ij"), -1).reshape(-1, g.dim).to(g.mean_t)
        log_density, _ = as_tensor(g.log_density(nodes), "gaussian")
        mass = torch.softmax(log_density, -1).reshape([len(line) for line in lines])
        return cls([to_kind(line, g.kind) for line in lines], to_kind(mass, g.kind))

    def with_mass(self, mass: Tensor) -> GridMeasure:
        """Return another measure on the same grid, from a tensor known to be right."""
        other = type(self).__new__(type(self))
        other._freeze(self._axes, mass, self.kind)
        return other

    @property
    def axes_t(self) -> tuple[Tensor, ...]:
        """Coordinates along each axis, as tensors."""
        return self._axes

    @property
    def mass_t(self) -> Tensor:
        """Masses as a tensor (..., n1[, n2])."""
        return self._mass

    @property
    def axes(self) -> tuple[Array, ...]:
        """Coordinates along each axis."""
        return tuple(view_of(line, self.kind) for line in self._axes)

    @property
    def mass(self) -> Array:
        """Masses, (..., n1[, n2])."""
        return view_of(self._mass, self.kind)

    @property
    def density(self) -> Array:
        """Mass over the area of a cell, (..., n1[, n2])."""
        return view_of(self._mass / self.cell, self.kind)

    @property
    def cell(self) -> float:
        """Length or area of a cell."""
        area = 1.0
        for line in self._axes:
            area *= float(line[-1] - line[0]) / (len(line) - 1)
        return area

    @property
    def dim(self) -> int:
        """Dimension, 1 or 2."""
        return len(self._axes)

    @property
    def batch_shape(self) -> tuple[int, ...]:
        """Batch dimensions, () for one measure."""
        return tuple(self._mass.shape[: self._mass.ndim - self.dim])

    @property
    def nodes_t(self) -> Tensor:
        """All nodes as a tensor (N, d), in the order of `mass` flattened."""
        return torch.stack(torch.meshgrid(*self._axes, indexing="ij"), -1).reshape(-1, self.dim)

    def to_particles(self) -> Particles:
        """The same measure as weighted particles (..., N, d)."""
        w = self._mass.flatten(-self.dim)
        return Particles.unchecked(self.nodes_t.expand(*self.batch_shape, *self.nodes_t.shape), w, self.kind)

    @property
    def mean(self) -> Array:
        """Mean, (..., d)."""
        return self.to_particles().mean

    @property
    def cov(self) -> Array:
        """Covariance, (..., d, d)."""
        return self.to_particles().cov

    def __repr__(self) -> str:
        shape = tuple(len(line) for line in self._axes)
        batch = f", batch={self.batch_shape}" if self.batch_shape else ""
        return f"GridMeasure(shape={shape}{batch}, dtype={self._mass.dtype}, kind={self.kind!r})"


def _checked_axes(axes: ArrayLike | Sequence[ArrayLike]) -> tuple[tuple[Tensor, ...], Kind]:
    several = isinstance(axes, list | tuple) and len(axes) > 0 and hasattr(axes[0], "__len__")
    given = list(axes) if several else [axes]  # type: ignore[arg-type]
    if len(given) not in (1, 2):
        raise InvalidInput(f"axes must be 1 or 2 arrays, got {len(given)}")
    lines = []
    for k, value in enumerate(given):
        line, _ = as_tensor(value, f"axes[{k}]", ndim=1, keep=True)
        if len(line) < 2:
            raise InvalidInput(f"axes[{k}] must have at least 2 nodes, got {len(line)}")
        gaps = torch.diff(line)
        step = (line[-1] - line[0]) / (len(line) - 1)
        slack = 1e3 * torch.finfo(line.dtype).eps * line.abs().max()
        if not bool(step > 0) or bool(((gaps - step).abs() > slack).any()):
            raise InvalidInput(f"axes[{k}] must be increasing and equally spaced")
        lines.append(line)
    return tuple(lines), common_kind(*given)
