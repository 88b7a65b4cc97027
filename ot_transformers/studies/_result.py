"""What every study hands back, and how it is written: the layer that a new study plugs into.

A study is one module `studies/<name>.py` with a frozen dataclass of options and one function:

    @dataclass(frozen=True)
    class NameConfig: ...       # plain values only: int, float, str, bool, Literal, tuples of these, None

    def run(config: NameConfig, progress: Progress = silent) -> StudyResult: ...

`run` computes and draws, writes nothing, prints nothing; it calls `progress("what is being done", fraction)`
with the fraction of the whole job in [0, 1]. It returns a `StudyResult`:

- `findings`: what was found, in words with numbers. `passed` is True or False where a tolerance applies and
  None where the number is only reported. A False anywhere makes `result.passed` False, the exit status 1.
- `tables`: each is shown in the report and written as `<name>.csv`.
- `figures`: matplotlib figures, made with `new_figure` (no window manager is involved) and drawn inside
  `with matplotlib.rc_context(STYLE)` (from `ot_transformers.plotting`); each is written as PNG and SVG and
  embedded in the report.
- `arrays`: everything numeric, written as `results.npz`.
- `files`: extra files by name (certificates, animations), text or bytes.
- `config`: `options_of(config)`; `config.json` reruns the study through `--config`.

`result.write(out)` makes the folder: report.html, figures, CSV, NPZ, config.json. It is written beside its
place and renamed into it, so a folder is whole or absent. The command line does this; `rows()` feeds its last
table.
"""

from __future__ import annotations

import io
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np

from ._files import write_folder

if TYPE_CHECKING:
    from matplotlib.figure import Figure

__all__ = [
    "Finding",
    "Progress",
    "StudyFigure",
    "StudyResult",
    "Table",
    "checked",
    "format_number",
    "new_figure",
    "options_of",
    "silent",
]

Progress: TypeAlias = Callable[[str, float], None]
"""(what is being done, fraction of the whole job done) -> None."""


def silent(stage: str, fraction: float) -> None:
    """Report no progress."""


@dataclass(frozen=True)
class Finding:
    """One thing that the study found.

    Attributes
    ----------
    title : a few words
    text : one to three sentences with the numbers
    value, tolerance : the number that decides and its bound, where there is one
    passed : True or False where a tolerance applies, None where the number is only reported
    """

    title: str
    text: str
    value: float | None = None
    tolerance: float | None = None
    passed: bool | None = None


def checked(title: str, text: str, value: float, tolerance: float) -> Finding:
    """A finding that passes where `value <= tolerance` (NaN does not)."""
    return Finding(title, text, float(value), float(tolerance), bool(value <= tolerance))


@dataclass(frozen=True)
class Table:
    """A table: file-name stem, title, column heads (with units), rows of numbers and words."""

    name: str
    title: str
    columns: Sequence[str]
    rows: Sequence[Sequence[Any]]
    note: str = ""

    def csv(self) -> str:
        """The table as CSV text, numbers with all their digits."""
        import csv

        buffer = io.StringIO()
        writer = csv.writer(buffer, lineterminator="\n")
        writer.writerow(self.columns)
        writer.writerows([[_plain(v) for v in row] for row in self.rows])
        return buffer.getvalue()


@dataclass(frozen=True)
class StudyFigure:
    """A figure: file-name stem, the matplotlib figure, its caption."""

    name: str
    figure: Figure
    caption: str


@dataclass
class StudyResult:
    """Everything that a study found; see the top of this module."""

    study: str
    title: str
    summary: str
    config: Mapping[str, Any]
    findings: list[Finding] = field(default_factory=list)
    tables: list[Table] = field(default_factory=list)
    figures: list[StudyFigure] = field(default_factory=list)
    arrays: dict[str, np.ndarray[Any, Any]] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)
    files: dict[str, str | bytes] = field(default_factory=dict)

    @property
    def passed(self) -> bool:
        """Whether no finding is outside its tolerance."""
        return all(f.passed is not False for f in self.findings)

    @property
    def exit_status(self) -> int:
        """0 done, 1 a result outside its tolerance."""
        return 0 if self.passed else 1

    def rows(self) -> list[tuple[str, str, str, str]]:
        """(finding, value, tolerance, verdict) as text, for the table at the end of a run."""
        return [
            (
                f.title,
                "" if f.value is None else format_number(f.value),
                "" if f.tolerance is None else f"<= {format_number(f.tolerance)}",
                {True: "pass", False: "FAIL", None: "reported"}[f.passed],
            )
            for f in self.findings
        ]

    def write(self, out: str | Path) -> Path:
        """Write the result folder and return its path; an earlier result folder of that name is replaced.

        Raises
        ------
        InvalidInput
            `out` is a file, or a folder that holds other things than an earlier result.
        """
        from ._report import render

        content: dict[str, bytes] = {}
        images: dict[str, str] = {}
        for item in self.figures:
            content[f"{item.name}.png"] = _drawn(item.figure, "png")
            svg = _drawn(item.figure, "svg")
            content[f"{item.name}.svg"] = svg
            images[item.name] = svg.decode("utf-8")
        for table in self.tables:
            content[f"{table.name}.csv"] = table.csv().encode("utf-8")
        if self.arrays:
            buffer = io.BytesIO()
            arrays: dict[str, Any] = {k: np.asarray(v) for k, v in self.arrays.items()}
            np.savez_compressed(buffer, **arrays)
            content["results.npz"] = buffer.getvalue()
        for name, data in self.files.items():
            content[name] = data.encode("utf-8") if isinstance(data, str) else data
        content["report.html"] = render(self, images).encode("utf-8")
        return write_folder(out, content, study=self.study, options=self.config)


def options_of(config: Any) -> dict[str, Any]:
    """The options of a config dataclass as plain values for config.json."""
    return asdict(config)


def new_figure(
    nrows: int = 1, ncols: int = 1, *, width: float = 5.0, height: float = 3.6, **kwargs: Any
) -> tuple[Figure, Any]:
    """Make a figure with a grid of axes (a 2D array), each `width` x `height` inches, without pyplot."""
    import matplotlib as mpl
    from matplotlib.figure import Figure

    from ..plotting import STYLE

    figure = Figure(figsize=(width * ncols, height * nrows), layout="constrained", facecolor="white")
    with mpl.rc_context(STYLE):
        axes = figure.subplots(nrows, ncols, squeeze=False, **kwargs)
    return figure, axes


def format_number(value: Any) -> str:
    """A number for reading: 4 significant digits, powers of ten where it is small or large."""
    if value is None:
        return ""
    if isinstance(value, bool | np.bool_):
        return "yes" if value else "no"
    if isinstance(value, int | np.integer):
        return str(int(value))
    if not isinstance(value, float | np.floating):
        return str(value)
    x = float(value)
    if math.isnan(x):
        return "not a number"
    if math.isinf(x):
        return "infinite" if x > 0 else "-infinite"
    if x != 0 and not 1e-3 <= abs(x) < 1e5:
        return f"{x:.2e}"
    return f"{x:.4g}"


def _plain(value: Any) -> Any:
    if isinstance(value, np.generic):
        value = value.item()
    return "" if value is None else repr(value) if isinstance(value, float) else value


def _drawn(figure: Figure, kind: str) -> bytes:
    import matplotlib as mpl

    from ..plotting import STYLE

    buffer = io.BytesIO()
    # Fixed ids and no date: the same result gives the same bytes.
    metadata = {"Date": None} if kind == "svg" else {"Software": None}
    with mpl.rc_context({**STYLE, "svg.hashsalt": "ot-transformers", "svg.fonttype": "path"}):
        figure.savefig(buffer, format=kind, dpi=160, metadata=metadata, facecolor="white")
    return buffer.getvalue()
