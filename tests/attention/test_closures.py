"""Gaussian closures: reference values, quadrature, singular and large covariances, derivatives."""

from __future__ import annotations

from typing import Any

import mpmath
import numpy as np
import pytest
import torch
from torch import Tensor

from ot_transformers import (
    AffineBlock,
    Gaussian,
    L2Attention,
    LinearAttention,
    MultiHeadAttention,
    NotGaussianPreserving,
    Particles,
    SoftmaxAttention,
)

from .kinds import BUILD, CLOSED, problem, stacked


def close(a: Any, b: Any, rtol: float = 1e-12) -> None:
    np.testing.assert_allclose(a, b, rtol=0, atol=rtol * max(1e-300, float(np.abs(b).max())))


def heads(r: Any) -> dict[str, Any]:
    return {
        "softmax": SoftmaxAttention(r["A"], r["V"]),
        "l2": L2Attention(r["Q"], r["K"], r["V"]),
        "linear": LinearAttention(r["A"], r["V"]),
    }


@pytest.mark.parametrize("case", ["closure_d3", "closure_d4_singular_S_rank2_A_rank1"])
def test_reference_values(reference: Any, case: str) -> None:
    r = reference[case]
    m = r["m"].ravel()
    w, U = np.linalg.eigh(r["S"])
    factor = (U * np.sqrt(w.clip(0)))[:, w > 1e-12 * w.max()]
    for gaussian in (Gaussian(m, r["S"]), Gaussian.from_factor(m, factor)):
        for name, attention in heads(r).items():
            field = attention.affine(gaussian)
            close(field.b, r[name]["b"].ravel())
            close(field.M, r[name]["M"])
    both = MultiHeadAttention([heads(r)["softmax"], heads(r)["l2"]], [r["A"], r["V"]]).affine(
        Gaussian(m, r["S"])
    )
    close(both.M, r["A"] @ r["softmax"]["M"] + r["V"] @ r["l2"]["M"])
    close(both.b, (r["A"] @ r["softmax"]["b"] + r["V"] @ r["l2"]["b"]).ravel())


@pytest.mark.parametrize("kind", CLOSED)
@pytest.mark.parametrize("d", [1, 2])
def test_closure_is_the_field_on_gauss_hermite_nodes(kind: str, d: int) -> None:
    z, w = np.polynomial.hermite_e.hermegauss(60 if d == 1 else 40)
    nodes = np.stack(np.meshgrid(*[z] * d, indexing="ij"), -1).reshape(-1, d)
    weights = np.prod(np.stack(np.meshgrid(*[w] * d, indexing="ij"), -1).reshape(-1, d), -1)
    _, _, p = problem(1, d, seed=4)
    m, L = np.array([0.3, -0.5])[:d], np.array([[0.6, 0.0], [0.2, 0.4]])[:d, :d]
    attention, gaussian = BUILD[kind](p), Gaussian.from_factor(m, L)
    points = m + np.random.default_rng(0).normal(size=(7, d))
    mu = Particles(m + nodes @ L.T, weights / weights.sum())
    close(attention.affine(gaussian).at(points, gaussian), attention.field(mu, points), 1e-11)


@pytest.mark.parametrize("kind", CLOSED)
def test_fault_batch_differs_from_loop(kind: str) -> None:
    x, w, p = stacked(6, 3, 4)
    g = [Particles(x[i], w[i]).to_gaussian() for i in range(4)]
    batch = Gaussian.from_factor(np.stack([t.mean for t in g]), np.stack([t.factor for t in g]))
    together, shared = BUILD[kind](p).affine(batch), BUILD[kind](p).affine(g[0])
    for i in range(4):
        one = BUILD[kind]({k: v[i] for k, v in p.items()})
        for whole, measure in ((together, g[i]), (shared, g[0])):
            close(whole.b[i], one.affine(measure).b, 1e-14)
            close(whole.M[i], one.affine(measure).M, 1e-14)
    many = BUILD[kind](problem(6, 3)[2]).affine(batch)
    close(many.b[2], BUILD[kind](problem(6, 3)[2]).affine(g[2]).b, 1e-14)


@pytest.mark.parametrize("kind", CLOSED)
def test_a_dirac_mass_moves_by_its_own_velocity(kind: str) -> None:
    x, _, p = problem(1, 3)
    field = BUILD[kind](p).affine(Gaussian(x[0], np.zeros((3, 3))))
    close(field.b, BUILD[kind](p).velocity(x)[0])


def exact_l2(Q: Any, K: Any, V: Any, L: Any) -> Any:
    with mpmath.workdps(80):
        Q, K, V, L = (mpmath.matrix(t.tolist()) for t in (Q, K, V, L))
        S = L * L.T
        M = 2 * V * S * mpmath.inverse(mpmath.eye(S.rows) + 2 * K.T * K * S) * K.T * Q
        return np.array([[float(v) for v in row] for row in M.tolist()])


@pytest.mark.parametrize("size", [1.0, 1e4, 1e8])
def test_l2_closure_of_a_large_nearly_degenerate_covariance(size: float) -> None:
    """Columns nearly parallel, of norm `size`: forming K S K^T would lose the other direction altogether."""
    rng = np.random.default_rng(2)
    L = size * np.outer(rng.normal(size=3), np.ones(3)) + rng.normal(size=(3, 3))
    Q, K, V = rng.normal(size=(2, 3)), rng.normal(size=(2, 3)), rng.normal(size=(3, 3))
    M = L2Attention(Q, K, V).affine(Gaussian.from_factor(np.zeros(3), L)).M
    close(M, exact_l2(Q, K, V, L), 200 * size * np.finfo(np.float64).eps)


def test_l2_closure_where_the_covariance_overflows_is_not_an_exception() -> None:
    _, M = L2Attention(1.0, 1.0, 1.0).raw_affine(torch.zeros(1), torch.full((1, 1), torch.inf))
    assert not torch.isfinite(M).any()


@pytest.mark.parametrize("kind", [*CLOSED, "mixed"])
def test_derivatives_of_the_closure(kind: str) -> None:
    _, _, p = problem(1, 2)
    if kind == "mixed":
        heads = [BUILD[k](p) for k in ("softmax", "l2", "linear")]
        attention: Any = MultiHeadAttention(heads, [p["W"], p["U"], p["V"]])
    else:
        attention = BUILD[kind](p)
    m, L = (
        torch.from_numpy(np.random.default_rng(0).normal(size=s)).requires_grad_() for s in ((2,), (2, 2))
    )
    assert torch.autograd.gradcheck(attention.raw_affine, (m, L))
    assert torch.autograd.gradgradcheck(attention.raw_affine, (m, L))

    def f(s: Tensor) -> Tensor:
        b, M = attention.raw_affine(m.detach() * s, L.detach() * s.exp())
        return b.square().sum() + M.square().sum()

    s, one = torch.tensor(0.3, dtype=torch.float64), torch.ones((), dtype=torch.float64)
    second = torch.func.jvp(lambda u: torch.func.jvp(f, (u,), (one,))[1], (s,), (one,))[1]
    torch.testing.assert_close(second, torch.autograd.functional.hessian(f, s), rtol=1e-11, atol=1e-13)
    mapped = torch.func.vmap(f)(torch.tensor([0.1, 0.2], dtype=torch.float64))
    torch.testing.assert_close(mapped[1], f(torch.tensor(0.2, dtype=torch.float64)), rtol=1e-13, atol=0)


def test_linear_attention_needs_moments_alone() -> None:
    x, w, p = problem(12, 3)
    mu, attention = Particles(x, w), BUILD["linear"](p)
    close(attention.affine(mu.to_gaussian()).at(x, mu.to_gaussian()), attention.velocity(mu))


@pytest.mark.parametrize("kind", ["sigmoid", "unnormalised", "multihead"])
def test_kinds_without_a_closure_say_so(kind: str) -> None:
    attention = BUILD[kind](problem(1, 2)[2])
    assert not attention.preserves_gaussians
    with pytest.raises(NotGaussianPreserving, match=type(attention).__name__):
        attention.affine(Gaussian(np.zeros(2), np.eye(2)))


def test_an_affine_block_on_batches_of_shifts() -> None:
    W, c = np.array([[1.0, 2.0], [0.0, -1.0]]), np.array([[1.0, 0.0], [0.0, 3.0]])
    field = AffineBlock(W, c).affine(Gaussian(np.array([1.0, 1.0]), np.eye(2)))
    np.testing.assert_array_equal(field.b, [[4.0, -1.0], [3.0, 2.0]])
    np.testing.assert_array_equal(field.M, [W, W])
