"""Nested forward mode through custom autograd functions agrees with reverse mode."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import torch
from torch import Tensor

from ot_transformers import (
    Entropy,
    Gaussian,
    InteractionEnergy,
    KLDivergence,
    Particles,
    SelfTransportEnergy,
    SinkhornDivergence,
    SquaredWasserstein,
)
from ot_transformers.forward_mode import tracked, underlying
from ot_transformers.linalg import log_abs_det, solve
from ot_transformers.metrics._twisted_gaussians import riesz
from ot_transformers.numerics import tilted
from ot_transformers.numerics.coupling import coupling_covariance_of_factor
from ot_transformers.numerics.tilted import log_interaction
from ot_transformers.numerics.twisted import geodesic_acceleration, kernel_at, twisted_square
from ot_transformers.numerics.twisted_gaussians import (
    gaussian_acceleration,
    gaussian_form,
    gaussian_log_speed,
)
from ot_transformers.spd import sqrt_psd

S = torch.tensor([[2.0, 0.3], [0.3, 1.0]], dtype=torch.float64)
T = torch.tensor([[0.2, 0.1], [0.1, 0.3]], dtype=torch.float64)
W = torch.tensor([0.3, 0.7], dtype=torch.float64)
Q, R = torch.tensor([[[0.3, 0.7, 0.1], [-0.2, 0.0, 0.5]], [[0.1, 0.4, -0.3], [0.2, 0.1, 0.3]]], dtype=S.dtype)
POINT = torch.tensor(0.3, dtype=torch.float64)


def forward_second(f: Callable[[Tensor], Tensor], s: Tensor) -> Tensor:
    one = torch.ones_like(s)
    return torch.func.jvp(lambda u: torch.func.jvp(f, (u,), (one,))[1], (s,), (one,))[1]


@pytest.mark.parametrize(
    "f",
    [
        lambda s: sqrt_psd(S + s * s * T).sum(),
        lambda s: sqrt_psd(S @ S + s.exp() * T).sum(),
        lambda s: log_interaction(S + s * s * T, W, T).sum(),
        lambda s: log_abs_det(S + s * s * T),
        lambda s: (solve(S + s * s * T, s.exp() * T)).sum(),
    ],
    ids=["square root", "square root of an exponential", "log interaction", "log det", "solve"],
)
def test_nested_forward_mode_is_the_second_derivative(
    f: Callable[[Tensor], Tensor], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tilted, "_DENSE", 1)  # the streaming path, a custom function
    reverse = torch.autograd.functional.hessian(f, POINT)
    torch.testing.assert_close(forward_second(f, POINT), reverse, rtol=1e-12, atol=0)
    both = torch.func.vmap(lambda s: forward_second(f, s))(POINT.expand(3))
    torch.testing.assert_close(both, reverse.expand(3), rtol=1e-12, atol=0)


@pytest.mark.parametrize(
    "f",
    [
        lambda s: coupling_covariance_of_factor(T + s * s * S, S + s.exp() * T).sum(),
        lambda s: _acceleration(S + s * s * T, s.exp() * T, S).square().sum(),
        lambda s: _acceleration(S, T, S + s * s * T).square().sum(),
        lambda s: twisted_square(s.exp() * T, W, S + s * s * T, s * W),
        lambda s: gaussian_log_speed(s * W, T + s * s * S / 9, s.exp() * W, s * S, T, S + s * T)[0],
        lambda s: _form(torch.cat([s * W.unsqueeze(-1), T + s * s * S / 9], -1)),
        lambda s: gaussian_acceleration(Q + s * s * R, s.exp() * R, T, S, T).square().sum(),
        lambda s: torch.cat([t.flatten() for t in riesz(s * W, S / 3 + s * s * T, W, T, T, S)]).sum(),
    ],
    ids=[
        "coupling of a factor",
        "acceleration in x and v",
        "acceleration in D",
        "twisted square",
        "speed of Gaussians",
        "metric of Gaussians",
        "acceleration of Gaussians",
        "Riesz field of Gaussians",
    ],
)
def test_twisted_geometry_in_nested_forward_mode(f: Callable[[Tensor], Tensor]) -> None:
    """Those of `torch.linalg.solve` and `slogdet` are wrong here without an error: these must not use them."""
    reverse = torch.autograd.functional.hessian(f, POINT)
    step = 1e-3
    around = [f(POINT + k * step) for k in (-2, -1, 0, 1, 2)]
    difference = sum(c * v for c, v in zip((-1, 16, -30, 16, -1), around, strict=True)) / (12 * step**2)
    torch.testing.assert_close(reverse, difference, rtol=1e-7, atol=0)
    torch.testing.assert_close(forward_second(f, POINT), reverse, rtol=1e-11, atol=0)


def _form(q: Tensor) -> Tensor:
    log_z, K = gaussian_form(q, T)
    return log_z + K.sum()


def _acceleration(x: Tensor, v: Tensor, D: Tensor) -> Tensor:
    return geodesic_acceleration(x, v, T, D, kernel_at(x, W, T))


def test_energies_along_curves() -> None:
    rng = np.random.default_rng(0)
    x, v, y = (torch.from_numpy(rng.normal(size=(5, 2))) for _ in range(3))
    w = torch.from_numpy(rng.dirichlet(np.ones(5)))
    mean = torch.tensor([0.3, 0.2], dtype=torch.float64)
    interaction, kl = InteractionEnergy(0.3 * T), KLDivergence(Gaussian(mean, S))
    transport = SquaredWasserstein(Particles(y))
    heavy = Particles(y, rng.dirichlet(np.ones(5)))
    own, other = SelfTransportEnergy(T, tol=1e-14), SinkhornDivergence(heavy, 0.5, tol=1e-14)
    near = SquaredWasserstein(Gaussian(mean, S))
    for f in (
        lambda s: own.raw_gaussian(s * mean, 0.5 * S + s * s * T),
        lambda s: near.raw_gaussian(s * mean, 0.5 * S + s * s * T),
        lambda s: Entropy().raw_gaussian(mean, S + s * s * T),
        lambda s: own.raw_particles(x + s * s * v, w),
        lambda s: other.raw_particles(x + s * s * v, w),
        lambda s: interaction.raw_gaussian(s * mean, 0.5 * S + s * s * T),
        lambda s: kl.raw_gaussian(s * mean, S + s * s * T),
        lambda s: interaction.raw_particles(x + s * s * v, w),
        lambda s: transport.raw_particles(x + s * s * v, w),
    ):
        reverse = torch.autograd.functional.hessian(f, POINT)
        torch.testing.assert_close(forward_second(f, POINT), reverse, rtol=1e-11, atol=0)


def test_what_lies_below_transforms() -> None:
    seen: list[torch.Tensor] = []
    recorded: list[bool] = []

    def f(x: torch.Tensor) -> torch.Tensor:
        seen.append(underlying(x))
        recorded.append(tracked(x))
        return x.square().sum()

    points = torch.arange(6, dtype=torch.float64).reshape(2, 3)
    torch.func.vmap(f)(points)
    torch.func.vmap(torch.func.grad(f))(points)
    torch.func.jvp(f, (points,), (points,))
    f(points)
    f(points.clone().requires_grad_())
    assert recorded == [False, True, True, False, True]
    for t in seen:
        assert torch.equal(t, points)
