"""The Riemannian Hessian of an energy at a measure, matrix-free, and its smallest eigenpair."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from scipy.sparse.linalg import ArpackNoConvergence, LinearOperator, eigsh
from torch import Tensor

from ..arrays import Array, Kind, check_count, check_positive, to_kind
from ..energies import Energy
from ..errors import InvalidInput
from ..measures import Measure, as_measure
from ._charts import Chart, chart_at
from ._states import energy_of

__all__ = ["EigenPair", "RiemannianHessian", "riemannian_hessian"]

_DENSE = 96
"""Up to this dimension the matrix is formed, column by column: Lanczos has nothing to gain."""


@dataclass(frozen=True, eq=False)
class EigenPair:
    """The smallest eigenvalue of a Riemannian Hessian and its direction.

    Attributes
    ----------
    value : float
        The best modulus at the measure: Hess F(v, v) >= value |v|^2 for all v, up to `error`.
    direction : array (n, d), or AffineVelocity
        The tangent of unit length where it is attained.
    error : float
        Norm of the residual (there is an eigenvalue that close) plus rounding.
    converged : bool
        Whether the residual met the tolerance.
    n_matvec : int
        Hessian-vector products used.
    """

    value: float
    direction: Any
    error: float
    converged: bool
    n_matvec: int


class RiemannianHessian:
    """Hess F(v, v) = d2/dt2 F(exp(t v)) at t = 0, as a linear map on tangents; see `riemannian_hessian`."""

    def __init__(self, energy: Energy, chart: Chart, kind: Kind, measure: Measure) -> None:
        self.energy, self.measure, self.kind = energy, measure, kind
        self.raw_chart = chart
        self.dim = chart.size
        with torch.enable_grad():
            self._u = torch.zeros(chart.size, dtype=chart.dtype, device=chart.device, requires_grad=True)
            value = energy_of(energy, chart.state(self._u))
            (self._slope,) = torch.autograd.grad(value, self._u, create_graph=True, materialize_grads=True)
        if not bool(torch.isfinite(value)) or not bool(torch.isfinite(self._slope).all()):
            raise InvalidInput("energy is not finite at measure: it has no Hessian there")
        self.value = float(value.detach())
        self.gradient_norm = float(self._slope.detach().norm())

    def matvec(self, v: Any) -> Any:
        """The tangent Hess F v = nabla_v grad F.

        Parameters
        ----------
        v : array (n, d) at the tokens; AffineVelocity with D^-1 M symmetric at a Gaussian

        Returns
        -------
        the same kind of tangent

        Raises
        ------
        InvalidInput
            A tangent of another shape, or a field on a Gaussian that is no gradient.
        """
        u = self.raw_matvec(self.raw_chart.coordinates(v))
        return self.raw_chart.wrap(self.raw_chart.tangent(u), self._kind_of(v))

    def quadratic_form(self, v: Any) -> Array:
        """Hess F(v, v), a number."""
        u = self.raw_chart.coordinates(v)
        return to_kind(u @ self.raw_matvec(u), self._kind_of(v))

    def norm_squared(self, v: Any) -> Array:
        """|v|^2 in the metric."""
        return to_kind(self.raw_chart.coordinates(v).square().sum(), self._kind_of(v))

    def min_eigenpair(self, *, tol: float = 1e-8, max_iter: int = 2_000, seed: int = 0) -> EigenPair:
        """The smallest eigenvalue and its unit tangent: dense for small spaces, else Lanczos (ARPACK).

        Parameters
        ----------
        tol : float
            On the residual, relative to the largest eigenvalue seen.
        max_iter : int
            Restarts of the Lanczos method at most.
        seed : int
            Of its first vector.
        """
        check_positive(tol, "tol")
        check_count(max_iter, "max_iter")
        check_count(seed, "seed", 0)
        counter = [0]
        u, scale = (self._dense if self.dim <= _DENSE else self._lanczos)(counter, tol, max_iter, seed)
        Hu = self.raw_matvec(u)
        value = float(u @ Hu)
        residual = float((Hu - value * u).norm())
        ulp = torch.finfo(u.dtype).eps
        error = residual + 16.0 * ulp * self.dim**0.5 * scale
        largest = u.abs().argmax()
        u = u * u[largest].sign()  # one sign, so that the same call gives the same direction
        direction = self.raw_chart.wrap(self.raw_chart.tangent(u), self.kind)
        return EigenPair(value, direction, error, residual <= tol * max(scale, abs(value)), counter[0] + 1)

    def raw_matvec(self, u: Tensor) -> Tensor:
        """The Hessian in orthonormal coordinates, (N,) to (N,): one reverse sweep through the gradient."""
        if not self._slope.requires_grad:
            return torch.zeros_like(u)
        (out,) = torch.autograd.grad(self._slope, self._u, u, retain_graph=True, materialize_grads=True)
        return out

    def _kind_of(self, v: Any) -> Kind:
        return "torch" if isinstance(v, Tensor) or getattr(v, "kind", None) == "torch" else self.kind

    def _dense(self, counter: list[int], tol: float, max_iter: int, seed: int) -> tuple[Tensor, float]:
        eye = torch.eye(self.dim, dtype=self._u.dtype, device=self._u.device)
        H = torch.stack([self.raw_matvec(e) for e in eye])
        counter[0] += self.dim
        w, U = torch.linalg.eigh(0.5 * (H + H.mT))
        return U[:, 0], float(w.abs().max())

    def _lanczos(self, counter: list[int], tol: float, max_iter: int, seed: int) -> tuple[Tensor, float]:
        like = self._u.detach()

        def apply(y: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
            counter[0] += 1
            u = torch.from_numpy(np.ascontiguousarray(y.reshape(-1))).to(like)
            return self.raw_matvec(u).detach().cpu().double().numpy()

        operator = LinearOperator((self.dim, self.dim), matvec=apply, dtype=np.float64)
        start = np.random.default_rng(seed).standard_normal(self.dim)
        top = float(abs(eigsh(operator, k=1, which="LM", v0=start, tol=1e-2, return_eigenvectors=False)[0]))
        shifted = LinearOperator(
            (self.dim, self.dim), matvec=lambda y: apply(y) - top * y.reshape(-1), dtype=np.float64
        )
        try:
            # Shifted below 0 the tolerance of ARPACK, relative to the eigenvalue, is relative to the top one.
            _, U = eigsh(shifted, k=1, which="SA", v0=start, tol=tol, ncv=min(self.dim, 48), maxiter=max_iter)
            u = U[:, 0]
        except ArpackNoConvergence as stopped:
            u = stopped.eigenvectors[:, 0] if stopped.eigenvectors.shape[1] else start / np.linalg.norm(start)
        return torch.from_numpy(u.copy()).to(like), top


def riemannian_hessian(energy: Energy, metric: Any, measure: Measure) -> RiemannianHessian:
    r"""The Hessian of an energy at a measure in a metric: W2, Bures-Wasserstein or twisted.

        Hess F(v, v) = D2F(v, v) - DF(Gamma(v, v)) = d2/dt2 F(exp(t v)) at t = 0.

    Parameters
    ----------
    energy : Energy
    metric : Wasserstein (p = 2), BuresWasserstein or TwistedWasserstein
        With Wasserstein a cloud gives the Hessian over fields at its tokens, a Gaussian that of the
        Bures-Wasserstein space.
    measure : one cloud or Gaussian, no batch dimensions

    Returns
    -------
    RiemannianHessian
        `.matvec(v)`, `.quadratic_form(v)`, `.norm_squared(v)`, `.min_eigenpair()`.

    Raises
    ------
    InvalidInput
        The metric is not Riemannian on this measure, the energy is not finite there, dimensions that differ.

    Notes
    -----
    In coordinates that are normal to second order and orthonormal (in the twisted metric
    x + v + a(v, v) / 2 with a the acceleration of the geodesic) this is the Hessian of an ordinary function
    at 0; a product with a vector is one reverse sweep through the gradient. The smallest eigenvalue is the
    largest lambda for which F is lambda-convex near the measure, to second order.

    References
    ----------
    Castin, Ablin, Carrillo, Peyré, arXiv 2501.18322, section 3.

    Examples
    --------
    >>> import numpy as np
    >>> from ot_transformers import InteractionEnergy, Particles, Wasserstein
    >>> hessian = riemannian_hessian(InteractionEnergy(-1.0), Wasserstein(), Particles(np.zeros((1, 1))))
    >>> float(hessian.quadratic_form(np.ones((1, 1))))
    -1.0
    """
    if not isinstance(energy, Energy):
        raise InvalidInput(f"energy must be an Energy, got {type(energy).__name__}")
    mu = as_measure(measure)
    energy._check(mu)
    chart, kind = chart_at(metric, mu)
    return RiemannianHessian(energy, chart, "torch" if energy.kind == "torch" else kind, mu)
