"""The optimal-transport geometry of transformers.

Attention as a flow on measures (`solve`), its Gaussian closures, the metrics in which it is a gradient
flow (`gradient_structure`), JKO steps, and the (non)convexity of its energies.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from ._version import __version__ as __version__

if TYPE_CHECKING:
    from .analysis import (
        CLASSES,
        PhaseDiagram,
        classify,
        clustering_report,
        gaussianity,
        mean_field_experiment,
        numerical_rank,
        phase_diagram,
        stability_constant,
        stability_experiment,
    )
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
    from .convexity import (
        BuresGeodesic,
        Certificate,
        ConvexityProbe,
        DisplacementCurve,
        GeneralisedGeodesic,
        MixtureCurve,
        RiemannianHessian,
        TwistedGeodesic,
        Witness,
        check_certificate,
        find_nonconvexity,
        load_witness,
        probe_convexity,
        riemannian_hessian,
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
    from .errors import (
        InvalidInput,
        NotAGradientFlow,
        NotConverged,
        NotGaussianPreserving,
        OTTransformersError,
    )
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

__all__ = [
    "CLASSES",
    "PhaseDiagram",
    "classify",
    "clustering_report",
    "gaussianity",
    "mean_field_experiment",
    "numerical_rank",
    "phase_diagram",
    "stability_constant",
    "stability_experiment",
    "BuresGeodesic",
    "Certificate",
    "ConvexityProbe",
    "DisplacementCurve",
    "GeneralisedGeodesic",
    "MixtureCurve",
    "RiemannianHessian",
    "TwistedGeodesic",
    "Witness",
    "check_certificate",
    "find_nonconvexity",
    "load_witness",
    "probe_convexity",
    "riemannian_hessian",
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

# Ordered from cheap to dear. Nothing is imported before it is asked for: `ot-transformers --help` needs no torch.
_ROOMS = (
    "errors",
    "measures",
    "attention",
    "energies",
    "metrics",
    "flows",
    "analysis",
    "convexity",
    "models",
)
_SUBMODULES = (*_ROOMS, "arrays", "spd", "plotting", "studies", "cluster", "cli")


def __getattr__(name: str) -> Any:
    if name in _SUBMODULES:
        return import_module(f".{name}", __name__)
    if name in __all__:
        for room in _ROOMS:
            module = import_module(f".{room}", __name__)
            if name in module.__all__:
                globals()[name] = getattr(module, name)
                return globals()[name]
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__, *_SUBMODULES})
