"""The parameter sets of the paper's numerical section, as data: panels in the 2 x 2 cone and rank ensembles."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from ..attention import Attention, L2Attention, MultiHeadAttention, SinkhornAttention, SoftmaxAttention
from ..measures import Gaussian

__all__ = ["KINDS", "PANELS", "Panel", "rank_ensemble", "starts"]

Matrix = np.ndarray[Any, Any]
KINDS = ("softmax", "L2", "multi-head", "Sinkhorn")


@dataclass(frozen=True, eq=False)
class Panel:
    """One regime: parameters, the time, how to draw it, and what the theory says.

    Attributes
    ----------
    key, title : names
    Q, K, V : 2 x 2 parameters, A = K^T Q
    t_end : time of the flow (a flow that blows up ends before)
    disc : drawn in trace-normalised coordinates on the unit disc instead of the cone
    theory : what is known for softmax, in words
    """

    key: str
    title: str
    Q: Matrix
    K: Matrix
    V: Matrix
    t_end: float
    disc: bool
    theory: str

    @property
    def A(self) -> Matrix:
        """A = K^T Q."""
        return self.K.T @ self.Q

    def attention(self, kind: str) -> Attention:
        """The attention of a kind with these parameters (multi-head: half softmax, half L2)."""
        makers: dict[str, Callable[[], Attention]] = {
            "softmax": lambda: SoftmaxAttention(self.A, self.V),
            "L2": lambda: L2Attention(self.Q, self.K, self.V),
            "Sinkhorn": lambda: SinkhornAttention(self.A, self.V, eps=1.0),
            "multi-head": lambda: MultiHeadAttention(
                [SoftmaxAttention(self.A, self.V), L2Attention(self.Q, self.K, self.V)],
                outputs=[0.5 * np.eye(2), 0.5 * np.eye(2)],
            ),
        }
        return makers[kind]()


_I = np.eye(2)
_E1 = np.diag([1.0, 0.0])

PANELS = (
    Panel(
        "zero", "to a point", _I, -_I, _I, 300.0, False,
        "V = I, A + A^T < 0: S(t) tends to 0 like 1/t, for every start",
    ),
    Panel(
        "line", "to a rank-1 line", _E1, -_E1, _I, 300.0, False,
        "V = I, A + A^T <= 0 of rank 1: S(inf) = S0^(1/2) P S0^(1/2), of rank 1",
    ),
    Panel(
        "mixed", "mixed sign: two lines", np.diag([1.0, -1.0]), _I, np.diag([1.0, -1.0]), 8.0, True,
        "V = A = diag(1, -1), so that VA = I: every regular start grows",
    ),
    Panel(
        "blow-up", "blow-up or divergence", _I, np.diag([-1.0, 1.0]), _I, 20.0, True,
        "V = I, A + A^T indefinite: softmax blows up at 1 / lambda_max(S0^(1/2) (A + A^T) S0^(1/2))",
    ),
    Panel(
        "data", "depends on the start", _E1, _E1, np.array([[-1.0, 1.0], [-1.0, 2.0]]), 20.0, True,
        "A = e e^T and V indefinite: some starts converge, others blow up",
    ),
)  # fmt: skip


def starts(n: int, seed: int) -> Gaussian:
    """A batch of n centred 2 x 2 Gaussians whose shapes cover the cone evenly: angles and eccentricities."""
    rng = np.random.default_rng(seed)
    angle = np.pi * (np.arange(n) + 0.5) / n
    small = rng.uniform(0.15, 0.7, n)
    e = np.stack([np.cos(angle), np.sin(angle)], -1)
    f = np.stack([-np.sin(angle), np.cos(angle)], -1)
    cov = np.einsum("ni,nj->nij", e, e) + small[:, None, None] * np.einsum("ni,nj->nij", f, f)
    return Gaussian(np.zeros((n, 2)), cov)


def rank_ensemble(
    d: int, n: int, kind: str, value: str, rng: np.random.Generator
) -> tuple[Attention, Gaussian, Matrix]:
    """Draw n flows of section 5: Q in R^{d//2 x d} standard normal, K = -Q, A = K^T Q / sqrt(d).

    V = I ("identity") or V = B^T B, B standard normal ("random"); S0 = X X^T, X standard normal d x d.

    Returns
    -------
    attention with parameters (n, d, d), Gaussian of batch (n,), A (n, d, d)
    """
    k = d // 2
    # The scale 1/sqrt(d) of the score goes half to each factor, so that L2 has it too.
    Q = rng.standard_normal((n, k, d)) / math.sqrt(math.sqrt(d))
    B = rng.standard_normal((n, d, d))
    X = rng.standard_normal((n, d, d))
    V = np.broadcast_to(np.eye(d), (n, d, d)).copy() if value == "identity" else B.transpose(0, 2, 1) @ B
    A = -Q.transpose(0, 2, 1) @ Q
    attention: Attention = SoftmaxAttention(A, V) if kind == "softmax" else L2Attention(Q, -Q, V)
    return attention, Gaussian(np.zeros((n, d)), X @ X.transpose(0, 2, 1)), A
