"""Bad inputs of the flows."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

import ot_transformers as otf

SOFTMAX = otf.SoftmaxAttention(-np.eye(2), np.eye(2))
G = otf.Gaussian(np.zeros(2), np.eye(2))
CLOUD = otf.Particles(np.eye(2))
ENERGY = otf.SelfTransportEnergy(np.eye(2))
BATCH = otf.SoftmaxAttention(np.ones((3, 2, 2)), np.eye(2))

ROWS: list[tuple[str, Callable[[], object], str]] = [
    ("solve-attention", lambda: otf.solve("softmax", G, 1.0), r"attention must be an Attention"),
    ("solve-measure", lambda: otf.solve(SOFTMAX, "cloud", 1.0), r"measure must be a Gaussian, Particles"),
    (
        "solve-dimension",
        lambda: otf.solve(SOFTMAX, otf.Particles(np.ones((4, 3))), 1.0),
        r"measure has dimension 3",
    ),
    ("solve-t-end", lambda: otf.solve(SOFTMAX, G, -1.0), r"t_end must be > 0"),
    ("solve-t-end-nan", lambda: otf.solve(SOFTMAX, G, float("nan")), r"t_end must be finite"),
    ("solve-rtol", lambda: otf.solve(SOFTMAX, G, 1.0, rtol=0.0), r"rtol must be > 0"),
    ("solve-atol", lambda: otf.solve(SOFTMAX, G, 1.0, atol=-1e-9), r"atol must be > 0"),
    (
        "solve-save-at-order",
        lambda: otf.solve(SOFTMAX, G, 1.0, save_at=[0.5, 0.2]),
        r"save_at must be strictly",
    ),
    ("solve-save-at-range", lambda: otf.solve(SOFTMAX, G, 1.0, save_at=[0.0, 2.0]), r"save_at must lie in"),
    ("solve-save-at-empty", lambda: otf.solve(SOFTMAX, G, 1.0, save_at=[]), r"save_at is empty"),
    ("solve-max-steps", lambda: otf.solve(SOFTMAX, G, 1.0, max_steps=0), r"max_steps must be at least 1"),
    (
        "solve-stop",
        lambda: otf.solve(SOFTMAX, G, 1.0, stop_when_converged="yes"),
        r"stop_when_converged must be",
    ),
    (
        "solve-converged-tol",
        lambda: otf.solve(SOFTMAX, G, 1.0, converged_tol=0.0),
        r"converged_tol must be > 0",
    ),
    (
        "solve-progress",
        lambda: otf.solve(SOFTMAX, G, 1.0, progress=3),
        r"progress must be a bool or a callable",
    ),
    ("solve-energy", lambda: otf.solve(SOFTMAX, G, 1.0, energy="E"), r"energy must be an Energy or a dict"),
    (
        "solve-not-gaussian",
        lambda: otf.solve(otf.SigmoidAttention(1.0, 1.0), otf.Gaussian(0.0, [[1.0]]), 1.0),
        r"SigmoidAttention does not keep Gaussian",
    ),
    (
        "solve-masked-plain-cloud",
        lambda: otf.solve(otf.MaskedAttention(SOFTMAX), CLOUD, 1.0),
        r"must be PositionedParticles",
    ),
    (
        "solve-schedule-end",
        lambda: otf.solve(otf.Schedule([SOFTMAX], [0.0, 0.5]), G, 1.0),
        r"outside the schedule",
    ),
    (
        "solve-schedule-start",
        lambda: otf.solve(otf.Schedule([SOFTMAX], [0.5]), G, 1.0),
        r"outside the schedule",
    ),
    ("trajectory-at", lambda: otf.solve(SOFTMAX, G, 1.0).at(1.5), r"t must lie in"),
    (
        "trajectory-load",
        lambda: otf.Trajectory.load("no-such-file.npz"),
        r"path cannot be read: no-such-file.npz",
    ),
    ("gradient-flow-energy", lambda: otf.gradient_flow("F", G, 1.0), r"energy must be an Energy"),
    (
        "gradient-flow-metric",
        lambda: otf.gradient_flow(ENERGY, G, 1.0, metric="W2"),
        r"metric must be a Metric",
    ),
    (
        "gradient-flow-dimension",
        lambda: otf.gradient_flow(ENERGY, otf.Gaussian(0.0, [[1.0]]), 1.0),
        r"measure has dimension 1",
    ),
    (
        "gradient-flow-infinite",
        lambda: otf.gradient_flow(otf.InteractionEnergy(2.0), otf.Gaussian(0.0, [[1.0]]), 1.0),
        r"energy InteractionEnergy is not finite",
    ),
    ("jko-tau", lambda: otf.jko(ENERGY, G, 0.0, 3), r"tau must be > 0"),
    ("jko-steps", lambda: otf.jko(ENERGY, G, 0.1, 0), r"n_steps must be at least 1"),
    ("jko-tol", lambda: otf.jko(ENERGY, G, 0.1, 1, tol=-1.0), r"tol must be > 0"),
    ("jko-variant", lambda: otf.jko(ENERGY, G, 0.1, 1, variant="backward"), r"variant must be one of"),  # type: ignore[arg-type]
    (
        "jko-metric",
        lambda: otf.jko(ENERGY, CLOUD, 0.1, 1, metric=otf.BuresWasserstein()),
        r"mu must be a Gaussian",
    ),
    ("jko-step-tau", lambda: otf.jko_step(ENERGY, G, float("inf")), r"tau must be finite"),
    ("jko-step-energy", lambda: otf.jko_step(None, G, 0.1), r"energy must be an Energy"),  # type: ignore[arg-type]
    ("structure-attention", lambda: otf.gradient_structure(ENERGY), r"attention must be an Attention"),  # type: ignore[arg-type]
    (
        "solve-batches",
        lambda: otf.solve(BATCH, otf.Gaussian(np.zeros((5, 2)), np.stack([np.eye(2)] * 5)), 1.0),
        "batch",
    ),
    ("structure-batch", lambda: otf.gradient_structure(BATCH), r"attention has a batch of A"),
    (
        "structure-none",
        lambda: otf.gradient_structure(otf.SoftmaxAttention([[0.0, 1.0], [0.0, 0.0]], np.eye(2))),
        r"A is not symmetric",
    ),
    (
        "structure-schedule",
        lambda: otf.gradient_structure(otf.Schedule([SOFTMAX], [0.0])),
        r"parameters depend on time",
    ),
]
