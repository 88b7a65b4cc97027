"""The optimal map from a singular covariance, with derivatives along the matrices of its rank.

Let S0 have rank r < d and let Z (d, r) be a factor, S0 = Z Z^T. The optimal coupling moves Z z to X1 z,
X1 = S1 Z M^{-1/2} with M = Z^T S1 Z, and

    T = X1 (Z^T X1)^{-1} X1^T = S1 Z M^{-3/2} Z^T S1

is the symmetric T >= 0 of least rank with T Z = X1. It sends N(0, S0) to N(0, S1) wherever a map does.

**What I - T is to BW^2.** Along S(t) = L(t) L(t)^T, L (d, r), the derivative of BW^2(S(t), S1) at S0 is
<I - T, S'>: it needs (I - T) Z = Z - X1 only. Off the range BW^2 has one-sided derivatives only, in the directions
E with P' E P' >= 0 (P' the projector on the kernel). Where S1 is the image of S0 by T they are <I - T, E> too;
where S1 has mass that T does not reach, BW^2 falls like -t^{1/2}, with slope -infinity, and I - T is but the
gradient on the matrices of rank r. Where S1 does not see a part of the range of S0 (M singular), many
couplings are optimal and BW^2 has a concave kink; T is then 0 on that part, the mean over all of them.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ..forward_mode import to_front
from ..linalg import solve
from ..spd import eigh_psd, sqrt_psd, symmetrise

__all__ = ["cholesky_regular", "map_of_factor", "regular_part", "singular_map"]


def cholesky_regular(S: Tensor) -> tuple[Tensor, Tensor]:
    """Cholesky factor, and where its pivots are all above rounding of the largest diagonal entry."""
    L, info = torch.linalg.cholesky_ex(S)
    pivot = L.diagonal(dim1=-2, dim2=-1).amin(-1).square()
    scale = S.diagonal(dim1=-2, dim2=-1).amax(-1)
    # A NaN pivot (failed factorisation) compares False.
    return L, (info == 0) & (pivot > 16 * S.shape[-1] * torch.finfo(S.dtype).eps * scale)


def regular_part(S: Tensor) -> Tensor:
    """1 where S is safely regular, else 0, (..., 1, 1); also where values cannot be read. No derivative."""
    flag: Tensor = _Regular.apply(S.detach())  # type: ignore[no-untyped-call]
    return flag


def singular_map(S0: Tensor, S1: Tensor) -> Tensor:
    """T (..., d, d) of the module for S0, S1 of one batch shape; meaningless, but finite, where S0 is regular.

    Differentiable to any order: in S1, and in S0 along the matrices of its rank.
    """
    Q, null, missed = _Frame.apply(S0.detach(), S1.detach())  # type: ignore[no-untyped-call]
    # Q spans the range with Q^T S0 Q = I there. It is a constant: S0 Q (Q^T S0 Q)^{-1/2} is a factor of
    # every matrix of that rank nearby, and smooth, where eigenvectors are not.
    V = Q.mT @ S0
    Zt = solve(sqrt_psd(symmetrise(V @ Q) + null), V)
    ZS = Zt @ S1
    root = sqrt_psd(symmetrise(ZS @ Zt.mT) + missed)
    X1t = solve(root, ZS)
    return symmetrise(X1t.mT @ solve(root, X1t))


def map_of_factor(L0: Tensor, L1: Tensor) -> Tensor:
    """Symmetric K (..., d, d) with K L0 = X1, x1 = X1 z the optimal partner of x0 = L0 z; no derivative.

    K = C S0^+ + (C S0^+)^T (I - P), C = E[x1 x0^T] and P the projector on the range of S0. It equals the map of
    least rank on the range, and stays bounded where S1 hardly sees a part of the range: what flows of a
    factor need. Where S1 does not see a part at all, one of the optimal couplings is taken that sends it to
    what is left of S1, the largest directions first: along the mean of all of them a flow stalls.
    """
    batch = torch.broadcast_shapes(L0.shape[:-2], L1.shape[:-2])
    U, s, _ = torch.linalg.svd(L0.detach().expand(*batch, *L0.shape[-2:]), full_matrices=False)
    V, t, _ = torch.linalg.svd(L1.detach().expand(*batch, *L1.shape[-2:]), full_matrices=False)
    ulp = max(*L0.shape[-2:], L1.shape[-1]) * torch.finfo(s.dtype).eps
    s = torch.where(s > ulp * s[..., :1], s, 0.0)
    t = torch.where(t > ulp * t[..., :1], t, 0.0)
    L1 = V * t.unsqueeze(-2)
    P, seen, Qh = torch.linalg.svd((U * s.unsqueeze(-2)).mT @ L1, full_matrices=False)
    both = (seen > ulp * s[..., :1] * t[..., :1]).to(s.dtype).unsqueeze(-2)
    turn = (Qh.mT * both) @ P.mT
    if bool((both.sum((-2, -1)) < torch.minimum((s > 0).sum(-1), (t > 0).sum(-1))).any()):
        turn = turn + _unseen(s, t, (P * both) @ P.mT, (Qh.mT * both) @ Qh, ulp)
    C = L1 @ turn * torch.where(s > 0, 1 / torch.where(s > 0, s, 1.0), 0.0).unsqueeze(-2) @ U.mT
    on_range = (U * (s > 0).to(s.dtype).unsqueeze(-2)) @ U.mT
    return symmetrise(C + C.mT - C.mT @ on_range)


def _unseen(s: Tensor, t: Tensor, seen0: Tensor, seen1: Tensor, ulp: float) -> Tensor:
    """The rotation of what is left of diag(s) to what is left of diag(t), directions paired by size."""
    eye0 = torch.eye(s.shape[-1], dtype=s.dtype, device=s.device)
    eye1 = torch.eye(t.shape[-1], dtype=t.dtype, device=t.device)
    _, a, A = torch.linalg.svd(s.unsqueeze(-1) * (eye0 - seen0))
    _, b, B = torch.linalg.svd(t.unsqueeze(-1) * (eye1 - seen1))
    k = min(a.shape[-1], b.shape[-1])
    both = (a[..., :k] > ulp * s[..., :1]) & (b[..., :k] > ulp * t[..., :1])
    return (B[..., :k, :].mT * both.to(s.dtype).unsqueeze(-2)) @ A[..., :k, :]


class _Constant(torch.autograd.Function):
    """Base of functions of detached tensors: a rule for `torch.vmap`, no derivative."""

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        pass


class _Regular(_Constant):
    @staticmethod
    def forward(S: Tensor) -> Tensor:
        return cholesky_regular(S)[1].to(S.dtype)[..., None, None]

    @staticmethod
    def vmap(info: Any, in_dims: tuple[Any, ...], S: Tensor) -> tuple[Tensor, int]:
        return _Regular.apply(*to_front(info, in_dims, S)), 0  # type: ignore[no-untyped-call]


class _Frame(_Constant):
    """Q, and what makes Q^T S0 Q and Z^T S1 Z regular: the identity, or its like, on their kernels."""

    @staticmethod
    def forward(S0: Tensor, S1: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        w, U = eigh_psd(S0)
        kept = (w > 0) & (cholesky_regular(S0)[1].unsqueeze(-1) == 0)
        Q = U * torch.where(kept, 1 / torch.where(kept, w, 1.0).sqrt(), 0.0).unsqueeze(-2)
        Z = U * torch.where(kept, w, 0.0).sqrt().unsqueeze(-2)
        a, V = eigh_psd(Z.mT @ S1 @ Z)
        size = a.amax(-1, keepdim=True)
        fill = torch.where(a > 0, 0.0, torch.where(size > 0, size, 1.0))
        return Q, torch.diag_embed(torch.where(kept, 0.0, 1.0).to(S0.dtype)), (V * fill.unsqueeze(-2)) @ V.mT

    @staticmethod
    def vmap(info: Any, in_dims: tuple[Any, ...], *args: Tensor) -> tuple[Any, tuple[int, int, int]]:
        return _Frame.apply(*to_front(info, in_dims, *args)), (0, 0, 0)  # type: ignore[no-untyped-call]
