"""One small run of each study for all tests of it."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from ot_transformers.studies import StudyResult
from ot_transformers.studies.compare import CompareConfig, run

SMALL = {
    "n": 24,
    "d": 3,
    "t_end": 1.0,
    "n_times": 13,
    "jko_steps": (4, 8),
    "sizes": (32, 64),
    "repeats": 3,
}


@pytest.fixture(scope="session")
def compared() -> StudyResult:
    return run(CompareConfig(**SMALL))  # type: ignore[arg-type]


@pytest.fixture(scope="session")
def token_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("tokens") / "cloud.npy"
    rng = np.random.default_rng(0)
    np.save(path, rng.standard_normal((30, 2)) @ np.diag([1.0, 0.6]))
    return path
