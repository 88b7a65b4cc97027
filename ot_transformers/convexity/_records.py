"""Energies and metrics as plain arrays, so that files can name them without pickle."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from ..arrays import tensor_of
from ..energies import Energy, InteractionEnergy, KLDivergence, ScaledEnergy, SelfTransportEnergy
from ..errors import InvalidInput
from ..measures import Gaussian
from ..metrics import BuresWasserstein, TwistedWasserstein, Wasserstein

__all__ = [
    "energy_from_record",
    "energy_record",
    "metric_from_record",
    "metric_record",
    "unscaled",
    "write_atomically",
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


def write_atomically(path: str | Path, data: bytes) -> Path:
    """Write a file beside its place and rename it: a reader never sees half of it."""
    target = Path(path).expanduser()
    if not target.parent.is_dir():
        raise InvalidInput(f"path is in a folder that does not exist: {path}")
    handle, name = tempfile.mkstemp(prefix=f".{target.name}.", dir=target.parent)
    try:
        with os.fdopen(handle, "wb") as stream:
            stream.write(data)
        umask = os.umask(0)
        os.umask(umask)
        os.chmod(name, 0o666 & ~umask)  # mkstemp makes private files
        Path(name).replace(target)
    except BaseException:
        Path(name).unlink(missing_ok=True)
        raise
    return target


def _array(value: Any) -> np.ndarray[Any, Any]:
    return np.asarray(tensor_of(value).detach().cpu().numpy())
