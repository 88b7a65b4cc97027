"""One attention head of a trained transformer, as the matrices of the paper."""

from __future__ import annotations

import math
from dataclasses import dataclass

from ..arrays import Array, ArrayLike, as_matrix, as_tensor, check_nonnegative, to_kind
from ..errors import InvalidInput

__all__ = ["Head"]


@dataclass(frozen=True, eq=False)
class Head:
    """Query, key, value and output maps of one head: x -> W_O softmax(<Q x, K y> / sqrt(k)) W_V y.

    The paper writes A = K^T Q and a d x d value matrix V. A trained head has its scale 1 / sqrt(k) in the
    score, and its value matrix is the product W_O W_V of rank k; both are explicit here.

    Attributes
    ----------
    Q, K : array (k, d)
        Query and key maps, without the scale.
    W_V : array (k, d)
        Value map of the head.
    W_O : array (d, k)
        The columns of the output map that belong to the head.
    layer, index : int
        Where the head sits in its model (-1 if unknown).
    """

    Q: Array
    K: Array
    W_V: Array
    W_O: Array
    layer: int = -1
    index: int = -1

    def __post_init__(self) -> None:
        k, d = _matrix_shape(self.Q, "Q")
        for name, want in (("K", (k, d)), ("W_V", (k, d)), ("W_O", (d, k))):
            got = _matrix_shape(getattr(self, name), name)
            if got != want:
                raise InvalidInput(f"{name} must have shape {want} to go with Q of shape {(k, d)}, got {got}")

    @property
    def dim(self) -> int:
        """Dimension d of the tokens."""
        return int(self.Q.shape[1])

    @property
    def width(self) -> int:
        """Dimension k of the head."""
        return int(self.Q.shape[0])

    @property
    def scale(self) -> float:
        """The scale 1 / sqrt(k) that the model puts in the score."""
        return 1.0 / math.sqrt(self.width)

    def double(self) -> Head:
        """Return the head in float64, so that products keep the exact rank k of their factors."""
        Q, K, W_V, W_O = (as_tensor(m, "head") for m in (self.Q, self.K, self.W_V, self.W_O))
        parts = [to_kind(t.double(), kind) for t, kind in (Q, K, W_V, W_O)]
        return Head(parts[0], parts[1], parts[2], parts[3], self.layer, self.index)

    def A(self, scale: float | None = None) -> Array:
        """Return scale * K^T Q, (d, d), so that the score is y^T A x; `scale` is 1 / sqrt(k) unless given."""
        factor = self.scale if scale is None else check_nonnegative(scale, "scale")
        return factor * (self.K.T @ self.Q)

    @property
    def V(self) -> Array:
        """The value matrix W_O W_V, (d, d), of rank at most k."""
        return self.W_O @ self.W_V


def _matrix_shape(value: ArrayLike, name: str) -> tuple[int, int]:
    t, _ = as_matrix(value, name)
    if t.ndim != 2 or not hasattr(value, "shape"):
        raise InvalidInput(f"{name} must be one matrix (an array with two dimensions), got {tuple(t.shape)}")
    return int(t.shape[0]), int(t.shape[1])
