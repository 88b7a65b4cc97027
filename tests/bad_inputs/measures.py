"""Bad inputs of the measures."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch

from ot_transformers.measures import Gaussian, Particles, PositionedParticles

I2 = np.eye(2)
ZERO = np.zeros(2)

ROWS: list[tuple[str, Callable[[], object], str]] = [
    ("cov-not-square", lambda: Gaussian(ZERO, np.ones((2, 3))), "cov must be square"),
    ("cov-asymmetric", lambda: Gaussian(ZERO, [[1.0, 0.5], [0.0, 1.0]]), "cov must be symmetric"),
    (
        "cov-indefinite",
        lambda: Gaussian(ZERO, np.diag([1.0, -0.25])),
        "cov must be positive semi-definite.*-0.25",
    ),
    ("cov-nan", lambda: Gaussian(ZERO, np.array([[np.nan, 0], [0, 1.0]])), "cov has 1 NaN"),
    ("mean-inf", lambda: Gaussian([np.inf, 0.0], I2), "mean has 1 NaN or infinite"),
    ("mean-dimension", lambda: Gaussian(np.zeros(3), I2), "mean has dimension 3, cov has dimension 2"),
    ("mean-complex", lambda: Gaussian(np.zeros(2, complex), I2), "mean must be real"),
    ("mean-objects", lambda: Gaussian(np.array([None, 1], dtype=object), I2), "mean must be a numeric array"),
    ("mean-text", lambda: Gaussian(["a", "b"], I2), "mean must be a numeric array"),
    ("mean-ragged", lambda: Gaussian([[1.0], [1.0, 2.0]], I2), "mean must be a numeric array"),
    (
        "mean-half",
        lambda: Gaussian(torch.zeros(2, dtype=torch.float16), torch.eye(2)),
        "mean must be float32 or",
    ),
    ("mean-empty", lambda: Gaussian([], I2), "mean is empty"),
    (
        "batches",
        lambda: Gaussian(np.zeros((2, 2)), np.stack([I2] * 3)),
        "batch dimensions do not broadcast: mean",
    ),
    ("list-of-tensors", lambda: Gaussian([torch.zeros(1), torch.zeros(1)], I2), "mean is a list of tensors"),
    (
        "factor-dimension",
        lambda: Gaussian.from_factor(np.zeros(3), np.ones((2, 1))),
        "factor has dimension 2",
    ),
    ("rank-tol", lambda: Gaussian(ZERO, I2).rank(-1.0), "tol must be >= 0"),
    ("sample-count", lambda: Gaussian(ZERO, I2).sample(0), "n must be at least 1"),
    ("sample-float", lambda: Gaussian(ZERO, I2).sample(2.5), "n must be an integer"),
    ("sample-seed", lambda: Gaussian(ZERO, I2).sample(2, seed=-1), "seed must be at least 0"),
    (
        "density-dimension",
        lambda: Gaussian(ZERO, I2).log_density(np.zeros((1, 3))),
        "x must have last dimension 2",
    ),
    ("ellipse", lambda: Gaussian(ZERO, I2).ellipse(0.0), "n_std must be > 0"),
    ("index", lambda: Gaussian(ZERO, I2)[0], "no batch dimensions"),
    ("cloud-vector", lambda: Particles(np.zeros(3)), "x must be a cloud"),
    ("cloud-empty", lambda: Particles(np.zeros((0, 2))), "x is empty"),
    ("cloud-nan", lambda: Particles([[np.nan]]), "x has 1 NaN"),
    ("weights-sum", lambda: Particles(np.zeros((2, 1)), [0.5, 0.6]), "weights must sum to 1"),
    ("weights-negative", lambda: Particles(np.zeros((2, 1)), [1.5, -0.5]), "weights must be nonnegative"),
    ("weights-count", lambda: Particles(np.zeros((2, 1)), [1.0]), "weights are for 1 tokens, x has 2"),
    ("positions-range", lambda: PositionedParticles(np.zeros((2, 1)), [0.0, 1.5]), "s must lie in"),
    ("positions-count", lambda: PositionedParticles(np.zeros((2, 1)), [0.0]), "s has 1 positions"),
]
