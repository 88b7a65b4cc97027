"""Gaussian measures N(m, S), S possibly singular, with batch dimensions in front."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from ..arrays import (
    Array,
    ArrayLike,
    Kind,
    as_matrix,
    as_tensor,
    broadcast_batch,
    check_count,
    check_nonnegative,
    check_positive,
    check_psd,
    common_kind,
    make_generator,
    to_kind,
    view_of,
)
from ..errors import InvalidInput
from ..spd import eigh_psd, numerical_rank_psd, sqrt_psd, symmetrise

__all__ = ["Gaussian"]


class Gaussian:
    """A Gaussian measure N(m, S) on R^d, or a batch of them; S may be singular.

    The density, where S is regular, is (2 pi)^(-d/2) det(S)^(-1/2) exp(-(x - m)^T S^(-1) (x - m) / 2).
    Frozen: nothing writes to it. Give it NumPy or torch; properties answer in the same kind. What is given is
    copied, and NumPy properties are read-only, as for `Particles`.

    Parameters
    ----------
    mean : array (..., d)
        Mean m. A scalar stands for d = 1.
    cov : array (..., d, d)
        Covariance S, symmetric and PSD up to rounding. Batch dimensions broadcast with those of `mean`.

    Raises
    ------
    InvalidInput
        Not square, not symmetric, not PSD (the message gives the eigenvalue), dimensions that do not match,
        NaN or infinity.

    Examples
    --------
    >>> import numpy as np
    >>> g = Gaussian(np.zeros(2), np.diag([4.0, 0.0]))
    >>> g.dim, int(g.rank())
    (2, 1)
    """

    __slots__ = ("_cov", "_factor", "_mean", "has_factor", "kind")

    _mean: Tensor
    _cov: Tensor | None
    _factor: Tensor | None
    has_factor: bool
    """Whether the Gaussian was built from a factor (so that rank is exact)."""
    kind: Kind

    def __init__(self, mean: ArrayLike, cov: ArrayLike) -> None:
        m, _ = as_tensor(mean, "mean", keep=True)
        m = m.reshape(1) if m.ndim == 0 else m
        S, _ = as_matrix(cov, "cov", square=True)
        check_psd(S, "cov")
        m, S = _aligned(m, S, "cov", S.shape[-1])
        self._freeze(m, symmetrise(S), None, common_kind(mean, cov))

    @classmethod
    def from_factor(cls, mean: ArrayLike, factor: ArrayLike) -> Gaussian:
        """Build N(m, L L^T) from a factor L (..., d, r): exact rank at most r, exactly PSD.

        Raises
        ------
        InvalidInput
            Dimensions that do not match, NaN or infinity.
        """
        m, _ = as_tensor(mean, "mean", keep=True)
        m = m.reshape(1) if m.ndim == 0 else m
        L, _ = as_matrix(factor, "factor", keep=True)
        m, L = _aligned(m, L, "factor", L.shape[-2])
        return cls.unchecked(m, factor=L, kind=common_kind(mean, factor))

    @classmethod
    def unchecked(
        cls, mean: Tensor, cov: Tensor | None = None, factor: Tensor | None = None, kind: Kind = "torch"
    ) -> Gaussian:
        """Build from tensors that are known to be right (inner loops); one of `cov`, `factor` is needed."""
        self = cls.__new__(cls)
        self._freeze(mean, cov, factor, kind)
        return self

    def _freeze(self, mean: Tensor, cov: Tensor | None, factor: Tensor | None, kind: Kind) -> None:
        object.__setattr__(self, "_mean", mean)
        object.__setattr__(self, "_cov", cov)
        object.__setattr__(self, "_factor", factor)
        # Fixed now: covariance and factor are filled in later, where they are asked for.
        object.__setattr__(self, "has_factor", cov is None)
        object.__setattr__(self, "kind", kind)

    def __setattr__(self, name: str, value: object) -> None:
        raise AttributeError(f"Gaussian is frozen: cannot set {name!r}")

    def __getstate__(self) -> tuple[Tensor, Tensor | None, Tensor | None, Kind]:
        return self._mean, None if self.has_factor else self._cov, self._factor, self.kind

    def __setstate__(self, state: tuple[Tensor, Tensor | None, Tensor | None, Kind]) -> None:
        self._freeze(*state)

    @property
    def mean_t(self) -> Tensor:
        """Mean as a tensor (..., d)."""
        return self._mean

    @property
    def cov_t(self) -> Tensor:
        """Covariance as a tensor (..., d, d)."""
        if self._cov is None:
            assert self._factor is not None
            object.__setattr__(self, "_cov", symmetrise(self._factor @ self._factor.mT))
        assert self._cov is not None
        return self._cov

    @property
    def factor_t(self) -> Tensor:
        """A factor L (..., d, r) with S = L L^T: the one given, else the symmetric square root of S."""
        if self._factor is None:
            object.__setattr__(self, "_factor", sqrt_psd(self.cov_t))
        assert self._factor is not None
        return self._factor

    @property
    def mean(self) -> Array:
        """Mean m, (..., d)."""
        return view_of(self._mean, self.kind)

    @property
    def cov(self) -> Array:
        """Covariance S, (..., d, d)."""
        return view_of(self.cov_t, self.kind)

    @property
    def factor(self) -> Array:
        """A factor L (..., d, r) with S = L L^T."""
        return view_of(self.factor_t, self.kind)

    @property
    def dim(self) -> int:
        """Dimension d of the space."""
        return int(self._mean.shape[-1])

    @property
    def batch_shape(self) -> tuple[int, ...]:
        """Batch dimensions, () for one measure."""
        return tuple(self._mean.shape[:-1])

    @property
    def dtype(self) -> torch.dtype:
        """The torch dtype of mean and covariance."""
        return self._mean.dtype

    @property
    def device(self) -> torch.device:
        """The torch device of mean and covariance."""
        return self._mean.device

    def rank(self, tol: float | None = None) -> Array:
        """Numerical rank of S: singular values of L above sqrt(tol) * largest, shape (...) of integers.

        Parameters
        ----------
        tol : float, optional
            Relative to the largest eigenvalue of S. Default: d ulp if S was given, and (max(d, r) ulp)^2 if a
            factor was given (small eigenvalues keep their digits in a factor).
        """
        if tol is not None:
            check_nonnegative(tol, "tol")
        if not self.has_factor:
            return to_kind(numerical_rank_psd(self.cov_t, tol), self.kind)
        s = torch.linalg.svdvals(self.factor_t.detach())
        relative = max(self.factor_t.shape[-2:]) * torch.finfo(s.dtype).eps if tol is None else math.sqrt(tol)
        return to_kind((s > relative * s.amax(-1, keepdim=True)).sum(-1), self.kind)

    def sample(self, n: int, seed: int | torch.Generator | None = None) -> Array:
        """Draw n points m + L z, z standard normal; shape (..., n, d). The same seed gives the same bits."""
        check_count(n, "n")
        L = self.factor_t
        shape = (*self.batch_shape, n, L.shape[-1])
        z = torch.randn(shape, generator=make_generator(seed), dtype=torch.float64)
        x = self._mean.unsqueeze(-2) + z.to(L) @ L.mT
        return to_kind(x, self.kind)

    def log_density(self, x: ArrayLike) -> Array:
        """log of the density at x (..., n, d), shape (..., n); for regular S only.

        Raises
        ------
        InvalidInput
            S is singular (no density), or x has another dimension.
        """
        points, _ = as_tensor(x, "x", min_ndim=1)
        if points.shape[-1] != self.dim:
            raise InvalidInput(f"x must have last dimension {self.dim}, got shape {tuple(points.shape)}")
        if bool((numerical_rank_psd(self.cov_t) < self.dim).any()):
            raise InvalidInput("the covariance is singular: the Gaussian has no density")
        if points.ndim == 1 and self.batch_shape:
            points = points.unsqueeze(-2)
        L = torch.linalg.cholesky(self.cov_t)
        centred = points - (self._mean if points.ndim == 1 else self._mean.unsqueeze(-2))
        flat = centred.unsqueeze(-2) if points.ndim == 1 else centred
        z = torch.linalg.solve_triangular(L, flat.mT, upper=False)
        half_logdet = L.diagonal(dim1=-2, dim2=-1).log().sum(-1, keepdim=True)
        value = -0.5 * z.square().sum(-2) - half_logdet - 0.5 * self.dim * math.log(2 * math.pi)
        return to_kind(value[..., 0] if points.ndim == 1 else value, common_kind(self, x))

    def ellipse(self, n_std: float = 2.0, n_points: int = 100) -> Array:
        """Points of the curve m + n_std L_2 (cos t, sin t) in the plane of the first two coordinates.

        Shape (..., n_points, 2). For d = 1 the second coordinate is 0.
        """
        check_positive(n_std, "n_std")
        check_count(n_points, "n_points", 3)
        m, S = self._mean, self.cov_t
        if self.dim == 1:
            m = torch.cat([m, torch.zeros_like(m)], -1)
            S = torch.nn.functional.pad(S, (0, 1, 0, 1))
        w, U = eigh_psd(S[..., :2, :2])
        t = torch.linspace(0, 2 * math.pi, n_points, dtype=m.dtype, device=m.device)
        circle = torch.stack([t.cos(), t.sin()], -1)
        curve = m[..., None, :2] + n_std * circle @ (U * w.sqrt().unsqueeze(-2)).mT
        return to_kind(curve, self.kind)

    def __getitem__(self, index: int | slice | tuple[int | slice, ...]) -> Gaussian:
        """Take members of a batch."""
        if not self.batch_shape:
            raise InvalidInput("this Gaussian has no batch dimensions to index")
        index = index if isinstance(index, tuple) else (index,)
        if len(index) > len(self.batch_shape):
            raise InvalidInput(f"index {index} has more entries than batch dimensions {self.batch_shape}")
        cov = None if self.has_factor or self._cov is None else self._cov[index]
        factor = None if self._factor is None else self._factor[index]
        return Gaussian.unchecked(self._mean[index], cov, factor, self.kind)

    def __repr__(self) -> str:
        batch = f", batch={self.batch_shape}" if self.batch_shape else ""
        return f"Gaussian(dim={self.dim}{batch}, dtype={self.dtype}, kind={self.kind!r})"


def _aligned(m: Tensor, S: Tensor, name: str, d: int) -> tuple[Tensor, Tensor]:
    """Bring mean and matrix to one dtype, device and batch shape."""
    if m.shape[-1] != d:
        raise InvalidInput(f"mean has dimension {m.shape[-1]}, {name} has dimension {d}")
    if m.device != S.device:
        raise InvalidInput(f"mean is on device {m.device}, {name} on {S.device}: move one of them")
    dtype = torch.promote_types(m.dtype, S.dtype)
    batch = broadcast_batch([m.shape[:-1], S.shape[:-2]], ["mean", name])
    return m.to(dtype).expand(*batch, d), S.to(dtype).expand(*batch, *S.shape[-2:])
