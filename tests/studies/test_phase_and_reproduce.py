"""The jobs `phase` and `reproduce` on small problems."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from ot_transformers.errors import InvalidInput
from ot_transformers.studies import phase, reproduce, silent


def test_softmax_phases_are_those_of_the_closed_form(tmp_path: Path) -> None:
    config = phase.PhaseConfig(points=3, draws=2, save=str(tmp_path / "phase.npz"))
    result = phase.run(config)
    assert result.passed
    code = result.arrays["code"]
    assert np.all(code[0, 0] == 1)  # A < 0: to a point
    assert np.all(code[0, 1] == 2)  # A <= 0 of rank 1
    assert np.all(code[1, 1] == 3)  # A = 0: nothing moves
    assert np.all(code[2] == 5)
    assert (tmp_path / "phase.npz").is_file()


def test_l2_has_no_blow_up_where_softmax_has() -> None:
    result = phase.run(phase.PhaseConfig(attention="l2", points=2, draws=1, t_end=5.0))
    assert result.passed
    assert np.isinf(result.arrays["blow_up_time"]).all()


def test_what_phase_cannot_use() -> None:
    for config, name in (
        (phase.PhaseConfig(attention="linear"), "attention"),
        (phase.PhaseConfig(points=1), "points"),
        (phase.PhaseConfig(low=1.0, high=-1.0), "low"),
        (phase.PhaseConfig(t_end=-1.0), "t_end"),
        (phase.PhaseConfig(eps=0.0), "eps"),
    ):
        with pytest.raises(InvalidInput, match=name):
            phase.run(config)


def test_reproduce_agrees_with_the_theory() -> None:
    result = reproduce.run(reproduce.ReproduceConfig(starts=2, draws=4, rank_t_end=1e4))
    assert result.passed, [f for f in result.findings if f.passed is False]
    assert {f.name for f in result.figures} >= {
        "panel_zero",
        "panel_line",
        "panel_blow-up",
        "ranks",
        "growth",
    }


def test_a_short_time_of_the_rank_flows_is_no_error() -> None:
    # The save times are counted from the end: at 1 they coincided.
    ranks = reproduce._ranks(reproduce.ReproduceConfig(draws=1, rank_t_end=1.0), silent)
    assert len(ranks.table.rows) == 12
    assert [r[1] for r in ranks.table.rows].count("identity") == 6
