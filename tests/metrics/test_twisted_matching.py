"""Which particle goes where: matchings and plans of twisted geodesics."""

from __future__ import annotations

from itertools import permutations

import numpy as np
import pytest
import torch

from ot_transformers.measures import Particles
from ot_transformers.metrics import TwistedWasserstein
from ot_transformers.metrics._twisted_particles import cloud_path, flat_speed, path_scale
from ot_transformers.numerics.path_batch import rough_lengths

from .twisted_settings import cloud, setting


def test_matching_on_the_line_is_monotone() -> None:
    metric = TwistedWasserstein(-0.5, D=1.0)
    g = metric.geodesic(Particles([[2.0], [0.0], [1.0]]), Particles([[0.5], [3.0], [1.5]]))
    np.testing.assert_array_equal(g.details["matching"], [1, 0, 2])


@pytest.mark.parametrize(("seed", "sign"), [(2, 1), (2, -1)])
def test_unlabelled_distance_is_that_of_the_best_matching(seed: int, sign: int) -> None:
    """Against all 24 matchings; the assignment problem alone misses the best one by 0.7 and 1.9 per cent here."""
    rng = np.random.default_rng(seed)
    A = rng.standard_normal((2, 2))
    metric = TwistedWasserstein(sign * A @ A.T / 2, D=np.eye(2), tol=1e-4)
    x, y = 1.2 * rng.standard_normal((2, 4, 2))
    best = float(metric.geodesic(Particles(x), Particles(y), max_degree=8).length)
    Am, eye, w = torch.from_numpy(sign * A @ A.T / 2), torch.eye(2).double(), torch.full((4,), 0.25).double()
    labelled = [
        cloud_path(
            torch.from_numpy(x), torch.from_numpy(y[list(s)]), w, Am, eye, eye, 1e-4, (2, 4, 8)
        ).log_length
        for s in permutations(range(4))
    ]
    assert best == pytest.approx(np.exp(min(labelled)), rel=1e-3)


def test_permuted_clouds_are_the_same_measure() -> None:
    metric = TwistedWasserstein(-np.eye(2), D=np.eye(2))
    x = np.random.default_rng(0).standard_normal((6, 2))
    order = np.array([3, 0, 5, 1, 2, 4])
    w = np.arange(1.0, 7.0) / 21
    assert float(metric.distance(Particles(x), Particles(x[order]))) == 0.0
    assert float(metric.distance(Particles(x, w), Particles(x[order], w[order]))) == 0.0


def test_different_weights_move_along_the_plan() -> None:
    metric = TwistedWasserstein(np.zeros((2, 2)), D=np.eye(2))
    mu = Particles([[0.0, 0.0], [1.0, 0.0]], [0.75, 0.25])
    nu = Particles([[0.0, 1.0], [1.0, 1.0]], [0.25, 0.75])
    # A = 0: G = 1 and the metric is W_2. Half the mass goes (0,0) -> (1,1), the rest straight up.
    assert float(metric.distance(mu, nu)) == pytest.approx(np.sqrt(0.5 * 1 + 0.5 * 2), rel=1e-8)


@pytest.mark.parametrize(
    ("A", "D", "seed"),
    [([[-1.493, -0.925], [-0.925, -0.369]], [1.0, 1.0], 0), ([[1.0, 0.0], [0.0, 1.0]], [1.0, 0.2], 1)],
)
def test_far_clouds_of_three_have_the_shortest_of_all_matchings(
    A: list[list[float]], D: list[float], seed: int
) -> None:
    metric = TwistedWasserstein(np.array(A), D=np.diag(D), tol=1e-3)
    x, y = 1.5 * np.random.default_rng(seed).standard_normal((2, 3, 2))
    found = metric.geodesic(Particles(x), Particles(y), max_degree=8)
    lengths = {
        s: metric.geodesic(Particles(x), Particles(y[list(s)]), matching="identity", max_degree=8).length
        for s in permutations(range(3))
    }
    assert tuple(found.details["matching"]) == min(lengths, key=lambda s: float(lengths[s]))


def test_lengths_found_together_are_those_found_alone() -> None:
    """Rough lengths of all matchings at once, against one path after another at the same degree."""
    A, D = (torch.from_numpy(t) for t in setting(3))
    Dinv, root, w = (
        torch.linalg.inv(D),
        torch.linalg.cholesky(D),
        torch.full((3,), 1 / 3, dtype=torch.float64),
    )
    x, y = (torch.from_numpy(cloud(k, 3).x) for k in (3, 4))
    orders = [list(s) for s in permutations(range(3))]
    ends = torch.stack([y[s] for s in orders])
    logs, offsets = rough_lengths(
        flat_speed(x.shape, w, A, Dinv),
        x.reshape(-1),
        ends.reshape(6, -1),
        path_scale(x, ends, w, A, root),
        degree=4,
        max_iter=400,
    )
    alone = [cloud_path(x, y[s], w, A, Dinv, root, 1e-6, (4,)).log_length for s in orders]
    np.testing.assert_allclose(logs, alone, atol=1e-3)
    torch.testing.assert_close(offsets[:, -1], (ends - x).reshape(6, -1))
