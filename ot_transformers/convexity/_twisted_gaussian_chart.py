"""The twisted metric restricted to Gaussians, in coordinates that are normal to second order."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ..arrays import Kind
from ..measures import AffineVelocity, Gaussian
from ..numerics.twisted_gaussians import gaussian_acceleration, gaussian_form, skew_basis
from ..spd import solve_lyapunov, symmetrise
from ._charts import Chart
from ._states import GaussianState, State, affine_parts
from .twisted import regular_factor

__all__ = ["TwistedGaussianChart"]


class TwistedGaussianChart(Chart):
    """The restricted twisted metric at a regular N(m, S), through factors S = L L^T.

    The metric on (m, L), for velocities x -> dm + M (x - m) with M L = dL, does not change under L -> L O:
    that on (m, S) is its quotient. Geodesics of the quotient are those of (m, L) that start orthogonally to
    the orbits {L W : W skew}, so tangents are those and the acceleration is that on (m, L).
    """

    def __init__(self, gaussian: Gaussian, A: Tensor, D: Tensor) -> None:
        self.q = regular_factor(gaussian, A)
        self.mean, self.L = self.q[:, 0], self.q[:, 1:]
        self.dtype, self.device = self.q.dtype, self.q.device
        self.A, self.D, self.Dinv = A, D, torch.linalg.inv(D)
        log_z, K = gaussian_form(self.q, A)
        self.G = torch.exp(log_z) * torch.kron(
            self.Dinv.contiguous(), K.contiguous()
        )  # on velocities [dm dL] as flat vectors
        self.basis = _horizontal(self.G, self.L)  # (d + d^2, N), columns orthonormal in G
        self.size = self.basis.shape[1]

    def _velocity(self, u: Tensor) -> Tensor:
        return (self.basis @ u).reshape(self.q.shape)

    def state(self, u: Tensor) -> State:
        """N(m + dm, (L + dL)(L + dL)^T) with [dm dL] = v + a(v, v) / 2."""
        v = self._velocity(u)
        moved = self.q + v + 0.5 * gaussian_acceleration(self.q, v, self.A, self.D, self.Dinv)
        L = moved[:, 1:]
        return GaussianState(moved[:, 0], symmetrise(L @ L.mT))

    def tangent(self, u: Tensor) -> tuple[Tensor, Tensor]:
        """(b, M) of the field."""
        v = self._velocity(u)
        return v[:, 0], torch.linalg.solve(self.L, v[:, 1:], left=False)

    def coordinates(self, tangent: Any) -> Tensor:
        """u of an AffineVelocity: of its covariance velocity M S + S M^T, whatever the skew part of M."""
        b, M = affine_parts(tangent, self.mean)
        S = self.L @ self.L
        # Any dL with that covariance velocity: projecting on the horizontal space removes the rest.
        X = solve_lyapunov(S, 2.0 * symmetrise(M @ S))
        v = torch.cat([b.unsqueeze(-1), X @ self.L], -1)
        return self.basis.mT @ (self.G @ v.reshape(-1))

    def wrap(self, tangent: Any, kind: Kind) -> AffineVelocity:
        """An AffineVelocity."""
        return AffineVelocity(tangent[0], tangent[1], kind)


def _horizontal(G: Tensor, L: Tensor) -> Tensor:
    """A basis, orthonormal in G, of the complement of the orbit directions [0 L W], W skew."""
    C = torch.linalg.cholesky(G)  # in coordinates C^T v the metric is Euclidean
    vertical = torch.nn.functional.pad(L @ skew_basis(len(L), L), (1, 0)).flatten(1)
    k = len(vertical)
    Q = torch.linalg.qr(C.mT @ vertical.mT, mode="complete").Q if k else torch.eye(len(G)).to(L)
    return torch.linalg.solve_triangular(C.mT, Q[:, k:], upper=True)
