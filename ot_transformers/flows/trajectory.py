"""Trajectories: the states of a flow at its save times, how it ended, and how to ask for a time between."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path
from typing import Any

import numpy as np
import torch

from ..arrays import as_scalar, describe
from ..energies import Energy
from ..errors import InvalidInput
from ..files import read_npz, write_npz
from ..measures import Gaussian, Measure, Particles, PositionedParticles

__all__ = ["Status", "Trajectory", "named"]

_MOVING = ("mean", "factor", "x")
"""What of a measure a flow changes."""


class Status(StrEnum):
    """How a flow ended."""

    COMPLETED = "completed"
    CONVERGED = "converged"
    BLEW_UP = "blew up"
    STEP_LIMIT = "step limit"


@dataclass(frozen=True, eq=False)
class Trajectory:
    """A flow of measures at its save times.

    Attributes
    ----------
    times : (T,) floats
    states : list of T measures (batched where the initial one was)
        A member that ended early (blow-up, step limit) keeps its last state; see `last_times` and `valid`.
    status : str, or array of str of the batch shape
        "completed", "converged" (the velocity fell below its tolerance before t_end), "blew up" or
        "step limit" (max_steps, or the floating range, was reached before t_end).
    blow_up_time : float or array, inf where there is none
    blow_up_error : float or array
        Bound on |blow_up_time - t*|, 0 where there is none.
    last_times : float or array
        Time of the last state reached.
    energies : dict of name -> (T, ...) arrays
    energy_rates : dict of name -> (T, ...) arrays
        dE/dt of each, from its gradient and the velocity.
    stats : dict, solver statistics
    warnings : tuple of str
    """

    times: np.ndarray[Any, Any]
    states: Sequence[Measure]
    status: Any
    blow_up_time: Any
    blow_up_error: Any
    last_times: Any
    energies: Mapping[str, np.ndarray[Any, Any]] = field(default_factory=dict)
    energy_rates: Mapping[str, np.ndarray[Any, Any]] = field(default_factory=dict)
    stats: Mapping[str, Any] = field(default_factory=dict)
    warnings: tuple[str, ...] = ()
    resume: Callable[[Measure, float, float], Measure] | None = field(default=None, repr=False)
    initial: Measure | None = field(default=None, repr=False)

    @property
    def valid(self) -> np.ndarray[Any, Any]:
        """Which (time, member) states belong to the flow (not frozen after its end), (T, ...) of bool."""
        ends = np.asarray(self.last_times, dtype=float)
        converged = np.asarray(self.status) == str(Status.CONVERGED)
        shape = (len(self.times), *([1] * ends.ndim))
        return (self.times.reshape(shape) <= ends) | converged

    def at(self, t: float) -> Measure:
        """The measure at a time between 0 and the last save time.

        A saved time gives its saved state; any other is integrated from the saved state before it, with the
        tolerances of the flow. A trajectory read from a file, or made by JKO steps, has no velocity to do so
        and gives the saved state before t (the piecewise constant curve of JKO steps). Before the first save time
        the state before t is the initial measure, which files hold as well.

        Raises
        ------
        InvalidInput
            t outside the times of the trajectory: from 0 (from the first save time, where the initial measure is
            not known) to the last save time.
        """
        s = as_scalar(t, "t")
        first = 0.0 if self.initial is not None else self.times[0]
        if not first <= s <= self.times[-1]:
            raise InvalidInput(
                f"t must lie in [{first:g}, {self.times[-1]:g}], the times that this trajectory holds, got {s:g}"
            )
        if s < self.times[0] and self.initial is not None:
            return self.initial if s == 0 or self.resume is None else self.resume(self.initial, 0.0, s)
        i = int(np.searchsorted(self.times, s, side="right")) - 1
        if self.times[i] == s or self.resume is None:
            return self.states[i]
        return self.resume(self.states[i], float(self.times[i]), s)

    def save(self, path: str | Path) -> Path:
        """Write as NPZ (atomically; no pickles): states, times, status, blow-up, energies.

        Raises
        ------
        InvalidInput
            A folder, or a place that cannot be written.
        """
        first = self.states[0]
        data: dict[str, Any] = {
            "format": "ot_transformers trajectory 1",
            "type": type(first).__name__,
            "kind": first.kind,
            "times": self.times,
            "status": np.asarray(self.status, dtype=str),
            "blow_up_time": np.asarray(self.blow_up_time, dtype=float),
            "blow_up_error": np.asarray(self.blow_up_error, dtype=float),
            "last_times": np.asarray(self.last_times, dtype=float),
            "stats": json.dumps({k: v for k, v in self.stats.items() if _plain(v)}),
            "warnings": np.array(list(self.warnings), dtype=str),
            **{f"energy_{name}": np.asarray(v) for name, v in self.energies.items()},
            **{f"rate_{name}": np.asarray(v) for name, v in self.energy_rates.items()},
            **{f"stats_{name}": np.asarray(v) for name, v in self.stats.items() if not _plain(v)},
            **_pack(self.states),
        }
        if self.initial is not None and self.times[0] > 0:
            start = _pack([self.initial])
            data |= {f"initial_{name}": start[name] for name in _MOVING if name in start}
        return write_npz(path, data)

    @classmethod
    def load(cls, path: str | Path) -> Trajectory:
        """Read what `save` wrote.

        Raises
        ------
        InvalidInput
            No such file, not a trajectory file, or a damaged one.
        """
        content = read_npz(path)
        if str(content.get("format", "")) != "ot_transformers trajectory 1":
            raise InvalidInput(f"path is not a trajectory file: {path}")
        try:
            return cls._from(content)
        except KeyError as err:
            raise InvalidInput(f"path is a trajectory file without {err.args[0]!r}: {path}") from err
        except (IndexError, RuntimeError, TypeError, ValueError) as err:
            reason = " ".join(str(err).split())[:120]
            raise InvalidInput(f"path is a damaged trajectory file: {path} ({reason})") from err

    @classmethod
    def _from(cls, content: Mapping[str, np.ndarray[Any, Any]]) -> Trajectory:
        blow_up, error, last = (
            v if v.ndim else float(v)
            for v in (content[n] for n in ("blow_up_time", "blow_up_error", "last_times"))
        )
        status, times, states = content["status"], content["times"], _unpack(content)
        if times.shape != (len(states),) or times.dtype.kind != "f":
            raise ValueError(f"{len(states)} states at times {describe(times)}")
        return cls(
            times=times,
            states=states,
            status=str(status) if status.ndim == 0 else status.astype(object),
            blow_up_time=blow_up,
            blow_up_error=error,
            last_times=last,
            energies=_starting(content, "energy_"),
            energy_rates=_starting(content, "rate_"),
            stats={**json.loads(str(content["stats"])), **_starting(content, "stats_")},
            warnings=tuple(str(w) for w in content["warnings"]),
            initial=_unpack({**content, **start})[0] if (start := _starting(content, "initial_")) else None,
        )


def _plain(value: Any) -> bool:
    return isinstance(value, int | float | str)


def _starting(content: Mapping[str, Any], prefix: str) -> dict[str, Any]:
    return {name.removeprefix(prefix): v for name, v in content.items() if name.startswith(prefix)}


def _pack(states: Sequence[Measure]) -> dict[str, np.ndarray[Any, Any]]:
    first = states[0]

    def stacked(name: str) -> np.ndarray[Any, Any]:
        return torch.stack([getattr(s, name).detach() for s in states]).cpu().numpy()

    if isinstance(first, Gaussian):
        return {"mean": stacked("mean_t"), "factor": stacked("factor_t")}
    packed = {"x": stacked("x_t"), "weights": first.weights_t.detach().cpu().numpy()}
    packed["uniform"] = np.array(first.uniform)
    if isinstance(first, PositionedParticles):
        packed["s"] = first.s_t.detach().cpu().numpy()
    return packed


def _unpack(data: Mapping[str, Any]) -> list[Measure]:
    kind: Any = str(data["kind"])
    if str(data["type"]) == "Gaussian":
        pairs = zip(data["mean"], data["factor"], strict=True)
        return [
            Gaussian.unchecked(torch.from_numpy(m), factor=torch.from_numpy(L), kind=kind) for m, L in pairs
        ]
    w = torch.from_numpy(data["weights"])
    clouds = [torch.from_numpy(x) for x in data["x"]]
    if "s" in data:
        s = torch.from_numpy(data["s"])
        first: Particles = PositionedParticles._trusted(clouds[0], w, s, kind, bool(data["uniform"]))
    else:
        first = Particles.unchecked(clouds[0], None if bool(data["uniform"]) else w, kind)
    return [first.moved(x) for x in clouds]


def named(energy: Energy | Mapping[str, Energy] | None, name: str = "energy") -> dict[str, Energy]:
    """A dict of energies to record."""
    if energy is None:
        return {}
    if isinstance(energy, Energy):
        return {"energy": energy}
    if isinstance(energy, Mapping) and all(isinstance(e, Energy) for e in energy.values()):
        return dict(energy)
    raise InvalidInput(f"{name} must be an Energy or a dict of them, got {describe(energy)}")
