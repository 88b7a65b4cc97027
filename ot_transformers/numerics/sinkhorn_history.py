"""Warm starts along a flow: potentials extrapolated from earlier states without knowing their times."""

from __future__ import annotations

import torch
from torch import Tensor

from .sinkhorn import SinkhornResult
from .sinkhorn_kernel import SolverMemory

__all__ = ["PotentialHistory"]

_LENGTH = 6
_RIDGE = 1e-10


class PotentialHistory:
    """The last few clouds with their potentials.

    The new cloud is written as x ~ sum_k c_k x_k with sum_k c_k = 1, by regularised least squares; where the
    states are a smooth curve this is polynomial extrapolation in time, at whatever times the integrator
    chose, and the same coefficients extrapolate the potentials.
    """

    def __init__(self) -> None:
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
        c = self._coefficients(new)
        f = last[1] + sum(c[..., k, None] * (s[1] - last[1]) for k, s in enumerate(self._states[:-1]))
        g = last[2] + sum(c[..., k, None] * (s[2] - last[2]) for k, s in enumerate(self._states[:-1]))
        return f, g

    def _coefficients(self, x: Tensor) -> Tensor:
        """c (..., k) of the earlier states relative to the last one."""
        last = self._states[-1][0]
        if len(self._states) == 1:
            return x.new_zeros(*x.shape[:-2], 0)
        basis = torch.stack([(s[0] - last).flatten(-2) for s in self._states[:-1]], -1)
        target = (x - last).flatten(-2).unsqueeze(-1)
        norm = basis.norm(dim=-2, keepdim=True)
        scale = torch.where(norm > 0, 1.0 / norm.clamp_min(torch.finfo(x.dtype).tiny), 0.0)
        unit = basis * scale
        gram = unit.mT @ unit
        # The ridge keeps the coefficients moderate, which would otherwise amplify the potentials' own error.
        eye = torch.eye(gram.shape[-1], dtype=x.dtype, device=x.device)
        ridge = max(_RIDGE, 100 * torch.finfo(x.dtype).eps)
        c = torch.linalg.solve(gram + ridge * eye, unit.mT @ target) * scale.mT
        return c.squeeze(-1)
