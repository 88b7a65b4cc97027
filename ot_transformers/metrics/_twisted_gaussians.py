"""The twisted metric restricted to Gaussians and affine velocities: paths of (mean, factor), horizontal lifts."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from ..errors import InvalidInput
from ..measures import AffineVelocity
from ..numerics.bures import align
from ..numerics.paths import Path, shortest_path
from ..numerics.tilted import tilted_gaussian
from ..numerics.twisted_flow import follow_geodesic, gaussian_factor_acceleration
from ..numerics.twisted_gaussians import gaussian_log_speed, horizontal, skew_basis
from ..spd import symmetrise

__all__ = ["check_domain", "gaussian_exp", "gaussian_path", "join", "side_by_side", "split"]


def split(z: Tensor, d: int) -> tuple[Tensor, Tensor]:
    """(..., d + d r) -> mean (..., d), factor (..., d, r)."""
    return z[..., :d], z[..., d:].reshape(*z.shape[:-1], d, -1)


def join(m: Tensor, L: Tensor) -> Tensor:
    """Mean and factor as one flat vector."""
    return torch.cat([m, L.flatten(-2)], -1)


def side_by_side(m: Tensor, L: Tensor) -> Tensor:
    """[m L], (..., d, 1 + r)."""
    return torch.cat([m.unsqueeze(-1), L], -1)


def check_domain(m: Tensor, L: Tensor, A: Tensor, name: str) -> None:
    """Reject Gaussians at which G is not integrable."""
    _, inside = gaussian_log_speed(
        m, L, torch.zeros_like(m), torch.zeros_like(L), A, torch.eye(m.shape[-1]).to(m)
    )
    if not bool(inside.all()):
        raise InvalidInput(
            f"{name} lies outside the domain I - S^(1/2) A^T S A S^(1/2) > 0 of the twisted metric: E G is infinite"
        )


def gaussian_path(
    m0: Tensor,
    L0: Tensor,
    m1: Tensor,
    L1: Tensor,
    A: Tensor,
    Dinv: Tensor,
    tol: float,
    degrees: tuple[int, ...],
    polish: float | None = None,
) -> Path:
    """Shortest path of (mean, factor) from (m0, L0) to the fibre {(m1, L1 O), O orthogonal}."""
    d = m0.shape[-1]
    target = align(L0, L1)
    K = skew_basis(L0.shape[-1], L0)

    def speed(points: Tensor, slopes: Tensor) -> Tensor:
        log_g, inside = gaussian_log_speed(*split(points, d), *split(slopes, d), A, Dinv)
        return torch.where(inside, log_g, torch.inf)

    def turn(angles: Tensor) -> Tensor:
        O = torch.matrix_exp(torch.einsum("k,kij->ij", angles, K))  # noqa: E741
        return join(m1, target @ O)

    start, end = join(m0, L0), join(m1, target)
    size = float((end - start).norm())
    scale = torch.full_like(start, max(size, 1e-300) / start.numel() ** 0.5)
    return shortest_path(
        speed,
        start,
        end,
        scale=scale,
        tol=tol,
        degrees=degrees,
        turn=turn if K.shape[0] else None,
        n_turn=K.shape[0],
        polish=polish,
    )


def gaussian_exp(
    m: Tensor, L: Tensor, dm: Tensor, dL: Tensor, A: Tensor, Dinv: Tensor, rtol: float
) -> tuple[Tensor, Tensor, float]:
    """Geodesic of the restricted metric for unit time: mean, factor and relative drift of its energy.

    The geodesic equation in (m, L) with the initial velocity made horizontal: it stays so.
    """
    q = side_by_side(m, L)
    v = horizontal(q, side_by_side(dm, dL), A, Dinv)
    if not bool((v != 0).any()):
        return m, L, 0.0
    run = follow_geodesic(gaussian_factor_acceleration(A, torch.linalg.inv(Dinv)), q, v, rtol=rtol)
    end, slope = run.at(1.0)
    before, _ = gaussian_log_speed(m, L, v[:, 0], v[:, 1:], A, Dinv)
    after, inside = gaussian_log_speed(end[:, 0], end[:, 1:], slope[:, 0], slope[:, 1:], A, Dinv)
    if run.reached < 1.0 or not bool(inside):
        raise InvalidInput(
            f"tangent leads out of the space at t = {run.reached:.4g} < 1: the twisted space of Gaussians is not "
            "complete"
        )
    return end[:, 0], end[:, 1:], abs(math.expm1(float(after - before)))


def inner(m: Tensor, L: Tensor, v: AffineVelocity, w: AffineVelocity, A: Tensor, Dinv: Tensor) -> Tensor:
    """Z E<D^{-1} v, w> under the tilted law, (...)."""
    law = tilted_gaussian(m, L @ L.mT, A)
    shift = (law.mean_x - m).unsqueeze(-1)
    p, q = (f.b_t.unsqueeze(-1) + f.M_t @ shift for f in (v, w))
    means = (p.mT @ Dinv @ q)[..., 0, 0]
    spreads = ((v.M_t @ law.cov_x @ w.M_t.mT) * Dinv).sum((-2, -1))
    return torch.exp(law.log_z) * (means + spreads)


def affine_of(m: Tensor, L: Tensor, dm: Tensor, dL: Tensor) -> tuple[Tensor, Tensor]:
    """The field x -> dm + M (x - m) with M L = dL, for regular square L."""
    del m
    return dm, torch.linalg.solve(L.mT, dL.mT).mT


def riesz(mean: Tensor, cov: Tensor, g: Tensor, H: Tensor, A: Tensor, D: Tensor) -> tuple[Tensor, Tensor]:
    """The affine field (b, M) with Z E<D^{-1}(b + M(x-m)), w + N(x-m)> = g.w + 2 tr(H N S) for all (w, N).

    With S' = (I - S N_A)^{-1} S the covariance of the tilted law, N_A = A S A, and delta = S' (A + N_A) m its
    mean minus m: M = D (2 H (I - S N_A) - g ((A + N_A) m)^T) / Z, b = D g / Z - M delta; no inverse of S.
    """
    law = tilted_gaussian(mean, cov, A)
    N = symmetrise(A @ cov @ A)
    eye = torch.eye(mean.shape[-1], dtype=mean.dtype, device=mean.device)
    q = ((A + N) @ mean.unsqueeze(-1)).squeeze(-1)
    z = torch.exp(-law.log_z)
    M = z[..., None, None] * (D @ (2.0 * H @ (eye - cov @ N) - g.unsqueeze(-1) * q.unsqueeze(-2)))
    delta = law.cov_x @ q.unsqueeze(-1)
    b = z.unsqueeze(-1) * (D @ g.unsqueeze(-1)).squeeze(-1) - (M @ delta).squeeze(-1)
    inside = law.inside
    return torch.where(inside[..., None], b, 0.0), torch.where(inside[..., None, None], M, 0.0)
