"""The parameters of the twisted metric: A, and the mobility D given or found from V = sign D A."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..arrays import ArrayLike, as_matrix, as_scalar, check_psd, check_symmetric, describe
from ..errors import InvalidInput, NotAGradientFlow
from ..numerics.structure import find_mobility
from ..spd import symmetrise

__all__ = ["Parameters", "parameters"]


class Parameters(NamedTuple):
    """A and D, both symmetric, the sign in V = sign D A, and how well that holds."""

    A: Tensor
    D: Tensor
    sign: int
    residual: float


def parameters(A: ArrayLike, V: ArrayLike | None, D: ArrayLike | None, sign: Any) -> Parameters:
    """Check A with V or D; find D and the sign from V."""
    a, _ = as_matrix(A, "A", square=True)
    if a.ndim != 2:
        raise InvalidInput(f"A must be one matrix (d, d), got shape {tuple(a.shape)}")
    if (V is None) == (D is None):
        raise InvalidInput("give V or D, one of them")
    if V is not None:
        return _found(a, as_matrix(V, "V", square=True)[0])
    assert D is not None
    check_symmetric(a, "A")
    mobility, _ = as_matrix(D, "D", square=True)
    check_psd(mobility, "D", definite=True)
    if mobility.shape != a.shape:
        raise InvalidInput(f"D must have the shape of A {tuple(a.shape)}, got {tuple(mobility.shape)}")
    if as_scalar(sign, "sign") not in (1.0, -1.0):
        raise InvalidInput(f"sign must be +1 or -1, got {describe(sign)}")
    return Parameters(symmetrise(a), symmetrise(mobility), int(sign), 0.0)


def _found(a: Tensor, v: Tensor) -> Parameters:
    if v.shape != a.shape:
        raise InvalidInput(f"V must have the shape of A {tuple(a.shape)}, got {tuple(v.shape)}")
    dtype = torch.promote_types(v.dtype, a.dtype)
    found = find_mobility(a.detach().to(dtype), v.detach().to(dtype))
    if not found.residual <= torch.finfo(dtype).eps ** 0.5:
        raise NotAGradientFlow(
            f"no symmetric positive definite D has V = sign D A with A symmetric: {found.reason}",
            found.residual,
        )
    return Parameters(symmetrise(a), symmetrise(found.D), found.sign, found.residual)
