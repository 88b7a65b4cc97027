"""Multi-head attention is the sum of its heads."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from ot_transformers import (
    AffineBlock,
    Gaussian,
    MultiHeadAttention,
    Particles,
    SinkhornAttention,
    SoftmaxAttention,
)

from .kinds import BUILD, KINDS, plain, problem, stacked
from .test_particles import close


def test_any_mix_of_kinds_is_the_sum_of_its_heads() -> None:
    x, w, p = problem(8, 3)
    heads = [BUILD[k](p) for k in KINDS]
    total = sum(plain(k, p, x, w) for k in KINDS)
    close(MultiHeadAttention(heads).velocity(Particles(x, w)), total)
    outputs = list(np.random.default_rng(0).normal(size=(len(KINDS), 3, 3)))
    weighted = sum(plain(k, p, x, w) @ W.T for k, W in zip(KINDS, outputs, strict=True))
    close(MultiHeadAttention(heads, outputs).velocity(Particles(x, w)), weighted)
    close(MultiHeadAttention(heads, np.stack(outputs)).field(Particles(x, w), x), weighted)


def test_heads_cut_from_one_matrix_are_a_transformer_layer() -> None:
    """W_O [head_1, ..., head_H] of torch.nn.MultiheadAttention with V_h = W_O,h W_V,h."""
    torch.manual_seed(0)
    layer = torch.nn.MultiheadAttention(6, 2, bias=False, batch_first=True, dtype=torch.float64)
    x = torch.randn(1, 9, 6, dtype=torch.float64)
    Q, K, V = layer.in_proj_weight.detach().chunk(3)
    heads = []
    for h in range(2):
        rows = slice(3 * h, 3 * h + 3)
        out = layer.out_proj.weight.detach()[:, rows] @ V[rows]
        heads.append(SoftmaxAttention.from_qkv(Q[rows], K[rows], out, scale=3**-0.5))
    expected = layer(x, x, x, need_weights=False)[0]
    torch.testing.assert_close(
        MultiHeadAttention(heads).velocity(x), expected.detach(), rtol=1e-12, atol=1e-13
    )


def test_a_sinkhorn_head_keeps_its_warm_start_and_its_closure() -> None:
    x, w, p = problem(8, 2)
    head = SinkhornAttention(p["A"], p["V"], tol=1e-12)
    both = MultiHeadAttention([head, BUILD["softmax"](p)])
    velocity = both.evaluator()
    X, W = torch.from_numpy(x), torch.from_numpy(w)
    for _ in range(3):
        expected = head.raw_velocity(X, W) + BUILD["softmax"](p).raw_velocity(X, W)
        torch.testing.assert_close(velocity(X, W), expected, rtol=0, atol=1e-9)
        X = X + 0.1 * expected
    g = Gaussian(x[0], np.cov(x.T))
    close(both.affine(g).M, head.affine(g).M + BUILD["softmax"](p).affine(g).M)


def test_batches_of_heads_and_outputs_broadcast() -> None:
    x, w, p = stacked(5, 2, 3)
    one = problem(5, 2)[2]
    v = MultiHeadAttention([BUILD["softmax"](p), BUILD["linear"](one)], [one["W"], p["U"]])
    assert v.batch_shape == (3,)
    together, field = v.velocity(Particles(x[0], w[0])), v.affine(Particles(x[0], w[0]).to_gaussian())
    for i in range(3):
        q = {k: t[i] for k, t in p.items()}
        single = MultiHeadAttention([BUILD["softmax"](q), BUILD["linear"](one)], [one["W"], q["U"]])
        close(together[i], single.velocity(Particles(x[0], w[0])), 1e-14)
        close(field.M[i], single.affine(Particles(x[0], w[0]).to_gaussian()).M, 1e-14)


@pytest.mark.parametrize("kind", ["sigmoid", "unnormalised"])
def test_one_head_without_a_closure_is_enough(kind: str) -> None:
    p = problem(1, 2)[2]
    assert not MultiHeadAttention([BUILD["softmax"](p), BUILD[kind](p)]).preserves_gaussians
    assert MultiHeadAttention([BUILD["softmax"](p), AffineBlock(p["W"])]).preserves_gaussians
