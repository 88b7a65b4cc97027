"""Closed forms that the flows are compared with."""

from __future__ import annotations

import numpy as np
from scipy.integrate import quad
from scipy.optimize import brentq


def root(S):
    w, U = np.linalg.eigh(S)
    return (U * np.sqrt(np.clip(w, 0, None))[..., None, :]) @ np.swapaxes(U, -1, -2)


def softmax_covariance(S0, A, t):
    """S(t) = S0^(1/2) (I - t S0^(1/2) (A + A^T) S0^(1/2))^(-1) S0^(1/2) for V = I."""
    R = root(S0)
    B = R @ (A + np.swapaxes(A, -1, -2)) @ R
    return R @ np.linalg.inv(np.eye(S0.shape[-1]) - np.asarray(t)[..., None, None] * B) @ R


def softmax_blow_up(S0, A):
    """t* = 1 / lambda_max(S0^(1/2) (A + A^T) S0^(1/2)), inf where that is <= 0."""
    R = root(S0)
    top = np.linalg.eigvalsh(R @ (A + np.swapaxes(A, -1, -2)) @ R)[..., -1]
    return np.where(top > 0, 1 / np.where(top > 0, top, 1), np.inf)


def softmax_limit(S0, A):
    """S(inf) = S0^(1/2) Pi S0^(1/2), Pi the projector on the kernel, for A + A^T <= 0 and V = I."""
    R = root(S0)
    w, U = np.linalg.eigh(R @ (A + A.T) @ R)
    kernel = U[:, np.abs(w) < 1e-10 * np.abs(w).max()]
    return R @ kernel @ kernel.T @ R


def variance_by_quadrature(rate, s0, t):
    """Solve int_{s0}^{s} ds / rate(s) = t for s, increasing."""
    high = s0
    while quad(lambda s: 1 / rate(s), s0, high, limit=200)[0] < t:
        high *= 2
    return brentq(
        lambda s: quad(lambda u: 1 / rate(u), s0, s, epsabs=1e-14, epsrel=1e-13, limit=200)[0] - t,
        s0,
        high,
        xtol=1e-14,
        rtol=1e-14,
    )


def random_spd(rng, d, batch=()):
    C = rng.standard_normal((*batch, d, d))
    return C @ np.swapaxes(C, -1, -2) / d
