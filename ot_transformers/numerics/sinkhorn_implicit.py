"""Derivatives of the Sinkhorn fixed point, by two chord-Newton steps written in differentiable operations.

At the solution z* of r(z, theta) = 0, with J = dr/dz held constant, the step z -> z - J^(-1) r(z, theta)
leaves the value alone and gains one order of derivative each time: after one step first derivatives are
exact, after two the second ones. Those of the optimal value gain twice as fast (it is stationary in z).
"""

from __future__ import annotations

import torch
from torch import Tensor

from .sinkhorn_kernel import Problem

__all__ = ["attach_potentials", "dual_value", "soft_average"]

_CEILING = 600.0  # exponents of pairs of zero weight are cut here, where exp is still finite


def attach_potentials(
    problem: Problem, phi: Tensor, psi: Tensor
) -> tuple[tuple[Tensor, Tensor], tuple[Tensor, Tensor]]:
    """Potentials that carry first, and potentials that carry second derivatives in x, a, y, b."""
    with torch.no_grad():
        weight, _ = _weights(problem.x @ problem.y.mT + psi.unsqueeze(-2), problem.b, problem.mask)
        P = weight / weight.sum(-1, keepdim=True)
        back, _ = _weights(
            (problem.x @ problem.y.mT).mT + phi.unsqueeze(-2), problem.a, _transpose(problem.mask)
        )
        Q = back / back.sum(-1, keepdim=True)
        # I - Q P is similar, by b^(1/2), to I - T^T T with |T| <= 1. Constants are its kernel, the gauge, which
        # a rank-one term fixes. So is one vector more for each group of tokens that mass does not link to the
        # others: the shift bounds what rounding makes of those, and they move the plan by that missing mass.
        T = (P * Q.mT).sqrt()
        shift = 64.0 * T.shape[-1] * torch.finfo(T.dtype).eps
        eye = torch.eye(T.shape[-1], dtype=T.dtype, device=T.device)
        gauge = problem.b.sqrt().unsqueeze(-1) * problem.b.sqrt().unsqueeze(-2)
        factor = torch.linalg.cholesky((1.0 + shift) * eye - T.mT @ T + gauge)
    first = _step(problem, phi.detach(), psi.detach(), P, Q, factor)
    return first, _step(problem, *first, P, Q, factor)


def _step(
    problem: Problem, phi: Tensor, psi: Tensor, P: Tensor, Q: Tensor, factor: Tensor
) -> tuple[Tensor, Tensor]:
    s = problem.x @ problem.y.mT
    r_phi = phi + _log_sum(s + psi.unsqueeze(-2), problem.b, problem.mask)
    r_psi = psi + _log_sum(s.mT + phi.unsqueeze(-2), problem.a, _transpose(problem.mask))
    rhs = r_psi.unsqueeze(-1) - Q @ r_phi.unsqueeze(-1)
    root = problem.b.detach().sqrt().unsqueeze(-1)
    inverse_root = torch.where(root > 0, 1.0 / torch.where(root > 0, root, 1.0), 0.0)
    d_psi = inverse_root * torch.cholesky_solve(root * rhs, factor)
    d_psi = rhs + Q @ (P @ d_psi)  # also where b is 0
    d_phi = r_phi.unsqueeze(-1) - P @ d_psi
    return phi - d_phi.squeeze(-1), psi - d_psi.squeeze(-1)


def dual_value(problem: Problem, phi: Tensor, psi: Tensor) -> Tensor:
    """Sum a phi + sum b psi - (mass - 1): stationary in the potentials, whose errors enter squared."""
    row = phi + _log_sum(problem.x @ problem.y.mT + psi.unsqueeze(-2), problem.b, problem.mask)
    return (problem.a * (phi - torch.expm1(row))).sum(-1) + (problem.b * psi).sum(-1)


def soft_average(problem: Problem, psi: Tensor, values: Tensor) -> Tensor:
    """E[values | x_i] under kappa, rows normalised exactly."""
    weight, _ = _weights(problem.x @ problem.y.mT + psi.unsqueeze(-2), problem.b, problem.mask)
    return (weight @ values) / weight.sum(-1, keepdim=True)


def _weights(exponent: Tensor, b: Tensor, mask: Tensor | None) -> tuple[Tensor, Tensor]:
    """b_j exp(e_ij - top_i), and top_i; with b itself, as the derivative of its logarithm at 0 is NaN."""
    if mask is not None:
        exponent = exponent.masked_fill(~mask, -torch.inf)
    supported = torch.where((b > 0).unsqueeze(-2), exponent.detach(), -torch.inf)
    top = supported.amax(-1, keepdim=True)
    return b.unsqueeze(-2) * (exponent - top).clamp(max=_CEILING).exp(), top


def _log_sum(exponent: Tensor, b: Tensor, mask: Tensor | None) -> Tensor:
    weight, top = _weights(exponent, b, mask)
    return weight.sum(-1).log() + top.squeeze(-1)


def _transpose(mask: Tensor | None) -> Tensor | None:
    return None if mask is None else mask.mT
