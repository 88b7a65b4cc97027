"""Floor 4: curves, convexity probes, witnesses and certificates."""

from __future__ import annotations

from .certificate import Certificate, CertificateCheck, check_certificate
from .certify import certify_displacement, certify_hessian, certify_witness
from .curves import BuresGeodesic, Curve, DisplacementCurve
from .generalised import GeneralisedGeodesic
from .hessian import EigenPair, RiemannianHessian, riemannian_hessian
from .mixture import MixtureCurve
from .probe import ConvexityProbe, probe_convexity
from .search import find_nonconvexity
from .twisted import TwistedGeodesic
from .witness import Witness, load_witness

__all__ = [
    "BuresGeodesic",
    "Certificate",
    "CertificateCheck",
    "ConvexityProbe",
    "Curve",
    "DisplacementCurve",
    "EigenPair",
    "GeneralisedGeodesic",
    "MixtureCurve",
    "RiemannianHessian",
    "TwistedGeodesic",
    "Witness",
    "certify_displacement",
    "certify_hessian",
    "certify_witness",
    "check_certificate",
    "find_nonconvexity",
    "load_witness",
    "probe_convexity",
    "riemannian_hessian",
]
