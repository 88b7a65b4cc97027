"""Self-transport energy: half the entropic cost of a measure with itself."""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar

from torch import Tensor

from ..arrays import ArrayLike, ArrayView, as_matrix, cast_like, check_count, check_positive, readable
from ..numerics.coupling import (
    coupling_covariance,
    coupling_covariance_of_factor,
    gaussian_self_transport,
    quadratic_potential,
)
from ..numerics.sinkhorn import SinkhornResult, sinkhorn
from ..spd import symmetrise
from .base import Energy

__all__ = ["SelfTransportEnergy"]


class SelfTransportEnergy(Energy):
    """F(mu) = OT(mu, mu) / 2, with OT the entropic cost of coupling mu with itself.

        OT(mu, mu) = min over couplings pi of (mu, mu) of E_pi[-y^T A x] + eps KL(pi | mu x mu).

    On N(m, S), with w_i the eigenvalues of S^(1/2) B S B^T S^(1/2), B = A / eps, and
    h_i = (1 + sqrt(1 + 4 w_i)) / 2,

        OT = -m^T A m + eps sum_i (1 - h_i + log(h_i) / 2).

    Parameters
    ----------
    A : array (..., d, d)
        Bilinear form, symmetric or not. A scalar stands for d = 1.
    eps : float
        Entropic regularisation, > 0.
    tol : float
        Bound on the L1 error of each marginal of the coupling of particles.
    max_iter : int
        Iterations of one solve at most; then a `NotConverged` warning gives the errors reached.

    Notes
    -----
    The Wasserstein gradient on particles is -(A^T E_pi[y | x] + A E_pi[x | y]) / 2 (second mean at y = x).
    For symmetric A it is -A E_pi[y | x]: Sinkhorn attention with V = sigma D A is then the gradient flow of
    sigma F in W2 with inner product D^(-1). The value on particles is differentiable to second order.

    References
    ----------
    Castin, Ablin, Carrillo, Peyré, arXiv 2501.18322, sections 3 and 4.

    Examples
    --------
    >>> import numpy as np, ot_transformers as otf
    >>> float(SelfTransportEnergy(A=2.0).value(otf.Gaussian(0.0, [[1.0]])).round(12))
    -0.545622995878
    """

    A = ArrayView("Bilinear form, (..., d, d).")
    parameters: ClassVar[Mapping[str, int]] = {"A_t": 2}

    def __init__(self, A: ArrayLike, eps: float = 1.0, *, tol: float = 1e-9, max_iter: int = 5_000) -> None:
        self.A_t, self.kind = as_matrix(A, "A", square=True, keep=True)
        self.eps = check_positive(eps, "eps")
        self.tol, self.max_iter = check_positive(tol, "tol"), check_count(max_iter, "max_iter")
        self.dim, self.batch_shape = int(self.A_t.shape[-1]), tuple(self.A_t.shape[:-2])

    finite_on_gaussians = True

    def raw_particles(self, x: Tensor, weights: Tensor) -> Tensor:
        """OT / 2 of the cloud with itself, (...)."""
        A = cast_like(self.A_t, x, "A")
        return 0.5 * self._solve(x, weights, A, symmetric=_is_symmetric(A)).value

    def raw_gaussian(self, mean: Tensor, cov: Tensor) -> Tensor:
        """OT / 2 in closed form, (...)."""
        A = cast_like(self.A_t, mean, "A")
        bilinear = (mean * (A @ mean.unsqueeze(-1)).squeeze(-1)).sum(-1)
        return 0.5 * (self.eps * gaussian_self_transport(cov, A / self.eps) - bilinear)

    def raw_particles_gradient(self, x: Tensor, weights: Tensor) -> Tensor:
        """-(A^T E[y | x] + A E[x | y]) / 2 at the tokens, (..., n, d)."""
        A = cast_like(self.A_t, x, "A")
        if _is_symmetric(A):
            return -self._solve(x, weights, A, symmetric=True).mean_y @ A
        forward = self._solve(x, weights, A)
        # the same coupling read from the other side: scores x^T A y, potentials exchanged
        backward = self._solve(x, weights, A.mT, warm=(forward.g.detach(), forward.f.detach()))
        return -0.5 * (forward.mean_y @ A + backward.mean_y @ A.mT)

    def _solve(
        self,
        x: Tensor,
        weights: Tensor,
        A: Tensor,
        *,
        symmetric: bool = False,
        warm: tuple[Tensor, Tensor] | None = None,
    ) -> SinkhornResult:
        tol, max_iter = self.tol, self.max_iter
        return sinkhorn(
            x, weights, x, weights, A, self.eps, tol=tol, max_iter=max_iter, symmetric=symmetric, warm=warm
        )

    def raw_gaussian_gradient(self, mean: Tensor, cov: Tensor) -> tuple[Tensor, Tensor]:
        """(-(A + A^T) m / 2, -eps (N (I + C N)^(-1) + B^T C B) / 4) with B = A / eps, N = B S B^T."""
        B = cast_like(self.A_t, mean, "A") / self.eps
        return self._gaussian_gradient(mean, B, coupling_covariance(cov, B), B @ cov @ B.mT)

    def raw_gaussian_gradient_of_factor(self, mean: Tensor, factor: Tensor) -> tuple[Tensor, Tensor]:
        """The same from a factor, which keeps its digits where S = L L^T has lost them."""
        B = cast_like(self.A_t, mean, "A") / self.eps
        BL = B @ factor
        return self._gaussian_gradient(mean, B, coupling_covariance_of_factor(factor, B), BL @ BL.mT)

    def _gaussian_gradient(self, mean: Tensor, B: Tensor, C: Tensor, N: Tensor) -> tuple[Tensor, Tensor]:
        H = -0.25 * self.eps * (quadratic_potential(C, symmetrise(N)) + symmetrise(B.mT @ C @ B))
        return -0.5 * self.eps * ((B + B.mT) @ mean.unsqueeze(-1)).squeeze(-1), H


def _is_symmetric(A: Tensor) -> bool:
    """Exact symmetry, which lets one potential serve both sides (not decided where values cannot be read)."""
    return readable(A) and bool((A.detach() == A.detach().mT).all())
