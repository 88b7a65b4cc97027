"""The Sinkhorn solver against its optimality conditions, an independent iteration, POT and closed forms."""

from __future__ import annotations

import warnings
from typing import Any

import numpy as np
import ot
import pytest
import torch
from scipy.special import logsumexp
from torch import Tensor

from ot_transformers.errors import InvalidInput, NotConverged
from ot_transformers.numerics import sinkhorn_kernel
from ot_transformers.numerics.sinkhorn import SinkhornResult, barycentre, sinkhorn


def clouds(n: int, m: int, d: int, seed: int = 0, scale: float = 1.0) -> tuple[Tensor, ...]:
    rng = np.random.default_rng(seed)
    a, b = rng.dirichlet(np.ones(n)), rng.dirichlet(np.ones(m))
    parts = (scale * rng.normal(size=(n, d)), a, scale * rng.normal(size=(m, d)) + 0.5, b)
    return (*(torch.from_numpy(p) for p in parts), torch.from_numpy(rng.normal(size=(d, d)) / np.sqrt(d)))


def coupling(r: SinkhornResult, x: Tensor, a: Tensor, y: Tensor, b: Tensor, A: Tensor, eps: float) -> Tensor:
    """pi from the potentials alone, by the definition."""
    log_kappa = (x @ A.mT @ y.mT + r.f.unsqueeze(-1) + r.g.unsqueeze(-2)) / eps
    return a.unsqueeze(-1) * b.unsqueeze(-2) * log_kappa.exp()


def reference_potential(score: np.ndarray, a: np.ndarray, b: np.ndarray, n_iter: int) -> np.ndarray:
    """exp-free plain alternating iterations, written apart from the library: the plan."""
    g = np.zeros_like(b)
    for _ in range(n_iter):
        f = -logsumexp(score + g + np.log(b), axis=1)
        g = -logsumexp(score.T + f + np.log(a), axis=1)
    return a[:, None] * b * np.exp(score + f[:, None] + g)


@pytest.mark.parametrize("eps", [1.0, 0.1, 1e-2, 1e-3, 1e-4])
def test_both_marginals_and_value_from_the_definition(eps: float) -> None:
    """Kernel underflow at eps = 1e-4: the naive exp(s / eps) is 0 or inf there, the potentials are right."""
    x, a, y, b, A = clouds(30, 40, 2)
    r = sinkhorn(x, a, y, b, A, eps)
    pi = coupling(r, x, a, y, b, A, eps)
    assert r.converged
    # exponents of size |s| / eps carry rounding of that size
    slack = 1e-14 * max(1.0, 10 / eps)
    assert abs(float((pi.sum(-1) - a).abs().sum() - r.error_x)) < slack
    assert abs(float((pi.sum(-2) - b).abs().sum() - r.error_y)) < slack
    assert max(float(r.error_x), float(r.error_y)) <= 1e-9
    score = x @ A.mT @ y.mT
    value = -(pi * score).sum() + (pi * (score + r.f[:, None] + r.g)).sum()
    assert float(r.value) == pytest.approx(float(value), abs=2e-8)
    assert float((a * r.f).sum()) == pytest.approx(float((b * r.g).sum()), abs=1e-12)
    torch.testing.assert_close(barycentre(r), (pi @ y) / a[:, None], rtol=1e-7, atol=1e-9)


def test_underflow_of_the_naive_kernel_is_real() -> None:
    x, _, y, _, A = clouds(30, 40, 2)
    naive = (x @ A.mT @ y.mT / 1e-4).exp()
    assert bool(((naive == 0) | naive.isinf()).all(-1).any())


@pytest.mark.parametrize(("eps", "n_iter"), [(1.0, 200), (0.3, 3_000)])
def test_against_an_independent_iteration(eps: float, n_iter: int) -> None:
    x, a, y, b, A = clouds(20, 15, 3)
    score = (x @ A.mT @ y.mT).numpy() / eps
    plan = reference_potential(score, a.numpy(), b.numpy(), n_iter)
    r = sinkhorn(x, a, y, b, A, eps, tol=1e-13)
    np.testing.assert_allclose(coupling(r, x, a, y, b, A, eps).numpy(), plan, rtol=1e-9, atol=1e-14)


def test_against_pot() -> None:
    x, a, y, b, A = clouds(25, 30, 2)
    cost = -(x @ A.mT @ y.mT).numpy()
    plan = ot.sinkhorn(
        a.numpy(), b.numpy(), cost, 0.5, method="sinkhorn_log", stopThr=1e-14, numItermax=5_000
    )
    r = sinkhorn(x, a, y, b, A, 0.5, tol=1e-13)
    np.testing.assert_allclose(coupling(r, x, a, y, b, A, 0.5).numpy(), plan, rtol=1e-8, atol=1e-13)


def test_small_eps_tends_to_the_exact_transport_value() -> None:
    x, a, y, b, A = clouds(20, 25, 2)
    exact = ot.emd2(a.numpy(), b.numpy(), -(x @ A.mT @ y.mT).numpy())
    eps = 1e-4
    value = float(sinkhorn(x, a, y, b, A, eps).value)
    entropy_bound = eps * min(float(-(a * a.log()).sum()), float(-(b * b.log()).sum()))
    assert exact - 1e-8 <= value <= exact + entropy_bound + 1e-8


def test_translation_changes_the_potentials_not_the_coupling() -> None:
    """y^T A x of clouds far from the origin: centring keeps the digits."""
    x, a, y, b, A = clouds(20, 20, 2)
    near, far = sinkhorn(x, a, y, b, A, 0.5), sinkhorn(x + 1e4, a, y - 3e3, b, A, 0.5)
    torch.testing.assert_close(far.mean_y, near.mean_y - 3e3, rtol=0, atol=1e-8)


def test_one_hot_marginals_at_eps_a_tenth() -> None:
    """(0,1,0,0) against (1,0,0,0): value exact, potentials finite at the points without mass."""
    x = torch.arange(4.0, dtype=torch.float64)[:, None]
    a, b = torch.tensor([0.0, 1, 0, 0]).double(), torch.tensor([1.0, 0, 0, 0]).double()
    A = torch.eye(1).double()
    for eps in (0.1, 1e-4):
        r = sinkhorn(x + 1, a, x + 1, b, A, eps)
        assert r.converged
        assert float(r.value) == pytest.approx(-2.0, abs=1e-12)
        assert bool(torch.isfinite(r.f).all() & torch.isfinite(r.g).all())
        np.testing.assert_allclose(r.mean_y.numpy(), 1.0, rtol=1e-12)


def test_zero_weights_give_what_dropping_the_points_gives() -> None:
    x, a, y, b, A = clouds(12, 10, 2)
    a, b = a.clone(), b.clone()
    a[3], b[0], b[7] = 0, 0, 0
    a, b = a / a.sum(), b / b.sum()
    r = sinkhorn(x, a, y, b, A, 0.2, tol=1e-13)
    i, j = a > 0, b > 0
    s = sinkhorn(x[i], a[i], y[j], b[j], A, 0.2, tol=1e-13)
    torch.testing.assert_close(r.f[i], s.f, rtol=0, atol=1e-11)
    torch.testing.assert_close(r.value, s.value, rtol=1e-13, atol=0)
    # the soft-min extension: kappa still averages to 1 at the points without mass
    log_kappa = (x @ A.mT @ y.mT + r.f[:, None] + r.g) / 0.2
    np.testing.assert_allclose((log_kappa.exp() @ b).numpy(), 1.0, rtol=1e-11)
    np.testing.assert_allclose((a @ log_kappa.exp()).numpy(), 1.0, rtol=1e-11)


def test_a_dirac_against_itself() -> None:
    x, one = torch.tensor([[3.0, -2.0]]).double(), torch.ones(1).double()
    r = sinkhorn(x, one, x, one, torch.eye(2).double(), 0.1, symmetric=True)
    assert r.converged
    assert float(r.value) == pytest.approx(-13.0, rel=1e-14)
    torch.testing.assert_close(r.mean_y, x)


def test_nan_is_never_converged() -> None:
    x, a, y, b, A = clouds(6, 6, 2)
    x = x.clone()
    x[2, 0] = torch.nan
    with pytest.warns(NotConverged):
        r = sinkhorn(x, a, y, b, A, 1.0)
    assert not r.converged


def test_too_few_iterations_warn_with_the_errors() -> None:
    x, a, y, b, A = clouds(30, 30, 2)
    with pytest.warns(NotConverged, match=r"after 2 iterations with marginal errors \(L1\)"):
        r = sinkhorn(x, a, y, b, A, 0.05, max_iter=2)
    assert not r.converged
    pi = coupling(r, x, a, y, b, A, 0.05)
    assert float((pi.sum(-2) - b).abs().sum()) == pytest.approx(float(r.error_y), rel=1e-9)


def test_equal_measures_and_symmetric_form_share_one_potential() -> None:
    x, a, _, _, A = clouds(40, 1, 3)
    A = A + A.mT
    r = sinkhorn(x, a, x, a, A, 1.0, symmetric=True)
    assert torch.equal(r.f, r.g)
    pi = coupling(r, x, a, x, a, A, 1.0)
    assert max(float((pi.sum(k) - a).abs().sum()) for k in (-1, -2)) <= 1e-9
    plain = sinkhorn(x, a, x, a, A, 1.0, tol=1e-13)
    torch.testing.assert_close(plain.f, plain.g, rtol=0, atol=1e-11)


def test_a_batch_gives_what_the_loop_gives() -> None:
    x, a, y, b, A = (torch.stack(t) for t in zip(*(clouds(15, 12, 2, seed=s) for s in range(4)), strict=True))
    scale = torch.tensor([0.2, 1.0, 3.0, 8.0]).double()[:, None, None]  # members of very different difficulty
    r = sinkhorn(scale * x, a, y, b, A, 0.3, tol=1e-13)
    assert r.error_x.shape == (4,)
    for k in range(4):
        one = sinkhorn(scale[k] * x[k], a[k], y[k], b[k], A[k], 0.3, tol=1e-13)
        torch.testing.assert_close(r.mean_y[k], one.mean_y, rtol=0, atol=1e-11)
        torch.testing.assert_close(r.value[k], one.value, rtol=1e-12, atol=1e-13)


def test_streaming_beyond_the_budget_gives_the_same_numbers(monkeypatch: pytest.MonkeyPatch) -> None:
    x, a, y, b, A = clouds(100, 80, 2)
    dense = sinkhorn(x, a, y, b, A, 0.3, tol=1e-12)
    monkeypatch.setattr(sinkhorn_kernel, "KERNEL_BUDGET", 1_000)
    monkeypatch.setattr(sinkhorn_kernel, "_BLOCK_BYTES", 20 * 80 * 8)
    streamed = sinkhorn(x, a, y, b, A, 0.3, tol=1e-12)
    torch.testing.assert_close(streamed.f, dense.f, rtol=0, atol=1e-10)
    torch.testing.assert_close(streamed.mean_y, dense.mean_y, rtol=0, atol=1e-11)


@pytest.mark.parametrize("eps", [1.0, 1e-3])
def test_float32_is_as_good_as_its_rounding(eps: float) -> None:
    """Solved in float64: the means carry a few float32 ulp even at eps = 1e-3, and tol is met."""
    given = [t.float() for t in clouds(50, 50, 3)]
    r = sinkhorn(*given, eps)
    exact = sinkhorn(*(t.double() for t in given), eps)
    assert r.converged
    assert r.f.dtype == r.mean_y.dtype == r.value.dtype == torch.float32
    assert max(float(r.error_x), float(r.error_y)) <= 1e-9
    torch.testing.assert_close(r.mean_y.double(), exact.mean_y, rtol=0, atol=1e-6)


def test_tokens_that_only_see_themselves() -> None:
    """At small eps the coupling falls apart into parts with a gauge each; f = g stays finite."""
    x = torch.from_numpy(np.random.default_rng(0).normal(size=(50, 200)))
    w = torch.full((50,), 0.02, dtype=torch.float64)
    r = sinkhorn(x, w, x, w, torch.eye(200, dtype=torch.float64), 1e-2, symmetric=True)
    assert r.converged
    torch.testing.assert_close(r.mean_y, x, rtol=0, atol=1e-9)


def test_a_warm_start_at_the_solution_needs_one_sweep() -> None:
    x, a, y, b, A = clouds(40, 30, 2)
    cold = sinkhorn(x, a, y, b, A, 0.5)
    assert cold.n_iter > 3
    assert sinkhorn(x, a, y, b, A, 0.5, warm=(cold.f, cold.g)).n_iter == 1


def test_a_bad_warm_start_does_no_harm() -> None:
    x, a, y, b, A = clouds(40, 30, 2)
    cold = sinkhorn(x, a, y, b, A, 0.5, tol=1e-12)
    bad = (1e5 * torch.ones_like(a), torch.linspace(-500, 500, 30).double())
    warm = sinkhorn(x, a, y, b, A, 0.5, tol=1e-12, warm=bad)
    torch.testing.assert_close(warm.f, cold.f, rtol=0, atol=1e-9)


def test_gaussian_potentials_are_the_solution_on_gaussian_quadrature() -> None:
    """On Gauss-Hermite nodes the closed-form start is the solution up to the error of quadrature."""
    z, w = np.polynomial.hermite_e.hermegauss(40)
    x, w = torch.from_numpy(0.7 * z)[:, None], torch.from_numpy(w / w.sum())
    y = torch.from_numpy(0.9 * z)[:, None]
    r = sinkhorn(x, w, y, w, torch.full((1, 1), 0.8, dtype=torch.float64), 1.0, tol=1e-10)
    assert r.n_iter == 1


def test_acceleration_beats_plain_iterations() -> None:
    """Where a hundred plain alternating iterations are still far from 1e-9."""
    x, a, y, b, A = clouds(100, 100, 2)
    score = (x @ A.mT @ y.mT).numpy() / 0.1
    plain = reference_potential(score, a.numpy(), b.numpy(), 100)
    assert np.abs(plain.sum(1) - a.numpy()).sum() > 1e-6
    assert sinkhorn(x, a, y, b, A, 0.1).n_iter <= 100


def test_causal_sinkhorn_is_an_error_that_explains_itself() -> None:
    x, _, y, _, A = clouds(8, 8, 2)
    w = torch.full((8,), 0.125).double()
    with pytest.raises(
        InvalidInput, match="mask is causal: its only doubly stochastic matrix is the identity"
    ):
        sinkhorn(x, w, y, w, A, 1.0, mask=torch.ones(8, 8, dtype=torch.bool).tril())


def test_a_mask_without_any_coupling_says_so() -> None:
    x, _, y, _, A = clouds(4, 4, 2)
    w = torch.full((4,), 0.25).double()
    mask = torch.ones(4, 4, dtype=torch.bool)
    mask[1:, 1:] = False
    with pytest.raises(InvalidInput, match="mask admits no coupling"):
        sinkhorn(x, w, y, w, A, 1.0, mask=mask)


def test_a_mask_with_total_support_is_solved() -> None:
    x, _, y, _, A = clouds(8, 8, 2)
    w = torch.full((8,), 0.125).double()
    band = (torch.arange(8)[:, None] - torch.arange(8)).abs() <= 1
    r = sinkhorn(x, w, y, w, A, 1.0, mask=band, tol=1e-12)
    pi = torch.where(band, coupling(r, x, w, y, w, A, 1.0), 0.0)
    assert max(float((pi.sum(k) - w).abs().sum()) for k in (0, 1)) <= 1e-11
    torch.testing.assert_close(r.mean_y, pi @ y / w[:, None], rtol=0, atol=1e-10)


def test_nothing_is_written_in_place() -> None:
    given = clouds(10, 10, 2)
    before = [t.clone() for t in given]
    sinkhorn(*given, 0.5)
    assert all(torch.equal(p, q) for p, q in zip(given, before, strict=True))


def _function(which: str, eps: float = 0.5) -> Any:
    def call(x: Tensor, la: Tensor, y: Tensor, lb: Tensor, A: Tensor) -> Tensor:
        r = sinkhorn(x, la.softmax(-1), y, lb.softmax(-1), A, eps, tol=1e-13)
        return getattr(r, which)

    return call


@pytest.mark.parametrize("which", ["f", "g", "mean_y", "value"])
def test_derivatives_in_all_arguments(which: str) -> None:
    """Against finite differences: reverse to second order, and forward mode."""
    x, a, y, b, A = clouds(4, 3, 2)
    args = [t.clone().requires_grad_() for t in (x, a.log(), y, b.log(), A)]
    assert torch.autograd.gradcheck(_function(which), args, check_forward_ad=True)
    assert torch.autograd.gradgradcheck(_function(which), args)


def test_derivatives_in_a_batch_under_vmap_are_those_of_the_loop() -> None:
    x, a, y, b, A = (torch.stack(t) for t in zip(*(clouds(5, 4, 2, seed=s) for s in range(3)), strict=True))
    gradient = torch.func.grad(_function("value"), argnums=0)
    together = torch.func.vmap(gradient)(x, a.log(), y, b.log(), A)
    for k in range(3):
        alone = gradient(x[k], a[k].log(), y[k], b[k].log(), A[k])
        torch.testing.assert_close(together[k], alone, rtol=0, atol=1e-11)


def test_gradients_are_finite_at_zero_weights() -> None:
    x, _, y, b, A = clouds(4, 4, 1)
    a = torch.tensor([0.0, 0.5, 0.5, 0.0]).double().requires_grad_()
    r = sinkhorn(x.requires_grad_(), a, y, b, A, 0.2, tol=1e-12)
    (ga, gx) = torch.autograd.grad(r.value, (a, x))
    # the first variation of the value is the potential up to a constant; a point without mass moves for free
    torch.testing.assert_close(ga - ga[1], (r.f - r.f[1]).detach(), rtol=0, atol=1e-9)
    assert float(gx[0].abs().max()) == 0.0


def test_no_warning_on_a_plain_solve() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        sinkhorn(*clouds(10, 10, 2), 1.0)
