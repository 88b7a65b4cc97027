"""Metrics and clouds that the tests of the twisted metric share."""

from __future__ import annotations

import numpy as np

from ot_transformers.measures import Particles


def setting(seed: int, d: int = 2) -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(seed)
    A = rng.standard_normal((d, d))
    X = rng.standard_normal((d, d + 1))
    return (A + A.T) / 4, X @ X.T + 0.2 * np.eye(d)


def cloud(seed: int, n: int, d: int = 2, weighted: bool = True) -> Particles:
    rng = np.random.default_rng(seed)
    w = rng.random(n) + 0.2
    return Particles(rng.standard_normal((n, d)), w / w.sum() if weighted else None)
