"""Witnesses of nonconvexity: a measure, a direction and how negative the second derivative is."""

from __future__ import annotations

import io
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from ..arrays import check_positive, tensor_of
from ..energies import Energy
from ..errors import InvalidInput
from ..files import read_npz
from ..measures import AffineVelocity, Gaussian, Measure, Particles
from ..metrics import BuresWasserstein, TwistedWasserstein
from ._records import (
    energy_from_record,
    energy_record,
    metric_from_record,
    metric_record,
    write_record,
)
from .curves import BuresGeodesic, Curve, DisplacementCurve
from .twisted import TwistedGeodesic

if TYPE_CHECKING:
    from .certificate import Certificate

__all__ = ["Witness", "load_witness"]

_FORMAT = "ot_transformers witness 1"


@dataclass(frozen=True, eq=False)
class Witness:
    """Where an energy is least convex, as far as a search found.

    Attributes
    ----------
    energy, metric : what was searched
    measure : Particles or Gaussian
    direction : array (n, d), or AffineVelocity
        Tangent of unit length at the measure.
    modulus : float
        Hess F(direction, direction): an upper bound on every lambda for which F is lambda-convex.
    error : float
        Error of the modulus as an eigenvalue at the measure.
    seed : int
        The search that found it.
    trace : array (k,)
        The best modulus after each start.
    """

    energy: Energy
    metric: Any
    measure: Measure
    direction: Any
    modulus: float
    error: float
    seed: int
    trace: np.ndarray[Any, Any]

    @property
    def negative(self) -> bool:
        """Whether the modulus is negative beyond its error: the energy is not geodesically convex."""
        return self.modulus + self.error < 0

    @property
    def curve(self) -> Curve:
        """The geodesic of length up to 2 through the measure, which is its midpoint (twisted: its start).

        Halved until it is minimising: the matching along it is optimal (clouds), I + t X stays positive
        (Gaussians).
        """
        return self.geodesic(1.0)

    def geodesic(self, reach: float) -> Curve:
        """The geodesic exp(t v), |t| <= reach (twisted: 0 <= t <= reach), shortened until it is minimising.

        Raises
        ------
        InvalidInput
            reach that is not positive.
        """
        check_positive(reach, "reach")
        if isinstance(self.metric, TwistedWasserstein):
            return self._twisted_geodesic(reach)
        if isinstance(self.measure, Gaussian):
            return self._gaussian_geodesic(reach)
        x, v = self.measure.x_t, tensor_of(self.direction).to(self.measure.dtype)
        while True:
            ends = [self.measure.moved(x + s * v) for s in (-reach, reach)]
            curve = DisplacementCurve(*ends, D=self.metric.D)
            square = float((self.measure.weights_t * _square(2 * reach * v, self.metric.D_t)).sum())
            if abs(float(torch.as_tensor(curve.speed_squared())) - square) <= 1e-9 * square or reach < 1e-6:
                return curve
            reach *= 0.5

    def _gaussian_geodesic(self, reach: float) -> Curve:
        assert isinstance(self.measure, Gaussian)
        M = self.direction.M_t.double()
        low = float(torch.linalg.eigvals(M).real.abs().max())
        reach = min(reach, 0.9 / low) if low > 0 else reach
        metric = BuresWasserstein(D=self.metric.D)
        ends = [metric.exp(self.measure, _scaled(self.direction, s)) for s in (-reach, reach)]
        return BuresGeodesic(ends[0], ends[1], D=self.metric.D)

    def _twisted_geodesic(self, reach: float) -> Curve:
        while True:
            try:
                return TwistedGeodesic.from_velocity(
                    self.metric, self.measure, _scaled(self.direction, reach)
                )
            except InvalidInput:
                reach *= 0.5
                if reach < 1e-6:
                    raise

    def certify(self, **options: Any) -> Certificate:
        """Prove by ball arithmetic that the energy is not convex here; see `certify_witness`."""
        from .certify import certify_witness

        return certify_witness(self, **options)

    def save(self, path: str | Path) -> Path:
        """Write to an .npz file (no pickle), atomically; `load_witness` reads it back.

        Raises
        ------
        InvalidInput
            An energy or metric that has no record (only those of the library do).
        """
        return write_record(path, self.to_bytes())

    def to_bytes(self) -> bytes:
        """The content of the .npz file."""
        arrays: dict[str, Any] = {"format": np.array(_FORMAT), "seed": np.array(self.seed)}
        arrays |= {"modulus": np.array(self.modulus), "error": np.array(self.error), "trace": self.trace}
        arrays |= {f"energy/{k}": v for k, v in energy_record(self.energy).items()}
        arrays |= {f"metric/{k}": v for k, v in metric_record(self.metric).items()}
        if isinstance(self.measure, Gaussian):
            arrays |= {"mean": _host(self.measure.mean_t), "cov": _host(self.measure.cov_t)}
            arrays |= {"direction_b": _host(self.direction.b_t), "direction_M": _host(self.direction.M_t)}
        else:
            arrays |= {"x": _host(self.measure.x_t), "weights": _host(self.measure.weights_t)}
            arrays["direction"] = _host(tensor_of(self.direction))
        buffer = io.BytesIO()
        np.savez_compressed(buffer, **arrays)
        return buffer.getvalue()

    def plot(self, *, ax: Any = None) -> Any:
        """Draw the energy along `curve` against its chord (`plotting.plot_chord`)."""
        from importlib import import_module

        return import_module("ot_transformers.plotting.convexity").plot_chord(self.energy, self.curve, ax=ax)


def load_witness(path: str | Path) -> Witness:
    """Read a witness that `Witness.save` wrote.

    Raises
    ------
    InvalidInput
        No such file, or not a witness.
    """
    data = read_npz(path)
    if str(data.get("format")) != _FORMAT:
        raise InvalidInput(f"path holds no witness of this version: {path}")
    try:
        energy = energy_from_record(_part(data, "energy/"))
        metric = metric_from_record(_part(data, "metric/"))
        if "mean" in data:
            measure: Measure = Gaussian(data["mean"], data["cov"])
            b, M = (torch.from_numpy(data[k]) for k in ("direction_b", "direction_M"))
            direction: Any = AffineVelocity(b, M, "numpy")
        else:
            measure, direction = Particles(data["x"], data["weights"]), data["direction"]
        modulus, error, seed = float(data["modulus"]), float(data["error"]), int(data["seed"])
        return Witness(energy, metric, measure, direction, modulus, error, seed, data["trace"])
    except KeyError as err:
        raise InvalidInput(f"path holds a witness without {err.args[0]}: {path}") from err
    except (RuntimeError, TypeError, ValueError) as err:
        raise InvalidInput(
            f"path holds a damaged witness: {path} ({' '.join(str(err).split())[:120]})"
        ) from err


def _scaled(tangent: Any, factor: float) -> Any:
    if isinstance(tangent, AffineVelocity):
        return AffineVelocity(factor * tangent.b_t, factor * tangent.M_t, tangent.kind)
    return factor * tangent


def _part(data: dict[str, Any], prefix: str) -> dict[str, Any]:
    return {k.removeprefix(prefix): v for k, v in data.items() if k.startswith(prefix)}


def _host(t: torch.Tensor) -> np.ndarray[Any, Any]:
    return t.detach().cpu().numpy()


def _square(v: torch.Tensor, D: torch.Tensor | None) -> torch.Tensor:
    if D is None:
        return v.square().sum(-1)
    return (v * torch.linalg.solve(D.to(v), v.mT).mT).sum(-1)
