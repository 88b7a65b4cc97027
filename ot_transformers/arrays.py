"""NumPy or torch at the door, torch inside: conversion and the checks that every public function shares.

A public function turns its arguments into tensors once, with `as_tensor`, and its results back with
`to_kind`. The checks read values, so they step aside where values cannot be read (inside `torch.vmap`).
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from numbers import Integral, Real
from typing import Any, Literal, NoReturn, TypeAlias

import numpy as np
import torch
from torch import Tensor

from .errors import InvalidInput

__all__ = [
    "Array",
    "ArrayLike",
    "ArrayView",
    "Kind",
    "as_matrix",
    "as_scalar",
    "as_tensor",
    "broadcast_batch",
    "cast_like",
    "check_choice",
    "check_count",
    "check_finite",
    "check_nonnegative",
    "check_positive",
    "check_psd",
    "check_square",
    "check_symmetric",
    "common_kind",
    "describe",
    "layers",
    "make_generator",
    "own_index",
    "readable",
    "tensor_of",
    "to_kind",
    "view_of",
]

ArrayLike: TypeAlias = "np.ndarray[Any, Any] | Tensor | Sequence[Any] | float"
Array: TypeAlias = Any
"""What comes out: `numpy.ndarray` or `torch.Tensor`, the kind that went in."""
Kind = Literal["numpy", "torch"]


def describe(value: object) -> str:
    """Say in a few words what came: type, shape and dtype."""
    if isinstance(value, Tensor | np.ndarray):
        return f"{type(value).__name__} of shape {tuple(value.shape)} and dtype {value.dtype}"
    text = " ".join(repr(value).split())  # an error is one line
    return f"{type(value).__name__} {text if len(text) <= 60 else text[:57] + '...'}"


def layers(t: Tensor) -> Iterator[Tensor]:
    """The tensor, and what every function transform has wrapped, from outside in."""
    functorch = torch._C._functorch
    yield t
    while functorch.is_functorch_wrapped_tensor(t):
        t = functorch.get_unwrapped(t)
        yield t


def readable(t: Tensor) -> bool:
    """Whether the values of a tensor can be read (not under `torch.vmap`, nor on the meta device)."""
    for layer in layers(t):
        if torch._C._functorch.is_batchedtensor(layer):
            return False
    return layer.device.type != "meta"


def as_tensor(
    value: ArrayLike, name: str, *, ndim: int | None = None, min_ndim: int = 0, keep: bool = False
) -> tuple[Tensor, Kind]:
    """Convert one argument to a real floating tensor, and say which kind it came as.

    Lists, integers and booleans become float64; float32 and float64 stay; NumPy data are copied, so that
    nobody's array is shared or written. Autograd history of a tensor is kept. With `keep`, for an object that
    keeps the argument, a tensor is cloned too: written to later by its owner, it does not change the object.

    Raises
    ------
    InvalidInput
        Complex, object, string or half-precision data, ragged lists, wrong number of dimensions, an empty
        array, NaN or infinity.
    """
    kind: Kind = "torch" if isinstance(value, Tensor) else "numpy"
    if isinstance(value, Tensor):
        t = value
        if t.is_complex():
            raise InvalidInput(f"{name} must be real, got {describe(value)}")
        if not t.is_floating_point():
            t = t.to(torch.float64)
        if t.layout != torch.strided:
            raise InvalidInput(f"{name} must be a dense tensor, got layout {t.layout}")
    else:
        t = _tensor_of_numpy(value, name)
    if t.dtype not in (torch.float32, torch.float64):
        raise InvalidInput(f"{name} must be float32 or float64, got {describe(value)}")
    if ndim is not None and t.ndim != ndim:
        raise InvalidInput(f"{name} must have {ndim} dimension(s), got shape {tuple(t.shape)}")
    if t.ndim < min_ndim:
        raise InvalidInput(f"{name} must have at least {min_ndim} dimension(s), got shape {tuple(t.shape)}")
    if t.numel() == 0:
        raise InvalidInput(f"{name} is empty: shape {tuple(t.shape)}")
    check_finite(t, name)
    return (t.clone() if keep and t is value else t), kind


def _tensor_of_numpy(value: Any, name: str) -> Tensor:
    if isinstance(value, list | tuple) and any(isinstance(v, Tensor) for v in value):
        raise InvalidInput(f"{name} is a {type(value).__name__} of tensors: stack it first (torch.stack)")
    try:
        a = np.asarray(value)
    except (ValueError, TypeError) as err:
        raise InvalidInput(f"{name} must be a numeric array, got {describe(value)}") from err
    if a.dtype.kind in "biu":
        a = a.astype(np.float64)
    if a.dtype.kind == "c":
        raise InvalidInput(f"{name} must be real, got {describe(a)}")
    if a.dtype.kind != "f":
        raise InvalidInput(f"{name} must be a numeric array, got {describe(value)}")
    if a.dtype.newbyteorder("=") not in (np.dtype(np.float32), np.dtype(np.float64)):
        raise InvalidInput(f"{name} must be float32 or float64, got {describe(a)}")
    a = np.array(a, dtype=a.dtype.newbyteorder("="), copy=True, order="C")
    return torch.from_numpy(a)


def tensor_of(value: Any) -> Tensor:
    """A tensor of numbers known to be right; a read-only array (a view of an object) is copied."""
    if isinstance(value, np.ndarray) and not value.flags.writeable:
        value = value.copy()
    return torch.as_tensor(value)


def to_kind(t: Tensor, kind: Kind) -> Array:
    """Give a tensor back as the kind that came in (NumPy results are detached; 0-d becomes a NumPy scalar)."""
    if kind == "torch":
        return t
    a = t.detach().cpu().numpy()
    return a if a.ndim else a[()]


def view_of(t: Tensor, kind: Kind) -> Array:
    """Show a tensor that an object keeps: `to_kind`, read-only for NumPy, so that nobody writes through it.

    Nothing is copied. A torch user gets the tensor itself, with its history: tensors cannot be read-only.
    """
    a = to_kind(t, kind)
    if isinstance(a, np.ndarray):
        a.flags.writeable = False
    return a


class ArrayView:
    """The public face of a tensor that an object keeps: `A = ArrayView("...")` shows `self.A_t` by `view_of`.

    Parameters
    ----------
    doc : str
        What it is, with its shape.
    """

    def __init__(self, doc: str) -> None:
        self.__doc__ = doc

    def __set_name__(self, owner: type, name: str) -> None:
        self.name = name

    def __get__(self, instance: Any, owner: type | None = None) -> Array:
        if instance is None:
            return self
        t: Tensor | None = getattr(instance, f"{self.name}_t")
        return None if t is None else view_of(t, instance.kind)

    def __set__(self, instance: Any, value: object) -> NoReturn:
        raise AttributeError(f"{type(instance).__name__}.{self.name} is read-only: build a new one")


def common_kind(*things: object) -> Kind:
    """Torch if any of the arguments is torch (or says `.kind == "torch"`), else NumPy."""
    for thing in things:
        if isinstance(thing, Tensor) or getattr(thing, "kind", None) == "torch":
            return "torch"
    return "numpy"


def own_index(index: tuple[int, ...], batch_shape: tuple[int, ...]) -> tuple[int, ...]:
    """Where something of a batch shape is for an index of a batch that it broadcasts to."""
    tail = index[len(index) - len(batch_shape) :]
    return tuple(0 if n == 1 else i for i, n in zip(tail, batch_shape, strict=True))


def cast_like(t: Tensor, like: Tensor, name: str) -> Tensor:
    """Bring a parameter to the dtype of the data it acts on; another device is an error, not a silent copy."""
    if t.device != like.device:
        raise InvalidInput(f"{name} is on device {t.device}, the measure on {like.device}: move one of them")
    return t if t.dtype == like.dtype else t.to(like.dtype)


def as_matrix(
    value: ArrayLike, name: str, *, square: bool = False, keep: bool = False
) -> tuple[Tensor, Kind]:
    """Convert an argument to a (batch of) matrices; a scalar is read as the 1 x 1 matrix."""
    t, kind = as_tensor(value, name, keep=keep)
    if t.ndim == 0:
        t = t.reshape(1, 1)
    if t.ndim < 2:
        raise InvalidInput(f"{name} must be a matrix (..., d, d), got shape {tuple(t.shape)}")
    if square:
        check_square(t, name)
    return t, kind


def as_scalar(value: Any, name: str) -> float:
    """Convert an argument to a finite Python float."""
    if isinstance(value, Tensor | np.ndarray) and math.prod(value.shape) != 1:
        raise InvalidInput(f"{name} must be a single number, got {describe(value)}")
    if isinstance(value, bool) or not isinstance(value, Real | Tensor | np.ndarray):
        raise InvalidInput(f"{name} must be a number, got {describe(value)}")
    try:
        x = float(value.item() if isinstance(value, Tensor | np.ndarray) else value)
    except (TypeError, ValueError) as err:
        raise InvalidInput(f"{name} must be a number, got {describe(value)}") from err
    if not math.isfinite(x):
        raise InvalidInput(f"{name} must be finite, got {x}")
    return x


def check_positive(value: Any, name: str) -> float:
    """Return the number if it is finite and > 0."""
    x = as_scalar(value, name)
    if x <= 0:
        raise InvalidInput(f"{name} must be > 0, got {x:g}")
    return x


def check_nonnegative(value: Any, name: str) -> float:
    """Return the number if it is finite and >= 0."""
    x = as_scalar(value, name)
    if x < 0:
        raise InvalidInput(f"{name} must be >= 0, got {x:g}")
    return x


def check_count(value: Any, name: str, minimum: int = 1) -> int:
    """Return the integer if it is one and at least `minimum`."""
    if isinstance(value, bool) or not isinstance(value, Integral):
        raise InvalidInput(f"{name} must be an integer, got {describe(value)}")
    n = int(value)
    if n < minimum:
        raise InvalidInput(f"{name} must be at least {minimum}, got {n}")
    return n


def check_choice(value: Any, name: str, choices: Iterable[str]) -> str:
    """Return the word if it is one of the choices."""
    options = tuple(choices)
    if not isinstance(value, str) or value not in options:
        raise InvalidInput(f"{name} must be one of {', '.join(options)}, got {describe(value)}")
    return value


def check_finite(t: Tensor, name: str) -> None:
    """Reject NaN and infinity, saying how many entries are affected."""
    if not readable(t):
        return
    # A finite sum has finite terms: one pass, where a mask takes several.
    if bool(torch.isfinite(t.detach().sum())):
        return
    bad = ~torch.isfinite(t.detach())
    if bool(bad.any()):
        raise InvalidInput(f"{name} has {int(bad.sum())} NaN or infinite entries of {t.numel()}")


def check_square(t: Tensor, name: str) -> None:
    """Reject matrices that are not square."""
    if t.ndim < 2 or t.shape[-1] != t.shape[-2]:
        raise InvalidInput(f"{name} must be square (..., d, d), got shape {tuple(t.shape)}")


def check_symmetric(t: Tensor, name: str) -> None:
    """Reject matrices that differ from their transpose by more than rounding."""
    check_square(t, name)
    if not readable(t):
        return
    s = t.detach()
    if torch.equal(s, s.mT):
        return
    gap = (s - s.mT).abs().amax(dim=(-2, -1))
    scale = s.abs().amax(dim=(-2, -1))
    # Products such as X^T X are symmetric to a few ulp times d; 1e3 ulp separates rounding from a mistake.
    bad = gap > 1e3 * torch.finfo(s.dtype).eps * scale
    if bool(bad.any()):
        worst = float((gap / scale.clamp_min(torch.finfo(s.dtype).tiny)).max())
        raise InvalidInput(f"{name} must be symmetric; |S - S^T| / |S| is {worst:.2e}")


def check_psd(t: Tensor, name: str, *, definite: bool = False) -> None:
    """Reject symmetric matrices with an eigenvalue that is negative beyond rounding (or not > 0)."""
    check_symmetric(t, name)
    if not readable(t):
        return
    s = t.detach()
    d = s.shape[-1]
    slack = 10 * d * torch.finfo(s.dtype).eps
    # A Cholesky factorisation that succeeds is proof enough, and many times cheaper than eigenvalues.
    moved = s
    if definite:
        moved = s - (d * slack * s.abs().amax(dim=(-2, -1)))[..., None, None] * torch.eye(
            d, dtype=s.dtype, device=s.device
        )
    suspect = torch.linalg.cholesky_ex(moved).info != 0
    if not bool(suspect.any()):
        return
    w = torch.linalg.eigvalsh(0.5 * (s[suspect] + s[suspect].mT))
    low, scale = w[..., 0], w.abs().amax(-1)
    bad = (low <= slack * scale) if definite else (low < -slack * scale)
    if bool(bad.any()):
        word = "definite" if definite else "semi-definite"
        raise InvalidInput(
            f"{name} must be positive {word}; its smallest eigenvalue is {float(low[bad].min()):.6g}"
        )


def broadcast_batch(shapes: Sequence[tuple[int, ...]], names: Sequence[str]) -> tuple[int, ...]:
    """Broadcast leading (batch) shapes, or say which arguments do not fit."""
    try:
        return tuple(torch.broadcast_shapes(*shapes))
    except RuntimeError:
        listed = ", ".join(f"{n} {tuple(s)}" for n, s in zip(names, shapes, strict=True))
        raise InvalidInput(f"batch dimensions do not broadcast: {listed}") from None


def make_generator(
    seed: int | np.random.Generator | torch.Generator | None, name: str = "seed"
) -> torch.Generator:
    """Turn a seed (an integer, a `torch.Generator`, a `numpy.random.Generator`) into a CPU generator."""
    if isinstance(seed, torch.Generator):
        return seed
    if isinstance(seed, np.random.Generator):
        seed = int(seed.integers(2**62))
    if seed is None:
        seed = 0  # the same call gives the same bits: randomness is always asked for
    return torch.Generator().manual_seed(check_count(seed, name, minimum=0))
