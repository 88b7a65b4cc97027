"""Phase diagrams: the long-run class of Gaussian flows over one or two parameters and random ensembles."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Literal

import numpy as np

from ..arrays import check_choice, check_count, check_positive, describe
from ..attention import Attention
from ..errors import InvalidInput
from ..files import read_npz, rehearse, write_npz
from ..flows import solve
from ..measures import Gaussian
from .classify import CLASSES, classify

__all__ = ["Build", "PhaseDiagram", "check_diagram_file", "phase_diagram"]

Build = Callable[[Mapping[str, np.ndarray[Any, Any]], np.random.Generator], tuple[Attention, Gaussian]]
"""(values of each parameter (B,), generator) -> attention with parameters (B, d, d), Gaussian of batch (B,)."""

Job = tuple[int, dict[str, np.ndarray[Any, Any]]]
Mapper = Callable[[Callable[[Job], dict[str, np.ndarray[Any, Any]]], Iterable[Job]], Iterable[Any]]

_FIELDS = ("code", "rank", "numerical_rank", "growth_rate", "blow_up_time", "blow_up_error", "trace")


@dataclass(frozen=True, eq=False)
class PhaseDiagram:
    """Result of `phase_diagram`; arrays have shape (n_1[, n_2], n_draws).

    Attributes
    ----------
    axes : dict of name -> (n_k,) values
    code : class of each trajectory, an index into `CLASSES`
    rank : rank of the limit where it converges, -1 elsewhere
    numerical_rank : eigenvalues above a relative threshold at the last time reached
    growth_rate : d log tr(S) / dt there
    blow_up_time, blow_up_error : inf and 0 where there is none
    trace : tr(S) at the last time reached
    """

    axes: dict[str, np.ndarray[Any, Any]]
    code: np.ndarray[Any, Any]
    rank: np.ndarray[Any, Any]
    numerical_rank: np.ndarray[Any, Any]
    growth_rate: np.ndarray[Any, Any]
    blow_up_time: np.ndarray[Any, Any]
    blow_up_error: np.ndarray[Any, Any]
    trace: np.ndarray[Any, Any]

    def fraction(self, label: str) -> np.ndarray[Any, Any]:
        """Share of the draws in a class, shape (n_1[, n_2])."""
        if label not in CLASSES:
            raise InvalidInput(f"label must be one of {', '.join(CLASSES)}, got {describe(label)}")
        return np.mean(self.code == CLASSES.index(label), axis=-1)

    def save(self, file: str | Path) -> Path:
        """Write as NPZ (atomically: a temporary file, then a rename)."""
        return write_npz(file, self._content(), "file")

    def _content(self) -> dict[str, Any]:
        axes = {f"axis_{i}": values for i, values in enumerate(self.axes.values())}
        return {**{f: getattr(self, f) for f in _FIELDS}, **axes, "names": np.array(list(self.axes))}

    @classmethod
    def load(cls, file: str | Path) -> PhaseDiagram:
        """Read what `save` wrote.

        Raises
        ------
        InvalidInput
            No such file, or not a whole phase diagram.
        """
        return cls._from(read_npz(file, "file"), file)

    @classmethod
    def _from(cls, data: Mapping[str, np.ndarray[Any, Any]], file: str | Path) -> PhaseDiagram:
        names = data.get("names", np.array([]))
        axes = {str(name): data.get(f"axis_{i}", np.array([])) for i, name in enumerate(np.atleast_1d(names))}
        missing = [f for f in _FIELDS if f not in data]
        if len(axes) not in (1, 2) or missing or any(v.ndim != 1 or v.size == 0 for v in axes.values()):
            raise InvalidInput(f"file is not a phase diagram: {file}")
        shape = tuple(len(v) for v in axes.values())
        if any(data[f].shape[:-1] != shape or data[f].dtype.kind not in "fi" for f in _FIELDS):
            raise InvalidInput(f"file is not a phase diagram: its arrays do not fit its axes: {file}")
        return cls(axes, *(data[f] for f in _FIELDS))


def phase_diagram(
    build: Build,
    axes: Mapping[str, Sequence[float]],
    *,
    t_end: float,
    n_draws: int = 1,
    seed: int = 0,
    chunk: int = 1000,
    file: str | Path | None = None,
    rtol: float = 1e-7,
    atol: float = 1e-9,
    max_steps: int = 20_000,
    method: Literal["explicit", "auto"] = "auto",
    progress: Callable[[int, int], None] | None = None,
    mapper: Mapper = map,
) -> PhaseDiagram:
    """Flow a Gaussian for every point of a grid and every random draw, and classify each trajectory.

    All trajectories of a chunk are one batched solve, each with its own adaptive step. With `file`, each
    finished chunk is saved at once; a later call with the same arguments resumes there and gives the same
    result as an undisturbed run, since the randomness of chunk k depends on (seed, k) alone.

    Parameters
    ----------
    build : callable
        From the parameters of a chunk, {name: (B,) array}, and a `numpy.random.Generator` to a batched
        attention and a batched Gaussian.
    axes : dict of one or two names -> values
    t_end : float > 0
    n_draws : int
        Random draws for each grid point (the generator's business to use).
    seed, chunk : int
    rtol, atol, max_steps, method
        Of each flow, as in `solve`. Flows along which a direction grows by many decades beside another one are
        stiff: "auto" goes on implicitly where explicit steps become many.
    file : path, optional
        NPZ (.npz) for saving as it goes; "<file>.part" holds finished chunks until the diagram is complete. A
        finished file of the same arguments is returned as it is. Neither knows another `build`: its code leaves
        no mark in the file, so name another file for it.
    progress : callable (done, total), optional
    mapper : callable (function, jobs) -> results in order
        How chunks are run: the builtin `map`, or `ot_transformers.cluster.dask_mapper(client)`.

    Raises
    ------
    InvalidInput
        No or more than two axes, an empty axis, a file (whole or partial) of another diagram, a damaged one or
        one that cannot be written, or a `build` that returns something else than a batched pair.
    """
    if not isinstance(axes, Mapping) or len(axes) not in (1, 2):
        raise InvalidInput(f"axes must name one or two parameters, got {describe(axes)}")
    grid = {name: _axis(name, values) for name, values in axes.items()}
    t_end, rtol, atol = (
        check_positive(v, name) for v, name in ((t_end, "t_end"), (rtol, "rtol"), (atol, "atol"))
    )
    n_draws, chunk = check_count(n_draws, "n_draws"), check_count(chunk, "chunk")
    seed, max_steps = check_count(seed, "seed", 0), check_count(max_steps, "max_steps")
    check_choice(method, "method", ("explicit", "auto"))
    shape = (*(len(v) for v in grid.values()), n_draws)
    total = int(np.prod(shape))
    mesh = np.meshgrid(*grid.values(), np.arange(n_draws), indexing="ij")[:-1]
    flat = {name: values.reshape(-1) for name, values in zip(grid, mesh, strict=True)}
    stamp = _stamp(grid, t_end, n_draws, seed, chunk, rtol, atol, max_steps, method)
    part: Path | None = None
    if file is not None:
        file = check_diagram_file(file)
        if file.exists():
            return _finished(file, stamp)
        part = file.with_name(f"{file.name}.part")
    done = _resume(part, stamp, total)
    start = len(next(iter(done.values()))) if done else 0
    options = {"rtol": rtol, "atol": atol, "max_steps": max_steps, "method": method}
    run = partial(_run_chunk, build, seed, t_end, options)
    begins = range(start, total, chunk)
    jobs = ((b // chunk, {name: v[b : b + chunk] for name, v in flat.items()}) for b in begins)
    if progress is not None:
        progress(start, total)
    for begin, new in zip(begins, mapper(run, jobs), strict=True):
        done = {f: np.concatenate([done[f], new[f]]) if done else new[f] for f in _FIELDS}
        if part is not None:
            write_npz(part, {**done, "stamp": np.array(stamp)}, "file")
        if progress is not None:
            progress(min(begin + chunk, total), total)
    diagram = PhaseDiagram(grid, *(done[f].reshape(shape) for f in _FIELDS))
    if file is not None and part is not None:
        write_npz(file, {**diagram._content(), "stamp": np.array(stamp)}, "file")
        part.unlink(missing_ok=True)
    return diagram


def _run_chunk(
    build: Build, seed: int, t_end: float, options: dict[str, Any], job: Job
) -> dict[str, np.ndarray[Any, Any]]:
    index, values = job
    size = len(next(iter(values.values())))
    made = build(values, np.random.default_rng([seed, index]))
    if not (isinstance(made, tuple) and len(made) == 2 and isinstance(made[1], Gaussian)):
        raise InvalidInput(f"build must return (attention, Gaussian), got {describe(made)}")
    attention, gaussian = made
    if gaussian.batch_shape != (size,):
        raise InvalidInput(
            f"build must return a Gaussian of batch shape ({size},), got {gaussian.batch_shape}"
        )
    times = np.concatenate([[0.0], np.geomspace(1e-3 * t_end, t_end, 25)])
    run = solve(attention, gaussian, t_end, save_at=times, **options)
    kind = classify(attention, run)
    trace = run.states[-1].factor_t.detach().square().sum((-2, -1)).cpu().numpy()
    return {
        "code": kind.code.astype(np.int64),
        "rank": kind.rank.astype(np.int64),
        "numerical_rank": kind.numerical_rank.astype(np.int64),
        "growth_rate": kind.growth_rate.astype(float),
        "blow_up_time": np.broadcast_to(np.asarray(run.blow_up_time, float), (size,)).copy(),
        "blow_up_error": np.broadcast_to(np.asarray(run.blow_up_error, float), (size,)).copy(),
        "trace": trace.astype(float),
    }


def _axis(name: str, values: Sequence[float]) -> np.ndarray[Any, Any]:
    try:
        a = np.asarray(values, dtype=float)
    except (TypeError, ValueError):
        a = np.array([])
    if a.ndim != 1 or a.size == 0 or not np.all(np.isfinite(a)):
        raise InvalidInput(
            f"axes[{name!r}] must be a non-empty list of finite numbers, got {describe(values)}"
        )
    return a


def _stamp(grid: dict[str, np.ndarray[Any, Any]], *settings: float | str) -> str:
    """A digest of what makes two diagrams the same job."""
    text = json.dumps([{k: v.tolist() for k, v in grid.items()}, *settings])
    return hashlib.sha256(text.encode()).hexdigest()


def check_diagram_file(file: Any, name: str = "file") -> Path:
    """Return the path of an NPZ that can be written, or say before any flow why it cannot.

    Raises
    ------
    InvalidInput
        Another ending than .npz, a folder, or a place that cannot be written.
    """
    if not isinstance(file, str | os.PathLike) or not str(file):
        raise InvalidInput(f"{name} must be the path of an .npz file, got {describe(file)}")
    path = Path(file).expanduser()
    if path.suffix != ".npz":
        raise InvalidInput(f"{name} must end in .npz, got {file}")
    try:
        if path.is_dir():
            raise InvalidInput(f"{name} is a folder, expected an .npz file: {file}")
        rehearse(path)
    except OSError as err:
        raise InvalidInput(f"{name} cannot be written: {file} ({err.strerror})") from err
    return path


def _finished(file: Path, stamp: str) -> PhaseDiagram:
    """The diagram of a finished file, if it is the one asked for; nothing else is ever overwritten."""
    data = read_npz(file, "file")
    if str(data.get("stamp", "")) != stamp:
        raise InvalidInput(f"file holds something else than this diagram: remove it or name another: {file}")
    return PhaseDiagram._from(data, file)


def _resume(part: Path | None, stamp: str, total: int) -> dict[str, np.ndarray[Any, Any]]:
    if part is None or not part.exists():
        return {}
    data = read_npz(part, "file")
    if str(data.get("stamp", "")) != stamp:
        raise InvalidInput(
            f"file {part.name} holds something else than chunks of this diagram, as of another diagram: "
            "remove it or name another"
        )
    done = {f: data.get(f, np.array(0.0)) for f in _FIELDS}
    size = done["code"].size
    if size > total or any(v.shape != (size,) or v.dtype.kind not in "fi" for v in done.values()):
        raise InvalidInput(f"file {part.name} is not a partial phase diagram: its arrays do not fit")
    return done
