"""The jobs `flow` and `jko` on small problems."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from ot_transformers.errors import InvalidInput
from ot_transformers.studies import flow, jko


def test_flow_reports_the_blow_up_time_of_the_closed_form(token_file: Path) -> None:
    config = flow.FlowConfig(
        tokens=str(token_file), attention="softmax", preset="identity", d=None, t_end=3.0, n_times=31
    )
    result = flow.run(config)
    S = np.cov(np.load(token_file).T, bias=True)
    ending = next(f for f in result.findings if f.title == "How the Gaussian closure ends")
    assert ending.value == pytest.approx(0.5 / np.linalg.eigvalsh(S)[-1], rel=1e-6)
    assert result.arrays["times"][-1] < ending.value


def test_flow_of_linear_attention_on_particles_is_its_closure(token_file: Path) -> None:
    """Linear attention acts on a cloud through its moments alone: no gap, up to the solver."""
    config = flow.FlowConfig(
        tokens=str(token_file), attention="linear", preset="repulsive", d=None, t_end=0.5, n_times=5
    )
    result = flow.run(config)
    assert result.arrays["gap"].max() < 1e-7


def test_jko_steps_have_order_one_on_gaussians_and_tokens(token_file: Path) -> None:
    result = jko.run(
        jko.JKOConfig(tokens=str(token_file), preset="repulsive", d=None, t_end=0.5, steps=(6, 12))
    )
    assert result.passed
    for key in ("gaussian", "tokens"):
        error = result.arrays[f"{key}_error"]
        assert np.log2(error[0] / error[1]) == pytest.approx(1.0, abs=0.1)
        assert (np.diff(result.arrays[f"{key}_energy_12"]) < 0).all()


def test_jko_needs_a_gradient_structure_and_says_what_to_do() -> None:
    with pytest.raises(InvalidInput, match=r"must be of gradient type.*try --preset head0-symmetric"):
        jko.run(jko.JKOConfig(preset="head0", n=20, d=3))
