"""Trajectories: dense output, files, energies, progress."""

from __future__ import annotations

import numpy as np
import pytest
import torch

import ot_transformers as otf


def gaussian_run(**options):
    g = otf.Gaussian.from_factor(np.array([0.3, -0.2]), np.array([[1.0], [0.5]]))
    return otf.solve(otf.SoftmaxAttention(-np.eye(2), np.eye(2)), g, 2.0, save_at=[0.0, 1.0, 2.0], **options)


def test_dense_output_has_the_accuracy_of_the_flow():
    """V = I, A = -I, S of rank one along u: |S| = s0 / (1 + 2 t s0)."""
    run = gaussian_run(rtol=1e-10, atol=1e-12)
    for t in (0.0, 0.1, 0.77, 1.0, 1.999, 2.0):
        assert np.trace(run.at(t).cov) == pytest.approx(1.25 / (1 + 2 * t * 1.25), rel=1e-9)


def test_a_saved_time_gives_the_saved_state():
    run = gaussian_run()
    assert run.at(1.0) is run.states[1]


@pytest.mark.parametrize("kind", ["gaussian", "particles", "weighted", "positioned", "batch", "torch"])
def test_files_give_back_what_was_saved(tmp_path, kind):
    rng = np.random.default_rng(0)
    x = rng.standard_normal((5, 2))
    attention: otf.SoftmaxAttention | otf.MaskedAttention = otf.SoftmaxAttention(np.eye(2), -np.eye(2))
    energy = otf.InteractionEnergy(-np.eye(2))
    measure = {
        "gaussian": otf.Gaussian.from_factor(np.ones(2), np.array([[1.0], [0.0]])),
        "particles": otf.Particles(x),
        "weighted": otf.Particles(x, np.array([0.1, 0.2, 0.3, 0.4, 0.0])),
        "positioned": otf.PositionedParticles(x, np.linspace(0, 1, 5)),
        "batch": otf.Gaussian(np.zeros((3, 2)), np.eye(2)),
        "torch": otf.Particles(torch.tensor(x, dtype=torch.float32)),
    }[kind]
    if kind == "positioned":
        attention = otf.MaskedAttention(attention)
    run = otf.solve(attention, measure, 0.2, energy=energy, save_at=[0.0, 0.1, 0.2])
    back = otf.Trajectory.load(run.save(tmp_path / "deep" / "run.npz"))
    np.testing.assert_array_equal(back.times, run.times)
    np.testing.assert_array_equal(np.asarray(back.status), np.asarray(run.status))
    np.testing.assert_array_equal(back.energies["energy"], run.energies["energy"])
    np.testing.assert_array_equal(back.energy_rates["energy"], run.energy_rates["energy"])
    np.testing.assert_array_equal(np.asarray(back.blow_up_time), np.asarray(run.blow_up_time))
    assert back.stats["n_steps"] == run.stats["n_steps"]
    for a, b in zip(back.states, run.states, strict=True):
        assert type(a) is type(b)
        assert a.kind == b.kind
        assert a.dtype == b.dtype
        assert getattr(a, "uniform", None) == getattr(b, "uniform", None)
        for name in ("factor", "mean", "x", "weights", "s"):
            if hasattr(b, name):
                np.testing.assert_array_equal(np.asarray(getattr(a, name)), np.asarray(getattr(b, name)))
    assert list(tmp_path.glob("deep/*")) == [tmp_path / "deep" / "run.npz"]


def refused(path, words):
    with pytest.raises(otf.InvalidInput, match=words) as caught:
        otf.Trajectory.load(path)
    assert str(path) in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_file_of_anything_else_is_refused(tmp_path):
    np.savez(tmp_path / "other.npz", x=np.ones(3))
    np.save(tmp_path / "objects.npy", np.array([{}], dtype=object), allow_pickle=True)
    np.save(tmp_path / "numbers.npy", np.ones(3))
    (tmp_path / "text.npz").write_text("not a zip")
    (tmp_path / "empty.npz").touch()
    refused(tmp_path / "other.npz", "path is not a trajectory file")
    for name in ("objects.npy", "numbers.npy", "text.npz", "empty.npz"):
        refused(tmp_path / name, "path is not an NPZ file")
    refused(tmp_path / "missing.npz", "path cannot be read: .*No such file")
    refused(tmp_path, "path cannot be read")


def test_a_damaged_file_is_refused(tmp_path):
    path = gaussian_run().save(tmp_path / "run.npz")
    whole = path.read_bytes()
    path.write_bytes(whole[: len(whole) // 2])
    refused(path, "path is a damaged NPZ file")
    flipped = bytearray(whole)
    flipped[whole.index(b"factor.npy") + 40] ^= 0xFF
    path.write_bytes(bytes(flipped))
    refused(path, "path is a damaged NPZ file")


def test_a_file_that_lacks_something_says_what(tmp_path):
    path = gaussian_run().save(tmp_path / "run.npz")
    with np.load(path) as data:
        content = dict(data)
    for name in ("times", "status", "kind", "factor", "stats", "warnings", "last_times"):
        np.savez(path, **{k: v for k, v in content.items() if k != name})
        refused(path, f"path is a trajectory file without '{name}'")
    for name, wrong in {
        "times": content["times"][:-1],
        "mean": content["mean"].astype(str),
        "stats": np.array("{"),
        "factor": content["factor"][1:],
        "warnings": np.array("one"),
    }.items():
        np.savez(path, **{**content, name: wrong})
        refused(path, "path is a damaged trajectory file")


def test_a_place_that_cannot_be_written_is_named(tmp_path):
    with pytest.raises(otf.InvalidInput, match="path is a folder"):
        gaussian_run().save(tmp_path)
    (tmp_path / "file").write_text("")
    with pytest.raises(otf.InvalidInput, match="path cannot be written"):
        gaussian_run().save(tmp_path / "file" / "run.npz")


def test_a_loaded_trajectory_gives_the_state_before_t(tmp_path):
    run = gaussian_run()
    back = otf.Trajectory.load(run.save(tmp_path / "run.npz"))
    np.testing.assert_array_equal(back.at(1.7).cov, run.states[1].cov)


@pytest.mark.parametrize("kind", ["gaussian", "weighted", "positioned", "batch", "torch"])
def test_a_file_holds_the_start_before_the_first_save_time(tmp_path, kind):
    """Solved: integrated from the initial measure. Loaded: that measure, the state before t."""
    x = np.random.default_rng(0).standard_normal((4, 2))
    w, s = [0.1, 0.2, 0.3, 0.4], [0.0, 0.2, 0.2, 1.0]
    measure = {
        "gaussian": otf.Gaussian.from_factor(np.ones(2), np.array([[1.0], [0.5]])),
        "weighted": otf.Particles(x, w),
        "positioned": otf.PositionedParticles(x, s, w),
        "batch": otf.Particles(np.stack([x, -x])),
        "torch": otf.Gaussian(torch.zeros(2), torch.eye(2)),
    }[kind]
    attention: otf.Attention = otf.SoftmaxAttention(-np.eye(2), np.eye(2))
    if kind == "positioned":
        attention = otf.MaskedAttention(attention)
    run = otf.solve(attention, measure, 1.0, save_at=[0.5, 1.0])
    full = otf.solve(attention, measure, 1.0, save_at=[0.25, 0.5, 1.0])
    back = otf.Trajectory.load(run.save(tmp_path / "run.npz"))
    np.testing.assert_array_equal(back.times, [0.5, 1.0])
    for state, expected in (
        (back.at(0.0), measure),
        (back.at(0.4), measure),
        (back.at(0.5), run.states[0]),
        (back.at(0.7), run.states[0]),
        (run.at(0.0), measure),
    ):
        assert type(state) is type(measure)
        assert state.kind == measure.kind
        for name in ("factor_t", "mean_t", "x_t", "weights_t", "s_t"):
            if hasattr(expected, name):
                torch.testing.assert_close(getattr(state, name), getattr(expected, name), rtol=0, atol=0)
    tol = 1e-6 if kind == "torch" else 1e-8
    torch.testing.assert_close(run.at(0.25).cov_t, full.states[0].cov_t, rtol=tol, atol=tol)
    with pytest.raises(
        otf.InvalidInput, match=r"t must lie in \[0, 1\], the times that this trajectory holds, got -0.1"
    ):
        back.at(-0.1)


def test_a_file_without_its_start_says_which_times_it_holds(tmp_path):
    run = otf.solve(otf.AffineBlock(-1.0), np.ones((3, 1)), 1.0, save_at=[0.5, 1.0])
    path = run.save(tmp_path / "run.npz")
    with np.load(path) as data:
        np.savez(path, **{k: v for k, v in data.items() if not k.startswith("initial_")})
    with pytest.raises(
        otf.InvalidInput, match=r"t must lie in \[0\.5, 1\], the times that this trajectory holds, got 0\.2"
    ):
        otf.Trajectory.load(path).at(0.2)


def test_recorded_rates_are_the_derivatives_of_recorded_energies():
    """dE/dt along any flow, also one that is not a gradient flow, by central differences."""
    rng = np.random.default_rng(1)
    A, V = 0.5 * rng.standard_normal((2, 2, 2))
    h = 1e-4
    for measure in (otf.Gaussian(np.ones(2), 0.3 * np.eye(2)), otf.Particles(rng.standard_normal((6, 2)))):
        run = otf.solve(
            otf.SoftmaxAttention(A, V),
            measure,
            1.0,
            energy={"E": otf.InteractionEnergy(0.3 * np.eye(2)), "F": otf.SelfTransportEnergy(np.eye(2))},
            save_at=[0.5 - h, 0.5, 0.5 + h],
            rtol=1e-11,
            atol=1e-12,
        )
        for name in ("E", "F"):
            e = run.energies[name]
            slope = (e[2] - e[0]) / (2 * h)
            assert run.energy_rates[name][1] == pytest.approx(slope, rel=1e-5)


def test_progress_is_reported_and_ends_at_one():
    seen: list[float] = []
    gaussian_run(progress=seen.append)
    assert seen == sorted(seen)
    assert seen[-1] == 1.0
    gaussian_run(progress=True)


def test_a_trajectory_is_frozen_and_its_start_is_not_written():
    x = np.ones((3, 2)) * np.arange(3)[:, None]
    before = x.copy()
    run = otf.solve(otf.SoftmaxAttention(np.eye(2), np.eye(2)), otf.Particles(x), 0.1)
    np.testing.assert_array_equal(x, before)
    with pytest.raises(AttributeError):
        run.status = "completed"  # type: ignore[misc]


def test_times_before_the_first_saved_one(tmp_path):
    """A flow goes back to its start, which a file holds as well."""
    g = otf.Gaussian([1.0], [[1.0]])
    run = otf.solve(otf.AffineBlock(-1.0), g, 1.0, save_at=[0.5, 1.0])
    assert run.at(0.0).mean[0] == 1.0
    assert run.at(0.25).mean[0] == pytest.approx(np.exp(-0.25), rel=1e-7)
    back = otf.Trajectory.load(run.save(tmp_path / "late.npz"))
    assert back.at(0.5).mean[0] == run.states[0].mean[0]
    assert back.at(0.25).mean[0] == 1.0  # the state before it
