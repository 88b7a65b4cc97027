"""Bad inputs of everything Sinkhorn."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch

from ot_transformers.attention import SinkhornAttention
from ot_transformers.energies import SelfTransportEnergy, SinkhornDivergence
from ot_transformers.measures import Gaussian, Particles
from ot_transformers.metrics import sinkhorn_coupling
from ot_transformers.numerics.sinkhorn import sinkhorn

I2, X = np.eye(2), np.zeros((3, 2))
G1, G2 = Gaussian(0.0, [[1.0]]), Gaussian(np.zeros(2), np.eye(2))


def _causal() -> object:
    x, w = torch.zeros(3, 1).double(), torch.full((3,), 1 / 3).double()
    mask = torch.ones(3, 3, dtype=torch.bool).tril()
    return sinkhorn(x, w, x, w, torch.ones(1, 1).double(), 1.0, mask=mask)


def _short_mask() -> object:
    x, w = torch.zeros(3, 1).double(), torch.full((3,), 1 / 3).double()
    return sinkhorn(x, w, x, w, torch.ones(1, 1).double(), 1.0, mask=torch.ones(2, 3, dtype=torch.bool))


def _bad_eps() -> object:
    x, w = torch.zeros(3, 1).double(), torch.full((3,), 1 / 3).double()
    return sinkhorn(x, w, x, w, torch.ones(1, 1).double(), float("nan"))


ROWS: list[tuple[str, Callable[[], object], str]] = [
    ("attention-eps-zero", lambda: SinkhornAttention(I2, I2, eps=0.0), "eps must be > 0"),
    ("attention-eps-nan", lambda: SinkhornAttention(I2, I2, eps=float("nan")), "eps must be finite"),
    ("attention-tol", lambda: SinkhornAttention(I2, I2, tol=-1e-9), "tol must be > 0"),
    ("attention-max-iter", lambda: SinkhornAttention(I2, I2, max_iter=0), "max_iter must be at least 1"),
    ("attention-A-not-square", lambda: SinkhornAttention(np.ones((2, 3)), I2), "A must be square"),
    ("attention-V-nan", lambda: SinkhornAttention(I2, I2 * np.nan), "V has 4 NaN"),
    ("attention-A-V", lambda: SinkhornAttention(I2, np.eye(3)), "A acts on dimension 2, V on dimension 3"),
    ("attention-complex", lambda: SinkhornAttention(1j * I2, I2), "A must be real"),
    ("attention-QK", lambda: SinkhornAttention.from_qkv(np.ones((1, 2)), I2, I2), "Q and K must have equal"),
    (
        "attention-dim",
        lambda: SinkhornAttention(I2, I2).velocity(np.zeros((3, 1))),
        "particles has dimension 1",
    ),
    ("attention-gaussian", lambda: SinkhornAttention(I2, I2).affine(X), "gaussian must be a Gaussian"),  # type: ignore[arg-type]
    ("attention-measure", lambda: SinkhornAttention(I2, I2).velocity(G2), "particles must be Particles"),  # type: ignore[arg-type]
    ("self-transport-eps", lambda: SelfTransportEnergy(I2, -1.0), "eps must be > 0"),
    ("self-transport-A", lambda: SelfTransportEnergy(np.ones(3)), "A must be a matrix"),
    ("self-transport-dim", lambda: SelfTransportEnergy(I2).value(G1), "measure has dimension 1"),
    ("divergence-eps", lambda: SinkhornDivergence(G1, 0.0), "eps must be > 0"),
    ("divergence-target", lambda: SinkhornDivergence("cloud", 1.0), "target must be a Gaussian, Particles"),  # type: ignore[arg-type]
    ("divergence-kind", lambda: SinkhornDivergence(G2, 1.0).value(X), "measure is a cloud, the target"),
    ("divergence-kind-2", lambda: SinkhornDivergence(Particles(X), 1.0).value(G2), "measure is a Gaussian"),
    ("divergence-dim", lambda: SinkhornDivergence(G2, 1.0).value(G1), "measure has dimension 1"),
    (
        "divergence-batch",
        lambda: SinkhornDivergence(Particles(np.zeros((2, 3, 2))), 1.0).value(np.zeros((3, 3, 2))),
        "batch dimensions do not broadcast: measure",
    ),
    ("coupling-gaussian", lambda: sinkhorn_coupling(X, I2), "gaussian must be a Gaussian"),  # type: ignore[arg-type]
    ("coupling-dim", lambda: sinkhorn_coupling(G1, I2), "A acts on dimension 2, gaussian has dimension 1"),
    ("coupling-eps", lambda: sinkhorn_coupling(G2, I2, eps=0.0), "eps must be > 0"),
    ("coupling-inf", lambda: sinkhorn_coupling(G2, np.full((2, 2), np.inf)), "A has 4 NaN or inf"),
    ("solver-causal", _causal, "mask is causal"),
    ("solver-mask-shape", _short_mask, "mask must have shape"),
    ("solver-eps", _bad_eps, "eps must be > 0"),
]
