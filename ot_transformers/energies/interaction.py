"""The interaction energy E_A(mu) = 1/2 E E e^{x^T A y}."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import ClassVar

import torch
from torch import Tensor

from ..arrays import Array, ArrayLike, ArrayView, as_matrix, cast_like, common_kind, readable, to_kind
from ..measures import Gaussian, Measure
from ..numerics.tilted import log_interaction, safe_log, tilted_barycentre, tilted_gaussian
from ..spd import symmetrise, transfer
from .base import Energy

__all__ = ["InteractionEnergy"]

_LOG_HALF = -math.log(2.0)


class InteractionEnergy(Energy):
    r"""The interaction energy E_A(mu) = 1/2 \iint e^{x^T A y} dmu(x) dmu(y), for any square A.

    Its first variation is G_mu(x) = E_y e^{x^T A y} for symmetric A, and the mean of those of A and A^T
    otherwise. On N(m, S) it is finite iff I - S^(1/2) A^T S A S^(1/2) > 0, and then has a closed form
    (`ot_transformers.numerics.tilted.tilted_gaussian`), also for singular S; outside it is +inf.

    Parameters
    ----------
    A : array (..., d, d), or a scalar for d = 1
        The interaction matrix; A = K^T Q for attention. No hidden scale.

    Raises
    ------
    InvalidInput
        A that is not square, NaN or infinity.

    Notes
    -----
    Sums run in the log domain and in O(n d) memory. `value` is inf only where the number overflows (see
    `log_value`). Where it is inf, by overflow or outside the domain, its derivative by autograd is 0, and so
    is the Gaussian gradient outside the domain: no NaN.

    References
    ----------
    Castin, Ablin, Carrillo, Peyré, arXiv 2501.18322, section 3.

    Examples
    --------
    >>> import numpy as np
    >>> from ot_transformers import Particles
    >>> float(InteractionEnergy(np.zeros((2, 2))).value(Particles(np.ones((3, 2)))))
    0.5
    """

    A = ArrayView("The interaction matrix, (..., d, d).")
    parameters: ClassVar[Mapping[str, int]] = {"A_t": 2}

    def __init__(self, A: ArrayLike) -> None:
        self.A_t, self.kind = as_matrix(A, "A", square=True, keep=True)
        self.dim, self.batch_shape = int(self.A_t.shape[-1]), tuple(self.A_t.shape[:-2])
        self._symmetric = readable(self.A_t) and torch.equal(self.A_t, self.A_t.mT)

    def log_value(self, measure: Measure) -> Array:
        """log E_A(mu), which does not overflow, (...); on Gaussians inf outside the domain.

        Raises
        ------
        InvalidInput
            The dimension or the device does not match.
        """
        mu = self._check(measure)
        if isinstance(mu, Gaussian):
            log_e = self._log_gaussian(mu.mean_t, mu.cov_t)
        else:
            log_e = self._log_particles(mu.x_t, mu.weights_t)
        return to_kind(log_e, common_kind(mu, self))

    def raw_particles(self, x: Tensor, weights: Tensor) -> Tensor:
        """E_A on particles, (...)."""
        return _exp_without_nan(self._log_particles(x, weights))

    def raw_gaussian(self, mean: Tensor, cov: Tensor) -> Tensor:
        """E_A on N(m, S), (...)."""
        return _exp_without_nan(self._log_gaussian(mean, cov))

    def raw_particles_gradient(self, x: Tensor, weights: Tensor) -> Tensor:
        """(G_i A b_i + G'_i A^T b'_i) / 2, b the barycentre tilted by e^{x_i^T A y}, G', b' for A^T."""
        return self.raw_particles_gradient_scaled(x, weights, torch.zeros_like(weights))

    def raw_particles_gradient_scaled(self, x: Tensor, weights: Tensor, log_scale: Tensor) -> Tensor:
        """The gradient times e^{-log_scale_i}; with log_scale = log G it is A times the softmax barycentre."""
        return self._log_g_and_gradient(x, weights, log_scale)[1]

    def raw_particles_value_gradient(self, x: Tensor, weights: Tensor) -> tuple[Tensor, Tensor]:
        """E_A and its gradient from one pass over the pairs (two for A that is not symmetric)."""
        log_g, gradient = self._log_g_and_gradient(x, weights, torch.zeros_like(weights))
        return _exp_without_nan(_log_mean(weights, log_g)), gradient

    def _log_g_and_gradient(self, x: Tensor, weights: Tensor, log_scale: Tensor) -> tuple[Tensor, Tensor]:
        A = cast_like(self.A_t, x, "A")
        log_g, b = tilted_barycentre(x, weights, A)
        field = _scaled(log_g - log_scale, b @ A.mT)
        if self._symmetric:
            return log_g, field
        log_other, b = tilted_barycentre(x, weights, A.mT)
        return log_g, 0.5 * (field + _scaled(log_other - log_scale, b @ A))

    def raw_gaussian_gradient(self, mean: Tensor, cov: Tensor) -> tuple[Tensor, Tensor]:
        """g = E (A Ey + A^T Ex), H = E/2 (A E[y y^T] A^T + A^T E[x x^T] A), moments of the tilted law."""
        A = cast_like(self.A_t, mean, "A")
        law = tilted_gaussian(mean, cov, A)
        g = (A @ law.mean_y.unsqueeze(-1) + A.mT @ law.mean_x.unsqueeze(-1)).squeeze(-1)
        moment_x = law.cov_x + law.mean_x.unsqueeze(-1) * law.mean_x.unsqueeze(-2)
        moment_y = law.cov_y + law.mean_y.unsqueeze(-1) * law.mean_y.unsqueeze(-2)
        H = 0.5 * symmetrise(transfer(A, moment_y) + transfer(A.mT, moment_x))
        log_e = torch.where(law.inside, law.log_z + _LOG_HALF, -torch.inf).unsqueeze(-1)
        return _scaled(log_e, g.unsqueeze(-2)).squeeze(-2), _scaled(log_e, H)

    def _log_particles(self, x: Tensor, weights: Tensor) -> Tensor:
        return _log_mean(weights, log_interaction(x, weights, cast_like(self.A_t, x, "A")))

    def _log_gaussian(self, mean: Tensor, cov: Tensor) -> Tensor:
        law = tilted_gaussian(mean, cov, cast_like(self.A_t, mean, "A"))
        return torch.where(law.inside, law.log_z + _LOG_HALF, torch.inf)


def _log_mean(weights: Tensor, log_g: Tensor) -> Tensor:
    """log of 1/2 sum_i w_i G_i."""
    return torch.logsumexp(safe_log(weights) + log_g, -1) + _LOG_HALF


def _exp_without_nan(log_e: Tensor) -> Tensor:
    """exp, with derivative 0 where it overflows (inf times a zero of the chain rule would be NaN)."""
    fits = log_e < math.log(torch.finfo(log_e.dtype).max)
    return torch.where(fits, torch.exp(torch.where(fits, log_e, 0.0)), torch.inf)


def _scaled(log_scale: Tensor, v: Tensor) -> Tensor:
    """e^log_scale_i v_i, with 0 where v is 0 even if the factor overflows."""
    nonzero = v != 0
    scale = torch.exp(log_scale).unsqueeze(-1)
    return torch.where(nonzero, torch.where(nonzero, scale, 0.0) * v, 0.0)
