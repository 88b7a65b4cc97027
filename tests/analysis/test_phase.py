"""Phase diagrams: right classes, and a resumed run that equals an undisturbed one to the bit."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ot_transformers.analysis import CLASSES, PhaseDiagram, phase_diagram
from ot_transformers.attention import Attention, SoftmaxAttention
from ot_transformers.errors import InvalidInput
from ot_transformers.measures import Gaussian

AXES = {"scale": np.array([-1.0, -0.5, 0.5]), "mix": np.array([0.0, 0.4])}
OPTIONS: dict[str, Any] = {"t_end": 50.0, "n_draws": 2, "chunk": 5, "rtol": 1e-6}
FIELDS = ("code", "rank", "growth_rate", "blow_up_time", "blow_up_error", "trace")


def build(p: Mapping[str, np.ndarray], rng: np.random.Generator) -> tuple[Attention, Gaussian]:
    n = len(p["scale"])
    X = rng.standard_normal((n, 2, 2))
    A = p["scale"][:, None, None] * np.eye(2) + p["mix"][:, None, None] * np.array([[0.0, 1.0], [-1.0, 0.0]])
    return SoftmaxAttention(A, np.eye(2)), Gaussian(
        np.zeros((n, 2)), X @ X.transpose(0, 2, 1) + 0.1 * np.eye(2)
    )


class Killed(Exception):
    """Stands for a kill of the process."""


def killed_after(chunks: int) -> Callable[[Callable[[Any], Any], Iterable[Any]], Iterator[Any]]:
    def mapper(function: Callable[[Any], Any], jobs: Iterable[Any]) -> Iterator[Any]:
        for k, job in enumerate(jobs):
            if k == chunks:
                raise Killed
            yield function(job)

    return mapper


def test_classes_follow_the_sign_of_the_score() -> None:
    diagram = phase_diagram(build, AXES, **OPTIONS)
    # A + A^T = 2 scale I: to a point for scale < 0, blow-up for scale > 0, whatever the mixing.
    assert np.all(diagram.code[:2] == CLASSES.index("converges to a point"))
    assert np.all(diagram.code[2] == CLASSES.index("blows up"))
    assert np.all(np.isfinite(diagram.blow_up_time) == (diagram.code == CLASSES.index("blows up")))
    np.testing.assert_array_equal(diagram.fraction("blows up"), [[0, 0], [0, 0], [1, 1]])


def test_resumed_after_a_kill_it_is_the_same_to_the_bit(tmp_path: Path) -> None:
    whole = phase_diagram(build, AXES, **OPTIONS)
    file = tmp_path / "diagram.npz"
    with pytest.raises(Killed):
        phase_diagram(build, AXES, file=file, mapper=killed_after(2), **OPTIONS)
    assert not file.exists()
    seen: list[int] = []
    resumed = phase_diagram(build, AXES, file=file, progress=lambda done, total: seen.append(done), **OPTIONS)
    assert seen == [10, 12]
    loaded = PhaseDiagram.load(file)
    for name in FIELDS:
        np.testing.assert_array_equal(getattr(resumed, name), getattr(whole, name))
        np.testing.assert_array_equal(getattr(loaded, name), getattr(whole, name))
    assert sorted(p.name for p in tmp_path.iterdir()) == ["diagram.npz"]


def test_a_partial_file_of_another_diagram_is_an_error(tmp_path: Path) -> None:
    file = tmp_path / "diagram.npz"
    with pytest.raises(Killed):
        phase_diagram(build, AXES, file=file, mapper=killed_after(1), **OPTIONS)
    with pytest.raises(InvalidInput, match="another diagram"):
        phase_diagram(build, AXES, file=file, **{**OPTIONS, "seed": 1})
    (tmp_path / "diagram.npz.part").write_bytes(b"not an archive")
    with pytest.raises(InvalidInput, match="not a partial phase diagram"):
        phase_diagram(build, AXES, file=file, **OPTIONS)


def test_dask_gives_the_same() -> None:
    distributed = pytest.importorskip("distributed", reason="the extra `cluster` is optional")
    from ot_transformers.cluster import dask_mapper

    with distributed.Client(
        processes=False, n_workers=1, threads_per_worker=1, dashboard_address=None
    ) as client:
        spread = phase_diagram(build, AXES, mapper=dask_mapper(client), **OPTIONS)
    alone = phase_diagram(build, AXES, **OPTIONS)
    np.testing.assert_array_equal(spread.trace, alone.trace)
