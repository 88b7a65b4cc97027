"""Batched L-BFGS on problems with known minimisers."""

from __future__ import annotations

import torch
from torch import Tensor

from ot_transformers.numerics.minimise import lbfgs

torch.manual_seed(0)


def test_quadratics_of_a_batch_each_reach_their_minimum_as_alone() -> None:
    Q = torch.randn(3, 8, 8, dtype=torch.float64)
    H = Q @ Q.mT + torch.eye(8, dtype=torch.float64)
    b = torch.randn(3, 8, dtype=torch.float64)

    def problem(H: Tensor, b: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        Hy = (H @ y.unsqueeze(-1)).squeeze(-1)
        return (0.5 * y * Hy - b * y).sum(-1), Hy - b

    tolerance = torch.full((3,), 1e-10, dtype=torch.float64)
    start = torch.zeros(3, 8, dtype=torch.float64)
    found = lbfgs(lambda y: problem(H, b, y), start, scale=1.0, tolerance=tolerance, max_iter=200)
    assert found.converged.all()
    torch.testing.assert_close(
        found.y, torch.linalg.solve(H, b.unsqueeze(-1)).squeeze(-1), rtol=0, atol=1e-10
    )
    alone = lbfgs(
        lambda y: problem(H[1:2], b[1:2], y), start[:1], scale=1.0, tolerance=tolerance[:1], max_iter=200
    )
    torch.testing.assert_close(found.y[1], alone.y[0], rtol=0, atol=1e-10)


def test_rosenbrock_and_a_value_that_is_infinite_beyond_a_wall() -> None:
    def rosenbrock(y: Tensor) -> tuple[Tensor, Tensor]:
        a, b = y[..., 0], y[..., 1]
        value = (1 - a) ** 2 + 100 * (b - a * a) ** 2
        gradient = torch.stack([-2 * (1 - a) - 400 * a * (b - a * a), 200 * (b - a * a)], -1)
        wall = a > 1.5
        return torch.where(wall, torch.inf, value), torch.where(wall.unsqueeze(-1), torch.nan, gradient)

    start = torch.tensor([[-1.2, 1.0]], dtype=torch.float64)
    found = lbfgs(rosenbrock, start, scale=1.0, tolerance=torch.tensor([1e-9]).double(), max_iter=500)
    assert bool(found.converged)
    torch.testing.assert_close(found.y, torch.ones(1, 2, dtype=torch.float64), rtol=0, atol=1e-8)


def test_not_converged_is_said() -> None:
    def quartic(y: Tensor) -> tuple[Tensor, Tensor]:
        return y.pow(4).sum(-1), 4 * y.pow(3)

    found = lbfgs(
        quartic,
        torch.ones(1, 1, dtype=torch.float64),
        scale=0.01,
        tolerance=torch.zeros(1).double(),
        max_iter=3,
    )
    assert not bool(found.converged)
    assert found.n_iter == 3
    assert float(found.value) < 1.0
