"""The convexity study and its figures: what they say is what the tools give."""

from __future__ import annotations

from pathlib import Path

import matplotlib as mpl
import numpy as np
import pytest

mpl.use("Agg")

from ot_transformers import (
    DisplacementCurve,
    InteractionEnergy,
    Particles,
    check_certificate,
    load_witness,
    probe_convexity,
    riemannian_hessian,
)
from ot_transformers.plotting import plot_chord, plot_moduli, plot_second_derivative
from ot_transformers.studies._result import new_figure
from ot_transformers.studies.convexity import ConvexityConfig, check, run


def test_curves_between_equal_samples_are_skipped_with_a_note(tmp_path: Path) -> None:
    file = tmp_path / "c.npy"
    np.save(file, np.random.default_rng(0).standard_normal((6, 2)))
    # Samples of 4 n = 8 tokens out of 6 are all of them, twice.
    result = run(ConvexityConfig(tokens=str(file), n=2, curves=1, real=1, n_points=3, starts=1))
    assert any("token Gaussians: the two measures are equal" in note for note in result.notes)
    assert not any(row[1] == "token Gaussians" for row in result.tables[0].rows)
    assert all(np.isfinite(row[4]) for row in result.tables[0].rows)
    assert result.passed


def test_study_controls_and_certificates(tmp_path: Path) -> None:
    config = ConvexityConfig(n=3, curves=1, real=1, n_points=3, starts=1)
    result = run(config)
    passed = {f.title: f.passed for f in result.findings}
    assert passed["Positive control: KL is convex"] is True
    assert passed["Dirac masses"] is True
    assert passed["Second differences agree"] is True
    assert passed["Witness in the W2 metric"] is True
    assert passed["Witness in the twisted metric"] is True
    assert result.exit_status == 0
    families = {(row[0], row[2]) for row in result.tables[0].rows}
    for curve in ("W2 geodesic", "generalised geodesic", "linear mixture", "twisted geodesic"):
        assert {(curve, "interaction"), (curve, "-self-transport")} <= families
    assert ("Bures-Wasserstein geodesic", "KL to a Gaussian") in families
    out = result.write(tmp_path / "out")
    for name in ("w2", "twisted"):
        assert check(str(out / f"certificate_{name}.json")).valid
        witness = load_witness(out / f"witness_{name}.npz")
        hessian = riemannian_hessian(witness.energy, witness.metric, witness.measure)
        assert hessian.quadratic_form(witness.direction) == pytest.approx(witness.modulus, abs=1e-9)
    text = (out / "certificate_w2.json").read_text()
    (tmp_path / "changed.json").write_text(text.replace('"t": "1/2"', '"t": "1/4"'))
    assert not check_certificate(tmp_path / "changed.json").valid


def test_the_filled_area_is_where_the_energy_exceeds_its_chord() -> None:
    curve = DisplacementCurve(
        Particles([[-2.0]]), Particles([[2.0]])
    )  # e^{-x^2} / 2 has its top in the middle
    energy = InteractionEnergy(-1.0)
    _, axes = new_figure(1, 2)
    line, chord, area = plot_chord(energy, curve, ax=axes[0, 0])
    t, f = line.get_data()
    np.testing.assert_allclose(f, 0.5 * np.exp(-((4 * t - 2) ** 2)), rtol=1e-12)
    np.testing.assert_allclose(chord.get_ydata(), 0.5 * np.exp(-4.0), rtol=1e-12)
    assert area.get_paths()[0].get_extents().ymax == pytest.approx(0.5)
    probe = probe_convexity(energy, curve)
    second, _ = plot_second_derivative(probe, ax=axes[0, 1])
    x = 4 * second.get_xdata() - 2
    np.testing.assert_allclose(second.get_ydata(), (2 * x**2 - 1) * np.exp(-(x**2)), atol=1e-13)


def test_moduli_are_coloured_by_their_sign() -> None:
    _, axes = new_figure()
    artists = plot_moduli({"a": [-1.0, 2.0], "b": [0.5]}, ax=axes[0, 0])
    drawn = sorted((float(x), round(float(y))) for a in artists for x, y in a.get_offsets())
    assert drawn == [(-1.0, 0), (0.5, 1), (2.0, 0)]
    colours = {float(a.get_offsets()[0][0]) < 0: tuple(a.get_facecolor()[0][:3]) for a in artists}
    assert len(set(colours.values())) == 2
