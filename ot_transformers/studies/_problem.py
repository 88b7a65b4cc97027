"""The problem that compare, flow and jko share: one cloud, one (A, V, eps), one attention."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

from ..arrays import check_choice, check_count, check_positive
from ..attention import Attention, L2Attention, LinearAttention, SinkhornAttention, SoftmaxAttention
from ..errors import InvalidInput, NotAGradientFlow
from ..flows import GradientStructure, gradient_structure
from ..metrics import BuresWasserstein, Metric, Wasserstein
from ._presets import Parameters, load_parameters
from ._tokens import DEFAULT_COMPONENTS, Cloud, load_cloud

__all__ = ["ATTENTIONS", "Problem", "ProblemConfig", "build", "gaussian_metric"]

AttentionName = Literal["sinkhorn", "softmax", "l2", "linear"]
ATTENTIONS: tuple[AttentionName, ...] = ("sinkhorn", "softmax", "l2", "linear")


@dataclass(frozen=True)
class ProblemConfig:
    """What is studied.

    Attributes
    ----------
    tokens : "minilm" (bundled) or a file .npy, .npz, .csv of tokens (n, d)
    attention : kind of attention
    preset : named (A, V), see `studies._presets.PRESETS`
    matrices : .npz with A and V, or Q, K and V; replaces the preset
    scale : factor of K^T Q for the matrices of a file (a model with heads of width k has 1 / sqrt(k))
    eps : entropic regularisation of Sinkhorn attention
    t_end : end of the time interval
    n : tokens kept (all if None)
    d : principal components kept (all coordinates if None)
    seed : of everything that is random
    device, dtype : where and in what precision to compute
    """

    tokens: str = "minilm"
    attention: AttentionName = "sinkhorn"
    preset: str = "head4-symmetric"
    matrices: str | None = None
    scale: float = 1.0
    eps: float = 1.0
    t_end: float = 8.0
    n: int | None = None
    d: int | None = DEFAULT_COMPONENTS
    seed: int = 0
    device: str = "cpu"
    dtype: Literal["float64", "float32"] = "float64"


@dataclass(frozen=True, eq=False)
class Problem:
    """A cloud, an attention, and the gradient structure if there is one."""

    cloud: Cloud
    parameters: Parameters
    attention: Attention
    structure: GradientStructure | None
    residual: float
    why_not: str

    @property
    def is_gradient(self) -> bool:
        """Whether the flow is the gradient flow of an energy in a metric."""
        return self.structure is not None


def gaussian_metric(structure: GradientStructure) -> Metric:
    """The metric of a gradient structure on Gaussians: for W2 that is Bures-Wasserstein, of the same D."""
    if isinstance(structure.metric, Wasserstein):
        return BuresWasserstein(D=structure.D)
    return structure.metric


def build(config: ProblemConfig) -> Problem:
    """Load, check and assemble the problem.

    Raises
    ------
    InvalidInput
        Any option that cannot be used.
    """
    check_positive(config.t_end, "t_end")
    check_positive(config.eps, "eps")
    check_count(config.seed, "seed", 0)
    check_choice(config.attention, "attention", ATTENTIONS)
    if not math.isfinite(config.scale) or config.scale == 0:
        raise InvalidInput(f"scale must be finite and not 0, got {config.scale}")
    cloud = load_cloud(
        config.tokens, n=config.n, d=config.d, seed=config.seed, dtype=config.dtype, device=config.device
    )
    p = load_parameters(config.preset, config.matrices, config.scale, cloud, config.seed)
    attention = _attention(config.attention, p, config.eps)
    try:
        structure = gradient_structure(attention)
    except NotAGradientFlow as err:
        return Problem(cloud, p, attention, None, err.residual, str(err))
    return Problem(cloud, p, attention, structure, 0.0, "")


def _attention(name: AttentionName, p: Parameters, eps: float) -> Attention:
    if name == "sinkhorn":
        return SinkhornAttention(p.A, p.V, eps)
    if name == "softmax":
        return SoftmaxAttention(p.A, p.V)
    if name == "l2":
        return L2Attention(p.Q, p.K, p.V)
    return LinearAttention(p.A, p.V)
