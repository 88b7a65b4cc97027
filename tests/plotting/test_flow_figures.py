"""Figures of flows: what the artists hold is what the flow is."""

from __future__ import annotations

import matplotlib as mpl
import numpy as np
import pytest
import torch
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from ot_transformers import Gaussian, Particles
from ot_transformers.errors import InvalidInput
from ot_transformers.plotting import (
    eigenvalues_along,
    plot_eigenvalues,
    plot_ellipses,
    plot_energy,
    plot_particles,
    plot_rate,
    principal_plane,
)

TIMES = np.linspace(0.0, 1.0, 5)


def new_axes() -> Axes:
    return Figure().add_subplot()


def gaussian(seed: int, d: int, rank: int | None = None) -> Gaussian:
    rng = np.random.default_rng(seed)
    return Gaussian.from_factor(rng.standard_normal(d), rng.standard_normal((d, rank or d)))


def test_each_ellipse_is_the_level_set_it_claims_to_be() -> None:
    flow = [gaussian(k, 2) for k in range(5)]
    artists = plot_ellipses(flow, times=TIMES, ax=new_axes(), n_std=1.5, n_ellipses=5, colourbar=False)
    assert len(artists) == 6
    for line, g in zip(artists[:5], flow, strict=True):
        x = np.asarray(line.get_xydata()) - g.mean
        np.testing.assert_allclose(np.einsum("ni,ij,nj->n", x, np.linalg.inv(g.cov), x), 1.5**2, rtol=1e-9)
    np.testing.assert_allclose(artists[5].get_xydata(), [g.mean for g in flow])


def test_ellipses_in_high_dimension_are_those_of_the_principal_components() -> None:
    scales = np.array([3.0, 2.0, 0.5, 0.1])
    rotation = np.linalg.qr(np.random.default_rng(0).standard_normal((4, 4))).Q
    g = Gaussian(np.ones(4), rotation @ np.diag(scales**2) @ rotation.T)
    (line, mean) = plot_ellipses([g], ax=new_axes(), n_std=1.0, colourbar=False)
    radius = np.hypot(*np.asarray(line.get_xydata()).T)
    np.testing.assert_allclose([radius.max(), radius.min()], [3.0, 2.0], rtol=1e-3)
    np.testing.assert_allclose(mean.get_xydata(), [[0.0, 0.0]], atol=1e-12)
    assert "(68% of variance)" in mean.axes.get_xlabel()  # 9 of 9 + 4 + 0.25 + 0.01


@pytest.mark.parametrize(("d", "rank"), [(1, 1), (2, 1), (5, 2)])
def test_line_and_rank_deficient_ellipses_are_drawn(d: int, rank: int) -> None:
    artists = plot_ellipses([gaussian(1, d, rank), gaussian(2, d, rank)], ax=new_axes())
    assert all(np.isfinite(np.asarray(a.get_xydata())).all() for a in artists[:2])


def test_shown_times_are_the_nearest_to_evenly_spaced_ones() -> None:
    times = np.array([0.0, 0.01, 0.02, 0.5, 1.0])
    artists = plot_ellipses([gaussian(k, 2) for k in range(5)], times=times, ax=new_axes(), n_ellipses=3)
    assert [a.get_label() for a in artists[:3]] == ["t = 0", "t = 0.5", "t = 1"]


def test_eigenvalues_come_from_the_factor_and_keep_their_digits() -> None:
    s = np.array([1.0, 1e-7, 1e-12])
    flow = [Gaussian.from_factor(np.zeros(3), np.diag(s * k)) for k in (1.0, 2.0)]
    np.testing.assert_allclose(eigenvalues_along(flow), [s**2, 4 * s**2], rtol=1e-12)
    lines = plot_eigenvalues(flow, times=[0.0, 1.0], ax=new_axes())
    for k, line in enumerate(lines):
        np.testing.assert_allclose(line.get_xydata(), [[0.0, s[k] ** 2], [1.0, 4 * s[k] ** 2]], rtol=1e-12)


def test_eigenvalues_beyond_the_rank_are_zero_and_left_out_of_a_log_axis() -> None:
    flow = [gaussian(0, 4, 2), gaussian(1, 4, 2)]
    w = eigenvalues_along(flow)
    np.testing.assert_allclose(w[:, :2], [np.linalg.eigvalsh(g.cov)[:1:-1] for g in flow], rtol=1e-10)
    assert (w[:, 2:] == 0).all()
    lines = plot_eigenvalues(flow, ax=new_axes())
    assert np.isnan(np.asarray(lines[3].get_ydata(), dtype=float)).all()


def test_energy_curves_hold_the_values_and_leave_infinity_out() -> None:
    curves = {"flow": (TIMES, np.exp(-TIMES)), "steps": (TIMES, np.array([1.0, 0.8, np.inf, 0.5, 0.4]))}
    first, second = plot_energy(curves, ax=new_axes(), steps=("steps",))
    np.testing.assert_allclose(first.get_xydata(), np.stack([TIMES, np.exp(-TIMES)], -1))
    np.testing.assert_array_equal(np.isnan(second.get_ydata()), [False, False, True, False, False])
    assert second.get_linestyle() == "None"


def test_trails_start_and_end_where_the_tokens_do() -> None:
    rng = np.random.default_rng(3)
    clouds = [Particles(torch.from_numpy(rng.standard_normal((6, 2)))) for _ in TIMES]
    trails, start, end = plot_particles(clouds, times=TIMES, ax=new_axes())
    paths = np.stack([c.x.numpy() for c in clouds], 1)
    np.testing.assert_allclose(np.stack(trails.get_segments()), paths)
    np.testing.assert_allclose(start.get_offsets(), paths[:, 0])
    np.testing.assert_allclose(end.get_offsets(), paths[:, -1])


def test_marks_have_areas_proportional_to_weights() -> None:
    cloud = Particles(np.eye(2), weights=[0.75, 0.25])
    _, end = plot_particles([cloud], ax=new_axes())
    assert end.get_sizes()[0] / end.get_sizes()[1] == pytest.approx(3.0)


def test_rate_line_goes_through_the_last_point_with_its_slope() -> None:
    n = np.array([10.0, 100.0, 1000.0])
    bars, line = plot_rate(n, 2.0 / np.sqrt(n), ax=new_axes(), errors=0.1 / n, slope=-0.5)
    np.testing.assert_allclose(bars.lines[0].get_ydata(), 2.0 / np.sqrt(n))
    np.testing.assert_allclose(line.get_ydata(), 2.0 / np.sqrt(n), rtol=1e-12)


def test_projection_keeps_distances_inside_the_plane_and_the_sign_is_fixed() -> None:
    g = gaussian(5, 6)
    plane = principal_plane(g)
    again = principal_plane(Gaussian(g.mean, g.cov))
    np.testing.assert_allclose(plane.basis, again.basis)
    np.testing.assert_allclose(plane.basis.T @ plane.basis, np.eye(2), atol=1e-12)
    inside = g.mean + np.array([[3.0, 4.0]]) @ plane.basis.T
    np.testing.assert_allclose(plane.project(inside), [[3.0, 4.0]])


def test_global_matplotlib_settings_stay_as_they_are() -> None:
    before = dict(mpl.rcParams)
    plot_ellipses([gaussian(0, 2), gaussian(1, 2)], ax=new_axes())
    assert dict(mpl.rcParams) == before


def test_a_batch_is_refused_with_the_reason() -> None:
    with pytest.raises(InvalidInput, match="flow is a batch of shape"):
        plot_ellipses([Gaussian(np.zeros((3, 2)), np.eye(2))])
