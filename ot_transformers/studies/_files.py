"""Result folders on disk: written whole or not at all, and the config.json that reruns a study."""

from __future__ import annotations

import dataclasses
import json
import math
import os
import shutil
import tempfile
import types
import typing
from collections.abc import Mapping
from pathlib import Path
from typing import Any, TypeVar

from ..arrays import describe
from ..errors import InvalidInput
from ..files import rehearse

__all__ = ["check_out", "config_from_options", "load_config", "write_folder"]

T = TypeVar("T")
CONFIG = "config.json"


def write_folder(
    out: str | Path, content: Mapping[str, bytes], *, study: str, options: Mapping[str, Any]
) -> Path:
    """Write files into a folder beside `out` and rename it into place: a reader never sees half of it.

    An earlier result folder is replaced; files in it that a study did not write are carried over.
    """
    target = check_out(out)
    from .._version import __version__

    config = {
        "study": study,
        "version": __version__,
        "options": dict(options),
        "files": sorted([*content, CONFIG]),
    }
    target.parent.mkdir(parents=True, exist_ok=True)
    fresh = Path(tempfile.mkdtemp(prefix=f".{target.name}.", suffix=".part", dir=target.parent))
    try:
        for name, data in content.items():
            path = fresh / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(data)
        (fresh / CONFIG).write_text(json.dumps(config, indent=2, allow_nan=False) + "\n", encoding="utf-8")
        umask = os.umask(0)
        os.umask(umask)
        fresh.chmod(0o777 & ~umask)  # mkdtemp makes private folders
        _swap(fresh, target)
    except BaseException:
        shutil.rmtree(fresh, ignore_errors=True)
        raise
    return target


def _swap(fresh: Path, target: Path) -> None:
    if not target.exists():
        fresh.rename(target)
        return
    ours = set(_read_json(target / CONFIG).get("files", [])) if (target / CONFIG).exists() else set()
    for path in sorted(target.rglob("*")):
        name = path.relative_to(target)
        if path.is_file() and str(name) not in ours and not (fresh / name).exists():
            (fresh / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(path, fresh / name)
    old = Path(tempfile.mkdtemp(prefix=f".{target.name}.", suffix=".old", dir=target.parent)) / "folder"
    target.rename(old)
    try:
        fresh.rename(target)
    except OSError:
        old.rename(target)
        raise
    finally:
        shutil.rmtree(old.parent, ignore_errors=True)


def check_out(out: str | Path) -> Path:
    """Return the folder to write, or say before any work why it cannot be written.

    Raises
    ------
    InvalidInput
        It is a file, a folder that holds other things than an earlier result, or not writable.
    """
    try:
        target = Path(out).expanduser().absolute()
        if target.exists() and not target.is_dir():
            raise InvalidInput(f"out is a file, expected a folder: {out}")
        if target.is_dir() and any(target.iterdir()) and not (target / CONFIG).exists():
            raise InvalidInput(f"out holds other files and no earlier result (no {CONFIG}): {out}")
        parent = next(p for p in target.parents if p.exists())
        if not parent.is_dir() or not os.access(parent, os.W_OK):
            raise InvalidInput(f"out cannot be written: {parent} is not a writable folder")
        rehearse(target)
    except (
        OSError,
        RuntimeError,
        ValueError,
    ) as err:  # RuntimeError: ~name of nobody here; ValueError: a NUL
        if isinstance(err, InvalidInput):
            raise
        raise InvalidInput(f"out cannot be written: {out} ({getattr(err, 'strerror', None) or err})") from err
    return target


def load_config(path: str | Path, study: str) -> dict[str, Any]:
    """Read the options of a study from the config.json that it wrote.

    Raises
    ------
    InvalidInput
        No such file, not JSON, or of another study.
    """
    data = _read_json(Path(path).expanduser())
    if data.get("study") != study:
        raise InvalidInput(f"config is of the study {data.get('study')!r}, expected {study!r}: {path}")
    options = data.get("options")
    if not isinstance(options, dict):
        raise InvalidInput(f"config has no options: {path}")
    return options


def _read_json(path: Path) -> dict[str, Any]:
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
    except OSError as err:
        raise InvalidInput(f"config cannot be read: {path} ({err.strerror})") from err
    except (ValueError, RecursionError) as err:  # nested too deeply for the parser
        raise InvalidInput(f"config is not JSON: {path}") from err
    if not isinstance(data, dict):
        raise InvalidInput(f"config must be a JSON object, got {describe(data)}")
    return data


def config_from_options(cls: type[T], options: Mapping[str, Any]) -> T:
    """Build a config dataclass from plain values, checking names and types (lists become tuples).

    Raises
    ------
    InvalidInput
        An unknown option, or a value of the wrong type.
    """
    hints = typing.get_type_hints(cls)
    known = {f.name for f in dataclasses.fields(cls)}  # type: ignore[arg-type]
    unknown = sorted(set(options) - known)
    if unknown:
        raise InvalidInput(f"config has unknown option(s) {', '.join(unknown)}")
    values = {name: _coerced(value, hints[name], name) for name, value in options.items()}
    return cls(**values)


def _coerced(value: Any, hint: Any, name: str) -> Any:
    origin = typing.get_origin(hint)
    if origin in (typing.Union, types.UnionType):
        if value is None and type(None) in typing.get_args(hint):
            return None
        hint = next(a for a in typing.get_args(hint) if a is not type(None))
        return _coerced(value, hint, name)
    if origin is typing.Literal:
        if value not in typing.get_args(hint):
            listed = ", ".join(map(str, typing.get_args(hint)))
            raise InvalidInput(f"{name} must be one of {listed}, got {describe(value)}")
        return value
    if origin is tuple:
        if not isinstance(value, list | tuple):
            raise InvalidInput(f"{name} must be a list, got {describe(value)}")
        return tuple(_coerced(v, typing.get_args(hint)[0], name) for v in value)
    if hint is float and isinstance(value, int | float) and not isinstance(value, bool):
        if not math.isfinite(value):
            raise InvalidInput(f"{name} must be finite, got {value}")
        return float(value)
    if hint in (int, str, bool) and isinstance(value, hint) and (hint is bool or not isinstance(value, bool)):
        return value
    raise InvalidInput(f"{name} must be of type {getattr(hint, '__name__', hint)}, got {describe(value)}")
