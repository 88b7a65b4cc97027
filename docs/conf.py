"""Sphinx configuration: API pages from docstrings, the gallery from `examples/`."""

from __future__ import annotations

import ot_transformers

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
