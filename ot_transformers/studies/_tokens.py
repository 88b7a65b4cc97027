"""Token clouds from files or from the package, cut to n tokens and to principal components."""

from __future__ import annotations

import warnings
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ..arrays import as_tensor, check_choice, check_count
from ..errors import InvalidInput
from ..files import read_npz
from ..measures import Gaussian, Particles
from ..models import load_tokens
from ..models.bundled import NAMES

__all__ = ["DEFAULT_COMPONENTS", "Cloud", "load_cloud", "read_array", "torch_device", "torch_dtype"]

Floats = np.ndarray[Any, Any]
DTYPES = {"float64": torch.float64, "float32": torch.float32}

DEFAULT_COMPONENTS = 16
"""Principal components kept unless an option says otherwise; fewer where the tokens have fewer dimensions."""


@dataclass(frozen=True, eq=False)
class Cloud:
    """A token cloud in the coordinates that a study works in.

    Attributes
    ----------
    particles : (n, d), torch
    gaussian : the Gaussian to compare with: of the cloud's own moments, or the one that it was drawn from
    basis : Tensor (d_full, d)
        Orthonormal columns; the coordinates are basis^T x.
    share : float
        Share of the variance that the kept components carry.
    exact : bool
        Whether `gaussian` is the population and not the cloud's own moments.
    label : str
        Where the cloud is from, in words.
    """

    particles: Particles
    gaussian: Gaussian
    basis: Tensor
    share: float
    exact: bool
    label: str


def load_cloud(source: str, *, n: int | None, d: int | None, seed: int, dtype: str, device: str) -> Cloud:
    """Load the first n tokens of a cloud, in the coordinates of its first d principal components.

    Parameters
    ----------
    source : a bundled name ("minilm") or a file
        .npy or .csv: (n, d), one token a row. .npz: an array `tokens` or `x` (or the only array), and
        `weights` (n,) if there are any; or `mean` and `cov` of a Gaussian, of which n tokens are drawn.
    n : tokens kept; all by default (300 of a Gaussian)
    d : principal components kept; all coordinates by default

    Raises
    ------
    InvalidInput
        An unknown name or file, an array that is no cloud, n or d beyond what there is.
    """
    real, where = torch_dtype(dtype), torch_device(device)
    if n is not None:
        check_count(n, "n", 2)
    weights: Floats | None = None
    exact = False
    if source in NAMES:
        x, label = load_tokens(source).x, f"the bundled cloud {source!r}"
    else:
        arrays = read_array(source, "tokens")
        label = f"the cloud of {Path(source).name}"
        if "mean" in arrays and "cov" in arrays:
            law = Gaussian(arrays["mean"], arrays["cov"])
            x, exact = law.sample(300 if n is None else n, seed), True
            label = f"tokens drawn from the Gaussian of {Path(source).name}"
        else:
            x, weights = _cloud_array(arrays, source), arrays.get("weights")
    if x.ndim != 2:
        raise InvalidInput(f"tokens must be one cloud (n, d), got shape {x.shape}")
    if len(x) < 2:
        raise InvalidInput(f"tokens must hold at least 2 tokens, got {len(x)}")
    if n is not None and n > len(x):
        raise InvalidInput(f"n must be at most {len(x)}, the number of tokens, got {n}")
    cut = slice(None, n)
    w = None if weights is None else _kept_weights(weights, len(x), cut)
    full = Particles(torch.from_numpy(np.array(x[cut], dtype=np.float64)), w)
    if exact:
        law = Gaussian(torch.as_tensor(law.mean_t).double(), law.cov_t.double())
    basis, share = _basis(law.cov_t if exact else full.cov_t, d)
    moved = full.moved((full.x_t @ basis).to(real).to(where))
    particles = Particles.unchecked(moved.x_t, None if w is None else full.weights_t.to(real).to(where))
    if not exact:
        # Moments before the cast, so that float32 and float64 runs start from the same Gaussian.
        start = full.moved(full.x_t @ basis).to_gaussian()
    else:
        start = Gaussian.unchecked(law.mean_t @ basis, factor=basis.mT @ law.factor_t)
    gaussian = Gaussian.unchecked(start.mean_t.to(real).to(where), factor=start.factor_t.to(real).to(where))
    return Cloud(particles, gaussian, basis.to(real).to(where), share, exact, label)


def _kept_weights(weights: Floats, count: int, cut: slice) -> Floats:
    """The weights of the tokens kept, summing to 1."""
    if weights.shape != (count,):
        raise InvalidInput(f"weights must have shape ({count},), one a token, got {weights.shape}")
    if (weights < 0).any():
        raise InvalidInput(f"weights must be nonnegative; the smallest is {weights.min():.6g}")
    total = float(weights[cut].sum())
    if total <= 0:
        raise InvalidInput(f"weights of the {cut.stop or count} tokens kept are all 0: give another --n")
    return np.asarray(weights[cut] / total)


def _basis(cov: Tensor, d: int | None) -> tuple[Tensor, float]:
    """Orthonormal basis of the first d principal components, signs fixed; all coordinates for d None."""
    full = cov.shape[-1]
    if d == DEFAULT_COMPONENTS:  # nobody asked for more components than there are
        d = min(d, full)
    if d is None or d == full:
        return torch.eye(full, dtype=cov.dtype), 1.0
    check_count(d, "d")
    if d > full:
        raise InvalidInput(f"d must be at most {full}, the dimension of the tokens, got {d}")
    w, U = torch.linalg.eigh(cov)
    U = U[:, -d:].flip(-1)
    largest = U.gather(0, U.abs().argmax(0, keepdim=True))
    total = float(w.sum())
    return U * largest.sign(), float(w[-d:].sum()) / total if total > 0 else 1.0


def read_array(path: str | Path, name: str) -> dict[str, Floats]:
    """Read .npy, .npz or .csv without pickle; a lone array has the key ""."""
    file = Path(path).expanduser()
    if not file.is_file():
        extra = f" (bundled: {', '.join(NAMES)})" if name == "tokens" else ""
        raise InvalidInput(f"{name} file does not exist: {path}{extra}")
    kind = check_choice(file.suffix.lower(), f"{name} file ending", (".npy", ".npz", ".csv"))
    try:
        if kind == ".csv":
            arrays: dict[str, Any] = {"": _read_csv(file)}
        elif kind == ".npy":
            arrays = {"": np.load(file, allow_pickle=False)}
        else:
            arrays = dict(read_npz(file, f"{name} file"))
    except InvalidInput:
        raise
    except (OSError, ValueError, EOFError) as err:
        reason = " ".join(str(err).split())
        raise InvalidInput(f"{name} file cannot be read: {path} ({reason[:120]})") from err
    numeric = {k: v for k, v in arrays.items() if isinstance(v, np.ndarray) and v.dtype.kind in "fiub"}
    if not numeric:
        raise InvalidInput(f"{name} file holds no numeric array: {path}")
    for key, value in numeric.items():
        as_tensor(value, f"{name}[{key!r}]" if key else name)
    return numeric


def _read_csv(file: Path) -> Floats:
    with file.open(encoding="utf-8") as stream:
        first = stream.readline()
    if not first.strip():
        raise ValueError("it is empty")
    try:
        [float(v) for v in first.split(",")]
        head = 0
    except ValueError:
        head = 1  # a line of column names
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # of no data, which the next line says
        values = np.loadtxt(file, delimiter=",", skiprows=head, ndmin=2)
    if values.size == 0:
        raise ValueError("it has no line of numbers")
    return values


def _cloud_array(arrays: dict[str, Floats], source: str) -> Floats:
    for key in ("", "tokens", "x"):
        if key in arrays:
            return arrays[key]
    rest = [k for k in arrays if k != "weights"]
    if len(rest) == 1:
        return arrays[rest[0]]
    raise InvalidInput(
        f"tokens file needs an array `tokens` or `x`, it has {', '.join(sorted(arrays))}: {source}"
    )


def torch_dtype(name: str) -> torch.dtype:
    """float64 or float32 by name."""
    return DTYPES[check_choice(name, "dtype", DTYPES)]


def torch_device(name: str) -> torch.device:
    """A device that exists and can hold a tensor.

    Raises
    ------
    InvalidInput
        No such device here.
    """
    try:
        device = torch.device(name)
        if device.type == "meta":
            raise NotImplementedError("it holds no numbers")
        torch.zeros(1, device=device)
    except (RuntimeError, AssertionError, NotImplementedError, TypeError) as err:
        reason = " ".join(str(err).split())
        raise InvalidInput(f"device cannot be used: {name!r} ({reason[:100]})") from err
    return device
