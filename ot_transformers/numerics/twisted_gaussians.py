"""Geometry of the twisted metric on Gaussians, restricted to affine velocities, in raw form.

A Gaussian N(m, L L^T) is q = [m L] (..., d, 1 + r), a velocity x -> dm + M (x - m) is v = [dm dL], dL = M L. For
symmetric A put C = L^T A L, h = L^T A m, u = (I - C)^{-1} h, P = (I - C^2)^{-1}: the tilted law G mu / Z is Gaussian
with mean m + L u and covariance L P L^T, and

    g(v, v) = Z tr(v^T D^{-1} v K),  K = [[1, u^T], [u, u u^T + P]],  log Z = m^T A m + h^T u - log det(I - C^2) / 2.

It does not change under L -> L O: the metric on (m, S) is the quotient, with the tangents that are orthogonal to
{[0 L W] : W skew}. No inverse of L is taken. The domain is |C| < 1. Tensors in and out.
"""

from __future__ import annotations

import torch
from torch import Tensor

from .tilted import safe_log

__all__ = [
    "gaussian_acceleration",
    "gaussian_form",
    "gaussian_log_speed",
    "horizontal",
    "skew_basis",
]


def gaussian_log_speed(
    m: Tensor, L: Tensor, dm: Tensor, dL: Tensor, A: Tensor, Dinv: Tensor
) -> tuple[Tensor, Tensor]:
    """log of the restricted metric at N(m, L L^T) for the velocity (dm, dL), (...), and where it is finite.

    The field is x -> dm + M (x - m) with M L = dL. The tilted law G mu / Z is Gaussian, of covariance L P L^T and
    mean m + L u, with N = A S A, P = (I - L^T N L)^{-1}, u = P L^T (A + N) m, so that

        g = Z ( |dm + dL u|^2_{D^-1} + tr(D^{-1} dL P dL^T) ),
        log Z = m^T A m + m^T N m / 2 + q^T L P L^T q / 2 - log det(I - L^T N L) / 2,  q = (A + N) m.

    No inverse of L is taken. Outside the domain I - L^T N L > 0 the value is meaningless (second result False).
    """
    AL = A @ L
    gram = AL.mT @ L
    B = gram @ gram.mT  # L^T A S A L
    eye = torch.eye(B.shape[-1], dtype=B.dtype, device=B.device)
    C, info = torch.linalg.cholesky_ex(eye - B)
    inside = info == 0
    C = torch.where(inside[..., None, None], C, eye)
    q = (A @ m.unsqueeze(-1)) + AL @ (AL.mT @ m.unsqueeze(-1))
    half = torch.linalg.solve_triangular(C, L.mT @ q, upper=False)
    u = torch.linalg.solve_triangular(C.mT, half, upper=True)
    Am = (m.unsqueeze(-1).mT @ A @ m.unsqueeze(-1))[..., 0, 0]
    Nm = (AL.mT @ m.unsqueeze(-1)).square().sum((-2, -1))
    log_det_half = C.diagonal(dim1=-2, dim2=-1).log().sum(-1)
    log_z = Am + 0.5 * Nm + 0.5 * half.square().sum((-2, -1)) - log_det_half
    shift = dm.unsqueeze(-1) + dL @ u
    spread = torch.linalg.solve_triangular(C, dL.mT, upper=False)
    square = (shift.mT @ Dinv @ shift)[..., 0, 0] + ((spread @ Dinv) * spread).sum((-2, -1))
    return log_z + safe_log(square), inside


def gaussian_acceleration(q: Tensor, v: Tensor, A: Tensor, D: Tensor, Dinv: Tensor) -> Tensor:
    """d2q/dt2 of the restricted geodesic through q = [m L] with velocity v = [dm dL], both (..., d, 1 + r).

    With K^{-1} = [[1 + u^T P^{-1} u, -u^T P^{-1}], [-P^{-1} u, P^{-1}]] the Euler-Lagrange equation of g / 2 is

        a = D (d(g/2)/dq) K^{-1} / Z - (d log Z/dt) v - v (dK/dt) K^{-1}.

    Z cancels, so nothing overflows. Outside the domain |C| < 1 the value is meaningless.
    """
    m, L, dm, dL = q[..., :1], q[..., 1:], v[..., :1], v[..., 1:]
    Am, AL = A @ m, A @ L
    C, h = L.mT @ AL, L.mT @ Am
    eye = torch.eye(C.shape[-1], dtype=C.dtype, device=C.device)
    R = torch.linalg.inv(eye - C)
    P = R @ torch.linalg.inv(eye + C)
    u = R @ h
    # Along the curve: dC, dh, du, dP, d log Z.
    dC = dL.mT @ AL
    dC = dC + dC.mT
    dh = dL.mT @ Am + AL.mT @ dm
    du = R @ (dh + dC @ u)
    CdC = C @ dC
    dP = P @ (CdC + CdC.mT) @ P
    PC = P @ C
    rate = (
        (2.0 * Am * dm).sum((-2, -1)) + (2.0 * u * dh + u * (dC @ u)).sum((-2, -1)) + (PC * dC).sum((-2, -1))
    )
    # The gradient of g / (2 Z) in q at fixed v: the square S times d log Z / 2, and the change of the square.
    s = dm + dL @ u
    Ds, DdL = Dinv @ s, Dinv @ dL
    square = (s * Ds).sum((-2, -1)) + ((dL.mT @ DdL) * P).sum((-2, -1))
    y = R @ (dL.mT @ Ds)
    X = P @ (dL.mT @ DdL) @ P
    half = 0.5 * square[..., None, None]
    by_h = 2.0 * half * u + y
    by_C = half * (u @ u.mT + PC) + 0.5 * (y @ u.mT + u @ y.mT) + 0.5 * (X @ C + C @ X)
    slope = torch.cat([2.0 * half * Am + AL @ by_h, Am @ by_h.mT + 2.0 * AL @ by_C], -1)
    Pinv = eye - C @ C
    Pu = Pinv @ u
    one = 1.0 + (u.mT @ Pu)
    Kinv = torch.cat([torch.cat([one, -Pu.mT], -1), torch.cat([-Pu, Pinv], -1)], -2)
    dK = torch.cat(
        [
            torch.cat([torch.zeros_like(one), du.mT], -1),
            torch.cat([du, du @ u.mT + u @ du.mT + dP], -1),
        ],
        -2,
    )
    return (D @ slope - v @ dK) @ Kinv - rate[..., None, None] * v


def gaussian_form(q: Tensor, A: Tensor) -> tuple[Tensor, Tensor]:
    """log Z and K (1 + r, 1 + r) of g(v, w) = Z tr(v^T D^{-1} w K) at q (d, 1 + r) in the domain."""
    m, L = q[:, :1], q[:, 1:]
    Am, AL = A @ m, A @ L
    C, h = L.mT @ AL, L.mT @ Am
    eye = torch.eye(C.shape[-1], dtype=C.dtype, device=C.device)
    plus, minus = torch.linalg.cholesky(eye + C), torch.linalg.cholesky(eye - C)
    u = torch.cholesky_solve(h, minus)
    P = torch.linalg.inv(eye - C) @ torch.linalg.inv(eye + C)
    log_det = (plus.diagonal().log() + minus.diagonal().log()).sum()
    K = torch.cat([torch.cat([torch.ones_like(u[:1]), u.mT], -1), torch.cat([u, u @ u.mT + P], -1)], -2)
    return (m * Am).sum() + (h * u).sum() - log_det, K


def skew_basis(r: int, like: Tensor) -> Tensor:
    """A basis of skew r x r matrices, (r (r - 1) / 2, r, r)."""
    i, j = torch.triu_indices(r, r, 1, device=like.device)
    W = like.new_zeros((len(i), r, r))
    k = torch.arange(len(i), device=like.device)
    W[k, i, j], W[k, j, i] = 1.0, -1.0
    return W


def horizontal(q: Tensor, v: Tensor, A: Tensor, Dinv: Tensor) -> Tensor:
    """The velocity of least speed that moves mean and covariance as v does, (d, 1 + r): a linear solve."""
    W = skew_basis(q.shape[-1] - 1, q)
    if len(W) == 0:
        return v
    _, K = gaussian_form(q, A)
    vertical = torch.nn.functional.pad(q[:, 1:] @ W, (1, 0))  # [0 L W]
    dual = (Dinv @ vertical @ K).flatten(1)
    gram = dual @ vertical.flatten(1).mT
    coefficients = torch.linalg.solve(gram, dual @ v.reshape(-1))
    return v - torch.einsum("k,kij->ij", coefficients, vertical)
