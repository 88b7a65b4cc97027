"""The Kullback-Leibler divergence to a Gaussian, and the (negative Boltzmann) entropy."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from ..arrays import cast_like, readable
from ..errors import InvalidInput
from ..forward_mode import nested_jvp
from ..linalg import log_abs_det, solve
from ..measures import Gaussian, as_gaussian
from ..spd import numerical_rank_psd, symmetrise
from .base import Energy

__all__ = ["Entropy", "KLDivergence"]

_WHY_NOT_PARTICLES = (
    "a discrete measure is singular with respect to {what}: the value is +infinity at every cloud. "
    "Use measure.to_gaussian(), a grid (flows.grid_jko) or, for clouds, SinkhornDivergence"
)


class KLDivergence(Energy):
    """KL(mu | nu) to a Gaussian target nu = N(n, T), T regular, for Gaussian mu = N(m, S).

    KL = ( tr(T^-1 S) - d - log det(T^-1 S) + (m - n)^T T^-1 (m - n) ) / 2, and +inf where S is singular.

    Parameters
    ----------
    target : Gaussian
        With a regular covariance; batch dimensions broadcast with those of the measure.

    Raises
    ------
    InvalidInput
        A target that is not a Gaussian, or is singular. On particles: KL is +inf at every cloud.

    Notes
    -----
    Near S = T this is a sum of x - log(1 + x) over the eigenvalues x of C^-1 (S - T) C^-T, T = C C^T, each
    to full relative accuracy. Where the value is +inf autograd gives 0.

    Examples
    --------
    >>> import numpy as np
    >>> target = Gaussian(np.zeros(1), np.eye(1))
    >>> float(KLDivergence(target).value(Gaussian(np.ones(1), np.eye(1))))
    0.5
    """

    def __init__(self, target: Gaussian) -> None:
        self.target = as_gaussian(target, "target")
        S = self.target.cov_t
        if readable(S):
            rank = int(numerical_rank_psd(S).min())
            if rank < self.target.dim:
                raise InvalidInput(
                    f"target must have a regular covariance, got rank {rank} in dimension {self.target.dim}"
                )
        self.kind, self.dim = self.target.kind, self.target.dim
        self.batch_shape = self.target.batch_shape

    def raw_particles(self, x: Tensor, weights: Tensor) -> Tensor:
        """KL is +inf at every cloud: an error that says so."""
        what = "the Gaussian target"
        raise InvalidInput(
            f"KLDivergence is not defined on particles: {_WHY_NOT_PARTICLES.format(what=what)}"
        )

    def raw_particles_gradient(self, x: Tensor, weights: Tensor) -> Tensor:
        """KL is +inf at every cloud: an error that says so."""
        return self.raw_particles(x, weights)

    def raw_gaussian(self, mean: Tensor, cov: Tensor) -> Tensor:
        """KL(N(m, S) | target), (...)."""
        n, T = self._target(mean)
        batch = torch.broadcast_shapes(cov.shape, T.shape)
        u = (mean - n).unsqueeze(-1)
        quadratic = (u.mT @ solve(T, u))[..., 0, 0]
        half: Tensor = _CovarianceKL.apply(  # type: ignore[no-untyped-call]
            symmetrise(cov).expand(batch), symmetrise(T).expand(batch)
        )
        return half + 0.5 * quadratic

    def raw_gaussian_gradient(self, mean: Tensor, cov: Tensor) -> tuple[Tensor, Tensor]:
        """(g, H) = (T^-1 (m - n), T^-1 (S - T) S^-1 / 2)."""
        _reject_singular(cov, "KLDivergence")
        n, T = self._target(mean)
        g = solve(T, (mean - n).unsqueeze(-1)).squeeze(-1)
        batch = torch.broadcast_shapes(cov.shape, T.shape)
        return g, _gradient_in_cov(symmetrise(cov).expand(batch), T.expand(batch))

    def _target(self, like: Tensor) -> tuple[Tensor, Tensor]:
        return cast_like(self.target.mean_t, like, "target"), cast_like(self.target.cov_t, like, "target")


class Entropy(Energy):
    """The entropy int rho log rho of a Gaussian: -(log det(2 pi e S)) / 2, and +inf where S is singular.

    Its Wasserstein gradient flow is the heat equation d/dt rho = Laplacian rho.

    Raises
    ------
    InvalidInput
        On particles: the value is +inf at every cloud.

    Examples
    --------
    >>> import numpy as np
    >>> round(float(Entropy().value(Gaussian(np.zeros(1), np.eye(1)))), 6)
    -1.418939
    """

    def raw_particles(self, x: Tensor, weights: Tensor) -> Tensor:
        """The entropy is +inf at every cloud: an error that says so."""
        what = "the Lebesgue measure"
        raise InvalidInput(f"Entropy is not defined on particles: {_WHY_NOT_PARTICLES.format(what=what)}")

    def raw_particles_gradient(self, x: Tensor, weights: Tensor) -> Tensor:
        """The entropy is +inf at every cloud: an error that says so."""
        return self.raw_particles(x, weights)

    def raw_gaussian(self, mean: Tensor, cov: Tensor) -> Tensor:
        """-log det(2 pi e S) / 2, (...)."""
        d = cov.shape[-1]
        regular = numerical_rank_psd(cov) == d
        eye = torch.eye(d, dtype=cov.dtype, device=cov.device)
        S = torch.where(regular[..., None, None], symmetrise(cov), eye)
        value = -0.5 * (log_abs_det(S) + d * math.log(2 * math.pi * math.e))
        return torch.where(regular, value, torch.inf)

    def raw_gaussian_gradient(self, mean: Tensor, cov: Tensor) -> tuple[Tensor, Tensor]:
        """(g, H) = (0, -S^-1 / 2)."""
        _reject_singular(cov, "Entropy")
        return torch.zeros_like(mean), -0.5 * symmetrise(torch.linalg.inv(symmetrise(cov)))


def _reject_singular(cov: Tensor, what: str) -> None:
    if readable(cov) and int(numerical_rank_psd(cov).min()) < cov.shape[-1]:
        raise InvalidInput(
            f"{what} is +infinity at a singular covariance of measure: it has no gradient there"
        )


class _CovarianceKL(torch.autograd.Function):
    """( tr(T^-1 S) - d - log det(T^-1 S) ) / 2 of symmetric S, T of one shape."""

    generate_vmap_rule = True

    @staticmethod
    def forward(S: Tensor, T: Tensor) -> Tensor:
        C = torch.linalg.cholesky(T)
        whitened = _whiten(C, S - T)
        x = torch.linalg.eigvalsh(whitened)
        near = _x_minus_log1p(torch.where(x.abs() < 0.5, x, 0.0)).sum(-1)
        regular = numerical_rank_psd(S) == S.shape[-1]
        factor, info = torch.linalg.cholesky_ex(torch.where(regular[..., None, None], S, T))
        log_ratio = 2.0 * torch.log(factor.diagonal(dim1=-2, dim2=-1) / C.diagonal(dim1=-2, dim2=-1)).sum(-1)
        far = whitened.diagonal(dim1=-2, dim2=-1).sum(-1) - log_ratio
        value = 0.5 * torch.where((x.abs() < 0.5).all(-1), near, far)
        return torch.where(regular & (info == 0), value, torch.inf)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        ctx.save_for_backward(*inputs)
        ctx.save_for_forward(*inputs)

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Any) -> Any:
        in_S, in_T = _gradients(*ctx.saved_tensors)
        u = grad_outputs[0][..., None, None]
        return u * in_S, u * in_T

    @staticmethod
    @nested_jvp
    def jvp(ctx: Any, *grad_inputs: Any) -> Any:
        gradients = _gradients(*ctx.saved_tensors)
        parts = [(g * t).sum((-2, -1)) for g, t in zip(gradients, grad_inputs, strict=True) if t is not None]
        return torch.stack(parts).sum(0)


def _gradients(S: Tensor, T: Tensor) -> tuple[Tensor, Tensor]:
    """T^-1 (S - T) S^-1 / 2 and -T^-1 (S - T) T^-1 / 2; both 0 where S is singular."""
    regular = (numerical_rank_psd(S) == S.shape[-1])[..., None, None]
    R = torch.where(regular, S, T)
    return _gradient_in_cov(R, T), -0.5 * symmetrise(solve(T, solve(T, R - T).mT))


def _gradient_in_cov(S: Tensor, T: Tensor) -> Tensor:
    # (T^-1 - S^-1) / 2 written as a product: the difference loses all digits near S = T.
    return 0.5 * symmetrise(solve(S, solve(T, S - T).mT))


def _whiten(C: Tensor, X: Tensor) -> Tensor:
    """C^-1 X C^-T."""
    half = torch.linalg.solve_triangular(C, X, upper=False)
    return symmetrise(torch.linalg.solve_triangular(C, half.mT, upper=False))


def _x_minus_log1p(x: Tensor) -> Tensor:
    """x - log(1 + x) for |x| < 1/2, to full relative accuracy.

    With s = x / (2 + x): x = 2 s / (1 - s) and log(1 + x) = 2 atanh(s), so the terms of first order cancel
    exactly and 2 s^2 / (1 - s) - 2 (s^3 / 3 + s^5 / 5 + ...) remains.
    """
    s = x / (2.0 + x)
    q = s.square()
    tail = torch.zeros_like(s)
    for k in range(27, 1, -2):  # |s| < 1/3: the term of s^29 is below the rounding of the first one
        tail = q * tail + 1.0 / k
    return 2.0 * q / (1.0 - s) - 2.0 * s * q * tail
