"""The mean-field limit: n tokens against the exact Gaussian closure, and the measured rate in n."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ..arrays import check_count, check_positive, describe, make_generator
from ..attention import Attention
from ..errors import InvalidInput, NotGaussianPreserving
from ..flows import solve
from ..measures import Gaussian, Particles, as_gaussian
from ..metrics import BuresWasserstein

__all__ = ["MeanFieldReport", "fit_rate", "mean_field_experiment"]


@dataclass(frozen=True, eq=False)
class MeanFieldReport:
    """Error of n-token flows against the Gaussian closure at time t.

    Attributes
    ----------
    ns : (k,) numbers of tokens
    errors : (k, n_repeats) Bures-Wasserstein distance between the moments of the flowed cloud and the closure
    rms : (k,) root mean square over repeats
    rate : float
        Slope of log rms against log n; the mean-field theorem gives -1/2.
    rate_low, rate_high : float
        95% confidence interval of the slope, by bootstrap over the repeats.
    t : float
    """

    ns: np.ndarray[Any, Any]
    errors: np.ndarray[Any, Any]
    rms: np.ndarray[Any, Any]
    rate: float
    rate_low: float
    rate_high: float
    t: float


def fit_rate(
    ns: np.ndarray[Any, Any], errors: np.ndarray[Any, Any], *, n_bootstrap: int = 1000, seed: int = 0
) -> tuple[float, float, float]:
    """Slope of log(rms error) against log n with a 95% bootstrap interval over the repeats.

    Parameters
    ----------
    ns : (k,) sizes, at least two different
    errors : (k, n_repeats) positive errors

    Returns
    -------
    slope, low, high : floats
    """
    logs = np.log(np.asarray(ns, float))
    centred = (logs - logs.mean()) / np.sum((logs - logs.mean()) ** 2)
    e = np.asarray(errors, float)
    rng = np.random.default_rng(seed)
    draws = rng.integers(e.shape[1], size=(n_bootstrap, *e.shape))
    samples = np.take_along_axis(e[None], draws, axis=-1)
    slopes = 0.5 * np.log(np.mean(samples**2, axis=-1)) @ centred
    low, high = np.quantile(slopes, [0.025, 0.975])
    return float(0.5 * np.log(np.mean(e**2, axis=1)) @ centred), float(low), float(high)


def mean_field_experiment(
    attention: Attention,
    gaussian: Gaussian,
    t: float,
    *,
    ns: Sequence[int] = (64, 128, 256, 512, 1024),
    n_repeats: int = 16,
    seed: int = 0,
    rtol: float = 1e-7,
    atol: float = 1e-9,
) -> MeanFieldReport:
    """Draw n tokens from N(m, S), flow them, and measure the distance of their moments to the closure.

    The closure is exact for Gaussian data, so the error is that of the n-token system alone; it decays like
    n^(-1/2) (Castin et al., section 3; for smooth observables by the central limit theorem).

    Parameters
    ----------
    attention : Attention
        A kind that preserves Gaussians.
    gaussian : Gaussian (d,), (d, d)
        The initial law, no batch.
    t : float > 0
    ns : sizes, at least two different ones
    n_repeats : independent clouds a size, at least 2
    seed : int

    Raises
    ------
    NotGaussianPreserving
        The kind has no closure to compare with.
    InvalidInput
        A batch, a Dirac mass, fewer than two sizes, or a closure or a cloud that blows up before t.
    """
    if not isinstance(attention, Attention):
        raise InvalidInput(f"attention must be an Attention, got {describe(attention)}")
    g = as_gaussian(gaussian)
    t = check_positive(t, "t")
    check_count(n_repeats, "n_repeats", 2)
    check_count(seed, "seed", 0)
    sizes = _sizes(ns)
    if g.batch_shape:
        raise InvalidInput(f"gaussian must be a single measure, got batch dimensions {g.batch_shape}")
    if attention.batch_shape:
        raise InvalidInput(f"attention must be a single one, got batch dimensions {attention.batch_shape}")
    if int(g.rank()) == 0:
        raise InvalidInput("gaussian must not be a Dirac mass: its samples have no error to measure")
    if not attention.preserves_gaussians:
        raise NotGaussianPreserving(f"{type(attention).__name__} has no Gaussian closure to compare with")
    closure = solve(attention, g, t, rtol=1e-10, atol=1e-12, save_at=[0.0, float(t)])
    if str(closure.status) not in ("completed", "converged"):
        raise InvalidInput(f"the closure {closure.status} at {closure.blow_up_time:.6g}, before t = {t:g}")
    exact = closure.states[-1]
    metric = BuresWasserstein()
    generator = make_generator(seed)
    L, m = g.factor_t.detach(), g.mean_t.detach()
    errors = np.empty((len(sizes), n_repeats))
    for i, n in enumerate(sizes):
        z = torch.randn(n_repeats, n, L.shape[-1], generator=generator, dtype=torch.float64).to(L)
        run = solve(attention, Particles(m + z @ L.mT), t, rtol=rtol, atol=atol, save_at=[0.0, float(t)])
        lost = np.isin(np.asarray(run.status), ("completed", "converged"), invert=True)
        if lost.any():
            raise InvalidInput(
                f"{int(lost.sum())} of {n_repeats} clouds of {n} tokens do not reach t = {t:g} "
                f"({np.asarray(run.status)[lost][0]}): choose t further from the blow-up of the closure"
            )
        last = run.states[-1]
        assert isinstance(last, Particles)
        moments = last.to_gaussian()
        errors[i] = _numbers([metric.distance(moments[k], exact) for k in range(n_repeats)])
    rate, low, high = fit_rate(np.array(sizes), errors, seed=seed)
    rms = np.sqrt(np.mean(errors**2, axis=1))
    return MeanFieldReport(np.array(sizes), errors, rms, rate, low, high, float(t))


def _sizes(ns: Any) -> list[int]:
    if isinstance(ns, str) or not isinstance(ns, Iterable):
        raise InvalidInput(f"ns must be a list of sizes, got {describe(ns)}")
    listed = list(ns)
    sizes = sorted({check_count(n, "ns", 2) for n in listed})
    if len(sizes) < 2:
        raise InvalidInput(f"ns must hold at least two different sizes, got {describe(listed)}")
    return sizes


def _numbers(values: Sequence[Any]) -> np.ndarray[Any, Any]:
    return np.array([float(v.detach()) if isinstance(v, Tensor) else float(v) for v in values])
