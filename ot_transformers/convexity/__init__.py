"""Floor 4: curves, convexity probes, witnesses and certificates."""

from __future__ import annotations

from .curves import BuresGeodesic, Curve, DisplacementCurve
from .generalised import GeneralisedGeodesic
from .hessian import EigenPair, RiemannianHessian, riemannian_hessian
from .mixture import MixtureCurve
from .probe import ConvexityProbe, probe_convexity
from .twisted import TwistedGeodesic

__all__ = [
    "BuresGeodesic",
    "ConvexityProbe",
    "Curve",
    "DisplacementCurve",
    "EigenPair",
    "GeneralisedGeodesic",
    "MixtureCurve",
    "RiemannianHessian",
    "TwistedGeodesic",
    "probe_convexity",
    "riemannian_hessian",
]
