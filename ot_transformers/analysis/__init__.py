"""Floor 4: clustering, rank, gaussianity, stability, mean-field rate and phase diagrams."""

from __future__ import annotations

from .classify import CLASSES, Classification, classify
from .clustering import ClusteringReport, clustering_report
from .gaussianity import Gaussianity, gaussianity
from .mean_field import MeanFieldReport, fit_rate, mean_field_experiment
from .phase import PhaseDiagram, phase_diagram
from .rank import numerical_rank
from .stability import StabilityConstant, StabilityReport, stability_constant, stability_experiment

__all__ = [
    "CLASSES",
    "Classification",
    "ClusteringReport",
    "Gaussianity",
    "MeanFieldReport",
    "PhaseDiagram",
    "StabilityConstant",
    "StabilityReport",
    "classify",
    "clustering_report",
    "fit_rate",
    "gaussianity",
    "mean_field_experiment",
    "numerical_rank",
    "phase_diagram",
    "stability_constant",
    "stability_experiment",
]
