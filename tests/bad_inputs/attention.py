"""Bad inputs of the attention maps."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from ot_transformers.attention import (
    AffineBlock,
    L2Attention,
    LinearAttention,
    MaskedAttention,
    MultiHeadAttention,
    Schedule,
    SigmoidAttention,
    SinkhornAttention,
    SoftmaxAttention,
    UnnormalisedAttention,
)
from ot_transformers.measures import Gaussian, Particles, PositionedParticles

I2, I3, X = np.eye(2), np.eye(3), np.zeros((3, 2))
B2 = np.ones((2, 2, 2))
SOFTMAX = SoftmaxAttention(I2, I2)
MASKED = MaskedAttention(SOFTMAX)
S = np.array([0.0, 0.5, 1.0])
ANY: Any = None  # arguments of the wrong type, on purpose

Row = tuple[str, Callable[[], object], str]

ROWS: list[Row] = [
    ("A-not-square", lambda: SoftmaxAttention(np.ones((2, 3)), I2), r"A must be square .*\(2, 3\)"),
    ("A-vector", lambda: LinearAttention(np.ones(2), I2), r"A must be a matrix .*\(2,\)"),
    ("A-nan", lambda: UnnormalisedAttention(I2 * np.nan, I2), "A has 4 NaN or infinite"),
    ("A-complex", lambda: SigmoidAttention(1j * I2, I2), "A must be real"),
    ("A-object", lambda: SoftmaxAttention(np.array([[object()]]), 1.0), "A must be a numeric array"),
    ("A-none", lambda: SoftmaxAttention(ANY, I2), "A must be a numeric array"),
    ("A-text", lambda: SoftmaxAttention("identity", I2), "A must be a numeric array"),  # type: ignore[arg-type]
    ("A-empty", lambda: SoftmaxAttention(np.zeros((0, 0)), I2), "A is empty"),
    ("A-half", lambda: SoftmaxAttention(I2.astype(np.float16), I2), "A must be float32 or float64"),
    ("V-not-square", lambda: L2Attention(I2, I2, np.ones((3, 2))), "V must be square"),
    ("V-inf", lambda: LinearAttention(I2, np.full((2, 2), np.inf)), "V has 4 NaN or infinite"),
    ("A-V-dimension", lambda: SoftmaxAttention(I2, I3), "A acts on dimension 2, V on dimension 3"),
    ("A-V-batch", lambda: SigmoidAttention(B2, np.ones((3, 2, 2))), r"do not broadcast: A \(2,\), V \(3,\)"),
    ("Q-K-shape", lambda: L2Attention(np.ones((1, 2)), I2, I2), "Q and K must have equal shapes"),
    ("K-V-dimension", lambda: L2Attention(I2, I2, I3), "K acts on dimension 2, V on dimension 3"),
    ("Q-K-batch", lambda: L2Attention(B2, np.ones((3, 2, 2)), I2), r"do not broadcast: Q \(2,\), K \(3,\)"),
    ("Q-V-batch", lambda: L2Attention(B2, I2, np.ones((3, 2, 2))), r"do not broadcast: Q \(2,\), K \(\), V"),
    ("bias-nan", lambda: SigmoidAttention(I2, I2, bias=np.nan), "bias must be finite"),
    ("bias-text", lambda: SigmoidAttention(I2, I2, bias="-log n"), "bias must be a number"),  # type: ignore[arg-type]
    ("qkv-Q-K", lambda: SoftmaxAttention.from_qkv(I2, I3, I2), "Q and K must have equal shapes"),
    ("qkv-scale", lambda: LinearAttention.from_qkv(I2, I2, I2, scale=np.inf), "scale must be finite"),
    (
        "qkv-scale-array",
        lambda: UnnormalisedAttention.from_qkv(I2, I2, I2, scale=np.ones(2)),
        "scale must be a",
    ),
    ("qkv-l2-scale", lambda: L2Attention.from_qkv(I2, I2, I2, scale=-1.0), "scale must be > 0"),
    ("velocity-dimension", lambda: SOFTMAX.velocity(np.zeros((3, 1))), "particles has dimension 1, Softmax"),
    ("velocity-vector", lambda: SOFTMAX.velocity(np.zeros(3)), r"x must be a cloud .*\(3,\)"),
    ("velocity-nan", lambda: SOFTMAX.velocity(X * np.nan), "x has 6 NaN"),
    ("velocity-gaussian", lambda: SOFTMAX.velocity(Gaussian(np.zeros(2), I2)), "particles must be Particles"),  # type: ignore[arg-type]
    ("velocity-none", lambda: SOFTMAX.velocity(ANY), "particles must be"),
    (
        "velocity-batch",
        lambda: SoftmaxAttention(B2, I2).velocity(np.zeros((3, 4, 2))),
        r"broadcast: particles \(3,\)",
    ),
    (
        "velocity-device",
        lambda: SOFTMAX.velocity(Particles.unchecked(torch.zeros(3, 2, device="meta"))),
        "A is on device cpu, the measure on meta",
    ),
    (
        "field-points-dimension",
        lambda: SOFTMAX.field(X, np.zeros((2, 3))),
        "points has dimension 3, particles",
    ),
    ("field-points-vector", lambda: SOFTMAX.field(X, np.zeros(2)), "points must have at least 2 dimension"),
    ("field-points-nan", lambda: SOFTMAX.field(X, X * np.nan), "points has 6 NaN"),
    (
        "field-batch",
        lambda: SOFTMAX.field(np.zeros((2, 3, 2)), np.zeros((3, 1, 2))),
        r"broadcast: points \(3,\)",
    ),
    ("field-dimension-of-any", lambda: AffineBlock(I3).field(X, X), "particles has dimension 2, AffineBlock"),
    ("affine-cloud", lambda: SOFTMAX.affine(X), "gaussian must be a Gaussian"),  # type: ignore[arg-type]
    ("affine-dimension", lambda: SOFTMAX.affine(Gaussian(0.0, 1.0)), "gaussian has dimension 1"),
    (
        "affine-batch",
        lambda: LinearAttention(B2, I2).affine(Gaussian(np.zeros((3, 2)), I2)),
        r"broadcast: gaussian \(3,\), LinearAttention \(2,\)",
    ),
    (
        "affine-sigmoid",
        lambda: SigmoidAttention(I2, I2).affine(Gaussian(np.zeros(2), I2)),
        "SigmoidAttention does",
    ),
    ("block-W", lambda: AffineBlock(np.ones((2, 3))), "W must be square"),
    ("block-c", lambda: AffineBlock(I2, np.zeros(3)), "c has dimension 3, W acts on dimension 2"),
    ("block-c-nan", lambda: AffineBlock(I2, [0.0, np.nan]), "c has 1 NaN"),
    ("block-batch", lambda: AffineBlock(B2, np.zeros((3, 2))), r"do not broadcast: W \(2,\), c \(3,\)"),
    ("heads-empty", lambda: MultiHeadAttention([]), "heads must be a non-empty list"),
    ("heads-one", lambda: MultiHeadAttention(SOFTMAX), "heads must be a non-empty list"),  # type: ignore[arg-type]
    ("heads-matrix", lambda: MultiHeadAttention([SOFTMAX, I2]), "heads must be attentions"),  # type: ignore[list-item]
    (
        "heads-dimension",
        lambda: MultiHeadAttention([SOFTMAX, AffineBlock(I3)]),
        r"heads must act on one .*\[2, 3\]",
    ),
    (
        "heads-schedule",
        lambda: MultiHeadAttention([Schedule([SOFTMAX], [0.0])]),
        "heads must not be schedules",
    ),
    (
        "heads-batch",
        lambda: MultiHeadAttention([SoftmaxAttention(B2, I2), AffineBlock(np.ones((3, 2, 2)))]),
        r"do not broadcast: heads\[0\] \(2,\), heads\[1\] \(3,\)",
    ),
    ("outputs-count", lambda: MultiHeadAttention([SOFTMAX], [I2, I2]), "outputs must be 1 matrices"),
    ("outputs-number", lambda: MultiHeadAttention([SOFTMAX], 2.0), "outputs must be 1 matrices"),  # type: ignore[arg-type]
    (
        "outputs-dimension",
        lambda: MultiHeadAttention([SOFTMAX], [I3]),
        r"outputs act on dimension \[3\], heads on 2",
    ),
    ("outputs-shape", lambda: MultiHeadAttention([SOFTMAX], [np.ones((2, 3))]), "outputs must be square"),
    ("mask-matrix", lambda: MaskedAttention(I2), "attention must be one attention to mask"),  # type: ignore[arg-type]
    ("mask-twice", lambda: MaskedAttention(MASKED), "attention must be one attention to mask"),
    ("mask-schedule", lambda: MaskedAttention(Schedule([SOFTMAX], [0.0])), "attention must be one attention"),
    ("mask-sinkhorn", lambda: MaskedAttention(SinkhornAttention(I2, I2)), "attention .* no total support"),
    ("mask-without-positions", lambda: MASKED.velocity(X), r"particles must be PositionedParticles\(x, s\)"),
    (
        "mask-no-atom-at-0",
        lambda: MASKED.velocity(PositionedParticles(X, S + 0.5 * (1 - S))),
        "particles must have mass at position 0 .*smallest position with mass is 0.5",
    ),
    (
        "mask-weightless-atom",
        lambda: MASKED.velocity(PositionedParticles(X, S, [0.0, 0.5, 0.5])),
        "particles must have mass at position 0",
    ),
    ("mask-evaluator", lambda: MASKED.evaluator(), "particles must be PositionedParticles"),
    (
        "mask-dimension",
        lambda: MASKED.velocity(PositionedParticles(np.zeros((3, 1)), S)),
        "particles has dimension 1",
    ),
    ("mask-field-positions", lambda: MASKED.field(PositionedParticles(X, S), X), "s is missing"),
    (
        "mask-field-range",
        lambda: MASKED.field(PositionedParticles(X, S), X, S + 1),
        r"s must lie in \[0, 1\]",
    ),
    (
        "mask-field-dimension",
        lambda: MASKED.field(PositionedParticles(X, S), np.zeros((3, 1)), S),
        "points has dim",
    ),
    (
        "mask-gaussian",
        lambda: MASKED.affine(Gaussian(np.zeros(2), I2)),
        "MaskedAttention does not keep Gaussian",
    ),
    ("layers-empty", lambda: Schedule([], [0.0]), "attentions must be a non-empty list"),
    ("layers-matrix", lambda: Schedule([I2], [0.0]), "attentions must hold attentions"),  # type: ignore[list-item]
    ("layers-dimension", lambda: Schedule([SOFTMAX, AffineBlock(I3)], [0, 1]), "attentions must act on one"),
    ("times-count", lambda: Schedule([SOFTMAX], [0, 1, 2]), "times has 3 entries for 1 layers"),
    ("times-order", lambda: Schedule([SOFTMAX] * 2, [1.0, 0.0]), "times must be strictly increasing"),
    ("times-equal", lambda: Schedule([SOFTMAX] * 2, [1.0, 1.0]), "times must be strictly increasing"),
    ("times-nan", lambda: Schedule([SOFTMAX], [np.nan]), "times must be finite"),
    ("times-none", lambda: Schedule([SOFTMAX], ANY), "times must be a sequence of numbers"),
    ("time-outside", lambda: Schedule([SOFTMAX], [0.0, 1.0]).at(1.5), "t = 1.5 lies outside the schedule"),
    ("function", lambda: Schedule.from_function(SOFTMAX), "f must be a callable"),  # type: ignore[arg-type]
    ("function-value", lambda: Schedule.from_function(lambda t: I2), "f must return an Attention"),  # type: ignore[arg-type,return-value]
    (
        "jumps",
        lambda: Schedule.from_function(lambda t: SOFTMAX, jumps=ANY),
        "jumps must be a sequence of numbers",
    ),
    (
        "bounds-sinkhorn",
        lambda: SinkhornAttention(I2, I2).bounds(1.0),
        "attention SinkhornAttention has no explicit",
    ),
    ("bounds-batch", lambda: SoftmaxAttention(B2, I2).bounds(1.0), "attention has a batch of A"),
]
