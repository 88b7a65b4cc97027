"""Phase diagrams: right classes, and a resumed run that equals an undisturbed one to the bit."""

from __future__ import annotations

import io
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ot_transformers.analysis import CLASSES, PhaseDiagram, phase_diagram
from ot_transformers.analysis.phase import _FIELDS
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
    with pytest.raises(InvalidInput, match=r"file is not an NPZ file: .*\.part"):
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


DAMAGE: dict[str, Callable[[bytes], bytes]] = {
    "truncated": lambda b: b[: len(b) // 2],
    "flipped": lambda b: b[:200] + bytes([b[200] ^ 255]) + b[201:],
    "empty": lambda b: b"",
    "text": lambda b: b"a, b\n",
    "npy": lambda b: _npy(),
    "missing": lambda b: _npz(names=["a"], axis_0=[1.0]),
    "shapes": lambda b: _npz(names=["a"], axis_0=[1.0], **{f: [1.0, 2.0] for f in _FIELDS}),
}


def _npy() -> bytes:
    stream = io.BytesIO()
    np.save(stream, np.ones(3))
    return stream.getvalue()


def _npz(**arrays: Any) -> bytes:
    stream = io.BytesIO()
    np.savez(stream, **arrays)
    return stream.getvalue()


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    file = tmp_path_factory.mktemp("phase") / "s.npz"
    phase_diagram(build, AXES, file=file, **{**OPTIONS, "t_end": 1.0})
    return file


@pytest.mark.parametrize("damage", DAMAGE.values(), ids=DAMAGE.keys())
def test_damaged_files_are_one_clear_error(
    damage: Callable[[bytes], bytes], finished: Path, tmp_path: Path
) -> None:
    for name in ("s.npz", "s.npz.part"):
        broken = tmp_path / name
        broken.write_bytes(damage(finished.read_bytes()))
        with pytest.raises(InvalidInput, match=r"file.*s\.npz"):
            phase_diagram(build, AXES, file=tmp_path / "s.npz", **{**OPTIONS, "t_end": 1.0})
        if name == "s.npz":
            with pytest.raises(InvalidInput, match=r"file.*s\.npz"):
                PhaseDiagram.load(broken)
        broken.unlink()


def test_a_finished_file_is_returned_as_it_is_and_no_other_is_overwritten(
    finished: Path, tmp_path: Path
) -> None:
    before = finished.read_bytes()
    options = {**OPTIONS, "t_end": 1.0}
    again = phase_diagram(build, AXES, file=finished, mapper=killed_after(0), **options)
    np.testing.assert_array_equal(again.trace, PhaseDiagram.load(finished).trace)
    with pytest.raises(InvalidInput, match="something else than this diagram"):
        phase_diagram(build, AXES, file=finished, mapper=killed_after(0), **{**options, "seed": 1})
    assert finished.read_bytes() == before
    (tmp_path / "folder.npz").mkdir()
    (tmp_path / "taken").write_text("x")
    for bad, message in (
        ("notes.txt", "must end in .npz"),
        ("x.npy", "must end in .npz"),
        (".", "must end in .npz"),
        ("folder.npz", "is a folder"),
        ("taken/s.npz", "cannot be written"),
        (f"{'n' * 300}.npz", "cannot be written"),
    ):
        with pytest.raises(InvalidInput, match=message):
            phase_diagram(build, AXES, file=tmp_path / bad, mapper=killed_after(0), **options)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["folder.npz", "taken"]


def test_numpy_scalars_are_options_as_good_as_any(tmp_path: Path) -> None:
    plain: dict[str, Any] = {"t_end": 1.0, "n_draws": 2, "seed": 3}
    scalars = {"t_end": np.float32(1), "n_draws": np.int64(2), "seed": np.int64(3), "chunk": np.int32(1000)}
    file = tmp_path / "s.npz"
    one = phase_diagram(build, AXES, file=file, **scalars)
    two = phase_diagram(build, AXES, file=file, mapper=killed_after(0), **plain)
    np.testing.assert_array_equal(one.trace, two.trace)
