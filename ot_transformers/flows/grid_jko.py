"""Entropic JKO steps on a fixed grid (Peyré 2015)."""

from __future__ import annotations

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
from ..errors import InvalidInput
from ..measures import GridMeasure
from ..numerics.sinkhorn_accelerate import Anderson
from ..numerics.tilted import log_interaction

__all__ = ["GridFlow", "grid_jko"]

_PATIENCE = 40
"""Mixed iterations without progress after which the plain ones take over until there is some."""


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
        Whether the scaling iteration of each step met `tol`.
    marginal_errors : array (n_steps,)
        L1 distance of the coupling's second marginal to the KL-proximal map, at the end of each step (the
        worst batch member); the first marginal is exact.
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
      closed KL-proximal map: they enter semi-implicitly, as the potential U = dF/dmu at the present masses q.
      A step is then not a minimiser of F itself, and F decreases up to O(tau^2) a step only.

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
        On the L1 error of the second marginal (see `GridFlow`).
    max_iter : int
        Scaling iterations a step.
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
    terms = _Terms(energy, measure)
    sigma = terms.sigma - (eps / (2 * tau) if compensate_blur else 0.0)
    if sigma < 0:
        what = "after taking off the blur eps / (2 tau)" if compensate_blur else "of the entropy"
        raise InvalidInput(f"energy has the factor {sigma:g} {what}; expected >= 0")
    kernels = [-(line[:, None] - line[None, :]).square() / (2 * eps) for line in measure.axes_t]
    mass = measure.mass_t.detach()
    states, energies = [measure], [terms.value(mass)]
    converged, errors, counts = [], [], []
    log_b = torch.zeros_like(mass)
    for k in range(n_steps):
        potential = (tau / eps) * terms.potential(mass)
        mass, log_b, error, count = _step(
            mass, log_b, kernels, potential, tau * sigma / eps, tol=tol, max_iter=max_iter
        )
        states.append(measure.with_mass(mass))
        energies.append(terms.value(mass))
        converged.append(error <= tol)
        errors.append(error)
        counts.append(count)
        if progress is not None:
            progress(k + 1, n_steps)

    def out(values: Any) -> Array:
        dtype = mass.dtype if isinstance(values[0], float) else None  # lists would become float32
        return to_kind(torch.as_tensor(values, dtype=dtype), measure.kind)

    return GridFlow(
        times=out([k * tau for k in range(n_steps + 1)]),
        states=states,
        energies=to_kind(torch.stack(energies), measure.kind),
        converged=out(converged),
        marginal_errors=out(errors),
        n_iter=out(counts),
        status="completed" if all(converged) else "not converged",
    )


def _step(
    q: Tensor,
    log_b: Tensor,
    kernels: list[Tensor],
    potential: Tensor,
    ratio: float,
    *,
    tol: float,
    max_iter: int,
) -> tuple[Tensor, Tensor, float, int]:
    """One step; `potential` is tau U / eps and `ratio` tau sigma / eps.

    The fixed point in log b, a contraction of factor ratio / (1 + ratio), is found by Anderson mixing; a
    member whose error grows takes the plain iteration again.
    """
    batch, shape = q.shape[: q.ndim - len(kernels)], q.shape[q.ndim - len(kernels) :]
    q, log_b = q.reshape(-1, *shape), log_b.reshape(-1, *shape)
    log_q = torch.log(q)  # -inf where there is no mass: those rows of the coupling are empty
    # The least squares see every node: by the present masses alone, nodes that fill up later would not count.
    mixing = Anderson((0.9 * q + 0.1 / q[0].numel()).flatten(1))
    last = best = q.new_full((len(q),), torch.inf)
    stalled = torch.zeros(len(q), dtype=torch.long, device=q.device)
    for count in range(1, max_iter + 1):
        log_s = _apply(kernels, log_q - _apply(kernels, log_b))  # first marginal exact
        log_p = (log_s - potential.reshape(-1, *shape)) / (1 + ratio)
        change = log_p - log_s - log_b
        # The second marginal is b s: its L1 distance to what the proximal map asks for.
        errors = (torch.exp(log_p) * torch.expm1(-change)).abs().flatten(1).sum(-1)
        if bool((errors <= tol).all()) or count == max_iter:
            break
        stalled = torch.where(errors < 0.9 * best, 0, stalled + 1)
        best = torch.minimum(best, errors)
        # Mixing can lose its way far from the solution (tau sigma >> eps): the plain map contracts always.
        plain = ~(errors < last) | (stalled > _PATIENCE)
        proposal = mixing.propose(log_b.flatten(1), change.flatten(1), plain)
        log_b, last = proposal.reshape(log_b.shape), errors
    p = torch.exp(log_s + log_b)
    p = p / p.flatten(1).sum(-1).reshape(-1, *([1] * len(shape)))
    return p.reshape(*batch, *shape), log_b.reshape(*batch, *shape), float(errors.max()), count


def _apply(kernels: list[Tensor], v: Tensor) -> Tensor:
    """log K e^v, axis by axis."""
    for axis, kernel in zip(range(-len(kernels), 0), kernels, strict=True):
        v = _log_product(kernel, v.movedim(axis, -1)).movedim(-1, axis)
    return v


def _log_product(kernel: Tensor, v: Tensor) -> Tensor:
    """log sum_j e^{kernel_ij + v_j}, along the last axis."""
    top = v.amax(-1, keepdim=True)
    if bool(torch.isfinite(top).all()):
        product = torch.exp(v - top) @ kernel.exp().mT
        info = torch.finfo(v.dtype)
        # Terms lost to underflow are below `tiny`: where every sum is far above it, they do not count.
        if bool((product > info.tiny / info.eps**1.5).all()):
            return top + torch.log(product)
    return torch.logsumexp(v.unsqueeze(-2) + kernel, -1)


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
