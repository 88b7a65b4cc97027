"""Potential energies mu -> E f(x)."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor

from ..arrays import Array, check_count, describe, readable, to_kind
from ..errors import InvalidInput
from ..measures import Gaussian, as_gaussian
from ..spd import sqrt_psd, symmetrise
from .base import Energy

__all__ = ["PotentialEnergy"]

_MAX_NODES = 1 << 17


class PotentialEnergy(Energy):
    """The potential energy F(mu) = E_mu f(x) of a function f on R^d; its Wasserstein gradient is grad f.

    Parameters
    ----------
    f : callable
        Takes torch tensors (..., d) to (...), differentiable by autograd (twice, for gradients on Gaussians).
    n_nodes : int, optional
        Gauss-Hermite nodes an axis, for the value on Gaussians (tensor grid, d <= 4). Default 32 for
        d <= 2, 16 for d = 3, 12 for d = 4. Exact for polynomials of degree 2 n_nodes - 1 along each axis.

    Raises
    ------
    InvalidInput
        f is not callable or gives a wrong shape; a Gaussian in dimension > 4 (use `Gaussian.sample` and
        particles there).

    Notes
    -----
    `quadrature_error` is the error control on Gaussians: the difference to the rule with three quarters of
    the nodes. The gradient uses g = E grad f and H = E Hess f / 2, right at singular covariances too.

    Examples
    --------
    >>> import numpy as np
    >>> energy = PotentialEnergy(lambda x: x.square().sum(-1) / 2)
    >>> round(float(energy.value(Gaussian(np.ones(2), np.eye(2)))), 12)
    2.0
    """

    def __init__(self, f: Callable[[Tensor], Tensor], *, n_nodes: int | None = None) -> None:
        if not callable(f):
            raise InvalidInput(f"f must be callable, (..., d) -> (...), got {describe(f)}")
        self.f = f
        self.n_nodes = None if n_nodes is None else check_count(n_nodes, "n_nodes", minimum=2)

    def evaluate(self, x: Tensor) -> Tensor:
        """f(x) for x (..., d), with its shape checked."""
        value = self.f(x)
        if not isinstance(value, Tensor) or value.shape != x.shape[:-1]:
            raise InvalidInput(
                f"f must take a tensor (..., d) to (...); shape {tuple(x.shape)} gave {describe(value)}"
            )
        return value

    def raw_particles(self, x: Tensor, weights: Tensor) -> Tensor:
        """sum_i w_i f(x_i), (...)."""
        return (weights * self.evaluate(x)).sum(-1)

    def raw_particles_gradient(self, x: Tensor, weights: Tensor) -> Tensor:
        """grad f at the tokens (also at tokens of weight 0)."""
        return self._gradient(x, torch.is_grad_enabled() and x.requires_grad)

    def raw_gaussian(self, mean: Tensor, cov: Tensor) -> Tensor:
        """E f(m + S^(1/2) z) by Gauss-Hermite quadrature, (...)."""
        return self._expectation(mean, cov, self._nodes(mean.shape[-1]))

    def raw_gaussian_gradient(self, mean: Tensor, cov: Tensor) -> tuple[Tensor, Tensor]:
        """(E grad f, E Hess f / 2) by the same quadrature."""
        z, w = _gauss_hermite(self._nodes(mean.shape[-1]), mean)
        graph = torch.is_grad_enabled() and (mean.requires_grad or cov.requires_grad)
        x = mean.unsqueeze(-2) + z @ sqrt_psd(cov)
        with torch.enable_grad():
            x = x if graph else x.detach().requires_grad_()
            gradient = self._gradient(x, True)
            rows = [_row(gradient[..., i], x, graph) for i in range(x.shape[-1])]
        g = (w.unsqueeze(-1) * (gradient if graph else gradient.detach())).sum(-2)
        H = torch.stack([(w.unsqueeze(-1) * row).sum(-2) for row in rows], -2)
        return g, 0.5 * symmetrise(H)

    def quadrature_error(self, gaussian: Gaussian) -> Array:
        """Estimate the quadrature error of the value: |difference to 3/4 of the nodes|, (...)."""
        mu = as_gaussian(gaussian)
        n = self._nodes(mu.dim)
        fine, coarse = (self._expectation(mu.mean_t, mu.cov_t, k) for k in (n, max(1, (3 * n) // 4)))
        return to_kind((fine - coarse).abs(), mu.kind)

    def _nodes(self, d: int) -> int:
        if d > 4:
            raise InvalidInput(
                f"PotentialEnergy on Gaussians is a tensor quadrature for dimension <= 4, got {d}; "
                "use particles: Particles(gaussian.sample(n, seed))"
            )
        n = self.n_nodes or {1: 32, 2: 32, 3: 16, 4: 12}[d]
        if n**d > _MAX_NODES:
            raise InvalidInput(f"n_nodes = {n} gives {n**d} nodes in dimension {d}; at most {_MAX_NODES}")
        return n

    def _expectation(self, mean: Tensor, cov: Tensor, n: int) -> Tensor:
        z, w = _gauss_hermite(n, mean)
        return (w * self.evaluate(mean.unsqueeze(-2) + z @ sqrt_psd(cov))).sum(-1)

    def _gradient(self, x: Tensor, graph: bool) -> Tensor:
        with torch.enable_grad():
            y = x if x.requires_grad else x.detach().requires_grad_()
            value = self.evaluate(y).sum()
            if not value.requires_grad:
                if readable(value):
                    return torch.zeros_like(x)  # f does not depend on x
                raise InvalidInput("f must be differentiable by autograd")
            (g,) = torch.autograd.grad(value, y, create_graph=graph, materialize_grads=True)
        return g


def _row(g: Tensor, x: Tensor, graph: bool) -> Tensor:
    if not g.requires_grad:
        return torch.zeros_like(x)
    (row,) = torch.autograd.grad(g.sum(), x, create_graph=graph, retain_graph=True, materialize_grads=True)
    return row


def _gauss_hermite(n: int, like: Tensor) -> tuple[Tensor, Tensor]:
    """Nodes (n^d, d) and weights (n^d,) of the standard normal law."""
    nodes, weights = np.polynomial.hermite_e.hermegauss(n)
    z = torch.from_numpy(nodes).to(like)
    w = torch.from_numpy(weights / weights.sum()).to(like)
    d = like.shape[-1]
    grid = torch.cartesian_prod(*[z] * d).reshape(-1, d)
    mass = torch.cartesian_prod(*[w] * d).reshape(-1, d).prod(-1)
    return grid, mass
