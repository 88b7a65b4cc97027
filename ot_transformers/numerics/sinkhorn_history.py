"""Warm starts along a flow: potentials extrapolated from earlier states without knowing their times."""

from __future__ import annotations

import torch
from torch import Tensor

from .sinkhorn import SinkhornResult
from .sinkhorn_kernel import SolverMemory

__all__ = ["PotentialHistory"]

_LENGTH = 6
_SAMPLE = 256  # particles that the coefficients are fitted to


class PotentialHistory:
    """The last few clouds with their potentials.

    The new cloud is written as x ~ sum_k c_k x_k with sum_k c_k = 1, by regularised least squares over some
    of the particles; where the states are a smooth curve this is polynomial extrapolation in time, at
    whatever times the integrator chose, and the same coefficients extrapolate the potentials, which are known
    up to a relative `noise`.
    """

    def __init__(self, noise: float) -> None:
        self._noise = noise
        self._states: list[tuple[Tensor, Tensor, Tensor]] = []
        self._weights: Tensor | None = None
        self.memory = SolverMemory()

    def add(self, x: Tensor, weights: Tensor, result: SinkhornResult) -> None:
        """Remember a solved state; one that did not converge empties the memory."""
        if not result.converged:
            self._states = []
            return
        self._weights = weights
        state = x.detach().clone(), result.f.detach(), result.g.detach()
        self._states = [*self._states, state][-_LENGTH:]

    def guess(self, x: Tensor, weights: Tensor) -> tuple[Tensor, Tensor] | None:
        """Potentials for a new state, or None where nothing fits it."""
        if not self._states or self._weights is None:
            return None
        last = self._states[-1]
        if last[0].shape != x.shape or self._weights.shape != weights.shape:
            self._states = []
            return None
        new = x.detach()
        c = self._coefficients(new).unsqueeze(-2)
        if not c.shape[-1]:
            return last[1], last[2]
        f, g = (
            last[k] + (c @ torch.stack([s[k] - last[k] for s in self._states[:-1]], -2)).squeeze(-2)
            for k in (1, 2)
        )
        return f, g

    def _coefficients(self, x: Tensor) -> Tensor:
        """c (..., k) of the earlier states relative to the last one.

        Least squares in z and z^2, z = x centred and scaled to size 1, for potentials are nearly quadratic,
        plus (noise |c|)^2: an error of the fit does to the potentials what their own errors do times c. The
        columns are as dependent as powers of the time step; QR solves that, normal equations do not.
        """
        if len(self._states) == 1:
            return x.new_zeros(*x.shape[:-2], 0)
        some = slice(None, None, max(1, x.shape[-2] // _SAMPLE))  # five numbers want no more equations
        new, *old = (t[..., some, :] for t in (x, *(s[0] for s in self._states)))
        centre = old[-1].mean(-2, keepdim=True)
        size = (old[-1] - centre).square().mean((-2, -1), keepdim=True).sqrt()
        size = size.clamp_min(torch.finfo(x.dtype).tiny)

        def features(t: Tensor) -> Tensor:
            unit = (t - centre) / size
            return torch.cat([unit, unit * unit], -1).flatten(-2)

        base = features(old[-1])
        basis = torch.stack([features(t) - base for t in old[:-1]], -1)
        noise = max(self._noise, 4 * torch.finfo(x.dtype).eps) * basis.shape[-2] ** 0.5
        ridge = noise * torch.eye(basis.shape[-1], dtype=x.dtype, device=x.device)
        q, r = torch.linalg.qr(torch.cat([basis, ridge.expand(*basis.shape[:-2], -1, -1)], -2))
        rhs = q[..., : basis.shape[-2], :].mT @ (features(new) - base).unsqueeze(-1)
        c = torch.linalg.solve_triangular(r, rhs, upper=True).squeeze(-1)
        return torch.where(torch.isfinite(c), c, 0.0)  # a cloud that has just collapsed has no size
