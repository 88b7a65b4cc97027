"""Files: NPZ read without pickle, all written atomically, every failure one line that names the path."""

from __future__ import annotations

import os
import tempfile
import uuid
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import IO, Any

import numpy as np

from .errors import InvalidInput

__all__ = ["read_npz", "rehearse", "write_atomically", "write_npz"]

_ZIP = b"PK"


def read_npz(path: str | Path, name: str = "path") -> dict[str, np.ndarray[Any, Any]]:
    """Read every array of an NPZ file into memory, without pickle.

    Parameters
    ----------
    path : path of the file
    name : what the caller calls that argument, for the message

    Raises
    ------
    InvalidInput
        No such file, not an NPZ archive, a damaged one, or one with pickled objects.
    """
    file = _as_path(path, name)
    try:
        with file.open("rb") as stream:
            # np.load takes whatever is not an archive for a lone array or a pickle: that is no help here.
            if stream.read(len(_ZIP)) != _ZIP:
                raise InvalidInput(f"{name} is not an NPZ file: {path}")
            stream.seek(0)
            with np.load(stream, allow_pickle=False) as archive:
                arrays = {key: archive[key] for key in archive.files}
    except InvalidInput:
        raise
    except OSError as err:
        raise InvalidInput(f"{name} cannot be read: {path} ({_reason(err)})") from err
    except Exception as err:
        # A flipped byte surfaces as whatever zipfile, zlib or NumPy's header parser trips over: BadZipFile, EOFError,
        # zlib.error, NotImplementedError, RuntimeError, struct.error, MemoryError, SyntaxError and others.
        raise InvalidInput(f"{name} is a damaged NPZ file: {path} ({_reason(err)})") from err
    for key, value in arrays.items():
        if not isinstance(value, np.ndarray):
            raise InvalidInput(f"{name} is an archive with {key!r}, which is not an array: {path}")
    return arrays


def write_npz(path: str | Path, arrays: Mapping[str, Any], name: str = "path") -> Path:
    """Write arrays as a compressed NPZ file: all of it, or nothing is changed. Missing folders are made.

    Raises
    ------
    InvalidInput
        A folder, a place that cannot be written, or data that NPZ holds only as pickled objects.
    """
    data: dict[str, Any] = {key: np.asarray(value) for key, value in arrays.items()}
    for key, value in data.items():
        if value.dtype.hasobject:
            raise InvalidInput(f"{key!r} must be numbers or text to be written, got objects: {path}")
    return write_atomically(path, lambda stream: np.savez_compressed(stream, **data), name)


def write_atomically(path: str | Path, fill: Callable[[IO[bytes]], object], name: str = "path") -> Path:
    """Let `fill` write to a file beside `path` and rename it: a reader never sees half. Missing folders are made.

    Raises
    ------
    InvalidInput
        A folder, or a place that cannot be written.
    """
    file = _as_path(path, name)
    # Hidden, and of a name of its own: another process or thread may write the same file.
    temporary = file.with_name(f".{file.name[:40]}.{uuid.uuid4().hex}.tmp")
    try:
        if file.is_dir():
            raise InvalidInput(f"{name} is a folder, expected a file: {path}")
        file.parent.mkdir(parents=True, exist_ok=True)
        try:
            with temporary.open("xb") as stream:
                fill(stream)
            os.replace(temporary, file)
        finally:
            temporary.unlink(missing_ok=True)
    except OSError as err:
        raise InvalidInput(f"{name} cannot be written: {path} ({_reason(err)})") from err
    return file


def rehearse(target: Path) -> None:
    """Make what writing `target` will make beside it, missing folders too, and take it away again.

    Permissions do not tell it all: /proc, a full disk, a long name.

    Raises
    ------
    OSError
        What writing would raise.
    """
    made = [p for p in target.absolute().parents if not p.exists()]
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        Path(tempfile.mkdtemp(prefix=f".{target.name}.", suffix=".part", dir=target.parent)).rmdir()
    finally:
        for p in made:
            if p.is_dir():
                p.rmdir()


def _as_path(path: Any, name: str) -> Path:
    if not isinstance(path, str | os.PathLike) or not str(path) or "\0" in str(path):
        text = " ".join(repr(path).split())
        raise InvalidInput(f"{name} must be the path of a file, got {type(path).__name__} {text[:60]}")
    try:
        file = Path(path).expanduser()
    except RuntimeError as err:  # "~name" of nobody here
        raise InvalidInput(f"{name} cannot be found: {path} ({_reason(err)})") from err
    if not file.name:
        raise InvalidInput(f"{name} is a folder, expected a file: {path}")
    return file


def _reason(err: BaseException) -> str:
    text = getattr(err, "strerror", None) or str(err) or type(err).__name__
    return " ".join(str(text).split())[:120]
