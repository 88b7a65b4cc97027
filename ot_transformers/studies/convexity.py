"""Convexity of the energies of attention along geodesics: numbers with errors, verdicts, and certificates.

1. Every family of curves (W2, generalised, Bures-Wasserstein and twisted geodesics, mixtures) between random
   measures and between real tokens; the second derivative of each energy along it, with its error.
2. The Riemannian Hessian at Dirac masses in the twisted metric against its closed form, where there is one.
3. A search for the most negative modulus in W2 and in the twisted metric, and a proof by ball arithmetic.

The Kullback-Leibler divergence to a log-concave Gaussian, which is convex, is the positive control.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any

import matplotlib as mpl
import numpy as np

from ..arrays import check_count, check_positive
from ..convexity import (
    Certificate,
    CertificateCheck,
    Witness,
    check_certificate,
    find_nonconvexity,
    riemannian_hessian,
)
from ..errors import InvalidInput, OTTransformersError
from ..measures import Particles
from ..metrics import Wasserstein
from ..plotting import COLOURS, STYLE, plot_chord, plot_moduli, plot_second_derivative
from ._presets import load_parameters
from ._probing import Group, Setting, groups, probe_group, setting, unit_size
from ._result import (
    Finding,
    Progress,
    StudyFigure,
    StudyResult,
    Table,
    checked,
    format_number,
    new_figure,
    options_of,
    silent,
)
from ._tokens import load_cloud

__all__ = ["ConvexityConfig", "check", "run"]

Floats = np.ndarray[Any, Any]


@dataclass(frozen=True)
class ConvexityConfig:
    """Options of `convexity`.

    Attributes
    ----------
    tokens : bundled cloud or file, of which the real measures are subsets
    preset, matrices, scale : A and V, as in `compare`; the default is V = I, A = -I
    eps : entropic regularisation of the self-transport energy
    n : particles of a cloud
    d : principal components kept
    curves, real : curves a family between random measures, and between tokens
    n_points : times a curve
    starts : starts of the search for witnesses
    seed : of everything that is random
    """

    tokens: str = "minilm"
    preset: str = "repulsive"
    matrices: str | None = None
    scale: float = 1.0
    eps: float = 1.0
    n: int = 8
    d: int | None = 2
    curves: int = 4
    real: int = 2
    n_points: int = 17
    starts: int = 6
    seed: int = 0


@dataclass(frozen=True, eq=False)
class _Found:
    """A witness of one metric, its certificate (None without the extra), and the check of the written file."""

    name: str
    witness: Witness
    certificate: Certificate | None
    check: CertificateCheck | None


def check(path: str) -> CertificateCheck:
    """Prove the claim of a certificate file again, from its rationals alone (`--check FILE`)."""
    return check_certificate(path)


def run(config: ConvexityConfig, progress: Progress = silent) -> StudyResult:
    """Probe, search, certify.

    Raises
    ------
    InvalidInput
        An option that cannot be used.
    """
    _check_options(config)
    progress("loading", 0.0)
    rng = np.random.default_rng(config.seed)
    cloud = load_cloud(config.tokens, n=None, d=config.d, seed=config.seed, dtype="float64", device="cpu")
    parameters = load_parameters(config.preset, config.matrices, config.scale, cloud, config.seed)
    s = setting(parameters.A.numpy(), parameters.V.numpy(), config.eps, rng)
    tokens = unit_size(cloud.particles, s.A)
    notes = [
        f"Tokens are scaled about their mean by {tokens[1]:.4g}, so that their scores x^T A y are of order 1."
    ]
    probed: list[Group] = []
    jobs = list(groups(s, tokens[0], n=config.n, n_curves=config.curves, n_real=config.real, rng=rng))
    for k, (group, curves) in enumerate(jobs):
        progress(f"{group.energy}, {group.curve}", 0.05 + 0.6 * k / len(jobs))
        notes += probe_group(s, group, curves, config.n_points, config.seed)
        if group.probes:
            probed.append(group)
    progress("searching witnesses", 0.65)
    found, more = _witnesses(config, s)
    notes += more
    if s.metric is None:
        notes.append(f"No twisted metric: {s.why_not}.")
    dirac = _dirac(s, rng)
    progress("drawing", 0.95)
    result = StudyResult(
        study="convexity",
        title="Convexity of the energies of attention along geodesics",
        summary=(
            f"{parameters.text}; dimension {len(s.A)}; clouds of {config.n} particles, random and from "
            f"{cloud.label}; second derivatives by nested forward differentiation at {config.n_points} times a curve."
        ),
        config=options_of(config),
        findings=_findings(s, probed, found, dirac),
        tables=_tables(probed, found),
        figures=_figures(s, probed, found, dirac),
        arrays=_arrays(probed, found, dirac),
        notes=notes,
        files=_files(found),
    )
    progress("done", 1.0)
    return result


def _check_options(config: ConvexityConfig) -> None:
    check_positive(config.eps, "eps")
    check_count(config.n, "n", 2)
    check_count(config.curves, "curves", 1)
    check_count(config.real, "real", 0)
    check_count(config.n_points, "n_points", 2)
    check_count(config.starts, "starts", 1)
    check_count(config.seed, "seed", 0)


def _witnesses(config: ConvexityConfig, s: Setting) -> tuple[list[_Found], list[str]]:
    found: list[_Found] = []
    notes: list[str] = []
    size = 1.0 / np.sqrt(max(float(np.linalg.norm(s.A, 2)), 1e-300))
    metrics: dict[str, Any] = {"W2": Wasserstein()}
    if s.metric is not None:
        metrics["twisted"] = s.metric
    for name, metric in metrics.items():
        witness = find_nonconvexity(
            s.interaction, metric, n=2, radius=float(size), n_starts=config.starts, seed=config.seed
        )
        certificate: Certificate | None = None
        outcome: CertificateCheck | None = None
        try:
            certificate = witness.certify()
            outcome = check_certificate(certificate)
        except InvalidInput as err:
            notes.append(f"{name}: no certificate, {err}")
        except OTTransformersError as err:
            notes.append(str(err))
        found.append(_Found(name, witness, certificate, outcome))
    return found, notes


def _dirac(s: Setting, rng: np.random.Generator) -> tuple[Floats, Floats, Floats] | None:
    """|x|, modulus and error at Dirac masses, for A = -I, D = I, where the modulus is |x|^2 - 1."""
    d = len(s.A)
    if (
        s.metric is None
        or not np.array_equal(s.A, -np.eye(d))
        or not np.allclose(np.asarray(s.metric.D), np.eye(d))
    ):
        return None
    radii = np.linspace(0.0, 2.0, 21)
    pairs = []
    for r in radii:
        e = rng.standard_normal(d)
        pairs.append(
            riemannian_hessian(
                s.interaction, s.metric, Particles([r * e / np.linalg.norm(e)])
            ).min_eigenpair()
        )
    return radii, np.array([p.value for p in pairs]), np.array([p.error for p in pairs])


def _findings(
    s: Setting, probed: list[Group], found: list[_Found], dirac: tuple[Floats, Floats, Floats] | None
) -> list[Finding]:
    findings = [_control(s, probed)]
    if dirac is not None:
        gap = float(np.abs(dirac[1] - (dirac[0] ** 2 - 1)).max())
        text = (
            "In the twisted metric of V = I, A = -I the Riemannian Hessian of the interaction energy at a Dirac "
            f"mass is (|x|^2 - 1) times the metric; at {len(dirac[0])} points the smallest eigenvalue is within "
            f"{format_number(gap)} of it. Near the origin the energy is not convex."
        )
        findings.append(checked("Dirac masses", text, gap, 1e-10))
    total = sum(len(g.probes) for g in probed)
    bad = sum(not p.consistent for g in probed for p in g.probes)
    text = f"Second differences of plain values agree with the second derivatives on {total - bad} of {total} curves."
    findings.append(checked("Second differences agree", text, float(bad), 0.0))
    findings += [_energy_finding(name, [g for g in probed if g.energy == name]) for name in s.energies]
    return [*findings, *(_witness_finding(f) for f in found)]


def _control(s: Setting, probed: list[Group]) -> Finding:
    # In the twisted metric nothing is known of the KL divergence: those rows are reported, not part of the control.
    own = [g for g in probed if "KL" in g.energy and g.curve != "twisted geodesic"]
    bound = 1.0 / float(np.linalg.eigvalsh(np.asarray(s.target.cov)).max())
    low = min((float(p.modulus + p.modulus_error) for g in own for p in g.probes), default=float("nan"))
    convex, total = sum(g.count("convex") for g in own), sum(len(g.probes) for g in own)
    text = (
        f"KL to a log-concave Gaussian is convex on {convex} of {total} Bures-Wasserstein and generalised geodesics, "
        f"with modulus at least {format_number(low)}; theory says at least {format_number(bound)}, the smallest "
        "eigenvalue of the precision."
    )
    return checked("Positive control: KL is convex", text, max(bound - low, float(total - convex)), 0.0)


def _energy_finding(name: str, own: list[Group]) -> Finding:
    parts = []
    for curve in dict.fromkeys(g.curve for g in own):
        same = [g for g in own if g.curve == curve]
        count = {v: sum(g.count(v) for g in same) for v in ("convex", "not convex", "undecided")}
        low = min(float(g.worst.modulus) for g in same)
        total = sum(count.values())
        parts.append(
            f"{curve}: {count['not convex']} of {total} not convex, lowest modulus {format_number(low)}"
        )
    what = name if "KL" in name else f"{name} energy"
    text = f"The {what}. {'; '.join(parts)}."
    lowest = min((float(g.worst.modulus) for g in own), default=float("nan"))
    return Finding(f"{what[0].upper()}{what[1:]}", text, lowest)


def _witness_finding(f: _Found) -> Finding:
    text = (
        f"The most negative modulus found on clouds of two particles is {format_number(f.witness.modulus)} +- "
        f"{format_number(f.witness.error)}."
    )
    title = f"Witness in the {f.name} metric"
    if f.certificate is None or f.check is None:
        return Finding(title, text, f.witness.modulus)
    if not f.certificate.proved:
        return Finding(title, f"{text} No proof: {f.certificate.reason}.", f.witness.modulus)
    low, high = f.certificate.enclosure
    proof = (
        f" Proved by ball arithmetic: at rational points the second derivative lies in [{low:.12g}, {high:.12g}] "
        "(ends rounded for reading), below 0. The certificate, proved again from its rationals, "
        f"{'holds' if f.check.valid else 'FAILS'}."
    )
    return Finding(title, text + proof, f.witness.modulus, None, f.check.valid)


def _tables(probed: list[Group], found: list[_Found]) -> list[Table]:
    head = (
        "curve", "measures", "energy", "curves", "lowest modulus", "its error", "convex", "not convex", "undecided",
    )  # fmt: skip
    rows: list[tuple[Any, ...]] = []
    each: list[tuple[Any, ...]] = []
    for g in probed:
        low = g.worst
        counts = [g.count(v) for v in ("convex", "not convex", "undecided")]
        modulus, error = float(low.modulus), float(low.modulus_error)
        rows.append((g.curve, g.measures, g.energy, len(g.probes), modulus, error, *counts))
        each += [
            (
                g.curve,
                g.measures,
                g.energy,
                k,
                float(p.modulus),
                float(p.modulus_error),
                p.verdict,
                p.consistent,
            )
            for k, p in enumerate(g.probes)
        ]
    note = "Modulus: the least F'' / |speed|^2 over the times probed. Undecided: inside the error."
    tables = [Table("moduli", "Moduli of convexity along curves", head, rows, note)]
    columns: tuple[str, ...] = ("metric", "modulus", "its error", "proved", "low end", "high end")
    tables.append(
        Table("witnesses", "Witnesses of nonconvexity and their proofs", columns, [_row(f) for f in found])
    )
    columns = ("curve", "measures", "energy", "number", "modulus", "error", "verdict", "agrees")
    return [*tables, Table("curves", "Every curve", columns, each)]


def _row(f: _Found) -> tuple[Any, ...]:
    proved = f.certificate is not None and f.certificate.proved
    ends = f.certificate.enclosure if f.certificate is not None and proved else (None, None)
    return (f.name, f.witness.modulus, f.witness.error, proved, *ends)


def _figures(
    s: Setting, probed: list[Group], found: list[_Found], dirac: tuple[Floats, Floats, Floats] | None
) -> list[StudyFigure]:
    names = list(dict.fromkeys(g.energy for g in probed))
    with mpl.rc_context(STYLE):
        figures = [_moduli_figure(name, [g for g in probed if g.energy == name]) for name in names]
        figures += [_witness_figure(f) for f in found]
        if dirac is not None:
            figure, axes = new_figure(width=5.0)
            ax = axes[0, 0]
            fine = np.linspace(0.0, dirac[0][-1], 200)
            ax.plot(fine, fine**2 - 1, color="0.35", lw=1.2, label=r"$|x|^2 - 1$")
            ax.plot(dirac[0], dirac[1], "o", ms=4.5, color=COLOURS[0], label="smallest eigenvalue")
            ax.axhline(0.0, color="0.4", lw=0.9)
            ax.set(xlabel="$|x|$", ylabel="modulus at $\\delta_x$", title="Dirac masses, twisted metric")
            ax.legend()
            caption = "The Riemannian Hessian of the interaction energy at Dirac masses, V = I, A = -I."
            figures.append(StudyFigure("dirac", figure, caption))
    return figures


def _moduli_figure(name: str, own: list[Group]) -> StudyFigure:
    rows = {f"{g.curve}, {g.measures}": [float(p.modulus) for p in g.probes] for g in own}
    figure, axes = new_figure(width=7.5, height=1.2 + 0.27 * len(rows))
    plot_moduli(rows, ax=axes[0, 0])
    axes[0, 0].tick_params(axis="y", labelsize=8)
    what = name if "KL" in name else f"{name} energy"
    axes[0, 0].set_title(f"{what}: moduli along curves")
    caption = (
        f"Moduli of convexity of the {what}, one point a curve: orange is negative, not convex along it."
    )
    return StudyFigure(f"moduli_{re.sub('[^a-z0-9]+', '_', name.lower()).strip('_')}", figure, caption)


def _witness_figure(f: _Found) -> StudyFigure:
    from ..convexity import probe_convexity

    figure, axes = new_figure(1, 2, width=4.4)
    curve = f.witness.curve
    plot_chord(f.witness.energy, curve, ax=axes[0, 0])
    axes[0, 0].legend()
    axes[0, 0].set_title(f"Witness in the {f.name} metric")
    plot_second_derivative(probe_convexity(f.witness.energy, curve), ax=axes[0, 1])
    axes[0, 1].set_title("second derivative along it")
    caption = (
        f"Energy along the {curve.family} through the witness against its chord, and its second derivative."
    )
    return StudyFigure(f"witness_{f.name.lower()}", figure, caption)


def _arrays(
    probed: list[Group], found: list[_Found], dirac: tuple[Floats, Floats, Floats] | None
) -> dict[str, Floats]:
    arrays: dict[str, Floats] = {}
    for k, g in enumerate(probed):
        key = f"group_{k:02d}"
        arrays[f"{key}_t"] = np.asarray(g.probes[0].t)
        for name in ("values", "second_derivatives", "errors", "speed_squared"):
            arrays[f"{key}_{name}"] = np.stack([np.asarray(getattr(p, name)) for p in g.probes])
    arrays["groups"] = np.array([f"{g.energy} | {g.curve} | {g.measures}" for g in probed])
    for f in found:
        arrays[f"witness_{f.name.lower()}_x"] = np.asarray(f.witness.measure.x_t)  # type: ignore[union-attr]
        arrays[f"witness_{f.name.lower()}_direction"] = np.asarray(f.witness.direction)
    if dirac is not None:
        arrays |= dict(zip(("dirac_radius", "dirac_modulus", "dirac_error"), dirac, strict=True))
    return arrays


def _files(found: list[_Found]) -> dict[str, str | bytes]:
    files: dict[str, str | bytes] = {}
    for f in found:
        name = f.name.lower()
        files[f"witness_{name}.npz"] = f.witness.to_bytes()
        if f.certificate is not None:
            files[f"certificate_{name}.json"] = f.certificate.to_json()
    return files
