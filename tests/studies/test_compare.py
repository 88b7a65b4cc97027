"""The main job on small problems: its numbers against closed forms and against independent computations."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from ot_transformers.attention import SinkhornAttention
from ot_transformers.flows import solve
from ot_transformers.measures import Gaussian, Particles
from ot_transformers.metrics import BuresWasserstein
from ot_transformers.studies import StudyResult
from ot_transformers.studies._steps import Run, Steps
from ot_transformers.studies.compare import CompareConfig, run

from .conftest import SMALL


def finding(result: StudyResult, title: str) -> Any:
    return next(f for f in result.findings if title in f.title)


def test_every_check_of_a_gradient_preset_is_within_tolerance(compared: StudyResult) -> None:
    assert compared.passed
    assert compared.exit_status == 0
    assert {f.title for f in compared.findings if f.passed is not None} >= {
        "The Gaussian closure is the gradient flow",
        "JKO steps tend to the flow at order 1",
        "Energy decreases at the rate of its squared gradient",
        "JKO steps never increase the energy",
        "Ranks and eigenvalues",
    }


def test_closure_and_gradient_flow_agree_to_1e_minus_7(compared: StudyResult) -> None:
    same = finding(compared, "The Gaussian closure is the gradient flow")
    assert same.tolerance == 1e-7
    assert same.value <= 1e-7


def test_reported_gap_is_that_of_an_independent_run(compared: StudyResult) -> None:
    a = compared.arrays
    cloud = Particles(torch.from_numpy(a["tokens_start"]))
    attention = SinkhornAttention(torch.from_numpy(a["A"]), torch.from_numpy(a["V"]))
    end = solve(attention, cloud, 1.0, rtol=1e-9).states[-1]
    law = solve(attention, Gaussian(cloud.mean, cloud.cov), 1.0, rtol=1e-9).states[-1]
    assert isinstance(end, Particles)
    expected = BuresWasserstein().distance(Gaussian(end.mean, end.cov), law)
    assert float(a["gap_tokens"][-1]) == pytest.approx(float(expected), rel=1e-5)
    np.testing.assert_allclose(a["tokens_end"], end.x, atol=1e-6)


def test_energy_balance_holds_pointwise_too(compared: StudyResult) -> None:
    table = next(t for t in compared.tables if t.name == "in_time")
    columns = {name: np.array([row[k] for row in table.rows]) for k, name in enumerate(table.columns)}
    for curve in ("closure", "gradient flow", "particles"):
        rate, speed = columns[f"dF/dt, {curve}"], columns[f"|grad F|^2, {curve}"]
        np.testing.assert_allclose(rate, -speed, rtol=1e-4)


def test_jko_errors_halve_with_the_step(compared: StudyResult) -> None:
    error = compared.arrays["jko_error"]
    assert error[0] / error[1] == pytest.approx(2.0, rel=0.15)


def test_trained_head_reports_its_residual_and_offers_the_symmetrised_one() -> None:
    result = run(CompareConfig(**{**SMALL, "preset": "head0", "sizes": (32, 64), "repeats": 2}))  # type: ignore[arg-type]
    text = finding(result, "Not a gradient flow")
    assert text.value > 0.1
    assert "--preset head0-symmetric" in text.text
    assert not any("JKO" in f.title or "nergy" in f.title for f in result.findings)
    assert "jko_error" not in result.arrays


@pytest.mark.parametrize("kind", ["softmax", "l2", "linear"])
def test_other_kinds_compare_particles_with_their_closure(kind: str, token_file: Path) -> None:
    config = CompareConfig(
        tokens=str(token_file),
        attention=kind,  # type: ignore[arg-type]
        preset="repulsive",
        d=None,
        t_end=0.5,
        n_times=9,
        jko_steps=(2, 4),
        sizes=(64, 256),
        repeats=4,
    )
    result = run(config)
    own, null = finding(result, "The gap of the tokens"), result.arrays["gap_gaussian"][-1]
    assert result.arrays["gap_tokens"][0] < 1e-12
    assert 0 < own.value < 30 * null.mean()
    assert np.diff(result.arrays["gap_against_n"].mean(1))[0] < 0


def test_comparison_ends_before_the_closure_blows_up(token_file: Path) -> None:
    config = CompareConfig(
        tokens=str(token_file),
        attention="softmax",
        preset="identity",
        d=None,
        t_end=10.0,
        n_times=9,
        jko_steps=(2, 4),
        sizes=(64, 128),
        repeats=2,
    )
    result = run(config)
    x = np.load(token_file)
    # V = A = I: t* = 1 / (2 lambda_max(S0)).
    blow_up = 0.5 / np.linalg.eigvalsh(np.cov(x.T, bias=True))[-1]
    assert any("blows up" in note for note in result.notes)
    # E_A is infinite where S has an eigenvalue >= 1: said, and left out.
    assert finding(result, "The energy is infinite along the closure").passed is None
    assert result.arrays["times"][-1] == pytest.approx(0.9 * blow_up, rel=1e-5)
    # Each cloud has a blow-up time of its own: near it the law n^(-1/2) has no verdict.
    rate = finding(result, "Gaussian samples approach the closure")
    assert rate.passed is None
    assert "close to a blow-up" in rate.text
    assert result.passed


def test_rank_deficient_cloud_keeps_its_rank() -> None:
    """n < d: the covariance is singular, and this just works."""
    result = run(CompareConfig(**{**SMALL, "n": 6, "d": 8, "sizes": (32, 64), "repeats": 2}))  # type: ignore[arg-type]
    ranks = finding(result, "Ranks and eigenvalues")
    assert ranks.passed
    assert "rank 5 of 8 at all times" in ranks.text
    assert finding(result, "The Gaussian closure is the gradient flow").passed


def test_the_same_seed_gives_the_same_bits_and_another_does_not(compared: StudyResult) -> None:
    again = run(CompareConfig(**SMALL))  # type: ignore[arg-type]
    for name, value in compared.arrays.items():
        np.testing.assert_array_equal(again.arrays[name], value)
    other = run(CompareConfig(**{**SMALL, "seed": 1}))  # type: ignore[arg-type]
    assert (other.arrays["gap_against_n"] != compared.arrays["gap_against_n"]).all()


def test_float32_runs_in_float32(token_file: Path) -> None:
    config = CompareConfig(
        **{
            **SMALL,
            "tokens": str(token_file),
            "preset": "repulsive",
            "d": None,
            "n": None,
            "dtype": "float32",
        }  # type: ignore[arg-type]
    )
    result = run(config)
    assert result.arrays["tokens_end"].dtype == np.float32
    assert finding(result, "The Gaussian closure is the gradient flow").passed


@pytest.mark.parametrize("cloud", ["identical tokens", "tokens at the origin", "no time"])
def test_where_distances_are_rounding_there_is_no_verdict(cloud: str, tmp_path: Path) -> None:
    """No power can be fitted to distances of 0: such runs end in order, with a word instead."""
    x = {"identical tokens": np.ones((9, 3)), "tokens at the origin": np.zeros((9, 3))}
    file = tmp_path / "tokens.npy"
    np.save(file, x.get(cloud, np.random.default_rng(0).standard_normal((9, 3))))
    t_end = 1e-300 if cloud == "no time" else 1.0
    small: dict[str, Any] = {"n_times": 9, "sizes": (8, 16), "repeats": 2}
    result = run(CompareConfig(tokens=str(file), preset="repulsive", d=3, t_end=t_end, **small))
    assert result.exit_status == 0
    if cloud == "no time":
        assert finding(result, "order 1").passed is None
        assert "hardly move" in finding(result, "The Gaussian closure is the gradient flow").text
    else:
        assert "errors of the solver and rounding" in finding(result, "Gaussian samples").text


def test_an_order_below_the_error_of_the_flow_is_not_read() -> None:
    def run_of(tau: float, error: float) -> Run:
        return Run(tau, np.zeros(1), np.zeros(1), np.array([error]), [], True)

    runs = [run_of(0.2, 2e-6), run_of(0.1, 1e-6)]
    assert Steps(runs, 1e-8).verdict("order", "", 0.1).passed
    undecided = Steps(runs, 2e-7).verdict("order", "", 0.1)
    assert undecided.passed is None
    assert "2.00e-06" in undecided.text
