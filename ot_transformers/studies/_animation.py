"""The animation of a flow as the bytes of a GIF, for the result folder."""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ..plotting import animate_particles, save_animation

__all__ = ["flow_gif"]


def flow_gif(times: Any, clouds: Sequence[Any], gaussians: Sequence[Any]) -> bytes:
    """Particles over the ellipses of the closure, at the same times."""
    with tempfile.TemporaryDirectory() as folder:
        animation = animate_particles(list(clouds), gaussians=list(gaussians), times=times)
        return save_animation(animation, Path(folder) / "flow.gif").read_bytes()
