"""Gradient flows of energies in a metric."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
from torch import Tensor

from ..arrays import ArrayLike, common_kind, describe
from ..energies import Energy
from ..errors import InvalidInput
from ..measures import Gaussian, Measure, as_measure
from ..metrics import BuresWasserstein, Metric, Wasserstein
from ._drive import drive
from ._options import Options
from ._system import System, expanded, of_kind
from .trajectory import Trajectory, named

__all__ = ["check_energy", "default_metric", "descent", "gradient_flow"]


def gradient_flow(
    energy: Energy,
    measure: Measure,
    t_end: float,
    metric: Metric | None = None,
    rtol: float = 1e-8,
    atol: float = 1e-10,
    save_at: ArrayLike | None = None,
    max_steps: int = 100_000,
    stop_when_converged: bool = False,
    *,
    converged_tol: float = 1e-8,
    record: Mapping[str, Energy] | None = None,
    progress: bool | Callable[[float], None] = False,
) -> Trajectory:
    r"""Gradient flow of an energy, d/dt mu = -grad F(mu) in a metric: the energy descends.

    The velocity is minus the Riesz representative of the Wasserstein gradient, x -> grad(dF/dmu)(x), in the
    metric: -D grad(dF/dmu) for W_2 with the inner product D^{-1}, -D grad(dF/dmu) / G_mu for the twisted one.

    Parameters
    ----------
    energy : Energy
    measure : Gaussian, Particles, or an array (..., n, d)
        On Gaussians the flow is that of F restricted to Gaussians.
    t_end : float > 0
    metric : Metric, optional
        Default `BuresWasserstein()` on Gaussians, `Wasserstein()` on particles.
    record : dict of Energy, optional
        More energies to record beside "energy".
    rtol, atol, save_at, max_steps, stop_when_converged, converged_tol, progress
        As in `solve`.

    Returns
    -------
    Trajectory
        `.energies["energy"]` holds F along the flow and `.energy_rates["energy"]` dF/dt = -|grad F|^2.

        A Gaussian that leaves the set where F is finite stops there with status "step limit", and a
        `NotConverged` warning.

    Raises
    ------
    InvalidInput
        Energy or metric not defined on this kind of measure, or the energy is infinite at the start.

    References
    ----------
    Castin, Ablin, Carrillo, Peyré, arXiv 2501.18322, section 3; Ambrosio, Gigli, Savaré 2008.

    Examples
    --------
    >>> import numpy as np
    >>> from ot_transformers import Gaussian, PotentialEnergy
    >>> energy = PotentialEnergy(lambda x: 0.5 * x.square().sum(-1))
    >>> run = gradient_flow(energy, Gaussian([1.0], [[1.0]]), t_end=1.0)
    >>> run.states[-1].mean.round(8).tolist()  # e^{-1}
    [0.36787944]
    """
    mu = as_measure(measure)
    distance = check_energy(energy, mu, metric)
    opts = Options(t_end, rtol, atol, save_at, max_steps, stop_when_converged, converged_tol, progress)
    mu = expanded(of_kind(mu, common_kind(mu, energy)), energy.batch_shape, type(energy).__name__)
    if not bool(torch.isfinite(torch.as_tensor(energy.value(mu))).all()):
        raise InvalidInput(
            f"energy {type(energy).__name__} is not finite at measure: it has no gradient there"
        )
    return drive(
        lambda m, start, end: descent(energy, distance, m),
        mu,
        opts,
        (),
        {"energy": energy, **named(record, "record")},
    )


def check_energy(energy: Energy, mu: Measure, metric: Metric | None) -> Metric:
    """Check the arguments that `gradient_flow` and `jko` share, and return the metric."""
    if not isinstance(energy, Energy):
        raise InvalidInput(f"energy must be an Energy, got {describe(energy)}")
    if energy.dim is not None and energy.dim != mu.dim:
        raise InvalidInput(f"measure has dimension {mu.dim}, the energy acts on dimension {energy.dim}")
    if metric is None:
        return default_metric(mu)
    if not isinstance(metric, Metric):
        raise InvalidInput(f"metric must be a Metric, got {describe(metric)}")
    return metric


def default_metric(mu: Measure) -> Metric:
    """W_2: the Bures-Wasserstein metric on Gaussians."""
    return BuresWasserstein() if isinstance(mu, Gaussian) else Wasserstein()


def descent(energy: Energy, metric: Metric, measure: Measure) -> System:
    """The system d/dt mu = -grad F(mu)."""

    def gaussian(mean: Tensor, factor: Tensor) -> tuple[Tensor, Tensor]:
        cov = factor @ factor.mT
        b, M = metric.raw_gaussian_riesz(mean, cov, *energy.raw_gaussian_gradient_of_factor(mean, factor))
        if energy.finite_on_gaussians:
            return -b, -M
        # Where F is infinite there is no gradient: NaN makes the integrator step back and stop at the boundary.
        inside = torch.isfinite(energy.raw_gaussian(mean, cov))[..., None]
        return torch.where(inside, -b, torch.nan), torch.where(inside[..., None], -M, torch.nan)

    def particles(x: Tensor, weights: Tensor) -> Tensor:
        return -metric.raw_particles_steepest(energy, x, weights)

    if isinstance(measure, Gaussian):
        return System(measure, gaussian=gaussian)
    return System(measure, particles=particles)
