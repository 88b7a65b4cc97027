"""Sphinx configuration: API pages from docstrings, the gallery from `examples/`."""

from __future__ import annotations

from typing import Any

from docutils.parsers.rst.states import Inliner

import ot_transformers


def _bar(inliner: Any, match: Any, lineno: int) -> tuple[str, list[Any], str, list[Any]]:
    """A bar is a bar: |x| is a norm on every page, and no page has substitutions."""
    end = match.end("start")
    return match.string[:end], [], match.string[end:], []


Inliner.dispatch["|"] = _bar

project = "ot_transformers"
author = "The ot_transformers developers"
release = version = ot_transformers.__version__
extensions = [
    "sphinx.ext.autodoc",
    "sphinx.ext.autosummary",
    "sphinx.ext.mathjax",
    "sphinx.ext.napoleon",
    "sphinx_gallery.gen_gallery",
]
html_theme = "furo"
html_title = "ot_transformers"
autosummary_generate = True
autodoc_typehints = "none"
napoleon_google_docstring = False
sphinx_gallery_conf = {
    "examples_dirs": "../examples",
    "gallery_dirs": "gallery",
    "filename_pattern": r"plot_",
    "download_all_examples": False,
    "remove_config_comments": True,
}
exclude_patterns = ["_build"]
# "times" in a type of one docstring names no attribute of another class.
suppress_warnings = ["ref.python"]
