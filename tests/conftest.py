"""Shared fixtures: reference values to 20 digits; one thread a worker, so that parallel tests do not fight."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

torch.set_num_threads(1)

SHARED = Path(__file__).resolve().parents[2] / "shared" / "reference" / "values.json"
OWN = Path(__file__).parent / "data" / "reference_values.json"


def floats(value: Any) -> Any:
    """Turn the strings of the reference file into floats and arrays."""
    if isinstance(value, str):
        return float(value)
    if isinstance(value, list) and value and isinstance(value[0], dict):
        return [floats(v) for v in value]
    if isinstance(value, list):
        return np.array([[float(x) for x in row] for row in value])
    return {k: floats(v) for k, v in value.items() if k not in ("about", "relative_perturbation")}


@pytest.fixture(scope="session")
def reference() -> Any:
    """Reference values as floats: `reference["closure_d3"]["softmax"]["M"]`; vectors are columns (d, 1)."""
    path = SHARED if SHARED.exists() and not os.environ.get("OTF_OWN_VALUES") else OWN
    return floats(json.loads(path.read_text()))
