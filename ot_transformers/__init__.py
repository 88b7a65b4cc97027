"""The optimal-transport geometry of transformers.

Attention as a flow on measures (`solve`), its Gaussian closures, the metrics in which it is a gradient
flow (`gradient_structure`), JKO steps, and the (non)convexity of its energies.
"""

from __future__ import annotations

from .attention import (
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
from .energies import (
    Energy,
    Entropy,
    GaussianFunctional,
    InteractionEnergy,
    KLDivergence,
    PotentialEnergy,
    SelfTransportEnergy,
    SinkhornDivergence,
    SquaredWasserstein,
)
from .errors import InvalidInput, NotAGradientFlow, NotConverged, NotGaussianPreserving, OTTransformersError
from .flows import (
    GradientStructure,
    GridFlow,
    Status,
    Trajectory,
    gradient_flow,
    gradient_structure,
    grid_jko,
    jko,
    jko_step,
    solve,
)
from .measures import AffineVelocity, Gaussian, GridMeasure, Particles, PositionedParticles
from .metrics import (
    BuresWasserstein,
    ConditionalWasserstein,
    TwistedWasserstein,
    Wasserstein,
    bures_barycenter,
    bures_distance,
    bures_exp,
    bures_geodesic,
    bures_log,
    bures_map,
    bures_transport,
    sinkhorn_coupling,
)
from .models import Head, load_head, load_tokens

__version__ = "0.1.0"

__all__ = [
    "GradientStructure",
    "GridFlow",
    "Status",
    "Trajectory",
    "gradient_flow",
    "gradient_structure",
    "grid_jko",
    "jko",
    "jko_step",
    "solve",
    "TwistedWasserstein",
    "BuresWasserstein",
    "bures_barycenter",
    "bures_distance",
    "bures_exp",
    "bures_geodesic",
    "bures_log",
    "bures_map",
    "bures_transport",
    "AffineBlock",
    "L2Attention",
    "LinearAttention",
    "MaskedAttention",
    "MultiHeadAttention",
    "Schedule",
    "SigmoidAttention",
    "SinkhornAttention",
    "SoftmaxAttention",
    "UnnormalisedAttention",
    "AffineVelocity",
    "ConditionalWasserstein",
    "Energy",
    "Entropy",
    "GaussianFunctional",
    "InteractionEnergy",
    "KLDivergence",
    "PotentialEnergy",
    "SelfTransportEnergy",
    "SinkhornDivergence",
    "SquaredWasserstein",
    "Wasserstein",
    "sinkhorn_coupling",
    "Gaussian",
    "GridMeasure",
    "Head",
    "InvalidInput",
    "NotAGradientFlow",
    "NotConverged",
    "NotGaussianPreserving",
    "OTTransformersError",
    "Particles",
    "PositionedParticles",
    "load_head",
    "load_tokens",
]
