"""The runnable jobs: options in, result folder out. Each study is a module with `run(config, progress)`."""

from __future__ import annotations

from ._files import check_out, config_from_options, load_config
from ._result import (
    Finding,
    Progress,
    StudyFigure,
    StudyResult,
    Table,
    checked,
    new_figure,
    options_of,
    silent,
)

__all__ = [
    "Finding",
    "Progress",
    "StudyFigure",
    "StudyResult",
    "Table",
    "check_out",
    "checked",
    "config_from_options",
    "load_config",
    "new_figure",
    "options_of",
    "silent",
]
