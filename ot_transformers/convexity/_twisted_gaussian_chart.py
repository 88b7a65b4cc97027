"""The twisted metric restricted to Gaussians, in coordinates that are normal to second order."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ..arrays import Kind, cast_like
from ..errors import InvalidInput
from ..measures import AffineVelocity, Gaussian
from ..numerics.twisted import gaussian_log_speed
from ..spd import numerical_rank_psd, solve_lyapunov, sqrt_psd, symmetrise
from ._charts import Chart
from ._states import GaussianState, State

__all__ = ["TwistedGaussianChart"]


class TwistedGaussianChart(Chart):
    """The restricted twisted metric at a regular N(m, S), through factors S = L L^T.

    The metric on (m, L), for velocities x -> dm + M (x - m) with M L = dL, does not change under L -> L O:
    that on (m, S) is its quotient. Geodesics of the quotient are those of (m, L) that start orthogonally to
    the orbits
    {L W : W skew}, so tangents are those and the acceleration is that on (m, L):

        a = -G^-1 ( dG(v) v - 1/2 d(v^T G v) ),  G the metric on (m, L), d in (m, L).
    """

    def __init__(self, gaussian: Gaussian, A: Tensor, D: Tensor) -> None:
        m, S = gaussian.mean_t.detach(), gaussian.cov_t.detach()
        if int(numerical_rank_psd(S)) < gaussian.dim:
            raise InvalidInput(
                "measure must be a regular Gaussian in the twisted metric, its covariance is singular"
            )
        self.dtype, self.device = m.dtype, m.device
        self.mean, self.L = m, sqrt_psd(S)
        d = gaussian.dim
        G, dG = _metric_and_derivative(m, self.L, A, torch.linalg.inv(D))
        self.basis = _horizontal(G, self.L)  # (d + d^2, N), columns orthonormal in G
        self.G = G
        self.size = self.basis.shape[1]
        # a(e_k, e_l) for basis vectors: dG[c] is the derivative of G in direction c.
        along = torch.einsum("cij,ck->kij", dG, self.basis) @ self.basis  # (k, i, l)
        slope = torch.einsum("ik,cij,jl->klc", self.basis, dG, self.basis)
        force = along.transpose(1, 2) - 0.5 * slope
        force = 0.5 * (force + force.transpose(0, 1))
        self.acceleration = -torch.linalg.solve(G, force.reshape(-1, d + d * d).mT).mT.reshape(force.shape)

    def _factor(self, theta: Tensor) -> tuple[Tensor, Tensor]:
        d = len(self.mean)
        return theta[:d], theta[d:].reshape(d, d)

    def state(self, u: Tensor) -> State:
        """N(m + dm, (L + dL)(L + dL)^T) with (dm, dL) = v + a(v, v) / 2."""
        step = self.basis @ u + 0.5 * torch.einsum("klc,k,l->c", self.acceleration, u, u)
        dm, dL = self._factor(step)
        L = self.L + dL
        return GaussianState(self.mean + dm, symmetrise(L @ L.mT))

    def tangent(self, u: Tensor) -> tuple[Tensor, Tensor]:
        """(b, M) of the field."""
        dm, dL = self._factor(self.basis @ u)
        return dm, torch.linalg.solve(self.L, dL, left=False)

    def coordinates(self, tangent: Any) -> Tensor:
        """u of an AffineVelocity: of its covariance velocity M S + S M^T, whatever the skew part of M."""
        if not isinstance(tangent, AffineVelocity):
            raise InvalidInput(f"v must be an AffineVelocity at a Gaussian, got {type(tangent).__name__}")
        if tangent.b_t.shape != self.mean.shape or tangent.M_t.shape != self.L.shape:
            raise InvalidInput(
                f"v must be a field on R^{len(self.mean)}, got b {tuple(tangent.b_t.shape)} and M "
                f"{tuple(tangent.M_t.shape)}"
            )
        b, M = (cast_like(t.detach(), self.mean, "v") for t in (tangent.b_t, tangent.M_t))
        S = self.L @ self.L
        # Any dL with that covariance velocity: projecting on the horizontal space removes the rest.
        X = solve_lyapunov(S, 2.0 * symmetrise(M @ S))
        theta = torch.cat([b, (X @ self.L).reshape(-1)])
        return self.basis.mT @ (self.G @ theta)

    def wrap(self, tangent: Any, kind: Kind) -> AffineVelocity:
        """An AffineVelocity."""
        return AffineVelocity(tangent[0], tangent[1], kind)


def _metric_and_derivative(m: Tensor, L: Tensor, A: Tensor, Dinv: Tensor) -> tuple[Tensor, Tensor]:
    """G (p, p) and its derivatives (p, p, p), first index the direction, p = d + d^2, by polarisation."""
    d = len(m)
    p = d + d * d
    eye = torch.eye(p, dtype=m.dtype, device=m.device)
    i, j = torch.triu_indices(p, p, device=m.device)
    v = eye[i] + eye[j]  # 2 e_i on the diagonal
    with torch.enable_grad():
        theta = torch.cat([m, L.reshape(-1)]).expand(len(i), p).clone().requires_grad_()
        log_g, inside = gaussian_log_speed(
            theta[:, :d], theta[:, d:].reshape(-1, d, d), v[:, :d], v[:, d:].reshape(-1, d, d), A, Dinv
        )
        g = torch.exp(log_g)
        (slope,) = torch.autograd.grad(g.sum(), theta)
    if not bool(inside.all()) or not bool(torch.isfinite(g).all()):
        raise InvalidInput(
            "measure is outside the domain of the twisted metric: E e^(x^T A y) is not finite there"
        )

    def polarised(t: Tensor) -> Tensor:
        full = t.new_zeros((p, p, *t.shape[1:]))
        full[i, j] = t
        full[j, i] = t
        own = 0.25 * full[range(p), range(p)]  # q(e_i)
        out = 0.5 * (full - own.unsqueeze(0) - own.unsqueeze(1))
        out[range(p), range(p)] = own
        return out

    return polarised(g.detach()), polarised(slope).permute(2, 0, 1).contiguous()


def _horizontal(G: Tensor, L: Tensor) -> Tensor:
    """A basis, orthonormal in G, of the complement of the orbit directions (0, L W), W skew."""
    d = len(L)
    C = torch.linalg.cholesky(G)  # in coordinates C^T v the metric is Euclidean
    i, j = torch.triu_indices(d, d, 1, device=L.device)
    W = L.new_zeros((len(i), d, d))
    k = torch.arange(len(i), device=L.device)
    W[k, i, j], W[k, j, i] = 1.0, -1.0
    vertical = torch.cat([L.new_zeros((len(i), d)), (L @ W).reshape(len(i), d * d)], -1)
    Q = torch.linalg.qr(C.mT @ vertical.mT, mode="complete").Q if len(i) else torch.eye(len(G)).to(L)
    return torch.linalg.solve_triangular(C.mT, Q[:, len(i) :], upper=True)
