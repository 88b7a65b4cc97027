"""Streaming sums: the same numbers and derivatives as whole matrices, in bounded memory."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from ot_transformers import MaskedAttention, Particles, PositionedParticles
from ot_transformers.numerics import streaming
from ot_transformers.numerics.streaming import attend, blockwise, exponentials, wants_derivative
from tests.attention.kinds import BUILD, KINDS, problem


def tensors(*shapes: tuple[int, ...]) -> list[Tensor]:
    rng = np.random.default_rng(0)
    return [torch.from_numpy(rng.normal(size=s)) for s in shapes]


def plain(q: Tensor, k: Tensor, v: Tensor, w: Tensor, causal: bool) -> Tensor:
    e = torch.exp(q @ k.mT) * w.unsqueeze(-2)
    e = e.tril() if causal else e
    return e @ v / e.sum(-1, keepdim=True)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("graph", [False, True])
@pytest.mark.parametrize("stream", [False, True])
def test_attend_is_the_weighted_average(
    causal: bool, graph: bool, stream: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if stream:
        monkeypatch.setattr(streaming, "BLOCK", 1)
        monkeypatch.setattr(streaming, "STREAM", 50)
        monkeypatch.setattr(streaming, "RECORDED", 50)
    q, k, v = tensors((2, 9, 3), (9, 3), (1, 9, 5))
    w = torch.from_numpy(np.random.default_rng(1).dirichlet(np.ones(9), size=2))
    w[:, 4] = 0.0
    q.requires_grad_(graph)
    equal = torch.full((), 1 / 9, dtype=torch.float64).expand(9)
    for weights, used in ((w, w), (None, torch.ones(9)), (equal, equal)):
        out = attend(q, k, v, weights, causal=causal)
        torch.testing.assert_close(out, plain(q, k, v, used.double(), causal), rtol=1e-13, atol=1e-14)


def test_absent_tokens_that_fill_whole_tiles_of_the_fused_kernel() -> None:
    q, k, v = tensors((3, 2), (4000, 2), (4000, 2))
    w = torch.zeros(4000, dtype=torch.float64)
    w[2500:2510] = 0.1
    torch.testing.assert_close(attend(q, k, v, w), plain(q, k, v, w, False), rtol=1e-13, atol=1e-14)


def test_exponentials_stay_in_range_and_keep_their_product() -> None:
    scores = torch.tensor([[900.0, 880.0, 2000.0], [-900.0, -901.0, 5.0]], dtype=torch.float64)
    weights = torch.tensor([[0.5, 0.5, 0.0]], dtype=torch.float64)
    c, e = exponentials(scores, weights)
    torch.testing.assert_close(c, torch.tensor([[900.0], [-900.0]], dtype=torch.float64), rtol=0, atol=0)
    expected = torch.tensor(
        [[0.5, 0.5 * np.exp(-20), 0.0], [0.5, 0.5 * np.exp(-1), 0.0]], dtype=torch.float64
    )
    torch.testing.assert_close(e, expected, rtol=1e-14, atol=0)


def test_derivatives_of_exponentials_are_finite_where_a_weight_is_zero() -> None:
    scores = torch.tensor([[0.0, 5000.0]], dtype=torch.float64, requires_grad=True)
    weights = torch.tensor([[1.0, 0.0]], dtype=torch.float64, requires_grad=True)
    _, e = exponentials(scores, weights)
    first = torch.autograd.grad(e.sum(), (scores, weights), create_graph=True)
    second = torch.autograd.grad(sum(g.sum() for g in first), (scores, weights))
    assert all(torch.isfinite(g).all() for g in (*first, *second))


def test_a_stream_is_recomputed_in_the_backward_pass_and_not_stored(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(streaming, "BLOCK", 1)
    monkeypatch.setattr(streaming, "STREAM", 40)
    monkeypatch.setattr(streaming, "RECORDED", 40)
    (x,) = tensors((20, 2))
    calls = []

    def rows(p: Tensor, y: Tensor) -> Tensor:
        calls.append(p.shape[-2])
        return torch.sin(p @ y.mT) @ y

    x.requires_grad_()
    out = blockwise(rows, (x,), (x,))
    assert calls == [2] * 10
    (g,) = torch.autograd.grad(out.sum(), x)
    assert calls == [2] * 19  # all but the first again
    (whole,) = torch.autograd.grad((torch.sin(x @ x.mT) @ x).sum(), x)
    torch.testing.assert_close(g, whole, rtol=1e-13, atol=1e-14)


def test_a_parameter_that_only_the_function_knows_gets_its_gradient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(streaming, "BLOCK", 1)
    (x, A) = tensors((10, 2), (2, 2))
    A.requires_grad_()
    out = blockwise(lambda p, y: torch.sin(p @ A @ y.mT) @ y, (x,), (x,))
    (g,) = torch.autograd.grad(out.sum(), A)
    (whole,) = torch.autograd.grad((torch.sin(x @ A @ x.mT) @ x).sum(), A)
    torch.testing.assert_close(g, whole, rtol=1e-13, atol=1e-14)
    slope = torch.func.jvp(
        lambda B: blockwise(lambda p, y: torch.sin(p @ B @ y.mT), (x,), (x,)).sum(), (A,), (A,)
    )[1]
    torch.testing.assert_close(slope, (torch.cos(x @ A @ x.mT) * (x @ A @ x.mT)).sum(), rtol=1e-12, atol=0)


def test_where_a_derivative_may_be_asked_for() -> None:
    (x,) = tensors((2, 2))
    assert not wants_derivative(x)
    assert wants_derivative(x, x.clone().requires_grad_())
    with torch.no_grad():
        assert not wants_derivative(x.clone().requires_grad_())
    seen = []
    torch.func.vmap(lambda t: seen.append(wants_derivative(x)) or t)(x)
    with torch.autograd.forward_ad.dual_level():
        seen.append(wants_derivative(x))
    assert seen == [True, True]


class Largest(TorchDispatchMode):
    """The largest storage that any operation has made, in elements."""

    elements = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        for t in tree_leaves(out):
            if isinstance(t, Tensor):
                self.elements = max(self.elements, t.untyped_storage().nbytes() // t.element_size())
        return out


@pytest.mark.parametrize("graph", [False, True])
@pytest.mark.parametrize("kind", KINDS)
def test_no_n_by_n_matrix_is_formed(kind: str, graph: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(streaming, "BLOCK", 1 << 15)
    monkeypatch.setattr(streaming, "STREAM", 1 << 15)
    monkeypatch.setattr(streaming, "RECORDED", 1 << 15)
    n = 1024
    x, w, p = problem(n, 2)
    attention = BUILD[kind]({k: 0.1 * v for k, v in p.items()})
    X = torch.from_numpy(x).requires_grad_(graph)
    s = np.arange(n) // 2 / n
    for measure, gamma in (
        (Particles(X, w), attention),
        (PositionedParticles(X, s, w), MaskedAttention(attention)),
        (PositionedParticles(X, np.linspace(0, 1, n), w), MaskedAttention(attention)),
    ):
        with Largest() as largest:
            out = gamma.velocity(measure)
            if graph:
                out.sum().backward()
        assert largest.elements <= 1 << 15
