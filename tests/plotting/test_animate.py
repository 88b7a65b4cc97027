"""Animations: a frame holds the state of its time, the view holds the frame, files are whole."""

from __future__ import annotations

import base64
import gc
import warnings
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from matplotlib.animation import FFMpegWriter
from PIL import Image

from ot_transformers import Gaussian, Particles
from ot_transformers.errors import InvalidInput
from ot_transformers.plotting import animate_ellipses, animate_particles, save_animation


@pytest.fixture(autouse=True)
def collected() -> Iterator[None]:
    """An animation that nobody drew warns when it is collected: here, not in the middle of a later test."""
    yield
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        gc.collect()


@pytest.mark.parametrize("d", [1, 2, 4])
def test_gif_has_a_frame_for_each_state_and_the_view_follows_a_blow_up(d: int, tmp_path: Path) -> None:
    x = np.random.default_rng(0).standard_normal((6, d))
    x -= x.mean(0)  # the picture is centred at the mean of the start, which must not move
    flow = [Particles(x * 10.0**k) for k in range(4)]
    ellipses = [Gaussian(np.zeros(d), np.eye(d) * 100.0**k) for k in range(4)]
    animation = animate_particles(flow, gaussians=ellipses)
    path = save_animation(animation, tmp_path / "flow.gif", fps=5)
    with Image.open(path) as image:
        assert image.n_frames == 4
    assert [p.name for p in tmp_path.iterdir()] == ["flow.gif"]
    axes = animation._fig.axes[0]  # type: ignore[attr-defined]
    animation._func(3)  # type: ignore[attr-defined]
    dots, ring = axes.lines
    if d == 2:
        np.testing.assert_allclose(dots.get_xydata(), x * 1000.0)
        np.testing.assert_allclose(np.linalg.norm(ring.get_xydata(), axis=1), 2000.0)
    late = np.ptp(axes.get_xlim())
    animation._func(0)  # type: ignore[attr-defined]
    np.testing.assert_allclose(late / np.ptp(axes.get_xlim()), 1000.0, rtol=1e-9)


def test_mp4_needs_ffmpeg(tmp_path: Path) -> None:
    animation = animate_ellipses([Gaussian(np.zeros(2), np.eye(2) * (1.0 + k)) for k in range(3)])
    if not FFMpegWriter.isAvailable():
        with pytest.raises(InvalidInput, match="ffmpeg is missing"):
            save_animation(animation, tmp_path / "flow.mp4")
        assert not list(tmp_path.iterdir())
        animation._func(0)  # type: ignore[attr-defined]
        return
    data = save_animation(animation, tmp_path / "flow.mp4").read_bytes()
    assert data[4:8] == b"ftyp"


def test_bad_input_is_refused(tmp_path: Path) -> None:
    flow = [Gaussian(np.zeros(2), np.eye(2))] * 2
    with pytest.raises(InvalidInput, match="path must end in"):
        save_animation(animate_ellipses(flow), tmp_path / "flow.avi")
    with pytest.raises(InvalidInput, match="flow is a batch"):
        animate_ellipses([Gaussian(np.zeros((3, 2)), np.tile(np.eye(2), (3, 1, 1)))])
    with pytest.raises(InvalidInput, match="gaussians must have 1 states"):
        animate_particles([Particles(np.zeros((3, 2)))], gaussians=flow)


def test_command_line_writes_the_animation_and_embeds_it(tmp_path: Path) -> None:
    from typer.testing import CliRunner

    from ot_transformers.cli import app

    out = tmp_path / "out"
    options = ["--n", "12", "--d", "2", "--t-end", "0.5", "--animate", "--out", str(out), "-q"]
    done = CliRunner().invoke(app, ["flow", *options])
    assert done.exit_code == 0, done.output
    data = (out / "flow.gif").read_bytes()
    assert data[:6] == b"GIF89a"
    assert base64.b64encode(data).decode() in (out / "report.html").read_text()
