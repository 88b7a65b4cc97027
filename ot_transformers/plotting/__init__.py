"""Figures: each function takes `ax=` and returns the artists that it drew."""

from __future__ import annotations

from ._style import COLOURS, STYLE

__all__ = ["COLOURS", "STYLE"]
