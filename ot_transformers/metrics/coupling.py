"""The conditional covariance of the entropic self-coupling of a Gaussian, as a public function."""

from __future__ import annotations

from ..arrays import (
    Array,
    ArrayLike,
    as_matrix,
    broadcast_batch,
    cast_like,
    check_positive,
    common_kind,
    to_kind,
)
from ..errors import InvalidInput
from ..measures import Gaussian, as_gaussian
from ..numerics.coupling import coupling_covariance, coupling_covariance_of_factor

__all__ = ["sinkhorn_coupling"]


def sinkhorn_coupling(gaussian: Gaussian, A: ArrayLike, eps: float = 1.0) -> Array:
    """C = Cov(y | x) of the optimal coupling of N(m, S) with itself, for E[-y^T A x] + eps KL(pi | mu x mu).

    C = 2 S^(1/2) (I + (I + 4 S^(1/2) B S B^T S^(1/2))^(1/2))^(-1) S^(1/2), B = A / eps, the PSD solution of
    C + C (B S B^T) C = S. The cross-covariance Cov(y, x) is C B S.

    Parameters
    ----------
    gaussian : Gaussian
        N(m, S); S of any rank. C does not depend on m.
    A : array (..., d, d)
        Bilinear form, any matrix. A scalar stands for d = 1.
    eps : float
        Entropic regularisation, > 0.

    Returns
    -------
    array (..., d, d)
        Differentiable in S (singular S included), in a factor of S, and in A.

    Raises
    ------
    InvalidInput
        Dimensions or devices that do not match, eps <= 0.

    References
    ----------
    Castin, Ablin, Carrillo, Peyré, arXiv 2501.18322, section 4.

    Examples
    --------
    >>> sinkhorn_coupling(Gaussian(0.0, [[1.0]]), 2.0).round(12).tolist()  # (sqrt(17) - 1) / 8
    [[0.390388203202]]
    """
    g = as_gaussian(gaussian)
    matrix, _ = as_matrix(A, "A", square=True)
    if matrix.shape[-1] != g.dim:
        raise InvalidInput(f"A acts on dimension {matrix.shape[-1]}, gaussian has dimension {g.dim}")
    broadcast_batch([matrix.shape[:-2], g.batch_shape], ["A", "gaussian"])
    B = cast_like(matrix, g.mean_t, "A") / check_positive(eps, "eps")
    C = coupling_covariance_of_factor(g.factor_t, B) if g.has_factor else coupling_covariance(g.cov_t, B)
    return to_kind(C, common_kind(gaussian, A))
