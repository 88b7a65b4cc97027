"""Result folders: whole or absent, self-contained, and enough to run again."""

from __future__ import annotations

import dataclasses
import json
import re
from html.parser import HTMLParser
from pathlib import Path

import numpy as np
import pytest

from ot_transformers.errors import InvalidInput
from ot_transformers.studies import (
    Finding,
    StudyFigure,
    StudyResult,
    Table,
    checked,
    config_from_options,
    load_config,
    new_figure,
)
from ot_transformers.studies.compare import CompareConfig


def small_result() -> StudyResult:
    figure, axes = new_figure()
    axes[0, 0].plot([0.0, 1.0], [1.0, 2.0])
    return StudyResult(
        study="compare",
        title="A <title> & more",
        summary="What was done.",
        config={"d": 3, "sizes": [1, 2]},
        findings=[checked("Near", "The gap is small.", 1e-9, 1e-7), Finding("Seen", "It is 3.", 3.0)],
        tables=[Table("numbers", "Numbers", ["x", "y"], [[0.1, "a"], [np.float64(1 / 3), None]])],
        figures=[StudyFigure("line", figure, "A line.")],
        arrays={"x": np.arange(3.0)},
        files={"extra/certificate.json": "{}"},
    )


class Links(HTMLParser):
    def __init__(self) -> None:
        super().__init__()
        self.found: list[str] = []
        self.open: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.found += [v or "" for k, v in attrs if k in ("src", "href", "srcset", "data", "action")]
        if tag not in ("meta", "img", "br"):
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag


def test_report_fetches_nothing_and_is_well_formed(tmp_path: Path) -> None:
    page = (small_result().write(tmp_path / "out") / "report.html").read_text()
    links = Links()
    links.feed(page)
    assert links.open == []
    assert len(links.found) == 1
    assert all(link.startswith("data:image/svg+xml;base64,") for link in links.found)
    assert not re.search(r"@import|url\(|<script|<link", page)
    assert "A &lt;title&gt; &amp; more" in page


def test_folder_holds_everything_with_all_digits(tmp_path: Path) -> None:
    out = small_result().write(tmp_path / "out")
    names = {str(p.relative_to(out)) for p in out.rglob("*") if p.is_file()}
    assert names == {
        "report.html",
        "line.png",
        "line.svg",
        "numbers.csv",
        "results.npz",
        "config.json",
        "extra/certificate.json",
    }
    assert (out / "numbers.csv").read_text() == "x,y\n0.1,a\n0.3333333333333333,\n"
    with np.load(out / "results.npz", allow_pickle=False) as data:
        np.testing.assert_array_equal(data["x"], [0.0, 1.0, 2.0])


def test_a_failed_write_leaves_the_earlier_result_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = small_result().write(tmp_path / "out")
    before = (out / "report.html").read_bytes()

    def full(self: Path, data: bytes) -> int:
        raise OSError("no space left on device")

    monkeypatch.setattr(Path, "write_bytes", full)
    with pytest.raises(OSError, match="no space"):
        small_result().write(out)
    monkeypatch.undo()
    assert (out / "report.html").read_bytes() == before
    assert [p.name for p in tmp_path.iterdir()] == ["out"]


def test_a_second_run_replaces_its_files_and_keeps_those_of_others(tmp_path: Path) -> None:
    out = small_result().write(tmp_path / "out")
    (out / "my notes.txt").write_text("keep")
    second = small_result()
    second.tables = []
    second.write(out)
    assert (out / "my notes.txt").read_text() == "keep"
    assert not (out / "numbers.csv").exists()
    assert [p.name for p in tmp_path.iterdir()] == ["out"]


def test_the_same_result_gives_the_same_bytes(tmp_path: Path) -> None:
    a, b = small_result().write(tmp_path / "a"), small_result().write(tmp_path / "b")
    for name in ("report.html", "line.svg", "line.png"):
        assert (a / name).read_bytes() == (b / name).read_bytes()


def test_a_folder_of_other_things_is_not_touched(tmp_path: Path) -> None:
    (tmp_path / "thesis.tex").write_text("x")
    with pytest.raises(InvalidInput, match="out holds other files"):
        small_result().write(tmp_path)
    assert (tmp_path / "thesis.tex").read_text() == "x"


def test_verdicts_and_exit_status() -> None:
    result = small_result()
    assert (result.passed, result.exit_status) == (True, 0)
    result.findings.append(checked("Far", "Too far.", float("nan"), 1.0))
    assert (result.passed, result.exit_status) == (False, 1)
    assert result.rows()[-1] == ("Far", "not a number", "<= 1", "FAIL")


def test_config_file_gives_the_options_back(compared: StudyResult, tmp_path: Path) -> None:
    out = dataclasses.replace(compared, figures=[]).write(tmp_path / "out")
    options = load_config(out / "config.json", "compare")
    assert config_from_options(CompareConfig, options) == CompareConfig(**compared.config)
    assert json.loads((out / "config.json").read_text())["study"] == "compare"


def test_config_of_another_study_is_refused(tmp_path: Path) -> None:
    out = small_result().write(tmp_path / "out")
    with pytest.raises(InvalidInput, match="config is of the study 'compare', expected 'jko'"):
        load_config(out / "config.json", "jko")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"epsilon": 1.0}, "unknown option.* epsilon"),
        ({"d": 2.5}, "d must be of type int"),
        ({"eps": "1"}, "eps must be of type float"),
        ({"eps": float("inf")}, "eps must be finite"),
        ({"attention": "hard"}, "attention must be one of"),
        ({"jko_steps": 3}, "jko_steps must be a list"),
        ({"seed": True}, "seed must be of type int"),
    ],
)
def test_wrong_options_are_named(options: dict[str, object], message: str) -> None:
    with pytest.raises(InvalidInput, match=message):
        config_from_options(CompareConfig, options)
