"""The parts that the studies measure with: time grid, matched clouds, slopes, tokens from files, presets."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from ot_transformers.measures import Gaussian, Particles
from ot_transformers.models import load_head, load_tokens
from ot_transformers.studies._curves import distance_travelled, spectrum
from ot_transformers.studies._grid import time_grid
from ot_transformers.studies._presets import PRESETS, balanced_factors, load_parameters
from ot_transformers.studies._problem import ProblemConfig, build
from ot_transformers.studies._sampling import matched_clouds, slope_with_interval
from ot_transformers.studies._steps import Run, Steps, step_counts
from ot_transformers.studies._tokens import load_cloud

OPTIONS = {"seed": 0, "dtype": "float64", "device": "cpu"}


def cloud_of(source: str, n: int | None = None, d: int | None = None):  # type: ignore[no-untyped-def]
    return load_cloud(source, n=n, d=d, **OPTIONS)  # type: ignore[arg-type]


def test_grid_integrates_and_differentiates_to_rounding() -> None:
    grid = time_grid(3.0)
    assert (grid.t[0], grid.t[-1]) == (0.0, 3.0)
    y = np.exp(-2 * grid.t)
    np.testing.assert_allclose(grid.integral(y), -0.5 * np.expm1(-2 * grid.t), atol=1e-13)
    np.testing.assert_allclose(grid.derivative(y), -2 * y, atol=1e-9)
    assert grid.truncation(y) < 1e-14 < grid.truncation(np.abs(grid.t - 1.1))


def test_matched_clouds_have_the_very_moments_of_the_cloud() -> None:
    rng = np.random.default_rng(0)
    cloud = Particles(torch.from_numpy(rng.exponential(size=(20, 4)) @ rng.standard_normal((4, 6))))
    twins = matched_clouds(cloud, 3, seed=1)
    for k in range(3):
        np.testing.assert_allclose(twins[k].mean, cloud.mean, atol=1e-12)
        np.testing.assert_allclose(twins[k].cov, cloud.cov, atol=1e-12)
    assert float((twins.x_t[0] - twins.x_t[1]).abs().max()) > 0.1


def test_slope_and_interval_of_known_powers() -> None:
    n = np.array([10.0, 100.0, 1000.0])
    exact = n[:, None] ** np.array([-0.4, -0.6, -0.5])
    slope, half = slope_with_interval(n, exact)
    assert slope == pytest.approx(-0.5, abs=1e-12)
    # Student's quantile for 2 degrees of freedom times 0.1 / sqrt(3).
    assert half == pytest.approx(4.302653 * 0.1 / np.sqrt(3), rel=1e-6)


def test_distance_travelled_of_a_translation_is_its_length() -> None:
    states = [Gaussian([3.0 * t, 4.0 * t], np.eye(2)) for t in (0.0, 0.5, 1.0)]
    assert distance_travelled(states) == pytest.approx(5.0, rel=1e-12)


def test_effective_rank_counts_equal_eigenvalues() -> None:
    s = spectrum([Gaussian(np.zeros(4), np.diag([2.0, 2.0, 2.0, 0.0]))])
    assert s.rank[0] == 3
    assert s.effective[0] == pytest.approx(3.0, rel=1e-12)


def test_principal_components_keep_the_largest_eigenvalues_and_the_mean() -> None:
    full = cloud_of("minilm")
    kept = cloud_of("minilm", d=5)
    w = torch.linalg.eigvalsh(full.particles.cov_t).flip(0)
    torch.testing.assert_close(kept.particles.cov_t, torch.diag(w[:5]), atol=1e-9, rtol=1e-9)
    assert kept.share == pytest.approx(float(w[:5].sum() / w.sum()), rel=1e-10)
    torch.testing.assert_close(kept.particles.mean_t, kept.basis.mT @ full.particles.mean_t)
    np.testing.assert_allclose(full.particles.x, load_tokens().x, atol=0)


@pytest.mark.parametrize("ending", [".npy", ".npz", ".csv"])
def test_every_format_gives_the_same_cloud(ending: str, tmp_path: Path) -> None:
    x = np.random.default_rng(1).standard_normal((7, 3))
    path = tmp_path / f"cloud{ending}"
    if ending == ".npy":
        np.save(path, x)
    elif ending == ".npz":
        np.savez(path, tokens=x)
    else:
        np.savetxt(path, x, delimiter=",", header="a,b,c", comments="", fmt="%.17g")
    np.testing.assert_array_equal(cloud_of(str(path)).particles.x, x)


def test_weights_of_a_file_are_kept(tmp_path: Path) -> None:
    np.savez(tmp_path / "w.npz", tokens=np.eye(3), weights=[0.5, 0.25, 0.25])
    np.testing.assert_allclose(cloud_of(str(tmp_path / "w.npz")).particles.weights, [0.5, 0.25, 0.25])


def test_a_gaussian_of_a_file_is_the_population_of_its_tokens(tmp_path: Path) -> None:
    S = np.array([[2.0, 0.5], [0.5, 1.0]])
    np.savez(tmp_path / "law.npz", mean=[1.0, -1.0], cov=S)
    cloud = cloud_of(str(tmp_path / "law.npz"), n=50)
    assert cloud.exact
    assert cloud.particles.n == 50
    np.testing.assert_allclose(cloud.gaussian.cov, S, rtol=1e-12)


def test_presets_are_compressed_to_the_kept_components() -> None:
    cloud = cloud_of("minilm", d=6)
    p = load_parameters("head0", None, 1.0, cloud, 0)
    B, head = cloud.basis.numpy(), load_head(0).double()
    np.testing.assert_allclose(p.A, B.T @ (head.K.T @ head.Q / np.sqrt(32)) @ B, atol=1e-12)
    np.testing.assert_allclose(p.V, B.T @ (head.W_O @ head.W_V) @ B, atol=1e-12)


@pytest.mark.parametrize("name", [k for k, v in PRESETS.items() if "a gradient flow" in v.text])
def test_gradient_presets_have_symmetric_scores(name: str) -> None:
    p = load_parameters(name, None, 1.0, cloud_of("minilm", d=4), 3)
    torch.testing.assert_close(p.A, p.A.mT, atol=1e-14, rtol=1e-12)


def test_query_and_key_of_a_file_carry_the_scale(tmp_path: Path) -> None:
    rng = np.random.default_rng(2)
    Q, K, V = rng.standard_normal((2, 3)), rng.standard_normal((2, 3)), rng.standard_normal((3, 3))
    np.savez(tmp_path / "qkv.npz", Q=Q, K=K, V=V)
    np.save(tmp_path / "x.npy", rng.standard_normal((9, 3)))
    p = load_parameters("head0", str(tmp_path / "qkv.npz"), -0.25, cloud_of(str(tmp_path / "x.npy")), 0)
    np.testing.assert_allclose(p.A, -0.25 * K.T @ Q, rtol=1e-12)
    torch.testing.assert_close(p.K.mT @ p.Q, p.A)


def test_balanced_factors_multiply_to_the_score() -> None:
    A = torch.from_numpy(np.random.default_rng(0).standard_normal((4, 4)))
    Q, K = balanced_factors(A)
    torch.testing.assert_close(K.mT @ Q, A)
    torch.testing.assert_close(torch.linalg.svdvals(Q), torch.linalg.svdvals(K))


def test_order_is_extrapolated_to_step_zero() -> None:
    """An error tau + tau^2 is of order 1, though its slope at these steps is off by more than 0.1."""
    tau = np.array([0.4, 0.2, 0.1])
    one = np.zeros(1)
    steps = Steps([Run(t, one, one, np.array([t + t**2]), [], True) for t in tau])
    assert steps.orders()[-1] > 1.1
    assert steps.order == pytest.approx(1.0, abs=0.05)


def test_steps_stay_below_the_critical_size() -> None:
    problem = build(ProblemConfig(preset="identity", n=30, d=2))
    counts = step_counts(problem, 8.0)
    # -OT / 2 and OT / 2 with A = I have curvature of size 1: steps of 1 or more have no minimiser.
    assert 8.0 / counts[0] <= 0.5
    assert counts[1:] == (2 * counts[0], 4 * counts[0])
