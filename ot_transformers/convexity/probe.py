"""Second derivatives of energies along curves, with their rounding error, and the verdict on convexity."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from dataclasses import dataclass, fields, replace
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor

from ..arrays import Array, ArrayLike, as_scalar, check_count, common_kind, to_kind
from ..energies import Energy
from ..errors import InvalidInput
from ._states import GaussianState, Jet, Path, energy_jet, energy_of, energy_second_reverse, perturbed
from .curves import Curve, check_times

__all__ = ["ConvexityProbe", "Verdict", "probe_convexity"]

Verdict = Literal["convex", "not convex", "undecided"]
_SAMPLES = 4
_SAFETY = 16.0
_CHUNK = 1 << 22
"""Pairs of particles times probe times taken at once."""


@dataclass(frozen=True, eq=False)
class ConvexityProbe:
    """Second derivatives of an energy along a curve at T times; batch dimensions of the curve come first.

    Attributes
    ----------
    t : array (T,)
    values, slopes, second_derivatives : array (..., T)
        F, dF/dt and d2F/dt2, exact up to rounding (nested forward differentiation, no step size).
    errors : array (..., T)
        Estimated error of the second derivatives: rounding, and the tolerance of iterative energies.
    speed_squared : array (..., T)
    modulus : array (...)
        min over t of second derivative / |speed|^2: the best lambda of lambda-convexity at these times.
    modulus_error : array (...)
        Error of the modulus.
    verdict : "convex", "not convex" or "undecided"
        For lambda-convexity with the `threshold` asked for; a NumPy array of these for a batch. "convex" speaks
        of the times probed; "undecided" is inside the error.
    differences, difference_errors : array (..., T)
        Plain second differences of values (F(t+h) - 2 F(t) + F(t-h)) / h^2 as an independent check, NaN at
        times too close to an end, with their rounding plus estimated truncation error.
    family : what the curve is
    threshold : float
    """

    t: Array
    values: Array
    slopes: Array
    second_derivatives: Array
    errors: Array
    speed_squared: Array
    modulus: Array
    modulus_error: Array
    verdict: Any
    differences: Array
    difference_errors: Array
    family: str
    threshold: float

    def __getitem__(self, index: Any) -> ConvexityProbe:
        """The probe of one member, or of a part, of a batch of curves."""
        shared = {"t", "family", "threshold"}
        values = {f.name: getattr(self, f.name) for f in fields(self)}
        parts = {name: v if name in shared else v[index] for name, v in values.items()}
        verdict = parts["verdict"]
        return replace(self, **parts | {"verdict": verdict if getattr(verdict, "ndim", 0) else str(verdict)})

    @property
    def consistent(self) -> bool:
        """Whether second differences agree with the second derivatives within both errors (a factor 2)."""
        gap, room = (
            np.asarray(torch.as_tensor(v).detach().cpu())
            for v in (self.differences - self.second_derivatives, self.difference_errors + self.errors)
        )
        return bool((np.isnan(gap) | (np.abs(gap) <= 2.0 * room)).all())


def probe_convexity(
    energy: Energy,
    curve: Curve,
    *,
    n_points: int = 33,
    ts: ArrayLike | None = None,
    threshold: float = 0.0,
    seed: int = 0,
) -> ConvexityProbe:
    """Evaluate d2F/dt2 along a curve with its error: is F lambda-convex there, F'' >= lambda |speed|^2 ?

    Parameters
    ----------
    energy : Energy
    curve : DisplacementCurve, GeneralisedGeodesic, BuresGeodesic, TwistedGeodesic, MixtureCurve, ...
    n_points : int
        Number of times, evenly spread (interior times for mixtures).
    ts : array (T,), optional
        The times themselves, in [0, 1].
    threshold : float
        The lambda that the verdict is about; 0 is convexity.
    seed : int
        Of the perturbations that measure the rounding error.

    Returns
    -------
    ConvexityProbe

    Raises
    ------
    InvalidInput
        The energy is not defined on the measures of the curve, or infinite along it; times outside [0, 1].

    Notes
    -----
    Rounding error: the states are perturbed by one ulp in each number, four times; 16 times the largest
    change of d2F/dt2, plus 32 ulp of |F| + |F'| + |F''|, is the estimate. In float32 the distance to the
    float64 evaluation is added. For energies found by iteration (`tol`), the change at a tolerance 100 times
    smaller is added. The estimate is meant as a bound, and has been one in every test against 60-digit
    arithmetic.

    Examples
    --------
    >>> import numpy as np
    >>> from ot_transformers import InteractionEnergy, Particles
    >>> from ot_transformers.convexity import DisplacementCurve
    >>> line = DisplacementCurve(Particles(np.zeros((1, 1))), Particles(np.ones((1, 1))))
    >>> probe = probe_convexity(InteractionEnergy(-1.0), line)
    >>> probe.verdict, round(float(probe.modulus), 12)
    ('not convex', -1.0)
    """
    if not isinstance(curve, Curve):
        raise InvalidInput(f"curve must be a curve of ot_transformers.convexity, got {type(curve).__name__}")
    if not isinstance(energy, Energy):
        raise InvalidInput(f"energy must be an Energy, got {type(energy).__name__}")
    lam = as_scalar(threshold, "threshold")
    t = _times(curve, n_points, ts)
    jet, errors, noise = _jets(energy, curve, t, check_count(seed, "seed", 0))
    _reject_infinite(jet, t)
    square = curve.raw_speed_squared(t).detach()
    differences, difference_errors = _differences(energy, curve, t, jet.value, noise)
    jet, errors = _reconciled(energy, curve, t, jet, errors, (differences, difference_errors))
    margin = jet.second - lam * square
    ratio = torch.where(square > 0, jet.second / square, torch.nan)
    worst = ratio.nan_to_num(nan=torch.inf).argmin(0, keepdim=True)
    modulus = ratio.gather(0, worst)[0]
    modulus_error = (errors / square).gather(0, worst)[0]
    kind = common_kind(curve, energy)

    def out(v: Tensor) -> Array:
        return to_kind(v.movedim(0, -1) if v.ndim > 1 else v, kind)

    return ConvexityProbe(
        to_kind(t, kind),
        out(jet.value),
        out(jet.first),
        out(jet.second),
        out(errors),
        out(square),
        to_kind(modulus, kind),
        to_kind(modulus_error, kind),
        _verdict(margin, errors),
        out(differences),
        out(difference_errors),
        curve.family,
        lam,
    )


def _times(curve: Curve, n_points: int, ts: ArrayLike | None) -> Tensor:
    if ts is None:
        return curve.default_times(check_count(n_points, "n_points", 2))
    t = check_times(ts, curve, "ts")
    inside = curve.default_times(2)
    if float(inside[0]) > 0 and not bool(((t > 0) & (t < 1)).all()):
        raise InvalidInput(f"ts must lie strictly inside (0, 1) along a {curve.family}, got an end")
    return t


def _verdict(margin: Tensor, errors: Tensor) -> Any:
    # An exact zero with a zero error is still only what was computed: `convex` needs a margin.
    below, above = (margin + errors < 0).any(0), (margin - errors >= 0).all(0)
    words = np.where(below.cpu().numpy(), "not convex", np.where(above.cpu().numpy(), "convex", "undecided"))
    return words if words.ndim else str(words)


def _reject_infinite(jet: Jet, t: Tensor) -> None:
    bad = ~(torch.isfinite(jet.value) & torch.isfinite(jet.second))
    if bool(bad.any()):
        where = float(t[bad.reshape(len(t), -1).any(-1)][0])
        raise InvalidInput(f"energy is not finite along the curve, first at t = {where:.4g}")


def _jets(energy: Energy, curve: Curve, t: Tensor, seed: int) -> tuple[Jet, Tensor, Tensor]:
    """Jets at all times, the errors of the second derivatives and the noise of values, in chunks of times."""
    parts = [_jet_with_error(energy, curve, c, seed) for c in _chunks(curve, t, 1 + _SAMPLES)]
    jets, errors, noise = zip(*parts, strict=True)
    return Jet(*(torch.cat(p) for p in zip(*jets, strict=True))), torch.cat(errors), torch.cat(noise)


def _reconciled(
    energy: Energy, curve: Curve, t: Tensor, jet: Jet, errors: Tensor, check: tuple[Tensor, Tensor]
) -> tuple[Jet, Tensor]:
    """Compare nested forward with reverse over reverse mode; where they differ, believe second differences.

    Where the two roads differ by more than rounding, the one nearer to the second difference is taken, and
    its error is then what second differences can vouch for.
    """
    parts = [energy_second_reverse(energy, curve.raw_path(c), torch.zeros_like(c)) for c in _chunks(curve, t)]
    other = torch.cat(parts)
    apart = (other - jet.second).abs() > errors
    d2, room = (v.nan_to_num(nan=torch.inf) for v in check)
    better = apart & ((other - d2).abs() < (jet.second - d2).abs())
    second = torch.where(better, other, jet.second)
    gap = torch.where(torch.isfinite(d2), (second - d2).abs() + room, (other - jet.second).abs())
    return jet._replace(second=second), torch.where(apart, errors + gap, errors)


def _chunks(curve: Curve, t: Tensor, copies: int = 1) -> Iterator[Tensor]:
    state = curve.raw_state(t[:1])
    pairs = 1 if isinstance(state, GaussianState) else state.x.shape[:-1].numel() * state.x.shape[-2]
    yield from t.split(max(1, _CHUNK // max(pairs * copies, 1)))


def _jet_with_error(energy: Energy, curve: Curve, t: Tensor, seed: int) -> tuple[Jet, Tensor, Tensor]:
    path, s = curve.raw_path(t), torch.zeros_like(t)
    ulp = torch.finfo(t.dtype).eps
    generator = torch.Generator().manual_seed(seed)
    # One evaluation of the path as it is and of its perturbed copies, block by block.
    blocks = 1 + _SAMPLES
    copies = perturbed(curve.raw_path(t.repeat(blocks)), blocks, ulp, generator)
    every = [v.unflatten(0, (blocks, len(t))) for v in energy_jet(energy, copies, s.repeat(blocks))]
    jet = Jet(*(v[0] for v in every))
    noise, change = ((every[k][1:] - jet[k]).abs().amax(0) for k in (0, 2))
    size = jet.value.abs() + jet.first.abs() + jet.second.abs()
    errors = _SAFETY * change + 32.0 * ulp * size + torch.finfo(t.dtype).tiny
    tight = _tightened(energy)
    if tight is not None:
        # Reverse mode, the cheaper road of the two (`_reconciled` compares them).
        errors = errors + 2.0 * (energy_second_reverse(tight, path, s) - jet.second).abs()
    if t.dtype == torch.float32:
        exact = energy_jet(energy, _in_double(path), s.double())
        errors = errors + 2.0 * (exact.second - jet.second.double()).abs().float()
    return jet, errors, noise


def _in_double(path: Path) -> Path:
    """The path of the float32 states, evaluated in float64 from the same numbers."""

    def moved(s: Tensor) -> Any:
        # A quadratic in s through the float32 jet: its coefficients are the data, exact in float64.
        zero = torch.zeros(s.shape, dtype=torch.float32, device=s.device)
        one = torch.ones_like(zero)

        def slopes(r: Tensor) -> Any:
            return torch.func.jvp(lambda q: tuple(path(q)), (r,), (one,))

        jet: Any = torch.func.jvp(slopes, (zero,), (one,))
        (x, v), (_, a) = jet
        terms = zip(x, v, a, strict=True)
        state = path(zero)
        shaped = [
            p.double() + (r := s.reshape(-1, *([1] * (p.ndim - 1)))) * (q.double() + 0.5 * r * b.double())
            for p, q, b in terms
        ]
        return type(state)(*shaped)

    return moved


def _tightened(energy: Energy) -> Energy | None:
    """The same energy with a tolerance 100 times smaller in every part that iterates; None if none does."""
    changed = copy.copy(energy)
    found = False
    for name in ("energy", "first", "second"):
        part = getattr(energy, name, None)
        if isinstance(part, Energy) and (tight := _tightened(part)) is not None:
            setattr(changed, name, tight)
            found = True
    tol = getattr(energy, "tol", None)
    if isinstance(tol, float):
        changed.tol = 1e-2 * tol  # type: ignore[attr-defined]
        found = True
    return changed if found else None


def _differences(
    energy: Energy, curve: Curve, t: Tensor, value: Tensor, noise: Tensor
) -> tuple[Tensor, Tensor]:
    """Second differences at steps h and h / 2: the finer one, its rounding error and their difference.

    `noise` is the change of values where the states move by an ulp: more than an ulp of a value whose parts cancel.
    """
    ulp = torch.finfo(t.dtype).eps
    h = ulp**0.25
    rows, lows = [], []
    for step in (h, 0.5 * h):
        inside = (t - step > 0) & (t + step < 1)
        u = torch.where(inside, t, torch.full_like(t, 0.5))
        # The points that are really used: t +- h rounded, so that the division is by the true step.
        up, down = (u + step) - u, u - (u - step)
        three = [
            torch.cat([energy_of(energy, curve.raw_state(c)).detach() for c in _chunks(curve, at)])
            for at in (u + up, u, u - down)
        ]
        h2 = (up * down).reshape(-1, *([1] * (value.ndim - 1)))
        d2 = ((three[0] - three[1]) - (three[1] - three[2])) / h2
        mask = inside.reshape(h2.shape)
        rows.append(torch.where(mask, d2, torch.nan))
        lows.append((16.0 * ulp * torch.stack([e.abs() for e in three]).sum(0) + _SAFETY * noise) / h2)
    return rows[1], lows[1] + lows[0] + (rows[1] - rows[0]).abs()
