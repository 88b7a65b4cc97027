"""The Sinkhorn kernel in mixed precision, and what a solve leaves to the next one along a flow."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import Tensor

from ot_transformers.attention import SinkhornAttention
from ot_transformers.errors import NotConverged
from ot_transformers.numerics import sinkhorn_mixed
from ot_transformers.numerics.sinkhorn import SinkhornResult, sinkhorn
from ot_transformers.numerics.sinkhorn_history import PotentialHistory
from ot_transformers.numerics.sinkhorn_kernel import Kernel, Problem, SecantPairs
from ot_transformers.numerics.sinkhorn_mixed import MixedKernel, mixed_pays
from ot_transformers.numerics.sinkhorn_solve import gaussian_potentials

N = 1_100  # just large enough for mixed precision


def weights(rng: np.random.Generator, *shape: int) -> Tensor:
    w = torch.from_numpy(rng.uniform(0.2, 2.0, size=shape))
    return w / w.sum(-1, keepdim=True)


def problem(
    rng: np.random.Generator, symmetric: bool, n: int, batch: int = 1, spread: float = 1.0
) -> Problem:
    y, a = torch.from_numpy(rng.normal(size=(batch, n, 3))), weights(rng, batch, n)
    M = torch.from_numpy(spread * rng.normal(size=(3, 3)))
    if symmetric:
        return Problem(y @ (0.5 * (M + M.mT)), a, y, a)
    x = torch.from_numpy(rng.normal(size=(batch, n + 7, 3)))
    return Problem(x @ M.mT, weights(rng, batch, n + 7), y, a)


def marginal_errors(
    r: SinkhornResult, x: Tensor, a: Tensor, y: Tensor, b: Tensor, A: Tensor, eps: float
) -> float:
    kappa = ((x @ A.mT @ y.mT + r.f[:, None] + r.g) / eps).exp()
    return max(float((a * (kappa @ b - 1).abs()).sum()), float((b * (a @ kappa - 1).abs()).sum()))


@pytest.mark.parametrize("batch", [1, 2])
@pytest.mark.parametrize("symmetric", [True, False])
@pytest.mark.parametrize("size", [1e-6, 1e-2, 0.5])
def test_sums_are_those_of_float64_within_the_stated_slack(
    symmetric: bool, batch: int, size: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        sinkhorn_mixed, "_BLOCK_BYTES", 8 * 97 * 20 * batch
    )  # five blocks, the last not whole
    rng = np.random.default_rng(3)
    p = problem(rng, symmetric, 97, batch)
    mixed = MixedKernel(p, *gaussian_potentials(p), symmetric)
    exact = Kernel(p, mixed.phi, mixed.psi)
    v = torch.from_numpy(np.exp(size * rng.normal(size=(batch, 97))))
    u, column = mixed.sweep(v)
    u_true, column_true = exact.sweep(v)
    error = (p.b * (column - column_true).abs()).sum(-1)
    assert bool((error <= mixed.slack(u, v)).all())
    assert bool(((p.a * (u / u_true - 1).abs()).sum(-1) <= mixed.slack(u, v) + 1e-15).all())
    for mine, true in zip(mixed.average(u, v), exact.average(u_true, v), strict=True):
        assert float((mine - true).abs().max()) <= 3e-6 * size * float(true.abs().max())


def test_entries_too_small_for_single_precision_are_no_trouble() -> None:
    rng = np.random.default_rng(4)
    p = problem(rng, False, 120, spread=60.0)
    phi, psi = gaussian_potentials(p)
    mixed, exact = MixedKernel(p, phi, psi, False), Kernel(p, phi, psi)
    assert float(exact.coupling(torch.ones_like(phi), torch.ones_like(psi)).min()) < 1e-60
    v = torch.from_numpy(np.exp(1e-3 * rng.normal(size=(1, 120))))
    assert float((mixed.sweep(v)[0] / exact.sweep(v)[0] - 1).abs().max()) < 1e-9
    assert not bool(((mixed._store > 0) & (mixed._store < torch.finfo(torch.float32).tiny)).any())


@pytest.mark.parametrize("symmetric", [True, False])
@pytest.mark.parametrize(("eps", "tol"), [(1.0, 1e-9), (1.0, 1e-12), (0.3, 1e-9)])
def test_the_solution_is_that_of_float64(
    symmetric: bool, eps: float, tol: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    rng = np.random.default_rng(5)
    x, a = torch.from_numpy(rng.normal(size=(N, 3))), weights(rng, N)
    y, b = (x, a) if symmetric else (torch.from_numpy(1 + rng.normal(size=(N + 30, 3))), weights(rng, N + 30))
    M = torch.from_numpy(0.7 * rng.normal(size=(3, 3)))
    A = 0.5 * (M + M.mT) if symmetric else M
    used = []
    sweep = MixedKernel.sweep
    monkeypatch.setattr(MixedKernel, "sweep", lambda self, v: used.append(1) or sweep(self, v))
    mixed = sinkhorn(x, a, y, b, A, eps, tol=tol, symmetric=symmetric)
    assert len(used) == mixed.n_iter  # nothing fell back to float64
    monkeypatch.setattr(sinkhorn_mixed, "_LEAST", 10**12)
    double = sinkhorn(x, a, y, b, A, eps, tol=1e-13, symmetric=symmetric)
    assert len(used) == mixed.n_iter
    assert mixed.converged
    assert max(float(mixed.error_x), float(mixed.error_y)) <= tol
    assert marginal_errors(mixed, x, a, y, b, A, eps) <= tol
    for name in ("f", "g", "value", "mean_y"):
        mine, true = getattr(mixed, name), getattr(double, name)
        assert float((mine - true).abs().max()) <= 300 * tol * max(1.0, float(true.abs().max())), name
    assert not symmetric or torch.equal(mixed.f, mixed.g)


def test_a_hard_problem_falls_back_and_is_solved() -> None:
    rng = np.random.default_rng(6)
    x, a = torch.from_numpy(rng.normal(size=(N, 2))), weights(rng, N)
    A, eps = torch.tensor([[1.0, 0.0], [0.0, -1.0]], dtype=torch.float64), 0.02
    r = sinkhorn(x, a, x, a, A, eps, symmetric=True)
    assert r.converged
    assert marginal_errors(r, x, a, x, a, A, eps) <= 1e-9


def test_derivatives_pass_through_a_solve_in_mixed_precision() -> None:
    rng = np.random.default_rng(7)
    x, a = torch.from_numpy(rng.normal(size=(N, 2))).requires_grad_(), weights(rng, N)
    A = torch.tensor([[0.5, 0.2], [0.2, -0.4]], dtype=torch.float64)
    step = torch.from_numpy(rng.normal(size=(N, 2)))
    (gradient,) = torch.autograd.grad(sinkhorn(x, a, x, a, A, 1.0, symmetric=True).value, x)
    with torch.no_grad():
        up, down = (
            sinkhorn(z, a, z, a, A, 1.0, tol=1e-12, symmetric=True).value
            for z in (x + 1e-4 * step, x - 1e-4 * step)
        )
    assert float((gradient * step).sum()) == pytest.approx(float(up - down) / 2e-4, rel=1e-6)


def test_what_mixed_precision_is_not_for() -> None:
    rng = np.random.default_rng(8)
    p = problem(rng, True, N)
    assert mixed_pays(p, True)
    zero = p.a.clone()
    zero[0, 3] = 0.0
    assert not mixed_pays(Problem(p.x, zero, p.y, zero), True)
    assert not mixed_pays(Problem(p.x, p.a, p.y, p.b, torch.ones(N, N, dtype=torch.bool)), True)
    assert not mixed_pays(problem(rng, True, 1_000), True)
    large = problem(rng, True, 16_000)
    assert mixed_pays(large, True)  # half of K in float32 is within the budget, all of it is not
    assert not mixed_pays(large, False)


def test_not_a_number_is_never_converged_in_mixed_precision() -> None:
    rng = np.random.default_rng(9)
    x, a = torch.from_numpy(rng.normal(size=(N, 2))), weights(rng, N)
    x[5] = torch.nan
    with pytest.warns(NotConverged, match="stopped"):
        assert not sinkhorn(x, a, x, a, torch.eye(2, dtype=torch.float64), 1.0, symmetric=True).converged


@pytest.mark.parametrize("symmetric", [True, False])
def test_steps_along_a_flow_take_three_sweeps_at_most(symmetric: bool) -> None:
    rng = np.random.default_rng(10)
    M = 0.4 * rng.normal(size=(4, 4))
    attention = SinkhornAttention(0.5 * (M + M.T) if symmetric else M, -np.eye(4))
    x, a = torch.from_numpy(rng.normal(size=(N, 4))), weights(rng, N)
    history, sweeps = PotentialHistory(attention.tol), []
    for _ in range(10):
        result = attention.solve(x, a, history.guess(x, a), history.memory)
        assert result.converged
        history.add(x, a, result)
        sweeps.append(result.n_iter)
        x = x - 0.02 * result.mean_y
    assert max(sweeps[6:]) <= 3
    assert sweeps[0] >= 7


def curve(t: float, start: Tensor) -> tuple[Tensor, Tensor]:
    """Tokens that spread at rates of their own, and a potential that is quadratic in them."""
    x = start * torch.exp(t * torch.tensor([0.5, -1.0, 2.0], dtype=torch.float64))
    return x, -0.5 * (x * x).sum(-1)


@pytest.mark.parametrize(
    "times", [[0, 0.02, 0.04, 0.06, 0.08, 0.1, 0.12], [0, 0.01, 0.03, 0.05, 0.06, 0.09, 0.1]]
)
def test_potentials_are_extrapolated_to_the_order_of_the_history(times: list[float]) -> None:
    rng = np.random.default_rng(11)
    start, w = torch.from_numpy(rng.normal(size=(700, 3))), weights(rng, 700)
    blank = torch.zeros(700, dtype=torch.float64)
    history = PotentialHistory(1e-9)
    for t in times[:-1]:
        x, f = curve(t, start)
        history.add(x, w, SinkhornResult(f, f, blank, blank, blank, blank, x, True, 1))
    x, f = curve(times[-1], start)
    guessed = history.guess(x, w)
    assert guessed is not None
    # three rates fix three coefficients, the others are free: still far below one step's change, 0.1
    assert float((guessed[0] - f).abs().max()) < 2e-5 * float(f.abs().max())


def test_extrapolation_of_states_that_stand_still_stays_put() -> None:
    rng = np.random.default_rng(12)
    x, w = torch.from_numpy(rng.normal(size=(300, 3))), weights(rng, 300)
    f, blank = x[:, 0] ** 2, torch.zeros(300, dtype=torch.float64)
    history = PotentialHistory(1e-9)
    for _ in range(4):
        history.add(x, w, SinkhornResult(f, f, blank, blank, blank, blank, x, True, 1))
    guessed = history.guess(x, w)
    assert guessed is not None
    assert torch.equal(guessed[0], f)


def test_secant_pairs_replace_the_oldest_and_forget_single_members() -> None:
    like = torch.zeros(2, 5, dtype=torch.float64)
    pairs = SecantPairs.empty(like, 3)
    for k in range(1, 6):
        pairs.add(torch.full_like(like, k), torch.full_like(like, 10.0 * k))
    assert pairs.count == 3
    assert sorted(pairs.steps[0, :, 0].tolist()) == [3, 4, 5]
    assert torch.equal(pairs.residuals, 10 * pairs.steps)
    pairs.forget(torch.tensor([False, True]))
    assert sorted(pairs.steps[0, :, 0].tolist()) == [3, 4, 5]
    assert not bool(pairs.steps[1].any() or pairs.residuals[1].any())
    assert pairs.fit(like)
    assert not pairs.fit(like[:1])


@pytest.mark.parametrize("max_iter", [1, 2, 5])
def test_no_more_sweeps_than_allowed(max_iter: int) -> None:
    rng = np.random.default_rng(13)
    x, a = torch.from_numpy(rng.normal(size=(N, 2))), weights(rng, N)
    with pytest.warns(NotConverged):
        r = sinkhorn(x, a, x, a, 0.9 * torch.eye(2, dtype=torch.float64), 1.0, max_iter=max_iter)
    assert r.n_iter <= max_iter


def test_a_potential_far_too_large_does_not_hide_its_rounding() -> None:
    """A cluster of mass 1e-2 whose sums fall by e^17 from the base: errors are those of the sums, not of the base."""
    rng = np.random.default_rng(0)
    x, y = (0.5 * torch.from_numpy(rng.normal(size=(N, 2))) for _ in range(2))
    y[:, 1] *= 0.05
    x[:20, 1], y[0, 1] = 3 + 0.1 * x[:20, 1], 10
    a, b = torch.full((N,), 0.99 / (N - 20)).double(), torch.full((N,), (1 - 1e-6) / (N - 1)).double()
    a[:20], b[0] = 1e-2 / 20, 1e-6
    a, b, A = a / a.sum(), b / b.sum(), torch.eye(2, dtype=torch.float64)
    r = sinkhorn(x, a, y, b, A, 1.0, tol=1e-13)
    g = r.g.clone()
    g[0] += 17.5
    for tol in (1.9e-7, 1e-8):
        q = sinkhorn(x, a, y, b, A, 1.0, tol=tol, warm=(r.f, g))
        assert q.converged
        assert marginal_errors(q, x, a, y, b, A, 1.0) <= tol


def test_a_finished_member_does_not_hold_up_the_others() -> None:
    rng = np.random.default_rng(0)
    x, u = torch.from_numpy(rng.normal(size=(N, 2))), torch.full((2, N), 1 / N).double()
    y = torch.from_numpy(rng.normal(size=(N, 2))).expand(2, N, 2)
    r = sinkhorn(torch.stack([0 * x, 2 * x]), u, y, u, 0.6 * torch.eye(2, dtype=torch.float64), 1.0)
    assert r.converged
    assert r.n_iter <= 15
