"""How far a cloud is from the Gaussian of its own mean and covariance, and how far samples of that one are."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import torch
from scipy.special import ndtri
from torch import Tensor

from ..arrays import ArrayLike, check_count, make_generator
from ..errors import InvalidInput
from ..measures import Particles, as_particles

__all__ = ["Gaussianity", "gaussianity"]


@dataclass(frozen=True)
class Gaussianity:
    """Result of `gaussianity`.

    Attributes
    ----------
    value : float
        The distance of the cloud to its moment-matched Gaussian (0 is Gaussian; scale-free).
    null_mean, null_quantile : float
        Mean and 95% quantile of the same distance for clouds drawn from that Gaussian, same n and weights.
    p_value : float
        Share of null draws at least as far (with +1 corrections), in (0, 1].
    rank : int
        Dimension of the affine hull in which the cloud was standardised.
    n_directions, n_null : int
        Directions averaged over, null draws made.
    """

    value: float
    null_mean: float
    null_quantile: float
    p_value: float
    rank: int
    n_directions: int
    n_null: int


def gaussianity(
    cloud: Particles | ArrayLike, *, n_directions: int = 200, n_null: int = 100, seed: int = 0
) -> Gaussianity:
    r"""Sliced, standardised Wasserstein distance of a cloud to the Gaussian of its mean and covariance.

    For a direction u the projections u^T x are standardised to mean 0 and variance 1, and their exact W_2
    distance to N(0, 1) is taken:

        W_2^2 = 2 - 2 sum_i z_(i) (phi(q_{i-1}) - phi(q_i)),   q_i = Phi^{-1}(w_(1) + ... + w_(i)),

    with phi the normal density (the quantile function of N(0, 1) integrates to -phi). The value is the root
    mean square over directions drawn uniformly in the whitened coordinates of the cloud's affine hull, so it
    does not change under invertible affine maps up to the draw of directions. It lies in [0, sqrt(2)].

    The null level is the same statistic, same directions, of clouds drawn from N(0, I) and standardised by
    their own moments: a finite sample of a Gaussian is not at distance 0.

    Parameters
    ----------
    cloud : Particles or array (n, d)
        At least 3 tokens that are not all equal.
    n_directions, n_null : int
    seed : int

    Notes
    -----
    In dimension r >= n - 1 whitened coordinates of any cloud form a regular simplex, so the value says
    nothing there: keep fewer principal components than tokens (n >> r) for a test with power.

    Raises
    ------
    InvalidInput
        Batch dimensions, fewer than 3 tokens, or a cloud of one point.
    """
    p = as_particles(cloud, "cloud")
    check_count(n_directions, "n_directions")
    check_count(n_null, "n_null")
    if p.batch_shape:
        raise InvalidInput(f"cloud must be a single cloud, got batch dimensions {p.batch_shape}")
    if p.n < 3:
        raise InvalidInput(f"cloud must have at least 3 tokens, got {p.n}")
    x, w = p.x_t.detach().double(), p.weights_t.detach().double()
    z = _whitened(x, w)
    if z.shape[-1] == 0:
        raise InvalidInput("cloud is a single point: it has no shape to compare")
    generator = make_generator(seed)
    r = z.shape[-1]
    u = torch.randn(r, n_directions, generator=generator, dtype=z.dtype).to(z.device)
    u = u / u.norm(dim=0)
    value = _sliced(z @ u, w)
    null = np.empty(n_null)
    for k in range(n_null):
        draw = torch.randn(p.n, r, generator=generator, dtype=z.dtype).to(z.device)
        null[k] = _sliced(draw @ u, w)
    exceed = int((null >= value).sum())
    return Gaussianity(
        value=value,
        null_mean=float(null.mean()),
        null_quantile=float(np.quantile(null, 0.95)),
        p_value=(exceed + 1) / (n_null + 1),
        rank=r,
        n_directions=n_directions,
        n_null=n_null,
    )


def _whitened(x: Tensor, w: Tensor) -> Tensor:
    """Coordinates of mean 0 and covariance I in the affine hull, (n, r)."""
    centred = x - (w.unsqueeze(-1) * x).sum(0)
    _, s, Vh = torch.linalg.svd(w.sqrt().unsqueeze(-1) * centred, full_matrices=False)
    # The mean is known to rounding of the tokens only: below that, differences are noise, not extent.
    keep = s > torch.maximum(s.max(), x.abs().max()) * max(x.shape) * torch.finfo(s.dtype).eps
    return centred @ (Vh[keep].T / s[keep])


def _sliced(y: Tensor, w: Tensor) -> float:
    """Root mean square over columns of the W_2 distance of the standardised column to N(0, 1)."""
    mean = (w.unsqueeze(-1) * y).sum(0)
    var = (w.unsqueeze(-1) * (y - mean).square()).sum(0)
    z, order = ((y - mean) / var.sqrt()).sort(dim=0)
    mass = w[order].cumsum(0)
    edge = mass[:-1].clamp(0.0, 1.0).cpu().numpy()
    density = np.exp(-0.5 * ndtri(edge) ** 2) / math.sqrt(2 * math.pi)
    phi = torch.from_numpy(density).to(z)
    zero = torch.zeros_like(phi[:1])
    cells = torch.cat([zero, phi]) - torch.cat([phi, zero])
    squared = 2.0 - 2.0 * (z * cells).sum(0)
    return float(squared.clamp_min(0.0).mean().sqrt())
