"""Nested forward mode through custom autograd functions agrees with reverse mode."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from ot_transformers.numerics import tilted
from ot_transformers.numerics.tilted import log_interaction
from ot_transformers.spd import sqrt_psd

S = torch.tensor([[2.0, 0.3], [0.3, 1.0]], dtype=torch.float64)
T = torch.tensor([[0.2, 0.1], [0.1, 0.3]], dtype=torch.float64)
W = torch.tensor([0.3, 0.7], dtype=torch.float64)
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
    ],
    ids=["square root", "square root of an exponential", "log interaction"],
)
def test_nested_forward_mode_is_the_second_derivative(
    f: Callable[[Tensor], Tensor], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tilted, "_DENSE", 1)  # the streaming path, a custom function
    reverse = torch.autograd.functional.hessian(f, POINT)
    torch.testing.assert_close(forward_second(f, POINT), reverse, rtol=1e-12, atol=0)
    both = torch.func.vmap(lambda s: forward_second(f, s))(POINT.expand(3))
    torch.testing.assert_close(both, reverse.expand(3), rtol=1e-12, atol=0)
