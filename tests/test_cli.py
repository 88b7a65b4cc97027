"""The command line: what it prints, what it writes, and its exit status for what is done, off, or bad."""

from __future__ import annotations

import json
import subprocess
import sys
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from typer.testing import CliRunner

from ot_transformers import __version__, cli
from ot_transformers.errors import NotConverged
from ot_transformers.studies import Finding, StudyResult, flow
from ot_transformers.studies._presets import PRESETS

SMALL = ["flow", "--n", "12", "--d", "2", "--t-end", "0.5", "--eps", "2"]


def call(*args: str) -> int:
    """Run `main` as the console script does and return its exit status."""
    with pytest.raises(SystemExit) as done:
        cli.main(list(args))
    assert isinstance(done.value.code, int)
    return done.value.code


def test_help_lists_the_studies() -> None:
    result = CliRunner().invoke(cli.app, ["--help"])
    assert result.exit_code == 0
    assert all(name in result.output for name in ("compare", "flow", "jko"))


def test_help_states_every_default_of_the_config() -> None:
    output = " ".join(CliRunner().invoke(cli.app, ["flow", "--help"]).output.split())
    defaults = flow.FlowConfig()
    for name in ("tokens", "attention", "preset", "d", "seed", "device", "dtype"):
        assert f"[default: {getattr(defaults, name)}" in output
    assert f"[default: {defaults.t_end:g}; jko: 4]" in output


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("cli") / "run"
    assert call(*SMALL, "--out", str(out)) == 0
    return out


class Caught:
    """Stands in for a study: keeps the config and finds nothing."""

    def __init__(self) -> None:
        self.config: Any = None

    def __call__(self, config: Any, progress: object) -> StudyResult:
        self.config = config
        return StudyResult("flow", "A run", "", {})


def test_a_run_writes_its_folder_with_its_options(written: Path) -> None:
    assert {p.name for p in written.iterdir()} >= {
        "report.html",
        "results.npz",
        "in_time.csv",
        "flow.png",
        "flow.svg",
    }
    config = json.loads((written / "config.json").read_text())
    assert config["study"] == "flow"
    options = {k: config["options"][k] for k in ("n", "d", "t_end", "eps")}
    assert options == {"n": 12, "d": 2, "t_end": 0.5, "eps": 2.0}
    with np.load(written / "results.npz") as data:
        assert data["times"][-1] == 0.5
        assert data["tokens_start"].shape == (12, 2)


def test_config_reruns_to_the_same_numbers(
    written: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    again = tmp_path / "again"
    assert call("flow", "--config", str(written / "config.json"), "--out", str(again), "-q") == 0
    assert capsys.readouterr().out.strip() == str(again)
    assert (again / "in_time.csv").read_text() == (written / "in_time.csv").read_text()


def test_given_options_win_over_the_config_and_that_over_defaults(
    written: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    caught = Caught()
    monkeypatch.setattr(flow, "run", caught)
    out = tmp_path / "out"
    assert call("flow", "--config", str(written / "config.json"), "--t-end", "0.25", "--out", str(out)) == 0
    assert caught.config == flow.FlowConfig(n=12, d=2, t_end=0.25, eps=2.0)
    assert f"Report: {out / 'report.html'}" in capsys.readouterr().out


def test_a_result_outside_its_tolerance_exits_1_and_is_still_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def run(config: object, progress: object) -> StudyResult:
        far = Finding("Too far", "It is off.", 2.0, 1.0, False)
        return StudyResult("flow", "A run", "", {}, findings=[far])

    monkeypatch.setattr(flow, "run", run)
    assert call("flow", "--out", str(tmp_path / "run")) == 1
    assert "FAIL" in capsys.readouterr().out
    assert "outside tolerance" in (tmp_path / "run" / "report.html").read_text()


BAD = {
    "no such command": (["nope"], "No such command 'nope'"),
    "no such option": (["flow", "--bogus", "1"], "No such option: --bogus"),
    "not a number": (["flow", "--eps", "abc"], "Invalid value for '--eps'"),
    "eps zero": (["flow", "--eps", "0"], "eps must be > 0, got 0"),
    "eps NaN": (["flow", "--eps", "nan"], "eps must be finite"),
    "t_end negative": (["flow", "--t-end", "-1"], "t_end must be > 0"),
    "unknown attention": (["flow", "--attention", "hard"], "attention must be one of"),
    "unknown preset": (["flow", "--preset", "x"], "preset must be one of"),
    "n too large": (["flow", "--n", "9999"], "n must be at most 334"),
    "n of one": (["flow", "--n", "1"], "n must be at least 2"),
    "d too large": (["flow", "--d", "385"], "d must be at most 384"),
    "d zero": (["flow", "--d", "0"], "d must be at least 1"),
    "seed negative": (["flow", "--seed", "-1"], "seed must be at least 0"),
    "unknown dtype": (["flow", "--dtype", "float16"], "dtype must be one of"),
    "no such device": (["flow", "--device", "abacus"], "device cannot be used: 'abacus'"),
    "out in no file system": (["flow", "--out", "/proc/x"], "out cannot be written"),
    "out of 300 letters": (["flow", "--out", "n" * 300], "out cannot be written"),
    "device without numbers": (["flow", "--device", "meta"], "device cannot be used: 'meta'"),
    "no such tokens": (["flow", "--tokens", "nothing.npy"], "tokens file does not exist: nothing.npy"),
    "no such matrices": (["flow", "--matrices", "nothing.npz"], "matrices file does not exist"),
    "no such config": (["flow", "--config", "nothing.json"], "config cannot be read: nothing.json"),
    "trained head for steps": (
        ["jko", "--preset", "head4", "--n", "9", "--d", "2"],
        "try --preset head4-symmetric",
    ),
}


@pytest.mark.parametrize(("args", "message"), BAD.values(), ids=BAD.keys())
def test_bad_input_is_one_line_and_exit_status_2(
    args: list[str],
    message: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    assert call(*args) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.startswith("error: ")
    assert captured.err.count("\n") == 1
    assert message in captured.err
    assert list(tmp_path.iterdir()) == []


def test_a_file_in_the_way_is_said_before_any_work(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "taken").write_text("x")
    assert call(*SMALL, "--out", str(tmp_path / "taken")) == 2
    assert "out is a file, expected a folder" in capsys.readouterr().err


def test_a_config_nested_too_deeply_is_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "deep.json").write_text("[" * 200_000)
    assert call("flow", "--config", str(tmp_path / "deep.json")) == 2
    assert "config is not JSON" in capsys.readouterr().err


def test_a_disk_that_fills_up_is_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def run(config: object, progress: object) -> StudyResult:
        raise OSError(28, "No space left on device", "results/flow")

    monkeypatch.setattr(flow, "run", run)
    assert call("flow", "--out", str(tmp_path / "run")) == 2
    assert capsys.readouterr().err == "error: results/flow: No space left on device\n"
    assert list(tmp_path.iterdir()) == []


def test_a_warning_is_one_line_without_a_source_path(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def run(config: object, progress: object) -> StudyResult:
        warnings.warn("2 flows stopped\nbefore t_end", NotConverged, stacklevel=1)
        return StudyResult("flow", "A run", "", {})

    monkeypatch.setattr(flow, "run", run)
    assert call("flow", "--out", str(tmp_path / "run"), "-q") == 0
    assert capsys.readouterr().err == "warning: 2 flows stopped before t_end\n"


def test_preset_list_and_version(capsys: pytest.CaptureFixture[str]) -> None:
    assert call("compare", "--preset", "list") == 0
    output = capsys.readouterr().out
    assert all(name in output for name in PRESETS)
    assert call("--version") == 0
    assert capsys.readouterr().out.strip() == __version__


def test_a_bug_is_not_dressed_up_as_bad_input(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def run(config: object, progress: object) -> StudyResult:
        raise ZeroDivisionError

    monkeypatch.setattr(flow, "run", run)
    with pytest.raises(ZeroDivisionError):
        cli.main(["flow", "--out", str(tmp_path / "run")])


def test_interrupt_leaves_nothing_behind(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def run(config: object, progress: object) -> StudyResult:
        raise KeyboardInterrupt

    monkeypatch.setattr(flow, "run", run)
    assert call("flow", "--out", str(tmp_path / "run")) == 130
    assert "nothing was written" in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []


def test_the_module_runs_as_the_console_script_does() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "ot_transformers.cli", "--version"],
        capture_output=True,
        text=True,
        check=False,
    )
    assert (done.returncode, done.stdout.strip(), done.stderr) == (0, __version__, "")
