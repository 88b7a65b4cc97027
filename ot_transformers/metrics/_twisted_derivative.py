"""First derivatives of the twisted distance, by the envelope theorem: the path is frozen, its ends move."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ..errors import InvalidInput
from ..measures import Gaussian, Particles
from ..numerics.paths import Path, gauss
from ..numerics.tilted import log_interaction, safe_log
from ..numerics.twisted_gaussians import gaussian_log_speed
from ._twisted_gaussians import join, split
from ._twisted_matching import Labels

__all__ = ["attached", "cloud_length", "gaussian_length", "line_length", "wanted"]

_LINE_POINTS = 400


def wanted(*tensors: Tensor) -> list[Tensor]:
    """Those that a derivative is asked for."""
    return [t for t in tensors if t.requires_grad] if torch.is_grad_enabled() else []


class _Known(torch.autograd.Function):
    """A value whose derivatives in the inputs are known numbers."""

    @staticmethod
    def forward(ctx: Any, value: Tensor, n: int, *rest: Tensor) -> Tensor:
        ctx.n = n
        ctx.save_for_backward(*rest)
        return value.clone()

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Any) -> Any:
        inputs, slopes = ctx.saved_tensors[: ctx.n], ctx.saved_tensors[ctx.n :]
        out = [grad_outputs[0] * _Slope.apply(g, *inputs) for g in slopes]  # type: ignore[no-untyped-call]
        return (None, None, *out, *(None for _ in slopes))


class _Slope(torch.autograd.Function):
    """A number that depends on the inputs in a way not known here: its derivative is an error, not 0."""

    @staticmethod
    def forward(ctx: Any, slope: Tensor, *inputs: Tensor) -> Tensor:
        return slope.clone()

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Any) -> Any:
        raise InvalidInput("distance has first derivatives only in the twisted metric")


def attached(value: Tensor, length: Callable[[], Tensor], inputs: list[Tensor]) -> Tensor:
    """The value with the first derivatives of `length()` in the inputs."""
    slopes = torch.autograd.grad(length(), inputs, materialize_grads=True)
    out: Tensor = _Known.apply(value, len(inputs), *inputs, *slopes)  # type: ignore[no-untyped-call]
    return out


def _total(log_g: Tensor, weights: np.ndarray[Any, Any]) -> Tensor:
    return torch.exp(torch.logsumexp(torch.from_numpy(np.log(weights)).to(log_g) + 0.5 * log_g, -1))


def _cloud_speed(points: Tensor, slopes: Tensor, w: Tensor, A: Tensor, Dinv: Tensor) -> Tensor:
    """`log_speed` by plain operations, which have the derivatives in A and D too."""
    square = ((slopes @ Dinv) * slopes).sum(-1)
    return torch.logsumexp(safe_log(w) + log_interaction(points, w, A) + safe_log(square), -1)


def cloud_length(path: Path, labels: Labels, a: Particles, b: Particles, A: Tensor, D: Tensor) -> Tensor:
    """Length of the frozen path with ends that carry derivatives: each moves it along a linear ramp."""
    s, w = path.quadrature()
    points, slopes = (t.reshape(len(s), -1, a.dim) for t in path.evaluate_many(s))
    x, y = a.x_t.double()[labels.rows], b.x_t.double()[labels.cols]
    x, y = x - x.detach(), y - y.detach()
    ramp = torch.from_numpy(s.copy()).to(points)[:, None, None]
    points, slopes = points + (1 - ramp) * x + ramp * y, slopes + (y - x)
    return _total(_cloud_speed(points, slopes, labels.mass, A, torch.linalg.inv(D)), w)


def line_length(a: Particles, b: Particles, A: Tensor, D: Tensor) -> Tensor:
    """The same for Dirac masses of R, where every path is the straight one."""
    s, w = gauss(_LINE_POINTS)
    x, y = a.x_t.double(), b.x_t.double()
    ramp = torch.from_numpy(s.copy()).to(x)[:, None, None]
    points = x + ramp * (y - x)
    return _total(_cloud_speed(points, (y - x).expand_as(points), x.new_ones(1), A, torch.linalg.inv(D)), w)


def gaussian_length(
    path: Path, factors: tuple[Tensor, Tensor], a: Gaussian, b: Gaussian, A: Tensor, D: Tensor
) -> Tensor:
    """The same for Gaussians with square factors that carry derivatives; the rotation of the end stays."""
    s, w = path.quadrature()
    points, slopes = path.evaluate_many(s)
    L0, L1 = factors
    _, end = split(path.end, a.dim)
    left, _, right = torch.linalg.svd(L1.detach().mT @ end)
    z0, z1 = join(a.mean_t.double(), L0), join(b.mean_t.double(), L1 @ (left @ right))
    z0, z1 = z0 - z0.detach(), z1 - z1.detach()
    ramp = torch.from_numpy(s.copy()).to(points).unsqueeze(-1)
    points, slopes = points + (1 - ramp) * z0 + ramp * z1, slopes + (z1 - z0)
    log_g, _ = gaussian_log_speed(*split(points, a.dim), *split(slopes, a.dim), A, torch.linalg.inv(D))
    return _total(log_g, w)
