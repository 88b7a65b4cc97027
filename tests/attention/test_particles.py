"""Attention maps on particles against plain sums, with their invariances, derivatives and extremes."""

from __future__ import annotations

from typing import Any

import mpmath
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from ot_transformers import (
    L2Attention,
    LinearAttention,
    Particles,
    SigmoidAttention,
    SoftmaxAttention,
    UnnormalisedAttention,
)
from ot_transformers.numerics import streaming

from .kinds import BIAS, BUILD, KINDS, PAIRWISE, plain, problem, stacked, turned


def close(a: Any, b: Any, rtol: float = 1e-12) -> None:
    """Relative to the largest entry: single entries may cancel."""
    np.testing.assert_allclose(a, b, rtol=0, atol=rtol * max(1e-300, float(np.abs(b).max())))


@pytest.fixture(params=["dense", "streaming"])
def blocks(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Whole score matrices, or three rows at a time."""
    if request.param == "streaming":
        monkeypatch.setattr(streaming, "BLOCK", 1)
        monkeypatch.setattr(streaming, "STREAM", 40)
        monkeypatch.setattr(streaming, "RECORDED", 40)
    return str(request.param)


@pytest.mark.parametrize("kind", KINDS)
def test_velocity_and_field_are_the_formula(kind: str, blocks: str) -> None:
    x, w, p = problem(13, 3)
    z = np.random.default_rng(1).normal(size=(5, 3))
    attention, mu = BUILD[kind](p), Particles(x, w)
    close(attention.velocity(mu), plain(kind, p, x, w))
    close(attention.field(mu, z), plain(kind, p, x, w, z))
    close(attention.field(mu, x), attention.velocity(mu))
    close(attention.velocity(x), plain(kind, p, x, np.full(13, 1 / 13)))
    close(attention.evaluator(mu)(torch.from_numpy(x), torch.from_numpy(w)), plain(kind, p, x, w))


@settings(max_examples=25, deadline=None)
@given(st.sampled_from(KINDS), st.integers(0, 10_000), st.integers(1, 9), st.integers(1, 4))
def test_equivariance_under_permutation_and_rotation(kind: str, seed: int, n: int, d: int) -> None:
    x, w, p = problem(n, d, seed)
    rng = np.random.default_rng(seed)
    order, R = rng.permutation(n), np.linalg.qr(rng.normal(size=(d, d)))[0]
    v = BUILD[kind](p).velocity(Particles(x, w))
    close(BUILD[kind](p).velocity(Particles(x[order], w[order])), v[order], 1e-11)
    close(BUILD[kind](turned(p, R)).velocity(Particles(x @ R.T, w)), v @ R.T, 1e-11)


@settings(max_examples=15, deadline=None)
@given(st.sampled_from(PAIRWISE), st.integers(0, 10_000))
def test_a_token_split_in_two_is_the_same_measure(kind: str, seed: int) -> None:
    x, w, p = problem(6, 2, seed)
    two, half = np.concatenate([x, x[-1:]]), np.concatenate([w[:-1], w[-1:] / 3, 2 * w[-1:] / 3])
    split = BUILD[kind](p).velocity(Particles(two, half))
    close(split[:6], BUILD[kind](p).velocity(Particles(x, w)), 1e-12)


@pytest.mark.parametrize("kind", KINDS)
def test_fault_batch_differs_from_loop(kind: str, blocks: str) -> None:
    x, w, p = stacked(7, 2, 3)
    together = BUILD[kind](p).velocity(Particles(x, w))
    z = np.random.default_rng(5).normal(size=(4, 2))
    elsewhere = BUILD[kind](p).field(Particles(x, w), z)
    shared = BUILD[kind](p).velocity(Particles(x[0], w[0]))
    many = BUILD[kind](problem(7, 2)[2]).velocity(Particles(x, w))
    for i in range(3):
        one = {k: v[i] for k, v in p.items()}
        close(together[i], BUILD[kind](one).velocity(Particles(x[i], w[i])), 1e-14)
        close(elsewhere[i], BUILD[kind](one).field(Particles(x[i], w[i]), z), 1e-14)
        close(shared[i], BUILD[kind](one).velocity(Particles(x[0], w[0])), 1e-14)
        close(many[i], BUILD[kind](problem(7, 2)[2]).velocity(Particles(x[i], w[i])), 1e-14)


@pytest.mark.parametrize("kind", KINDS)
def test_numpy_and_torch_give_the_same_bits_and_float32_its_precision(kind: str) -> None:
    x, w, p = problem(40, 3)
    v = BUILD[kind](p).velocity(Particles(x, w))
    assert isinstance(v, np.ndarray)
    t = BUILD[kind](p).velocity(Particles(torch.from_numpy(x), w))
    assert isinstance(t, Tensor)
    np.testing.assert_array_equal(t.numpy(), v)
    tensors = {k: torch.from_numpy(a) for k, a in p.items()}
    assert isinstance(BUILD[kind](tensors).velocity(Particles(x, w)), Tensor)
    single = BUILD[kind](p).velocity(Particles(x.astype(np.float32), w))
    assert single.dtype == np.float32
    close(single, v, 2e-6)


@pytest.mark.parametrize("kind", KINDS)
def test_fault_caller_array_changed_in_place(kind: str) -> None:
    x, w, p = problem(9, 2)
    before = {k: v.copy() for k, v in {**p, "x": x, "w": w}.items()}
    attention, mu = BUILD[kind](p), Particles(x, w)
    v = attention.velocity(mu)
    attention.field(mu, x)
    for k, a in {**p, "x": x, "w": w}.items():
        np.testing.assert_array_equal(a, before[k])
        a *= 3.0  # and nothing of ours changes with it
    np.testing.assert_array_equal(attention.velocity(mu), v)


@pytest.mark.parametrize("kind", KINDS)
def test_first_and_second_derivatives_in_tokens_weights_and_parameters(kind: str, blocks: str) -> None:
    x, w, p = problem(4, 2)
    names = [
        k
        for k in p
        if k in {"softmax": "AV", "l2": "QKV", "affine": "Wc", "multihead": "AQW"}.get(kind, "AV")
    ]

    def velocity(x: Tensor, logits: Tensor, *parameters: Tensor) -> Tensor:
        q = {**p, **dict(zip(names, parameters, strict=True))}
        return BUILD[kind](q).velocity(Particles(x, logits.softmax(-1)))

    tensors = [torch.from_numpy(t).requires_grad_() for t in (x, np.log(w), *(p[k] for k in names))]
    assert torch.autograd.gradcheck(velocity, tensors)
    assert torch.autograd.gradgradcheck(velocity, tensors)


@pytest.mark.parametrize("kind", KINDS)
def test_forward_mode_and_vmap_agree_with_reverse_mode(kind: str, blocks: str) -> None:
    x, w, p = problem(5, 2)
    X, W = torch.from_numpy(x), torch.from_numpy(w)
    A = {k: torch.from_numpy(v) for k, v in p.items()}

    def f(s: Tensor) -> Tensor:
        q = {k: v * (1 + s * s) for k, v in A.items()}
        return BUILD[kind](q).velocity(Particles(X * s.exp(), (W.log() * s).softmax(-1))).square().sum()

    s, one = torch.tensor(0.3, dtype=torch.float64), torch.ones((), dtype=torch.float64)
    second = torch.func.jvp(lambda u: torch.func.jvp(f, (u,), (one,))[1], (s,), (one,))[1]
    torch.testing.assert_close(second, torch.autograd.functional.hessian(f, s), rtol=1e-11, atol=0)
    several = torch.tensor([0.1, 0.3, -0.2], dtype=torch.float64)
    mapped = torch.func.vmap(torch.func.grad(f))(several)
    looped = torch.stack([torch.autograd.functional.jacobian(f, u) for u in several])
    torch.testing.assert_close(mapped, looped, rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize("kind", PAIRWISE)
def test_zero_weights_are_absent_tokens(kind: str, blocks: str) -> None:
    x, w, p = problem(11, 2)
    w = np.where(np.arange(11) % 3 == 0, 0.0, w)
    w, keep = w / w.sum(), w > 0
    attention = BUILD[kind](p)
    v = attention.velocity(Particles(x, w))
    close(v, attention.field(Particles(x[keep], w[keep]), x))
    # An absent token is not seen, however large its score would be.
    far = np.where(keep[:, None], x, 1e3 * x)
    close(attention.field(Particles(far, w), x), v)


@pytest.mark.parametrize("kind", PAIRWISE)
def test_the_derivative_in_a_weight_that_is_zero_is_not_zero(kind: str) -> None:
    """d/dw_j at w_j = 0 is the effect of a new token: a logarithm of the weight has it wrong (0 or NaN)."""
    x, w, p = problem(6, 2)
    w[2] = 0.0
    w /= w.sum()
    tilt = np.full(6, -w[3])
    tilt[[2, 3]] = 1.0, 1.0 - w[3]

    def velocity(s: Tensor) -> Tensor:
        weights = torch.from_numpy(w).clone()
        weights = weights + s * (torch.eye(6, dtype=torch.float64)[2] - torch.from_numpy(w))
        return BUILD[kind](p).raw_field(torch.from_numpy(x), torch.from_numpy(x), weights)

    slope = torch.func.jacfwd(velocity)(torch.tensor(0.0, dtype=torch.float64)).numpy()
    reverse = torch.autograd.functional.jacobian(velocity, torch.tensor(0.0, dtype=torch.float64)).numpy()
    h = 1e-4  # weights stay nonnegative: a one-sided difference of order 2
    e = np.eye(6)[2]
    f = [plain(kind, p, x, w + s * (e - w)) for s in (0.0, h, 2 * h)]
    difference = (-3 * f[0] + 4 * f[1] - f[2]) / (2 * h)
    assert np.abs(difference).max() > 1e-2
    close(slope, difference, 1e-6)
    close(reverse, slope, 1e-13)


def exact(kind: str, x: Any, p: Any) -> Any:
    """50 digits: the exponents of |x| = 30 reach 900."""
    with mpmath.workdps(50):
        X, V = mpmath.matrix(x.tolist()), mpmath.matrix(p["V"].tolist())
        rows = []
        for i in range(len(x)):
            if kind == "softmax":
                score = X * mpmath.matrix(p["A"].tolist()) * X[i, :].T
            else:
                gap = [mpmath.matrix((p["Q"] @ x[i] - p["K"] @ y).tolist()) for y in x]
                score = mpmath.matrix([-(g.T * g)[0] for g in gap])
            e = [mpmath.exp(s) for s in score]
            mean = sum((e[j] * X[j, :].T for j in range(len(x))), mpmath.zeros(len(x[0]), 1)) / sum(e)
            rows.append([float(t) for t in V * mean])
    return np.array(rows)


@pytest.mark.parametrize("kind", ["softmax", "l2"])
@pytest.mark.parametrize("shift", [0.0, 30.0])
def test_tokens_of_norm_thirty_do_not_overflow(kind: str, shift: float) -> None:
    """Scores of size s are rounded to s ulp, and the velocity is as wrong as they are: no more than that."""
    x, _, p = problem(8, 2)
    x = 30 * x / np.linalg.norm(x, axis=1, keepdims=True) if shift == 0 else x + shift
    truth = exact(kind, x, p)
    size = max(np.abs(x @ p[k]).max() ** 2 for k in ("A", "Q", "K"))
    close(BUILD[kind](p).velocity(x), truth, 8 * size * np.finfo(np.float64).eps)
    low = BUILD[kind](p).velocity(x.astype(np.float32))
    assert np.isfinite(low).all()
    truth = exact(kind, x.astype(np.float32).astype(np.float64), p)
    close(low, truth, 8 * size * np.finfo(np.float32).eps)


def test_float32_far_from_the_origin_sees_centred_scores() -> None:
    """A cloud of diameter 1 at distance 10^4: uncentred scores would be of size 10^8, wrong by 10."""
    x, w, _ = problem(50, 2)
    x = (x + 1e4).astype(np.float32)
    A = 1e-4 * np.array([[1.0, 0.3], [-0.2, 0.8]])  # the scores differ by about 1
    v = SoftmaxAttention(A, np.eye(2)).velocity(Particles(x, w.astype(np.float32)))
    truth = SoftmaxAttention(A, np.eye(2)).velocity(Particles(x.astype(np.float64), w.astype(np.float32)))
    np.testing.assert_allclose(v, truth, rtol=0, atol=4 * 1e4 * np.finfo(np.float32).eps)


def test_unnormalised_is_infinite_only_where_the_number_is() -> None:
    x = np.array([[26.0, 0.0], [26.0, 0.0]])
    v = UnnormalisedAttention(np.eye(2), 1e-10 * np.eye(2)).velocity(x)  # e^676 alone is 1e293
    np.testing.assert_allclose(v[:, 0], 26e-10 * np.exp(676.0), rtol=1e-12)
    small = UnnormalisedAttention(np.eye(2), 1e-20 * np.eye(2)).velocity(np.array([[26.8, 0.0]]))
    with mpmath.workdps(40):  # e^718.24 is beyond float64, 1e-20 of it is not
        truth = float(mpmath.mpf("26.8e-20") * mpmath.exp(mpmath.mpf(26.8) ** 2))
    np.testing.assert_allclose(small, [[truth, 0.0]], rtol=1e-12)
    over = UnnormalisedAttention(np.eye(2), np.eye(2)).velocity(np.array([[30.0, 0.0], [-30.0, 0.0]]))
    np.testing.assert_array_equal(over, [[np.inf, 0.0], [-np.inf, 0.0]])
    low = UnnormalisedAttention(-np.eye(2), np.eye(2)).velocity(np.array([[30.0, 0.0], [30.0, 1.0]]))
    np.testing.assert_array_equal(low, 0.0)  # e^-900 underflows to what it should


def test_sigmoid_saturates_without_overflow() -> None:
    x = np.array([[30.0], [-30.0]])
    v = SigmoidAttention(1.0, 2.0).velocity(x)
    np.testing.assert_allclose(v, [[30.0], [-30.0]], rtol=1e-14)


@pytest.mark.parametrize("scale", [1.0, 0.7])
def test_from_query_key_and_value(scale: float) -> None:
    rng = np.random.default_rng(3)
    Q, K, V, x = (rng.normal(size=s) for s in ((2, 3), (2, 3), (3, 3), (6, 3)))
    p = {"A": scale * K.T @ Q, "V": V, "Q": np.sqrt(scale) * Q, "K": np.sqrt(scale) * K}
    w = np.full(6, 1 / 6)
    for kind, cls in {
        "softmax": SoftmaxAttention,
        "l2": L2Attention,
        "linear": LinearAttention,
        "unnormalised": UnnormalisedAttention,
        "sigmoid": SigmoidAttention,
    }.items():
        options = {"bias": BIAS} if kind == "sigmoid" else {}
        close(cls.from_qkv(Q, K, V, scale, **options).velocity(x), plain(kind, p, x, w))  # type: ignore[attr-defined]


def test_two_tokens_and_one_in_closed_form() -> None:
    """mu = (delta_s + delta_-s) / 2: softmax is s tanh(a s x), L2 s tanh(2 q k s x)."""
    s, x = 0.8, np.linspace(-1, 1, 5)[:, None]
    mu = np.array([[s], [-s]])
    np.testing.assert_allclose(
        SoftmaxAttention(1.3, 2.0).field(mu, x), 2 * s * np.tanh(1.3 * s * x), rtol=1e-13
    )
    np.testing.assert_allclose(
        L2Attention(0.6, 1.5, 2.0).field(mu, x), 2 * s * np.tanh(2 * 0.6 * 1.5 * s * x), rtol=1e-13
    )
    np.testing.assert_allclose(SoftmaxAttention(1.3, 2.0).velocity(np.array([[5.0]])), [[10.0]], rtol=1e-15)


def test_softmax_is_the_fused_kernel_of_torch() -> None:
    x, _, p = problem(30, 4)
    X = torch.from_numpy(x)
    q = X @ torch.from_numpy(p["A"]).mT
    peer = torch.nn.functional.scaled_dot_product_attention(q, X, X, scale=1.0)
    close(BUILD["softmax"](p).velocity(x), (peer @ torch.from_numpy(p["V"]).mT).numpy())
