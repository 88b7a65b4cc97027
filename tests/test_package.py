"""The public names, found when they are asked for."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

import ot_transformers as otf


def test_every_public_name_is_found_once_and_every_import_for_type_checkers_is_public() -> None:
    assert len(set(otf.__all__)) == len(otf.__all__)
    assert all(getattr(otf, name) is not None for name in otf.__all__)
    tree = ast.parse(Path(otf.__file__).read_text())
    typed = next(node for node in tree.body if isinstance(node, ast.If))
    imported = {
        alias.name for node in ast.walk(typed) if isinstance(node, ast.ImportFrom) for alias in node.names
    }
    assert imported == set(otf.__all__)
    assert set(otf.__all__) <= set(dir(otf))


def test_unknown_name_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="no attribute 'solv'"):
        otf.solv  # type: ignore[attr-defined]  # noqa: B018


def test_help_needs_no_torch() -> None:
    code = (
        "import sys; from typer.testing import CliRunner; from ot_transformers.cli import app; "
        "done = CliRunner().invoke(app, ['compare', '--help']); "
        "assert done.exit_code == 0 and '--tokens' in done.output, done.output; "
        "assert not {'torch', 'scipy', 'matplotlib'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
    done = subprocess.run(
        [sys.executable, "-m", "ot_transformers", "--version"], capture_output=True, text=True
    )
    assert done.stdout.strip() == otf.__version__


def test_every_public_name_has_a_page() -> None:
    pages = (Path(__file__).parents[1] / "docs" / "api.rst").read_text().split()
    for module in (otf, otf.plotting):
        kept = {
            "COLOURS",
            "MARKERS",
            "STYLE",
            "Plane",
            "eigenvalues_along",
            "cone_coordinates",
            "disc_coordinates",
        }
        assert set(module.__all__) - kept <= set(pages)
