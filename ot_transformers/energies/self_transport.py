"""Self-transport energy: half the entropic cost of a measure with itself; Sinkhorn attention follows its gradient."""

from __future__ import annotations

import torch
from torch import Tensor

from ..arrays import ArrayLike, as_matrix, cast_like, check_count, check_positive
from ..numerics.coupling import coupling_covariance, gaussian_self_transport
from ..numerics.sinkhorn import sinkhorn
from ..spd import symmetrise
from .base import Energy

__all__ = ["SelfTransportEnergy"]


class SelfTransportEnergy(Energy):
    """F(mu) = OT(mu, mu) / 2, OT = min over couplings pi of mu with itself of E_pi[-y^T A x] + eps KL(pi | mu x mu).

    On N(m, S), with w_i the eigenvalues of S^(1/2) B S B^T S^(1/2), B = A / eps, h_i = (1 + sqrt(1 + 4 w_i)) / 2,

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
    The Wasserstein gradient on particles is -(A^T E_pi[y | x] + A E_pi[x | y]) / 2 (the second mean at y = x),
    which for symmetric A is -A E_pi[y | x]: there Sinkhorn attention with V = sigma D A is the gradient flow of
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

    def __init__(self, A: ArrayLike, eps: float = 1.0, *, tol: float = 1e-9, max_iter: int = 5_000) -> None:
        self.A, self.kind = as_matrix(A, "A", square=True)
        self.eps = check_positive(eps, "eps")
        self.tol, self.max_iter = check_positive(tol, "tol"), check_count(max_iter, "max_iter")
        self.dim = int(self.A.shape[-1])

    def raw_particles(self, x: Tensor, weights: Tensor) -> Tensor:
        """OT / 2 of the cloud with itself, (...)."""
        A = cast_like(self.A, x, "A")
        result = sinkhorn(
            x,
            weights,
            x,
            weights,
            A,
            self.eps,
            tol=self.tol,
            max_iter=self.max_iter,
            symmetric=_is_symmetric(A),
        )
        return 0.5 * result.value

    def raw_gaussian(self, mean: Tensor, cov: Tensor) -> Tensor:
        """OT / 2 in closed form, (...)."""
        A = cast_like(self.A, mean, "A")
        bilinear = (mean * (A @ mean.unsqueeze(-1)).squeeze(-1)).sum(-1)
        return 0.5 * (self.eps * gaussian_self_transport(cov, A / self.eps) - bilinear)

    def raw_particles_gradient(self, x: Tensor, weights: Tensor) -> Tensor:
        """-(A^T E[y | x] + A E[x | y]) / 2 at the tokens, (..., n, d)."""
        A = cast_like(self.A, x, "A")
        options = {"tol": self.tol, "max_iter": self.max_iter}
        if _is_symmetric(A):
            mean = sinkhorn(x, weights, x, weights, A, self.eps, symmetric=True, **options).mean_y
            return -mean @ A
        forward = sinkhorn(x, weights, x, weights, A, self.eps, **options)
        # the same coupling read from the other side: scores x^T A^T y, potentials exchanged
        warm = forward.g.detach(), forward.f.detach()
        backward = sinkhorn(x, weights, x, weights, A.mT, self.eps, warm=warm, **options)
        return -0.5 * (forward.mean_y @ A + backward.mean_y @ A.mT)

    def raw_gaussian_gradient(self, mean: Tensor, cov: Tensor) -> tuple[Tensor, Tensor]:
        """(dF/dm, dF/dS) = (-(A + A^T) m / 2, -(N (I + C N)^(-1) + A^T C A / eps^2) eps / 4), N = A S A^T / eps^2."""
        A = cast_like(self.A, mean, "A")
        B = A / self.eps
        C = coupling_covariance(cov, B)
        N = symmetrise(B @ cov @ B.mT)
        eye = torch.eye(A.shape[-1], dtype=A.dtype, device=A.device)
        left = symmetrise(torch.linalg.solve(eye + N @ C, N))
        H = -0.25 * self.eps * (left + symmetrise(B.mT @ C @ B))
        return -0.5 * ((A + A.mT) @ mean.unsqueeze(-1)).squeeze(-1), H


def _is_symmetric(A: Tensor) -> bool:
    return bool((A.detach() == A.detach().mT).all())
