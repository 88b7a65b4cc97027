"""Debiased Sinkhorn divergence to a target measure, between clouds or, in closed form, between Gaussians."""

from __future__ import annotations

import torch
from torch import Tensor

from ..arrays import broadcast_batch, cast_like, check_count, check_positive, readable
from ..errors import InvalidInput
from ..measures import Gaussian, Measure, Particles, as_measure
from ..numerics.gaussian_divergence import divergence_slope, gaussian_divergence
from ..numerics.sinkhorn import SinkhornResult, sinkhorn
from .base import Energy

__all__ = ["SinkhornDivergence"]


class SinkhornDivergence(Energy):
    """S(mu) = OT(mu, nu) - OT(mu, mu) / 2 - OT(nu, nu) / 2, nu the target.

        OT(mu, nu) = min over couplings pi of (mu, nu) of E_pi[|x - y|^2 / 2] + eps KL(pi | mu x nu).

    Nonnegative, zero only at mu = nu; it tends to W_2^2 / 2 as eps -> 0 and to |m_mu - m_nu|^2 / 2 as
    eps -> infinity.

    Parameters
    ----------
    target : Particles, Gaussian, or an array (..., n, d) read as a cloud
        nu. The energy is defined on measures of the same kind: clouds for a cloud, Gaussians for a Gaussian.
    eps : float
        Strength of the entropic regularisation, in units of the cost |x - y|^2 / 2 (so that GeomLoss's
        blur is sqrt(eps), and POT's `reg` for the metric |x - y|^2 is 2 eps).
    tol : float
        Bound on the L1 error of each marginal; the value's error is of second order in it.
    max_iter : int
        Iterations of one solve at most; then a `NotConverged` warning gives the errors reached.

    Raises
    ------
    InvalidInput
        eps <= 0, or a measure of the other kind or of another dimension.

    Notes
    -----
    The squares |x|^2 / 2 cancel, and so do the means but for |m_mu - m_nu|^2 / 2: what is solved is the
    bilinear problem -y^T x between centred clouds, in float64 also for float32 clouds. The value is
    E_mu[f_xy - f_xx] + E_nu[g_xy - g_yy] of the potentials. It is known to 16 ulps of R^2 + eps, with R^2 the sum
    of the squared radii, plus the marginal errors times the largest of those differences; a negative value
    is given as 0, which is nearer to the truth. The engine is this library's own solver: GeomLoss
    stops after a fixed annealing schedule and POT on one marginal, so that neither certifies a small divergence of
    two close clouds, the difference of three large numbers.

    On Gaussians, with phi(w) = 1 - h + log(h) / 2, h = (1 + sqrt(1 + 4 w)) / 2 and w_i(S, T) the eigenvalues
    of T^(1/2) S T^(1/2) / eps^2,

        S = |m - m_nu|^2 / 2 + eps sum_i (phi(w_i(S, T)) - phi(w_i(S, S)) / 2 - phi(w_i(T, T)) / 2),

    with Wasserstein gradient m - m_nu + (C_S - C_T) (x - m) / eps, where C_T = Cov(y | x) of the coupling
    of mu with nu and C_S that of mu with itself. Of near Gaussians the value is an integral along the segment
    of covariances, and the gradient solves one linear equation: neither subtracts, so that both keep their
    digits (1e-13 relative, times the condition of S where eps is far below it) and the value is >= 0.

    References
    ----------
    Feydy, Séjourné, Vialard, Amari, Trouvé, Peyré, AISTATS 2019; Janati, Muzellec, Peyré, Cuturi,
    NeurIPS 2020 (Gaussians).

    Examples
    --------
    >>> import numpy as np
    >>> target = Particles(np.array([[0.0], [1.0]]))
    >>> float(SinkhornDivergence(target, 0.5).value(Particles(np.array([[3.0], [4.0]]))).round(9))
    4.5
    """

    def __init__(self, target: Measure, eps: float, *, tol: float = 1e-11, max_iter: int = 5_000) -> None:
        self.target = as_measure(target, "target")
        self.eps = check_positive(eps, "eps")
        self.tol, self.max_iter = check_positive(tol, "tol"), check_count(max_iter, "max_iter")
        self.kind, self.dim = self.target.kind, self.target.dim
        self.batch_shape = self.target.batch_shape

    def raw_particles(self, x: Tensor, weights: Tensor) -> Tensor:
        """The divergence of two clouds, (...)."""
        dtype = x.dtype
        x, a, y, b = self._clouds(x, weights)
        mean_x, mean_y = _mean(x, a), _mean(y, b)
        x, y = x - mean_x, y - mean_y
        own_x, own_y = self._solve(x, a, x, a), self._solve(y, b, y, b)
        # Near clouds: from their own potentials, which at equal clouds are the answer already.
        near = self._near(x, a, y, b)
        cross = self._solve(x, a, y, b, warm=(own_x.f, own_y.f) if near else None)
        spread = cross.value - 0.5 * (own_x.value + own_y.value)
        # The number is that of differences token by token: three values rounded before they are subtracted lose
        # more. Derivatives are those of the values.
        with torch.no_grad():
            exact = (a * (cross.f - own_x.f)).sum(-1) + (b * (cross.g - own_y.g)).sum(-1)
            exact = exact - self.eps * (cross.excess - 0.5 * (own_x.excess + own_y.excess))
            # Truth is not negative: 0 is nearer to it than what the tolerance of the solves leaves below.
            exact = exact.clamp_min(0.0)
        spread = exact.detach() + (spread - spread.detach())
        return (0.5 * (mean_x - mean_y).square().sum((-2, -1)) + spread).to(dtype)

    def raw_particles_gradient(self, x: Tensor, weights: Tensor) -> Tensor:
        """E_(mu, mu)[y | x] - E_(mu, nu)[y | x] at the tokens, (..., n, d)."""
        dtype = x.dtype
        x, a, y, b = self._clouds(x, weights)
        return (self._solve(x, a, x, a).mean_y - self._solve(x, a, y, b).mean_y).to(dtype)

    def raw_gaussian(self, mean: Tensor, cov: Tensor) -> Tensor:
        """The divergence of two Gaussians, (...)."""
        m, T = self._gaussian(mean)
        shift = 0.5 * (mean - m).square().sum(-1)
        return shift + self.eps * gaussian_divergence(cov / self.eps, T / self.eps)

    def raw_gaussian_gradient(self, mean: Tensor, cov: Tensor) -> tuple[Tensor, Tensor]:
        """(m - m_nu, (C_S - C_T) / (2 eps)), exactly 0 at the target."""
        m, T = self._gaussian(mean)
        return mean - m, divergence_slope(cov / self.eps, T / self.eps)

    def _solve(
        self, x: Tensor, a: Tensor, y: Tensor, b: Tensor, warm: tuple[Tensor, Tensor] | None = None
    ) -> SinkhornResult:
        eye = torch.eye(x.shape[-1], dtype=x.dtype, device=x.device)
        if warm is not None:
            batch = torch.broadcast_shapes(warm[0].shape[:-1], warm[1].shape[:-1])
            warm = warm[0].expand(*batch, x.shape[-2]), warm[1].expand(*batch, y.shape[-2])
        tol, max_iter = self.tol, self.max_iter
        return sinkhorn(x, a, y, b, eye, self.eps, tol=tol, max_iter=max_iter, symmetric=y is x, warm=warm)

    def _near(self, x: Tensor, a: Tensor, y: Tensor, b: Tensor) -> bool:
        """Whether tokens differ so little that no score changes by more than eps."""
        if x.shape[-2] != y.shape[-2] or not (readable(x) and readable(y) and readable(a) and readable(b)):
            return False
        x, a, y, b = (t.detach() for t in (x, a, y, b))
        reach = torch.maximum(x.norm(dim=-1).amax(), y.norm(dim=-1).amax())
        return bool((x - y).norm(dim=-1).amax() * reach <= self.eps) and torch.allclose(
            a, b, rtol=0.1, atol=0
        )

    def _clouds(self, x: Tensor, weights: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Both clouds in float64, masses 1 to its rounding: float32 differences of near clouds are noise."""
        if not isinstance(self.target, Particles):
            raise InvalidInput("measure is a cloud, the target of this SinkhornDivergence is a Gaussian")
        cast_like(self.target.x_t, x, "target")  # the device must match
        broadcast_batch([x.shape[:-2], self.target.x_t.shape[:-2]], ["measure", "target"])
        x, a, y, b = (t.to(torch.float64) for t in (x, weights, self.target.x_t, self.target.weights_t))
        return x, a / a.sum(-1, keepdim=True), y, b / b.sum(-1, keepdim=True)

    def _gaussian(self, like: Tensor) -> tuple[Tensor, Tensor]:
        if not isinstance(self.target, Gaussian):
            raise InvalidInput("measure is a Gaussian, the target of this SinkhornDivergence is a cloud")
        m, T = cast_like(self.target.mean_t, like, "target"), cast_like(self.target.cov_t, like, "target")
        broadcast_batch([like.shape[:-1], m.shape[:-1]], ["measure", "target"])
        return m, T


def _mean(x: Tensor, w: Tensor) -> Tensor:
    return w.unsqueeze(-2) @ x
