"""Bad inputs of the analysis tools."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from ot_transformers.analysis import (
    classify,
    clustering_report,
    gaussianity,
    mean_field_experiment,
    numerical_rank,
    phase_diagram,
    stability_constant,
    stability_experiment,
)
from ot_transformers.attention import AffineBlock, LinearAttention, Schedule, SoftmaxAttention
from ot_transformers.cluster import dask_mapper
from ot_transformers.flows import solve
from ot_transformers.measures import Gaussian, Particles

I2 = np.eye(2)
SOFTMAX = SoftmaxAttention(-I2, I2)
UNIT = Gaussian(np.zeros(2), I2)
CLOUD = np.arange(8.0).reshape(4, 2)


def nothing(p: object, rng: object) -> object:
    return None


ROWS: list[tuple[str, Callable[[], object], str]] = [
    ("rank-both", lambda: numerical_rank(I2, 0.1, absolute=0.1), "tol or absolute"),
    ("rank-negative", lambda: numerical_rank(I2, -1.0), "tol must be >= 0"),
    (
        "rank-asymmetric",
        lambda: numerical_rank(np.array([[1.0, 1.0], [0.0, 1.0]])),
        "measure must be symmetric",
    ),
    ("clusters-scale", lambda: clustering_report(CLOUD, scale=0.0), "scale must be > 0"),
    ("clusters-gap", lambda: clustering_report(CLOUD, min_gap=1.0), "min_gap must be > 1"),
    ("clusters-batch", lambda: clustering_report(np.zeros((2, 3, 2))), "cloud must be a single cloud"),
    ("clusters-huge", lambda: clustering_report(np.array([[0.0], [1e200], [3e200]])), "cloud is too large"),
    ("gaussianity-rounding", lambda: gaussianity(np.full((10, 2), 0.1)), "single point"),
    ("gaussianity-few", lambda: gaussianity(np.zeros((2, 2))), "at least 3 tokens"),
    ("gaussianity-point", lambda: gaussianity(np.ones((5, 2))), "single point"),
    ("gaussianity-batch", lambda: gaussianity(np.zeros((2, 5, 2))), "cloud must be a single cloud"),
    ("stability-time", lambda: stability_constant(SOFTMAX, 0.0, 1.0), "t must be > 0"),
    ("stability-radius", lambda: stability_constant(SOFTMAX, 1.0, -1.0), "R0 must be > 0"),
    ("stability-kind", lambda: stability_constant("softmax", 1.0, 1.0), "attention must be"),
    (
        "stability-batch",
        lambda: stability_constant(SoftmaxAttention(np.ones((2, 1, 1)), 1.0), 1.0, 1.0),
        "batch",
    ),
    ("stability-p", lambda: stability_experiment(SOFTMAX, CLOUD, CLOUD + 1, 1.0, p=3), "p must be one of"),
    (
        "stability-p-list",
        lambda: stability_experiment(SOFTMAX, CLOUD, CLOUD + 1, 1.0, p=[1, 2]),
        "p must be a number",
    ),
    (
        "stability-times",
        lambda: stability_experiment(SOFTMAX, CLOUD, CLOUD + 1, 1.0, n_times=-1),
        "n_times must be",
    ),
    (
        "stability-times-word",
        lambda: stability_experiment(SOFTMAX, CLOUD, CLOUD + 1, 1.0, n_times="a"),
        "n_times must",
    ),
    (
        "stability-times-real",
        lambda: stability_experiment(SOFTMAX, CLOUD, CLOUD + 1, 1.0, n_times=2.5),
        "n_times must",
    ),
    ("mean-field-kind", lambda: mean_field_experiment(3, UNIT, 1.0), "attention must be an Attention"),
    ("mean-field-sizes", lambda: mean_field_experiment(SOFTMAX, UNIT, 1.0, ns=8), "ns must be a list"),
    (
        "mean-field-batch",
        lambda: mean_field_experiment(SoftmaxAttention(np.stack([I2, I2]), I2), UNIT, 1.0),
        "attention must be a single one",
    ),
    ("mean-field-dirac", lambda: mean_field_experiment(SOFTMAX, Gaussian(np.zeros(2), 0 * I2), 1.0), "Dirac"),
    (
        "mean-field-blown",
        lambda: mean_field_experiment(LinearAttention(I2, I2), UNIT, 0.45, ns=(4, 8, 16), n_repeats=3),
        "clouds of 4 tokens do not reach t = 0.45",
    ),
    ("mean-field-one-size", lambda: mean_field_experiment(SOFTMAX, UNIT, 1.0, ns=(8, 8)), "ns must hold"),
    ("mean-field-time", lambda: mean_field_experiment(SOFTMAX, UNIT, 0.0), "t must be > 0"),
    (
        "classify-particles",
        lambda: classify(SOFTMAX, solve(SOFTMAX, Particles(CLOUD), 0.1)),
        "trajectory must be",
    ),
    (
        "classify-schedule",
        lambda: classify(Schedule([AffineBlock(I2)], [0.0]), solve(SOFTMAX, UNIT, 0.1)),
        "attention must not depend on time",
    ),
    ("classify-none", lambda: classify(None, solve(SOFTMAX, UNIT, 0.1)), "attention must be an Attention"),
    ("classify-number", lambda: classify(SOFTMAX, 3), "trajectory must be a Trajectory"),
    (
        "classify-dimension",
        lambda: classify(SoftmaxAttention(np.eye(3), np.eye(3)), solve(SOFTMAX, UNIT, 0.1)),
        "trajectory has dimension 2",
    ),
    ("phase-no-axes", lambda: phase_diagram(nothing, {}, t_end=1.0), "axes must name"),
    ("phase-axis", lambda: phase_diagram(nothing, {"a": [np.nan]}, t_end=1.0), "axes\\['a'\\]"),
    ("phase-axis-word", lambda: phase_diagram(nothing, {"a": "xy"}, t_end=1.0), "axes\\['a'\\] must be"),
    ("phase-file", lambda: phase_diagram(nothing, {"a": [1.0]}, t_end=1.0, file=""), "file must be the path"),
    ("phase-build", lambda: phase_diagram(nothing, {"a": [1.0]}, t_end=1.0), "build must return"),
    ("dask-client", lambda: dask_mapper("client"), "client must be"),
]
