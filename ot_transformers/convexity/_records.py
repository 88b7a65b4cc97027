"""Energies and metrics as plain arrays, so that files can name them without pickle."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from ..arrays import tensor_of
from ..energies import Energy, InteractionEnergy, KLDivergence, ScaledEnergy, SelfTransportEnergy
from ..errors import InvalidInput
from ..files import write_atomically
from ..measures import Gaussian
from ..metrics import BuresWasserstein, TwistedWasserstein, Wasserstein

__all__ = [
    "energy_from_record",
    "energy_record",
    "metric_from_record",
    "metric_record",
    "unscaled",
    "write_record",
]

Record = dict[str, Any]


def unscaled(energy: Energy) -> tuple[Energy, float]:
    """The energy without its numerical factors, and their product."""
    factor = 1.0
    base = energy
    while isinstance(base, ScaledEnergy):
        factor *= base.factor
        base = base.energy
    return base, factor


def energy_record(energy: Energy) -> Record:
    """Name, factor and parameters of an energy of the library.

    Raises
    ------
    InvalidInput
        Another energy: a callable cannot be written without pickle.
    """
    base, factor = unscaled(energy)
    record: Record = {"name": np.array(type(base).__name__), "factor": np.array(factor)}
    if isinstance(base, InteractionEnergy):
        return record | {"A": _array(base.A)}
    if isinstance(base, SelfTransportEnergy):
        return record | {"A": _array(base.A), "eps": np.array(base.eps), "tol": np.array(base.tol)}
    if isinstance(base, KLDivergence):
        return record | {"mean": _array(base.target.mean_t), "cov": _array(base.target.cov_t)}
    raise InvalidInput(f"energy cannot be written: {type(base).__name__} has no record")


def energy_from_record(record: Mapping[str, Any]) -> Energy:
    """The energy of a record.

    Raises
    ------
    InvalidInput
        An unknown name.
    """
    name, factor = str(record["name"]), float(record["factor"])
    if name == "InteractionEnergy":
        energy: Energy = InteractionEnergy(record["A"])
    elif name == "SelfTransportEnergy":
        energy = SelfTransportEnergy(record["A"], float(record["eps"]), tol=float(record["tol"]))
    elif name == "KLDivergence":
        energy = KLDivergence(Gaussian(record["mean"], record["cov"]))
    else:
        raise InvalidInput(f"energy of the file is unknown: {name!r}")
    return energy if factor == 1.0 else factor * energy


def metric_record(metric: Any) -> Record:
    """Name and parameters of a metric of the library."""
    record: Record = {"name": np.array(type(metric).__name__)}
    if isinstance(metric, TwistedWasserstein):
        return record | {"A": _array(metric.A), "D": _array(metric.D), "sign": np.array(metric.sign)}
    if isinstance(metric, Wasserstein | BuresWasserstein):
        return record if metric.D is None else record | {"D": _array(metric.D)}
    raise InvalidInput(f"metric cannot be written: {type(metric).__name__} has no record")


def metric_from_record(record: Mapping[str, Any]) -> Any:
    """The metric of a record.

    Raises
    ------
    InvalidInput
        An unknown name.
    """
    name = str(record["name"])
    if name == "TwistedWasserstein":
        return TwistedWasserstein(record["A"], D=record["D"], sign=int(record["sign"]))
    if name == "Wasserstein":
        return Wasserstein(D=record.get("D"))
    if name == "BuresWasserstein":
        return BuresWasserstein(D=record.get("D"))
    raise InvalidInput(f"metric of the file is unknown: {name!r}")


def write_record(path: str | Path, data: bytes) -> Path:
    """Write a record atomically, into a folder that exists."""
    if not Path(path).expanduser().parent.is_dir():
        raise InvalidInput(f"path is in a folder that does not exist: {path}")
    return write_atomically(path, lambda stream: stream.write(data))


def _array(value: Any) -> np.ndarray[Any, Any]:
    return np.asarray(tensor_of(value).detach().cpu().numpy())
