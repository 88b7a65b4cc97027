"""Masked attention against plain sums over restricted measures, and against a decoder's causal attention."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from ot_transformers import (
    InvalidInput,
    MaskedAttention,
    MultiHeadAttention,
    NotGaussianPreserving,
    PositionedParticles,
    SinkhornAttention,
    SoftmaxAttention,
)
from ot_transformers.measures import Gaussian
from ot_transformers.numerics import streaming

from .kinds import BUILD, KINDS, PAIRWISE, plain, problem, stacked
from .test_particles import blocks, close

__all__ = ["blocks"]

TIES = np.array([0.5, 0.0, 0.25, 0.5, 1.0, 0.0, 0.25, 0.5, 0.75])
DISTINCT = np.array([0.5, 0.0, 0.2, 0.6, 1.0, 0.1, 0.25, 0.9, 0.75])


@pytest.mark.parametrize("s", [TIES, DISTINCT, np.sort(DISTINCT)], ids=["ties", "distinct", "in order"])
@pytest.mark.parametrize("kind", KINDS)
def test_each_token_sees_the_measure_restricted_to_earlier_positions(
    kind: str, s: np.ndarray, blocks: str
) -> None:
    x, w, p = problem(9, 3)
    attention = MaskedAttention(BUILD[kind](p))
    seen = s[None, :] <= s[:, None]
    close(attention.velocity(PositionedParticles(x, s, w)), plain(kind, p, x, w, None, seen))
    equal = plain(kind, p, x, np.full(9, 1 / 9), None, seen)
    close(attention.velocity(PositionedParticles(x, s)), equal)
    z, t = np.random.default_rng(1).normal(size=(4, 3)), np.array([0.0, 0.3, 0.5, 1.0])
    elsewhere = attention.field(PositionedParticles(x, s, w), z, t)
    close(elsewhere, plain(kind, p, x, w, z, s[None, :] <= t[:, None]))


@pytest.mark.parametrize("kind", KINDS)
def test_at_the_last_position_and_where_all_are_tied_the_mask_is_none(kind: str) -> None:
    x, w, p = problem(9, 2)
    free = BUILD[kind](p).velocity(PositionedParticles(x, TIES, w))
    close(MaskedAttention(BUILD[kind](p)).velocity(PositionedParticles(x, TIES, w))[4], free[4])
    close(MaskedAttention(BUILD[kind](p)).velocity(PositionedParticles(x, np.zeros(9), w)), free)


def test_softmax_is_the_causal_attention_of_a_decoder() -> None:
    rng = np.random.default_rng(0)
    x, K, Q, V = (torch.from_numpy(rng.normal(size=s)) for s in ((2, 50, 4), (3, 4), (3, 4), (4, 4)))
    peer = torch.nn.functional.scaled_dot_product_attention(
        x @ Q.mT, x @ K.mT, x @ V.mT, is_causal=True, scale=3**-0.5
    )
    s = torch.linspace(0, 1, 50, dtype=torch.float64)
    attention = MaskedAttention(SoftmaxAttention.from_qkv(Q, K, V, scale=3**-0.5))
    torch.testing.assert_close(attention.velocity(PositionedParticles(x, s)), peer, rtol=1e-12, atol=1e-12)
    order = torch.from_numpy(rng.permutation(50))
    shuffled = attention.velocity(PositionedParticles(x[:, order], s[order]))
    torch.testing.assert_close(shuffled, peer[:, order], rtol=1e-12, atol=1e-12)


def test_linear_attention_over_many_chunks() -> None:
    x, w, p = problem(300, 2)
    s = np.linspace(0, 1, 300)
    v = MaskedAttention(BUILD["linear"](p)).velocity(PositionedParticles(x, s, w))
    close(v, plain("linear", p, x, w, None, s[None, :] <= s[:, None]))


@settings(max_examples=20, deadline=None)
@given(st.sampled_from(PAIRWISE), st.integers(0, 10_000), st.integers(1, 8), st.booleans())
def test_the_future_does_not_act_on_the_past(kind: str, seed: int, n: int, tied: bool) -> None:
    x, w, p = problem(n + 3, 2, seed)
    rng = np.random.default_rng(seed)
    s = rng.integers(0, 3, n + 3) / 4 if tied else rng.permutation(n + 3) / (n + 3)
    s[0] = 0.0
    attention = MaskedAttention(BUILD[kind](p))
    v = attention.velocity(PositionedParticles(x, s, w))
    late = s > np.median(s)
    moved = attention.velocity(PositionedParticles(np.where(late[:, None], 50 * x, x), s, w))
    close(moved[~late], v[~late], 1e-11)


@pytest.mark.parametrize("kind", KINDS)
def test_fault_batch_differs_from_loop(kind: str, blocks: str) -> None:
    x, w, p = stacked(6, 2, 3)
    s = np.random.default_rng(0).integers(0, 4, (3, 6)) / 4
    s[:, 2] = 0.0
    s[1] = [0.1, 0.3, 0.0, 0.2, 0.9, 0.5]
    together = MaskedAttention(BUILD[kind](p)).velocity(PositionedParticles(x, s, w))
    shared = MaskedAttention(BUILD[kind](p)).velocity(PositionedParticles(x[0], s[0], w[0]))
    for i in range(3):
        one = MaskedAttention(BUILD[kind]({k: v[i] for k, v in p.items()}))
        close(together[i], one.velocity(PositionedParticles(x[i], s[i], w[i])), 1e-14)
        close(shared[i], one.velocity(PositionedParticles(x[0], s[0], w[0])), 1e-14)


def test_an_evaluator_takes_states_with_more_batch_dimensions_than_positions() -> None:
    x, w, p = problem(6, 2)
    velocity = MaskedAttention(BUILD["softmax"](p)).evaluator(PositionedParticles(x, TIES[:6], w))
    X, W = torch.from_numpy(np.stack([x, 2 * x])), torch.from_numpy(w)
    torch.testing.assert_close(velocity(X, W)[1], velocity(X[1], W), rtol=1e-13, atol=1e-14)


@pytest.mark.parametrize("s", [TIES[:5], DISTINCT[:5]], ids=["ties", "distinct"])
@pytest.mark.parametrize("kind", PAIRWISE)
def test_derivatives_to_second_order_and_in_every_mode(kind: str, s: np.ndarray, blocks: str) -> None:
    x, w, p = problem(5, 2)
    attention = MaskedAttention(BUILD[kind](p))

    def velocity(x: Tensor, logits: Tensor) -> Tensor:
        return attention.velocity(PositionedParticles(x, s, logits.softmax(-1)))

    tensors = [torch.from_numpy(t).requires_grad_() for t in (x, np.log(w))]
    assert torch.autograd.gradcheck(velocity, tensors)
    assert torch.autograd.gradgradcheck(velocity, tensors)
    X, L = torch.from_numpy(x), torch.from_numpy(np.log(w))

    def f(u: Tensor) -> Tensor:
        return velocity(X * u.exp(), L * u).square().sum()

    u, one = torch.tensor(0.3, dtype=torch.float64), torch.ones((), dtype=torch.float64)
    second = torch.func.jvp(lambda t: torch.func.jvp(f, (t,), (one,))[1], (u,), (one,))[1]
    torch.testing.assert_close(second, torch.autograd.functional.hessian(f, u), rtol=1e-11, atol=0)
    mapped = torch.func.vmap(f)(torch.stack([u, 2 * u]))
    torch.testing.assert_close(mapped, torch.stack([f(u), f(2 * u)]), rtol=1e-13, atol=0)


def test_zero_weights_after_the_sink() -> None:
    """More absent tokens than one tile of the fused kernel holds."""
    n = 1500
    x, _, p = problem(n, 2)
    s, w = np.linspace(0, 1, n), np.ones(n)
    w[1:1200] = 0.0
    w /= w.sum()
    keep = w > 0
    for kind in ("softmax", "l2"):
        attention = MaskedAttention(BUILD[kind](p))
        v = attention.velocity(PositionedParticles(x, s, w))
        few = attention.velocity(PositionedParticles(x[keep], s[keep]))
        close(v[keep], few)


def test_a_missing_sink_is_named_by_member_and_among_tokens_with_mass() -> None:
    attention, x = MaskedAttention(BUILD["softmax"](problem(2, 2)[2])), np.zeros((2, 3, 2, 2))
    s = np.zeros((2, 3, 2))
    s[1, 2] = [0.25, 0.75]
    with pytest.raises(InvalidInput, match=r"in member \(1, 2\) the smallest position with mass is 0\.25"):
        attention.velocity(PositionedParticles(x, s))
    with pytest.raises(InvalidInput, match=r"in member 2 the smallest position with mass is 0\.25"):
        attention.velocity(PositionedParticles(x[1], s[1]))
    with pytest.raises(InvalidInput, match=r"; the smallest position with mass is 0\.5"):
        attention.velocity(PositionedParticles(x[0, 0], [0.0, 0.5], [0.0, 1.0]))


def test_fault_causal_sinkhorn_that_converges() -> None:
    for attention in (
        SinkhornAttention(1.0, 1.0),
        MultiHeadAttention([SoftmaxAttention(1.0, 1.0), SinkhornAttention(1.0, 1.0)]),
    ):
        with pytest.raises(
            InvalidInput, match=r"attention .* total support, its only doubly stochastic matrix"
        ):
            MaskedAttention(attention)


def test_masked_heads_and_a_masked_multi_head_are_the_same() -> None:
    x, w, p = problem(9, 2)
    heads = [BUILD["softmax"](p), BUILD["linear"](p)]
    mu = PositionedParticles(x, TIES, w)
    outside = MaskedAttention(MultiHeadAttention(heads, [p["W"], p["U"]])).velocity(mu)
    inside = MultiHeadAttention([MaskedAttention(h) for h in heads], [p["W"], p["U"]]).velocity(mu)
    close(outside, inside)


def test_gaussians_do_not_stay_gaussian_under_a_mask() -> None:
    attention = MaskedAttention(SoftmaxAttention(1.0, 1.0))
    assert not attention.preserves_gaussians
    with pytest.raises(NotGaussianPreserving, match="MaskedAttention"):
        attention.affine(Gaussian(0.0, [[1.0]]))


def test_streaming_is_on_in_these_tests(blocks: str) -> None:
    assert (streaming.block_rows(9, 81) < 9) == (blocks == "streaming")
