"""JKO schemes: implicit, linearised and explicit Euler steps of a gradient flow in a metric."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor

from ..arrays import check_choice, check_count, check_positive, common_kind
from ..energies import Energy
from ..errors import NotConverged
from ..measures import Gaussian, Measure, Particles, as_measure
from ..metrics import Metric, ProximalResult, Wasserstein
from ..metrics.base import joined_step
from ..numerics.threads import few_threads
from ._frozen import frozen_step
from ._options import check_progress, progress_bar
from ._system import expanded, of_kind
from .gradient import check_energy
from .trajectory import Status, Trajectory

__all__ = ["Variant", "jko", "jko_step"]

Variant = Literal["implicit", "linearised", "explicit"]
_VARIANTS = ("implicit", "linearised", "explicit")


def jko_step(
    energy: Energy,
    measure: Measure,
    tau: float,
    metric: Metric | None = None,
    *,
    tol: float = 1e-9,
    max_iter: int = 200,
    variant: Variant = "implicit",
    warm_start: Measure | None = None,
) -> ProximalResult:
    r"""One JKO step, mu+ = argmin_nu F(nu) + d(mu, nu)^2 / (2 tau).

    Parameters
    ----------
    energy : Energy
        Batched parameters give a step of each member.
    measure : Gaussian, Particles, or an array (..., n, d)
    tau : float > 0
        Step size.
    metric : Metric, optional
        Default `BuresWasserstein()` on Gaussians, `Wasserstein()` on particles.
    tol : float
        Relative, on the first-order condition of the inner problem (see the metric's `proximal`).
    max_iter : int
        Inner iterations at most.
    variant : "implicit", "linearised" or "explicit"
        "implicit" is the definition above. "linearised" replaces d(mu, .) by the norm of the displacement
        in the metric frozen at mu: implicit Euler steps; the same thing where the metric is flat in the
        displacement (W_2 with the matching kept, Bures-Wasserstein through factors). "explicit" moves mu by
        -tau grad F: forward Euler, no inner problem and no guarantee of decrease.
    warm_start : Measure, optional
        A first guess of mu+.

    Returns
    -------
    ProximalResult
        For a batch: `converged` of all, the worst `gradient_norm`, arrays of energies.

    Raises
    ------
    InvalidInput
        An energy or a metric that is not defined on this kind of measure, tau <= 0, tol <= 0.
    """
    mu = as_measure(measure)
    distance = check_energy(energy, mu, metric)
    step = check_positive(tau, "tau")
    check_positive(tol, "tol")
    check_count(max_iter, "max_iter")
    check_choice(variant, "variant", _VARIANTS)
    mu = expanded(of_kind(mu, common_kind(mu, energy)), energy.batch_shape, type(energy).__name__)
    return _step(energy, mu, step, distance, tol, max_iter, variant, warm_start)


def jko(
    energy: Energy,
    measure: Measure,
    tau: float,
    n_steps: int,
    metric: Metric | None = None,
    tol: float = 1e-9,
    *,
    max_iter: int = 200,
    variant: Variant = "implicit",
    progress: bool | Callable[[float], None] = False,
) -> Trajectory:
    """JKO steps: minimising movements of an energy in a metric, of order 1 in tau.

    Parameters
    ----------
    energy, measure, tau, metric, tol, max_iter, variant
        As in `jko_step`.
    n_steps : int
    progress : bool or callable
        True shows a bar; a callable gets the fraction of steps done.

    Returns
    -------
    Trajectory
        Times k tau. `.energies["energy"]` is F at every step; `.stats` has arrays (n_steps,): "converged",
        "gradient_norms", "n_iter", "increases" (F(mu+) - F(mu), <= 0 up to rounding for the implicit
        scheme). Status "completed", or "step limit" if an inner problem did not reach `tol` (and a
        `NotConverged` warning says how many).

    References
    ----------
    Jordan, Kinderlehrer, Otto 1998; Castin, Ablin, Carrillo, Peyré, arXiv 2501.18322, section 3.

    Examples
    --------
    >>> from ot_transformers import Gaussian, PotentialEnergy
    >>> energy = PotentialEnergy(lambda x: 0.5 * x.square().sum(-1))
    >>> run = jko(energy, Gaussian([1.0], [[1.0]]), tau=1.0, n_steps=2)
    >>> run.states[-1].mean.round(8).tolist()  # 1 / (1 + tau)^2
    [0.25]
    """
    mu = as_measure(measure)
    distance = check_energy(energy, mu, metric)
    step = check_positive(tau, "tau")
    check_positive(tol, "tol")
    count = check_count(n_steps, "n_steps")
    check_count(max_iter, "max_iter")
    check_choice(variant, "variant", _VARIANTS)
    check_progress(progress)
    mu = expanded(of_kind(mu, common_kind(mu, energy)), energy.batch_shape, type(energy).__name__)
    states: list[Measure] = [mu]
    results: list[ProximalResult] = []
    with progress_bar(progress) as report:
        for k in range(count):
            guess = None if k == 0 else _extrapolated(states[-2], states[-1])
            results.append(_step(energy, states[-1], step, distance, tol, max_iter, variant, guess))
            states.append(results[-1].measure)
            if report is not None:
                report((k + 1) / count)
    return _trajectory(step, states, results)


def _trajectory(tau: float, states: list[Measure], results: list[ProximalResult]) -> Trajectory:
    energies = np.stack([_numbers(results[0].energy_before), *(_numbers(r.energy_after) for r in results)])
    before = np.stack([_numbers(r.energy_before) for r in results])
    failed = sum(not r.converged for r in results)
    notes: tuple[str, ...] = ()
    if failed:
        worst = max(r.gradient_norm for r in results)
        notes = (f"{failed} of {len(results)} JKO steps did not converge: gradient norm up to {worst:.3g}",)
        warnings.warn(notes[0], NotConverged, stacklevel=3)
    shape = states[0].batch_shape
    word = str(Status.STEP_LIMIT if failed else Status.COMPLETED)
    times = tau * np.arange(len(states))

    def shaped(value: Any) -> Any:
        return np.full(shape, value, dtype=object if isinstance(value, str) else float) if shape else value

    return Trajectory(
        times=times,
        states=states,
        status=shaped(word),
        blow_up_time=shaped(float("inf")),
        blow_up_error=shaped(0.0),
        last_times=shaped(float(times[-1])),
        energies={"energy": energies},
        stats={
            "n_steps": len(results),
            "converged": np.array([r.converged for r in results]),
            "gradient_norms": np.array([r.gradient_norm for r in results]),
            "n_iter": np.array([r.n_iter for r in results]),
            "increases": energies[1:] - before,
        },
        warnings=notes,
    )


def _numbers(value: Any) -> np.ndarray[Any, Any]:
    return np.asarray(value.detach().cpu() if isinstance(value, Tensor) else value, dtype=float)


def _step(
    energy: Energy,
    mu: Measure,
    tau: float,
    metric: Metric,
    tol: float,
    max_iter: int,
    variant: str,
    guess: Measure | None,
) -> ProximalResult:
    # The inner problem of a Gaussian is hundreds of products of small matrices.
    with few_threads(8.0 * mu.dim**3 if isinstance(mu, Gaussian) else math.inf):
        if variant == "explicit":
            return _explicit(energy, mu, tau, metric)
        if variant == "linearised":
            return frozen_step(energy, mu, tau, metric, tol=tol, max_iter=max_iter)
        # Clouds in W2 are one joint problem; the other inner problems take one measure and one energy at a time.
        one = isinstance(mu, Gaussian) or (energy.batch_shape != () and not isinstance(metric, Wasserstein))
        if one and mu.batch_shape:
            return _members(energy, mu, tau, metric, tol, max_iter, guess)
        return metric.proximal(energy, mu, tau, tol=tol, max_iter=max_iter, warm_start=guess)


def _members(
    energy: Energy, mu: Measure, tau: float, metric: Metric, tol: float, max_iter: int, guess: Measure | None
) -> ProximalResult:
    """A batch, one inner problem a member."""
    shape = mu.batch_shape
    results = []
    for index in np.ndindex(*shape):
        start = None if guess is None else guess[index]
        part = energy.member(index, shape)
        results.append(metric.proximal(part, mu[index], tau, tol=tol, max_iter=max_iter, warm_start=start))
    return joined_step(results, _joined(mu, [r.measure for r in results]))


def _joined(mu: Measure, parts: list[Measure]) -> Measure:
    if isinstance(mu, Particles):
        x = torch.stack([p.x_t for p in parts if isinstance(p, Particles)])
        return mu.moved(x.reshape(mu.x_t.shape))
    means = torch.stack([p.mean_t for p in parts])
    factors = torch.stack([p.factor_t for p in parts]).reshape(*mu.batch_shape, mu.dim, -1)
    return Gaussian.unchecked(means.reshape(*mu.batch_shape, mu.dim), factor=factors, kind=mu.kind)


def _explicit(energy: Energy, mu: Measure, tau: float, metric: Metric) -> ProximalResult:
    with torch.no_grad():
        moved: Measure
        if isinstance(mu, Gaussian):
            m, L = mu.mean_t, mu.factor_t
            cov = L @ L.mT
            b, M = metric.raw_gaussian_riesz(m, cov, *energy.raw_gaussian_gradient(m, cov))
            moved = Gaussian.unchecked(m - tau * b, factor=L - tau * M @ L, kind=mu.kind)
        else:
            g = energy.raw_particles_gradient(mu.x_t, mu.weights_t)
            moved = mu.moved(mu.x_t - tau * metric.raw_particles_riesz(mu.x_t, mu.weights_t, g))
        return ProximalResult(moved, True, 0.0, 0, energy.value(mu), energy.value(moved))


def _extrapolated(before: Measure, now: Measure) -> Measure | None:
    """2 mu_k - mu_{k-1} in the coordinates of the flow: a first guess for mu_{k+1}."""
    if isinstance(now, Gaussian) and isinstance(before, Gaussian):
        if before.factor_t.shape != now.factor_t.shape:
            return None
        mean, factor = 2 * now.mean_t - before.mean_t, 2 * now.factor_t - before.factor_t
        return Gaussian.unchecked(mean, factor=factor, kind=now.kind)
    assert isinstance(now, Particles)
    assert isinstance(before, Particles)
    return now.moved(2 * now.x_t - before.x_t)
