"""Exponential interactions e^{x^T A y}: log G_mu, tilted barycentres, and the tilted law of a Gaussian.

Sums over pairs of particles are streamed over blocks of rows, so that memory is O(n d) (also in backward
mode, which recomputes the blocks), and taken in the log domain, so that they do not overflow. All functions
take tensors, trust their caller, and are differentiable in reverse and forward mode, to any order.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..forward_mode import nested_jvp, wants_derivative
from ..linalg import log_abs_det, solve
from ..spd import eigh_psd, symmetrise, transfer

__all__ = [
    "TiltedLaw",
    "kernel_sums",
    "log_interaction",
    "safe_log",
    "tilted_barycentre",
    "tilted_gaussian",
]

_DENSE = 1 << 21
"""Pairs (times batch) up to which the score matrix is formed at once: 16 MB in float64."""

_BLOCK = 1 << 17
"""Pairs in a block of the streaming sums: 1 MB in float64, which stays in cache."""


def safe_log(w: Tensor) -> Tensor:
    """Return log w, with -inf and the derivative 0 (not NaN) where w = 0."""
    positive = w > 0
    return torch.where(positive, torch.log(torch.where(positive, w, 1.0)), -torch.inf)


def log_interaction(x: Tensor, weights: Tensor, A: Tensor, points: Tensor | None = None) -> Tensor:
    """log G_mu(p) = log sum_j w_j e^{p^T A x_j} at points p (default: the tokens), streaming.

    Parameters
    ----------
    x : Tensor (..., n, d)
    weights : Tensor (..., n)
    A : Tensor (..., d, d)
    points : Tensor (..., k, d), optional

    Returns
    -------
    Tensor (..., k)
    """
    z, y, b = _aligned(x if points is None else points, x, weights, A)
    if not wants_derivative(z, y, b):
        return _blocked_lse(z, y, b)
    if _is_small(z, y):
        return torch.logsumexp(z @ y.mT + b.unsqueeze(-2), -1)
    return _stream_lse(z, y, b)


def tilted_barycentre(
    x: Tensor, weights: Tensor, A: Tensor, points: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """log G_mu (..., k) and the barycentre sum_j w_j e^{p^T A x_j} x_j / G_mu(p) (..., k, d).

    Then grad log G_mu(p) = A times the barycentre.
    """
    z, y, b = _aligned(x if points is None else points, x, weights, A)
    if not wants_derivative(z, y, b):
        return _blocked_barycentre(z, y, b)
    if _is_small(z, y):
        scores = z @ y.mT + b.unsqueeze(-2)
        return torch.logsumexp(scores, -1), torch.softmax(scores, -1) @ y
    log_g = _stream_lse(z, y, b)
    return log_g, _kernel(z, y, -log_g, b, y)


class TiltedLaw(NamedTuple):
    """The Gaussian law of (x, y) proportional to e^{x^T A y} N(m, S)(dx) N(m, S)(dy).

    Attributes
    ----------
    log_z : Tensor (...)
        log E e^{x^T A y}; meaningless where `inside` is False.
    inside : Tensor (...) of bool
        Whether I - S^(1/2) A^T S A S^(1/2) > 0 (up to rounding), that is E e^{x^T A y} < inf.
    mean_x, mean_y : Tensor (..., d)
    cov_x, cov_y : Tensor (..., d, d)
        The two marginals. Where `inside` is False they are those of S = 0.
    """

    log_z: Tensor
    inside: Tensor
    mean_x: Tensor
    mean_y: Tensor
    cov_x: Tensor
    cov_y: Tensor


def tilted_gaussian(mean: Tensor, cov: Tensor, A: Tensor) -> TiltedLaw:
    """Closed form of the tilted law, without S^(-1), so that singular S works and has its derivatives.

    With N = A S A^T and N' = A^T S A:  Cov(x) = (I - S N)^(-1) S,  Cov(y) = (I - S N')^(-1) S,
    E x = (I - S N)^(-1) (I + S A) m,  E y = (I - S N')^(-1) (I + S A^T) m, and with q = A (I + S A^T) m

        log Z = m^T A m + m^T N m / 2 - log det(I - S N) / 2 + q^T Cov(x) q / 2.

    Parameters
    ----------
    mean : Tensor (..., d)
    cov : Tensor (..., d, d)
    A : Tensor (..., d, d)
    """
    m, S, A = _broadcast(mean, symmetrise(cov), A)
    inside = _in_domain(S.detach(), A.detach())
    # Outside the domain everything is computed at S = 0: `where` then hides numbers, never NaN.
    S = torch.where(inside[..., None, None], S, torch.zeros_like(S))
    m = torch.where(inside[..., None], m, torch.zeros_like(m)).unsqueeze(-1)
    eye = torch.eye(S.shape[-1], dtype=S.dtype, device=S.device)
    N = transfer(A, S)
    left_x, left_y = eye - S @ N, eye - S @ transfer(A.mT, S)
    shifted_x, shifted_y = m + S @ (A @ m), m + S @ (A.mT @ m)
    sol_x = solve(left_x, torch.cat([S, shifted_x], -1))
    sol_y = solve(left_y, torch.cat([S, shifted_y], -1))
    cov_x, cov_y = symmetrise(sol_x[..., :-1]), symmetrise(sol_y[..., :-1])
    q = A @ shifted_y
    quadratic = m.mT @ (A @ m) + 0.5 * (m.mT @ N @ m) + 0.5 * (q.mT @ cov_x @ q)
    log_z = quadratic[..., 0, 0] - 0.5 * log_abs_det(left_x)
    return TiltedLaw(log_z, inside, sol_x[..., -1], sol_y[..., -1], cov_x, cov_y)


def _in_domain(S: Tensor, A: Tensor) -> Tensor:
    w, U = eigh_psd(S)
    L = U * w.sqrt().unsqueeze(-2)
    top = torch.linalg.svdvals(L.mT @ A @ L)[..., 0]
    return top < 1 - 4 * S.shape[-1] * torch.finfo(S.dtype).eps


def _broadcast(m: Tensor, S: Tensor, A: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    d = m.shape[-1]
    batch = torch.broadcast_shapes(m.shape[:-1], S.shape[:-2], A.shape[:-2])
    return m.expand(*batch, d), S.expand(*batch, d, d), A.expand(*batch, d, d)


def _aligned(points: Tensor, x: Tensor, weights: Tensor, A: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Give p^T A (..., k, d), x and log w one batch shape."""
    z, b = points @ A, safe_log(weights)
    batch = torch.broadcast_shapes(z.shape[:-2], x.shape[:-2], b.shape[:-1])
    return z.expand(*batch, *z.shape[-2:]), x.expand(*batch, *x.shape[-2:]), b.expand(*batch, b.shape[-1])


def _is_small(z: Tensor, y: Tensor) -> bool:
    return z.shape[:-1].numel() * y.shape[-2] <= _DENSE


def _blocks(n: int, pairs: int) -> list[tuple[int, int]]:
    step = max(1, n * min(_BLOCK, _DENSE) // max(pairs, 1))
    return [(i, min(i + step, n)) for i in range(0, n, step)]


def _stream_lse(z: Tensor, y: Tensor, b: Tensor) -> Tensor:
    """log sum_j e^{z_i . y_j + b_j} (..., k)."""
    z0, y0, b0 = z.detach(), y.detach(), b.detach()
    base = _blocked_lse(z0, y0, b0)
    # base carries the value, the kernel sum (1 up to rounding) the derivatives.
    ones = torch.ones_like(b0).unsqueeze(-1)
    return base + torch.log(_kernel(z, y, -base, b, ones)).squeeze(-1)


def _blocked_lse(z: Tensor, y: Tensor, b: Tensor) -> Tensor:
    """log sum_j e^{z_i . y_j + b_j} (..., k), without derivatives."""
    top, mass = kernel_sums(z, y, b, torch.ones_like(b).unsqueeze(-1))
    return top + mass.log().squeeze(-1)


def _blocked_barycentre(z: Tensor, y: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
    """The same and the barycentres (..., k, d), one exponential a pair."""
    top, sums = kernel_sums(z, y, b, torch.cat([y, torch.ones_like(b).unsqueeze(-1)], -1))
    mass = sums[..., -1:]
    return top + mass.log().squeeze(-1), sums[..., :-1] / mass


def kernel_sums(z: Tensor, y: Tensor, b: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    """t_i = max_j (z_i . y_j + b_j) (..., k) and sum_j e^{z_i . y_j + b_j - t_i} v_j (..., k, r).

    Without derivatives, by blocks that stay in cache: a whole matrix costs more in page faults than in
    exponentials. All tensors have one batch shape.
    """
    blocks = _blocks(z.shape[-2], z.shape[:-1].numel() * y.shape[-2])
    shape = torch.Size((*z.shape[:-1], v.shape[-1] + 1))
    in_place = _in_place(z, y, b, v)

    def rows(i: int, j: int) -> Tensor:
        scores = z[..., i:j, :] @ y.mT
        scores = scores.add_(b.unsqueeze(-2)) if in_place else scores + b.unsqueeze(-2)
        top = scores.amax(-1, keepdim=True)
        top = torch.where(torch.isfinite(top), top, 0.0)  # inf - inf would be NaN
        e = scores.sub_(top).exp_() if in_place else torch.exp(scores - top)
        return torch.cat([top, e @ v], -1)

    out = _blockwise(blocks, rows, shape, z, y, b, v)
    return out[..., 0], out[..., 1:]


def _blockwise(
    blocks: list[tuple[int, int]], rows: Callable[[int, int], Tensor], shape: torch.Size, *inputs: Tensor
) -> Tensor:
    """Collect blocks of rows of z = inputs[0] in one array made beforehand.

    Pieces kept between the large temporaries would fragment the heap, which then grows to the size of the
    dense matrix.
    """
    axis = inputs[0].ndim - 2
    if not _in_place(*inputs):
        return torch.cat([rows(i, j) for i, j in blocks], axis)
    out = torch.empty(shape, dtype=inputs[0].dtype, device=inputs[0].device)
    for i, j in blocks:
        out.narrow(axis, i, j - i).copy_(rows(i, j))
    return out


def _in_place(*inputs: Tensor) -> bool:
    return not any(torch._C._functorch.is_functorch_wrapped_tensor(t) for t in inputs)


def _row_sums(z: Tensor, y: Tensor, c: Tensor, b: Tensor, v: Tensor) -> Tensor:
    if not _in_place(z, y, c, b, v):
        return torch.exp(z @ y.mT + c.unsqueeze(-1) + b.unsqueeze(-2)) @ v
    return (z @ y.mT).add_(c.unsqueeze(-1)).add_(b.unsqueeze(-2)).exp_() @ v


def _kernel(z: Tensor, y: Tensor, c: Tensor, b: Tensor, v: Tensor) -> Tensor:
    """sum_j e^{z_i . y_j + c_i + b_j} v_j (..., k, r), all of one batch shape, streaming."""
    out: Tensor = _Kernel.apply(z, y, c, b, v)  # type: ignore[no-untyped-call]
    return out


class _Kernel(torch.autograd.Function):
    """The kernel sum. Its derivatives are kernel sums again, so every order streams."""

    generate_vmap_rule = True

    @staticmethod
    def forward(z: Tensor, y: Tensor, c: Tensor, b: Tensor, v: Tensor) -> Tensor:
        blocks = _blocks(z.shape[-2], z.shape[:-1].numel() * y.shape[-2])
        shape = torch.Size((*z.shape[:-1], v.shape[-1]))
        return _blockwise(
            blocks, lambda i, j: _row_sums(z[..., i:j, :], y, c[..., i:j], b, v), shape, z, y, c, b, v
        )

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        ctx.save_for_backward(*inputs, output)
        ctx.save_for_forward(*inputs, output)

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Any) -> Any:
        z, y, c, b, v, out = ctx.saved_tensors
        u = grad_outputs[0]
        back = _kernel(y, z, b, c, torch.cat([u, _outer(u, z)], -1))
        grad_v, uz = back[..., : u.shape[-1]], back[..., u.shape[-1] :]
        vy = _kernel(z, y, c, b, _outer(v, y))
        return (
            _contract(u, vy),
            _contract(v, uz),
            (u * out).sum(-1),
            (v * grad_v).sum(-1),
            grad_v,
        )

    @staticmethod
    @nested_jvp
    def jvp(ctx: Any, *grad_inputs: Any) -> Any:
        z, y, c, b, v, out = ctx.saved_tensors
        dz, dy, dc, db, dv = grad_inputs
        total = torch.zeros_like(out)
        if dz is not None:
            total = total + _contract_left(dz, _kernel(z, y, c, b, _outer(v, y)), v.shape[-1])
        if dy is not None:
            total = total + _contract_left(z, _kernel(z, y, c, b, _outer(v, dy)), v.shape[-1])
        if dc is not None:
            total = total + dc.unsqueeze(-1) * out
        if db is not None:
            # b_j = -inf marks an absent particle, whose tangent is 0.
            total = total + _kernel(z, y, c, b, db.unsqueeze(-1) * v)
        if dv is not None:
            total = total + _kernel(z, y, c, b, dv)
        return total


def _outer(v: Tensor, y: Tensor) -> Tensor:
    """v_jr y_ja as (..., n, r d)."""
    return (v.unsqueeze(-1) * y.unsqueeze(-2)).flatten(-2)


def _contract(u: Tensor, w: Tensor) -> Tensor:
    """sum_r u_ir w_i(r a), (..., n, d)."""
    return (u.unsqueeze(-1) * w.unflatten(-1, (u.shape[-1], -1))).sum(-2)


def _contract_left(z: Tensor, w: Tensor, r: int) -> Tensor:
    """sum_a z_ia w_i(r a), (..., n, r)."""
    return (z.unsqueeze(-2) * w.unflatten(-1, (r, -1))).sum(-1)
