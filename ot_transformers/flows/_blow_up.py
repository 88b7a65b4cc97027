"""Telling a finite-time blow-up from exponential growth, and extrapolating its time."""

from __future__ import annotations

import torch
from torch import Tensor

__all__ = ["Growth"]

_STEEP = 1e9
"""rho * (time since the start of the flow) of a blow-up."""
_BEYOND_EXPONENTIAL = 1e3
"""rho * (time since the last jump) of a blow-up; exponential growth leaves the floating range at about 700."""
_UNRESOLVED = 4e12
"""rho * (time since the start of the flow) where 1/rho is a thousand ulps of the time: there is no waiting longer."""
_CONSECUTIVE = 5
_SLOPES = (1e-4, 1e4)


class Growth:
    """The relative growth rate rho = <y, dy/dt> / |y|^2 of each member along its accepted steps.

    At a blow-up |y| ~ (t* - t)^(-alpha), u = 1/rho = (t* - t) / alpha is linear in t and vanishes at t*.
    Under exponential growth u tends to a constant. A member has blown up when rho is huge against the time
    since the start, and u has been falling at a rate -1/alpha for several steps. A jump of the parameters starts
    growth anew: it may lie so close to t* that rho is huge against the time since the start of the flow alone, and
    after it u falls for a moment under exponential growth as well, until the fastest direction leads.

    Parameters
    ----------
    blocks : list of index tensors
        Parts of the state with norms of their own (mean and factor); rho is the largest of theirs.
    origin : float
        Start of the flow; `t` is the time from which parameters are smooth.
    """

    def __init__(self, t: Tensor, y: Tensor, f: Tensor, blocks: list[Tensor], origin: float) -> None:
        self.blocks, self.start, self.origin = blocks, t, origin
        self.t = t
        self.rate = self._rho(y, f)
        self.slope = torch.zeros_like(self.rate)
        self.falls = torch.zeros_like(self.rate)

    def _rho(self, y: Tensor, f: Tensor) -> Tensor:
        y, f = y.detach().double(), f.detach().double()
        rates = []
        for block in self.blocks:
            z, v = y[:, block], f[:, block]
            scale = z.abs().amax(-1, keepdim=True).clamp_min(1e-300)
            z = z / scale
            rates.append((z * (v / scale)).sum(-1) / z.square().sum(-1).clamp_min(1e-300))
        return torch.stack(rates).amax(0)

    def update(self, accept: Tensor, t: Tensor, y: Tensor, f: Tensor) -> Tensor:
        """Record accepted points; returns the factor (B,) by which rho has grown, at least 1."""
        rho = torch.where(accept, self._rho(y, f), self.rate)
        both = accept & (rho > 0) & (self.rate > 0)
        fall = 1 / torch.where(both, rho, 1.0) - 1 / torch.where(both, self.rate, 1.0)
        slope = fall / (t - self.t).clamp_min(1e-300)
        falling = both & (-slope > _SLOPES[0]) & (-slope < _SLOPES[1])
        self.falls = torch.where(accept, torch.where(falling, self.falls + 1, 0.0), self.falls)
        self.slope = torch.where(accept, torch.where(falling, slope, 0.0), self.slope)
        factor = torch.where(both, rho / torch.where(both, self.rate, 1.0), 1.0).clamp_min(1.0)
        self.t, self.rate = torch.where(accept, t, self.t), rho
        return factor

    def remainder(self) -> Tensor:
        """Time left to the zero of 1/rho, inf where it is not falling."""
        good = (self.slope < 0) & (self.rate > 0)
        left = 1 / torch.where(good, self.rate, 1.0) / torch.where(good, -self.slope, 1.0)
        return torch.where(good, left, torch.inf)

    def blown_up(self, end: Tensor) -> Tensor:
        """Members whose blow-up lies within rounding of here, and before `end`."""
        whole, piece = self.rate * (self.t - self.origin), self.rate * (self.t - self.start)
        steep = (whole > _STEEP) & ((piece > _BEYOND_EXPONENTIAL) | (whole > _UNRESOLVED))
        return steep & (self.falls >= _CONSECUTIVE) & (self.t + self.remainder() <= end)
