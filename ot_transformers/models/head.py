"""One attention head of a trained transformer, as the matrices of the paper."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import torch

from ..arrays import Array, ArrayLike, as_matrix, as_tensor, check_nonnegative, to_kind
from ..errors import InvalidInput

__all__ = ["Head"]

MATRICES = ("Q", "K", "W_V", "W_O")
BIASES = ("b_Q", "b_K", "b_V")


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
    b_Q, b_K, b_V : array (k,), optional
        Biases of the query, key and value maps. `A` and `V` leave them out; `homogeneous` keeps them.
    """

    Q: Array
    K: Array
    W_V: Array
    W_O: Array
    layer: int = -1
    index: int = -1
    b_Q: Array | None = None
    b_K: Array | None = None
    b_V: Array | None = None

    def __post_init__(self) -> None:
        k, d = _matrix_shape(self.Q, "Q")
        for name, want in (("K", (k, d)), ("W_V", (k, d)), ("W_O", (d, k))):
            got = _matrix_shape(getattr(self, name), name)
            if got != want:
                raise InvalidInput(f"{name} must have shape {want} to go with Q of shape {(k, d)}, got {got}")
        for name in BIASES:
            bias = getattr(self, name)
            if bias is not None and (shape := tuple(as_tensor(bias, name)[0].shape)) != (k,):
                raise InvalidInput(
                    f"{name} must have shape {(k,)} to go with Q of shape {(k, d)}, got {shape}"
                )

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
        parts = {}
        for name in (*MATRICES, *BIASES):
            value = getattr(self, name)
            if value is not None:
                t, kind = as_tensor(value, name)
                parts[name] = to_kind(t.double(), kind)
        return replace(self, **parts)

    def homogeneous(self) -> Head:
        """Return the same head on homogeneous coordinates (x, 1), with the biases as last columns.

        Q~ = [Q b_Q], K~ = [K b_K], W_V~ = [W_V b_V], and W_O~ is W_O over a row of zeros: the head of
        dimension d + 1 without biases whose scores and values at (x, 1) are those of this one at x, and which
        leaves the constant coordinate where it is. Biases that are None count as 0.
        """
        extended = {}
        for name, bias in zip(MATRICES, (self.b_Q, self.b_K, self.b_V), strict=False):
            t, kind = as_tensor(getattr(self, name), name)
            column = t.new_zeros(self.width) if bias is None else as_tensor(bias, name)[0].to(t)
            extended[name] = to_kind(torch.cat([t, column[:, None]], 1), kind)
        t, kind = as_tensor(self.W_O, "W_O")
        W_O = to_kind(torch.cat([t, t.new_zeros(1, self.width)]), kind)
        return Head(**extended, W_O=W_O, layer=self.layer, index=self.index)

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
