"""Entropic JKO steps on a fixed grid (Peyré 2015)."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ..arrays import Array, as_scalar, check_count, check_positive, describe, to_kind
from ..energies import (
    Energy,
    Entropy,
    InteractionEnergy,
    KLDivergence,
    PotentialEnergy,
    ScaledEnergy,
    SumEnergy,
)
from ..errors import InvalidInput, NotConverged
from ..measures import GridMeasure
from ..numerics.tilted import log_interaction
from ._grid_step import GridStep, grid_step

__all__ = ["GridFlow", "grid_jko"]


@dataclass(frozen=True, eq=False)
class GridFlow:
    """JKO steps on a grid.

    Attributes
    ----------
    times : array (n_steps + 1,)
    states : list of GridMeasure, one a time
    energies : array (n_steps + 1, ...)
        The energy itself, without the entropic term, by the grid's masses.
    converged : array (n_steps,) of bool
        Whether each step met `tol`.
    marginal_errors : array (n_steps,)
        L1 distance of the coupling's second marginal to the KL-proximal map, at the end of each step (the
        worst batch member); the first marginal is exact. Where the first variation is implicit, the larger of
        that and of its relative mean distance to the potential used; inf where the measure stayed.
    n_iter : array (n_steps,)
        Scaling iterations of each step.
    status : str
        "completed", or "not converged" if any step did not meet `tol`.
    """

    times: Array
    states: list[GridMeasure]
    energies: Array
    converged: Array
    marginal_errors: Array
    n_iter: Array
    eps: Array
    status: str


def grid_jko(
    energy: Energy,
    measure: GridMeasure,
    tau: float,
    n_steps: int,
    *,
    eps: float,
    tol: float = 1e-9,
    max_iter: int = 5000,
    compensate_blur: bool = False,
    progress: Callable[[int, int], None] | None = None,
) -> GridFlow:
    r"""JKO steps of an energy on a fixed grid, in entropic form.

    Each step solves, over couplings pi of the present masses q with free second marginal p,

        min  sum_xy |x - y|^2 / 2 pi_xy + eps sum_xy pi_xy (log pi_xy - 1) + tau F(p),

    the entropic form of argmin F(p) + W_2(q, p)^2 / (2 tau), by scaling pi = a K b with the Gibbs kernel
    K = e^{-|x - y|^2 / (2 eps)}: a = q / K b, then b from the KL-proximal map of F at s = K^T a. All in the
    log domain; K is applied axis by axis.

    What enters how
    ---------------
    - `Entropy`, `KLDivergence`, `PotentialEnergy` and their combinations sigma \int p log p + \int U p,
      sigma >= 0: implicitly, through the closed KL-proximal map
      p = (s e^{-tau U / eps})^{1 / (1 + tau sigma / eps)}.
    - `InteractionEnergy` and every other energy on particles that is differentiable in the weights have no
      closed KL-proximal map: they enter semi-implicitly, as the potential U = dF/dmu at the present masses q,
      and a step is not a minimiser of F itself. Where that would raise F, the implicit step is found instead:
      U = dF/dmu at the new masses p, by a descent of the objective (a local minimiser if F is not convex).

    F never increases by more than `tol` (and rounding). A minimiser has F(p) <= F(K q) with K q the blur of q,
    which may lie above F(q), as for a q at the minimum of a potential. A step that would raise F is taken again
    with eps / 4, / 16, ... (uncompensated), down to where the grid hides the blur and K q = q; `GridFlow.eps`
    tells. If none will do, because the scaling does not converge there, the measure stays, as not converged and
    with a `NotConverged` warning.

    Parameters
    ----------
    energy : Energy
        Sums and multiples included.
    measure : GridMeasure
        The start; batch dimensions run together.
    tau : float
        Step size, > 0.
    n_steps : int
    eps : float
        Entropic regularisation, > 0. Each step blurs by a variance of about eps: take eps << tau, and grid
        steps below eps^(1/2).
    tol : float
        On the L1 error of the second marginal (see `GridFlow`); at least 64 ulp, 8e-6 in float32.
    max_iter : int
        Scaling iterations of each problem; a step that would raise F solves several.
    compensate_blur : bool
        Take the blur, a diffusion of strength eps / (2 tau), off the entropy: sigma - eps / (2 tau), which
        must stay >= 0.
    progress : callable, optional
        Called with (steps done, n_steps).

    Returns
    -------
    GridFlow

    Raises
    ------
    InvalidInput
        Arguments out of range, dimensions that differ, an energy with sigma < 0.

    Notes
    -----
    For F = sigma Entropy, the step takes N(m, s) to N(m, v), v = c (c + eps) / s with
    2 c = s - eps + ((s + eps)^2 + 4 s tau sigma)^(1/2): v = s + eps + 2 tau sigma to first order.

    References
    ----------
    Peyré, Entropic approximation of Wasserstein gradient flows, SIAM J. Imaging Sci. 8 (2015),
    arXiv 1502.06216; Chizat, Peyré, Schmitzer, Vialard, arXiv 1607.05816.
    """
    if not isinstance(energy, Energy):
        raise InvalidInput(f"energy must be an Energy, got {describe(energy)}")
    if not isinstance(measure, GridMeasure):
        raise InvalidInput(f"measure must be a GridMeasure, got {describe(measure)}")
    if energy.dim is not None and energy.dim != measure.dim:
        raise InvalidInput(f"measure has dimension {measure.dim}, energy acts on dimension {energy.dim}")
    tau, eps, tol = check_positive(tau, "tau"), check_positive(eps, "eps"), check_positive(tol, "tol")
    check_count(n_steps, "n_steps")
    check_count(max_iter, "max_iter")
    tol = max(tol, 64 * torch.finfo(measure.mass_t.dtype).eps)
    terms = _Terms(energy, measure)
    sigma = terms.sigma - (eps / (2 * tau) if compensate_blur else 0.0)
    if sigma < 0:
        what = "after taking off the blur eps / (2 tau)" if compensate_blur else "of the entropy"
        raise InvalidInput(f"energy has the factor {sigma:g} {what}; expected >= 0")
    mass = measure.mass_t.detach()
    states, energies, log_b = [measure], [terms.value(mass)], torch.zeros_like(mass)
    steps: list[GridStep] = []
    for k in range(n_steps):
        step = grid_step(
            terms,
            mass,
            energies[-1],
            log_b,
            measure.axes_t,
            tau=tau,
            eps=eps,
            compensate=compensate_blur,
            implicit=bool(terms.linearised),
            tol=tol,
            max_iter=max_iter,
        )
        mass, log_b = step.mass, step.log_b
        steps.append(step)
        states.append(measure.with_mass(mass))
        energies.append(step.value)
        if progress is not None:
            progress(k + 1, n_steps)
    converged = [step.error <= tol for step in steps]
    stayed = sum(bool(step.stayed.any()) for step in steps)
    if stayed:
        text = f"{stayed} of {n_steps} grid JKO steps would have raised the energy at every eps: the measure stayed"
        warnings.warn(text, NotConverged, stacklevel=2)

    def out(values: Any) -> Array:
        dtype = mass.dtype if isinstance(values[0], float) else None  # lists would become float32
        return to_kind(torch.as_tensor(values, dtype=dtype), measure.kind)

    return GridFlow(
        times=out([k * tau for k in range(n_steps + 1)]),
        states=states,
        energies=to_kind(torch.stack(energies), measure.kind),
        converged=out(converged),
        marginal_errors=out([step.error for step in steps]),
        n_iter=out([step.count for step in steps]),
        eps=to_kind(torch.stack([step.eps for step in steps]), measure.kind),
        status="completed" if all(converged) else "not converged",
    )


class _Terms:
    """An energy taken apart: sigma times the entropy, a fixed potential, and what is linearised."""

    def __init__(self, energy: Energy, grid: GridMeasure) -> None:
        self.grid, self.nodes = grid, grid.nodes_t
        self.shape = tuple(len(line) for line in grid.axes_t)
        self.sigma = 0.0
        self.fixed = self.nodes.new_zeros(self.shape)
        self.linearised: list[tuple[float, Energy]] = []
        self._add(energy, 1.0)

    def _add(self, energy: Energy, factor: float) -> None:
        if isinstance(energy, SumEnergy):
            self._add(energy.first, factor)
            self._add(energy.second, factor)
        elif isinstance(energy, ScaledEnergy):
            self._add(energy.energy, factor * as_scalar(energy.factor, "factor"))
        elif isinstance(energy, Entropy):
            self.sigma += factor
        elif isinstance(energy, KLDivergence):
            if energy.target.batch_shape:
                raise InvalidInput(f"energy has a batch of targets, {energy.target!r}; expected one")
            self.sigma += factor
            log_density = torch.as_tensor(energy.target.log_density(self.nodes.to(energy.target.dtype)))
            self.fixed = self.fixed - factor * log_density.detach().to(self.nodes).reshape(self.shape)
        elif isinstance(energy, PotentialEnergy):
            self.fixed = self.fixed + factor * energy.evaluate(self.nodes).detach().reshape(self.shape)
        else:
            self.linearised.append((factor, energy))

    def _flat(self, mass: Tensor) -> tuple[Tensor, Tensor]:
        w = mass.flatten(-len(self.shape))
        return self.nodes.expand(*w.shape[:-1], *self.nodes.shape), w

    def value(self, mass: Tensor) -> Tensor:
        """F of the grid measure, with the density mass / cell in the entropy; (...)."""
        over = tuple(range(-len(self.shape), 0))
        total = (self.fixed * mass).sum(over)
        if self.sigma:
            total = total + self.sigma * torch.special.xlogy(mass, mass / self.grid.cell).sum(over)
        x, w = self._flat(mass)
        for factor, energy in self.linearised:
            with torch.no_grad():
                total = total + factor * energy.raw_particles(x, w)
        return total

    def potential(self, mass: Tensor) -> Tensor:
        """The fixed potential plus first variations at the present masses, (..., n1[, n2])."""
        total = self.fixed
        x, w = self._flat(mass)
        for factor, energy in self.linearised:
            total = total + factor * _first_variation(energy, x, w).reshape(mass.shape)
        return total


def _first_variation(energy: Energy, x: Tensor, w: Tensor) -> Tensor:
    """dF/dmu at the nodes: the derivative in the weights."""
    if isinstance(energy, InteractionEnergy):
        A = energy.A_t.to(x)
        with torch.no_grad():
            return 0.5 * (log_interaction(x, w, A).exp() + log_interaction(x, w, A.mT).exp())
    # Log-domain energies have no derivative at weight 0: give every node some mass.
    w = w.clamp_min(torch.finfo(w.dtype).tiny).detach().requires_grad_()
    with torch.enable_grad():
        value = energy.raw_particles(x, w).sum()
        if not value.requires_grad:
            raise InvalidInput(f"energy {type(energy).__name__} is not differentiable in the weights")
        (g,) = torch.autograd.grad(value, w)
    return g
