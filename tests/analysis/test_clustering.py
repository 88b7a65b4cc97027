"""Clusters, leaders and rank on clouds whose structure is known."""

from __future__ import annotations

import numpy as np
import pytest

from ot_transformers.analysis.clustering import clustering_report
from ot_transformers.analysis.rank import numerical_rank
from ot_transformers.measures import Gaussian, Particles
from ot_transformers.models import load_tokens

CENTRES = np.array([[0.0, 0.0], [10.0, 0.0], [0.0, 10.0]])


def three_clusters(scale: float) -> np.ndarray:
    rng = np.random.default_rng(0)
    return np.concatenate(
        [
            c + 0.3 * scale * rng.standard_normal((m, 2))
            for c, m in zip(scale * CENTRES, (5, 9, 7), strict=True)
        ]
    )


@pytest.mark.parametrize("scale", [1e-8, 1.0, 1e6])
def test_three_clusters_are_found_at_every_scale(scale: float) -> None:
    report = clustering_report(three_clusters(scale))
    assert report.n_clusters == 3
    np.testing.assert_allclose(report.masses, np.array([9, 7, 5]) / 21)
    np.testing.assert_array_equal(np.bincount(report.labels), [9, 7, 5])
    assert report.scale / scale < 10


def test_the_leader_is_the_weighted_medoid() -> None:
    x = np.array([[0.0], [1.0], [2.0], [100.0]])
    assert clustering_report(x, scale=1.5).leaders.tolist() == [1, 3]
    heavy = Particles(x, [0.1, 0.1, 0.7, 0.1])
    assert clustering_report(heavy, scale=1.5).leaders.tolist() == [2, 3]


def test_one_blob_is_one_cluster_and_coincident_points_are_clusters() -> None:
    rng = np.random.default_rng(1)
    assert clustering_report(rng.uniform(size=(200, 2)), min_gap=3.0).n_clusters == 1
    assert clustering_report(np.repeat(CENTRES, 4, axis=0)).n_clusters == 3
    assert clustering_report(np.zeros((5, 2))).n_clusters == 1
    assert clustering_report(np.zeros((1, 2))).n_clusters == 1


def test_diameter_and_rank() -> None:
    report = clustering_report(np.array([[0.0, 0.0, 1.0], [3.0, 4.0, 1.0], [1.0, 1.0, 1.0]]))
    assert report.diameter == pytest.approx(5.0)
    assert report.rank == 2


def test_rank_thresholds() -> None:
    S = np.diag([1.0, 1e-3, 1e-12, 0.0])
    g = Gaussian(np.zeros(4), S)
    assert int(numerical_rank(g)) == 3
    assert int(numerical_rank(g, 1e-6)) == 2
    assert int(numerical_rank(S, absolute=0.1)) == 1
    assert int(numerical_rank(1e-3 * S, absolute=0.1)) == 0
    assert int(numerical_rank(1e-3 * S, 1e-6)) == 2


def test_a_factor_keeps_the_rank_that_a_covariance_loses() -> None:
    L = np.diag([1.0, 1e-10, 0.0])
    assert int(numerical_rank(Gaussian.from_factor(np.zeros(3), L))) == 2
    assert int(numerical_rank(L @ L.T)) == 1


def test_rank_of_a_batch_is_that_of_its_members() -> None:
    S = np.stack([np.eye(2), np.diag([1.0, 0.0]), np.zeros((2, 2))])
    np.testing.assert_array_equal(numerical_rank(S), [2, 1, 0])


def test_one_duplicated_token_changes_nothing() -> None:
    x = np.asarray(load_tokens().x).copy()
    assert clustering_report(x).n_clusters == 1
    x[1] = x[0]
    assert clustering_report(x).n_clusters == 1
    rng = np.random.default_rng(2)
    blobs = np.concatenate([rng.uniform(size=(50, 2)), 10 + rng.uniform(size=(50, 2))])
    blobs[7] = blobs[3]
    report = clustering_report(blobs)
    assert report.n_clusters == 2
    np.testing.assert_allclose(report.masses, [0.5, 0.5])
    assert 1 < report.gap < np.inf


def test_tokens_of_weight_0_are_no_part_of_the_measure() -> None:
    x = np.array([[0.0], [0.1], [5.0], [5.1], [100.0]])
    report = clustering_report(Particles(x, [0.25, 0.25, 0.25, 0.25, 0.0]))
    assert report.n_clusters == 2
    assert report.diameter == pytest.approx(5.1)
    assert report.labels[-1] == -1
    assert 4 not in report.leaders
    alone = clustering_report(Particles(x, [0.0, 0.0, 1.0, 0.0, 0.0]))
    assert alone.n_clusters == 1
    assert alone.diameter == 0
    assert alone.leaders.tolist() == [2]
    assert alone.labels.tolist() == [-1, -1, 0, -1, -1]


def test_the_rank_of_one_place_is_0() -> None:
    # The mean of ten times 0.1 is off by an ulp, which is no extent.
    x = np.full((10, 2), 0.1)
    assert int(numerical_rank(Particles(x))) == 0
    assert clustering_report(x).rank == 0
    far = 1e6 + np.array([[0.0, 0.0], [1.0, 0.0], [2.0, 0.0]])
    assert int(numerical_rank(Particles(far))) == 1
