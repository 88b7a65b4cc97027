"""Every example runs from start to end and makes a picture."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLES = sorted((Path(__file__).parents[1] / "examples").glob("plot_*.py"))
COUNT_FIGURES = (
    "import runpy, sys, matplotlib; matplotlib.use('Agg'); import matplotlib.pyplot as plt; "
    "plt.show = lambda *a, **k: None; runpy.run_path(sys.argv[1], run_name='__main__'); "
    "n = sum(bool(plt.figure(i).axes) for i in plt.get_fignums()); "
    "assert n >= 1, 'the example left no figure open'"
)


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda p: p.stem)
def test_example_runs_and_makes_a_picture(path: Path, tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-W", "error::RuntimeWarning", "-c", COUNT_FIGURES, str(path)],
        cwd=tmp_path,
        env={**os.environ, "MPLBACKEND": "Agg", "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-2000:]
