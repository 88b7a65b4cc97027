"""Sinkhorn attention: the softmax made doubly stochastic, with a warm start along a flow."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ..arrays import (
    ArrayLike,
    ArrayView,
    as_scalar,
    broadcast_batch,
    cast_like,
    check_count,
    check_positive,
    common_kind,
    readable,
)
from ..errors import InvalidInput
from ..measures import Particles
from ..numerics.coupling import coupling_covariance_of_factor
from ..numerics.sinkhorn import SinkhornResult, barycentre, sinkhorn
from ..numerics.sinkhorn_history import PotentialHistory
from ..numerics.sinkhorn_kernel import SolverMemory
from ..numerics.streaming import blockwise
from ..numerics.tilted import safe_log
from .base import Attention, Field, parameter

__all__ = ["SinkhornAttention"]


class SinkhornAttention(Attention):
    """Gamma_mu(x) = V E[y kappa(x, y)], kappa doubly stochastic.

        kappa(x, y) = exp((y^T A x + f(x) + g(y)) / eps), both marginals of kappa mu x mu being mu.

    Parameters
    ----------
    A : array (..., d, d)
        Score matrix K^T Q: the score of a pair is y^T A x. A scalar stands for d = 1.
    V : array (..., d, d)
        Value matrix.
    eps : float
        Entropic regularisation, > 0.
    tol : float
        Bound on the L1 error of each marginal (float32 clouds are solved in float64).
    max_iter : int
        Iterations of one solve at most; then a `NotConverged` warning gives the errors reached.

    Notes
    -----
    On Gaussians b = V m and M = V C A / eps, with C = Cov(y | x) of the optimal coupling
    (`sinkhorn_coupling`); exact for singular covariances and singular A.

    References
    ----------
    Castin, Ablin, Carrillo, Peyré, arXiv 2501.18322, sections 2 and 4; Sander, Ablin, Blondel, Peyré,
    Sinkformers, AISTATS 2022.

    Examples
    --------
    >>> import numpy as np
    >>> attention = SinkhornAttention(A=1.0, V=1.0)
    >>> attention.velocity(np.array([[-1.0], [1.0]])).round(6).ravel().tolist()
    [-0.761594, 0.761594]
    """

    A = ArrayView("Score matrix, (..., d, d).")
    V = ArrayView("Value matrix, (..., d, d).")

    def __init__(
        self, A: ArrayLike, V: ArrayLike, eps: float = 1.0, *, tol: float = 1e-9, max_iter: int = 5_000
    ) -> None:
        self.A_t, _ = parameter(A, "A")
        self.V_t, _ = parameter(V, "V")
        self.eps = check_positive(eps, "eps")
        self.tol, self.max_iter = check_positive(tol, "tol"), check_count(max_iter, "max_iter")
        if self.A_t.shape[-1] != self.V_t.shape[-1]:
            raise InvalidInput(
                f"A acts on dimension {self.A_t.shape[-1]}, V on dimension {self.V_t.shape[-1]}"
            )
        self.batch_shape = broadcast_batch([self.A_t.shape[:-2], self.V_t.shape[:-2]], ["A", "V"])
        self.dim, self.kind = int(self.A_t.shape[-1]), common_kind(A, V)

    @classmethod
    def from_qkv(
        cls, Q: ArrayLike, K: ArrayLike, V: ArrayLike, scale: float = 1.0, *, eps: float = 1.0, **options: Any
    ) -> SinkhornAttention:
        """Build from query, key (..., k, d) and value matrices: A = scale K^T Q."""
        q, _ = parameter(Q, "Q", square=False)
        k, _ = parameter(K, "K", square=False)
        if q.shape[-2:] != k.shape[-2:]:
            raise InvalidInput(
                f"Q and K must have equal shapes (..., k, d), got {tuple(q.shape)}, {tuple(k.shape)}"
            )
        dtype = torch.promote_types(q.dtype, k.dtype)
        self = cls(as_scalar(scale, "scale") * k.to(dtype).mT @ q.to(dtype), V, eps, **options)
        self.kind = common_kind(Q, K, V)
        return self

    maskable = False
    _no_bounds = (
        "stability holds by the Lipschitz stability of the potentials, Carlier, Chizat, Laborde 2024, with a "
        "constant that is not explicit"
    )

    def raw_rows(self, points: Tensor, x: Tensor, log_weights: Tensor) -> Tensor:
        """Not defined: the potentials belong to one measure, and not to one measure a row."""
        raise InvalidInput(
            "attention is Sinkhorn, which is defined on one measure as a whole, not row by row"
        )

    def raw_field(self, points: Tensor, x: Tensor, weights: Tensor) -> Tensor:
        """V E[y kappa(z, y)] at other points z, with f(z) the soft-min extension of the potential."""
        log_v = safe_log(weights) + self.solve(x, weights).g / self.eps
        return blockwise(self._rows, (points,), (x, log_v.unsqueeze(-2)))

    def _rows(self, points: Tensor, x: Tensor, log_v: Tensor) -> Tensor:
        A, V = cast_like(self.A_t, x, "A"), cast_like(self.V_t, x, "V")
        return torch.softmax(points @ (A / self.eps).mT @ x.mT + log_v, -1) @ x @ V.mT

    def raw_velocity(self, x: Tensor, weights: Tensor) -> Tensor:
        """V E_pi[y | x_i], a cold solve: (..., n, d)."""
        return self._velocity(self.solve(x, weights), x)

    def raw_affine(self, mean: Tensor, factor: Tensor) -> tuple[Tensor, Tensor]:
        """(V m, V C A / eps), C from the factor."""
        A, V = cast_like(self.A_t, factor, "A"), cast_like(self.V_t, factor, "V")
        B = A / self.eps
        C = coupling_covariance_of_factor(factor, B)
        return (V @ mean.unsqueeze(-1)).squeeze(-1), V @ C @ B

    def evaluator(self, particles: Particles | None = None) -> Field:
        """A velocity for the successive steps of one flow, each solve starting from extrapolated potentials.

        The history lives in the returned function alone: use one evaluator for one flow, in one thread.
        """
        history = PotentialHistory(self.tol)

        def velocity(x: Tensor, weights: Tensor) -> Tensor:
            result = self.solve(x, weights, history.guess(x, weights), history.memory)
            history.add(x, weights, result)
            return self._velocity(result, x)

        return velocity

    def solve(
        self,
        x: Tensor,
        weights: Tensor,
        warm: tuple[Tensor, Tensor] | None = None,
        memory: SolverMemory | None = None,
    ) -> SinkhornResult:
        """The coupling of the cloud with itself: potentials, marginal errors, value (trusts its caller)."""
        A = cast_like(self.A_t, x, "A")
        options: dict[str, Any] = {"tol": self.tol, "max_iter": self.max_iter, "warm": warm, "memory": memory}
        return sinkhorn(x, weights, x, weights, A, self.eps, symmetric=self._symmetric, **options)

    @property
    def _symmetric(self) -> bool:
        return readable(self.A_t) and bool((self.A_t.detach() == self.A_t.detach().mT).all())

    def _velocity(self, result: SinkhornResult, x: Tensor) -> Tensor:
        return barycentre(result) @ cast_like(self.V_t, x, "V").mT
