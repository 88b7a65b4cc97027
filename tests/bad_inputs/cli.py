"""Bad inputs of the studies behind the command line: options and files."""

from __future__ import annotations

import io
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from ot_transformers.studies._problem import ProblemConfig, build
from ot_transformers.studies.compare import CompareConfig
from ot_transformers.studies.compare import run as compare
from ot_transformers.studies.convexity import ConvexityConfig
from ot_transformers.studies.convexity import run as convexity
from ot_transformers.studies.flow import FlowConfig
from ot_transformers.studies.flow import run as flow
from ot_transformers.studies.jko import JKOConfig
from ot_transformers.studies.jko import run as jko
from ot_transformers.studies.phase import PhaseConfig
from ot_transformers.studies.phase import run as phase
from ot_transformers.studies.reproduce import ReproduceConfig
from ot_transformers.studies.reproduce import run as reproduce
from ot_transformers.studies.trace import TraceConfig
from ot_transformers.studies.trace import run as trace


def problem(**options: Any) -> Callable[[], object]:
    return lambda: build(ProblemConfig(**options))


def with_file(name: str, content: bytes, option: str, **options: Any) -> Callable[[], object]:
    def call() -> object:
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / name
            path.write_bytes(content)
            return build(ProblemConfig(**{option: str(path), **options}))

    return call


def text_file(content: bytes, **options: Any) -> Callable[[], object]:
    def call() -> object:
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "text.txt"
            path.write_bytes(content)
            return trace(TraceConfig(text=str(path), **options))

    return call


def npy(array: Any) -> bytes:
    buffer = io.BytesIO()
    np.save(buffer, array, allow_pickle=True)
    return buffer.getvalue()


def npz(**arrays: Any) -> bytes:
    buffer = io.BytesIO()
    np.savez(buffer, **arrays)
    return buffer.getvalue()


def one_place() -> object:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "x.npy"
        np.save(path, np.ones((5, 2)))
        return convexity(ConvexityConfig(tokens=str(path), d=None, preset="repulsive"))


SMALL: dict[str, Any] = {"n": 9, "d": 2}
EYE = np.eye(2)
NAN = np.array([[1.0, np.nan], [0.0, 1.0]])
ROWS: list[tuple[str, Callable[[], object], str]] = [
    ("eps zero", problem(eps=0.0), "eps must be > 0"),
    ("t_end zero", problem(t_end=0.0), "t_end must be > 0"),
    ("scale zero", problem(scale=0.0), "scale must be finite and not 0"),
    ("unknown attention", problem(attention="hard"), "attention must be one of"),
    (
        "preset for another dimension",
        with_file("x.npy", npy(np.eye(3)), "tokens", d=None),
        "preset needs tokens of",
    ),
    ("pickled tokens", with_file("x.npy", npy(np.array([{}])), "tokens"), "tokens file cannot be read"),
    ("tokens with NaN", with_file("x.npy", npy(NAN), "tokens"), "tokens has 1 NaN"),
    ("complex tokens", with_file("x.npy", npy(1j * EYE), "tokens"), "tokens file holds no numeric array"),
    ("tokens of three axes", with_file("x.npy", npy(np.ones((2, 2, 2))), "tokens"), r"one cloud \(n, d\)"),
    ("one token", with_file("x.npy", npy(np.ones((1, 2))), "tokens"), "at least 2 tokens"),
    ("broken npz", with_file("x.npz", b"PK\x03\x04", "tokens"), "tokens file is a damaged NPZ"),
    ("ragged csv", with_file("x.csv", b"1,2\n3\n", "tokens"), "tokens file cannot be read"),
    ("empty csv", with_file("x.csv", b"", "tokens"), "tokens"),
    (
        "csv of a head",
        with_file("x.csv", b"a,b\n", "tokens"),
        "tokens file cannot be read.*no line of numbers",
    ),
    (
        "weights of the tokens kept",
        with_file("x.npz", npz(tokens=np.eye(4), weights=[0.0, 0.0, 0.5, 0.5]), "tokens", n=2, d=None),
        "weights of the 2 tokens kept are all 0",
    ),
    (
        "weights of another number",
        with_file("x.npz", npz(tokens=EYE, weights=[1.0]), "tokens"),
        r"weights must have shape \(2,\)",
    ),
    ("device meta", problem(device="meta"), "device cannot be used: 'meta'"),
    ("reproduce seed", lambda: reproduce(ReproduceConfig(seed=-1)), "seed must be at least 0"),
    ("reproduce at once", lambda: reproduce(ReproduceConfig(rank_t_end=0.0)), "rank_t_end must be > 0"),
    ("reproduce short", lambda: reproduce(ReproduceConfig(rank_t_end=1e-300)), "rank_t_end must lie in"),
    ("phase far", lambda: phase(PhaseConfig(low=-1e308)), "low must be at most"),
    ("phase into a folder", lambda: phase(PhaseConfig(save=".")), "save must end in .npz"),
    ("another format", with_file("x.pt", b"", "tokens"), "tokens file ending must be one of"),
    ("which array", with_file("x.npz", npz(a=EYE, b=EYE), "tokens"), "tokens file needs an array `tokens`"),
    (
        "negative weights",
        with_file("x.npz", npz(tokens=EYE, weights=[2.0, -1.0]), "tokens"),
        "weights must be",
    ),
    (
        "indefinite law",
        with_file("x.npz", npz(mean=[0.0, 0.0], cov=-EYE), "tokens"),
        "cov must be positive semi",
    ),
    ("matrices not npz", problem(matrices="a.npy"), "matrices must be an .npz file"),
    (
        "V missing",
        with_file("m.npz", npz(A=EYE), "matrices", **SMALL),
        "matrices need A and V, or Q, K and V",
    ),
    (
        "A of another size",
        with_file("m.npz", npz(A=np.eye(3), V=EYE), "matrices", **SMALL),
        "A must be 384 x 384",
    ),
    (
        "Q and K differ",
        with_file("m.npz", npz(Q=EYE, K=np.ones((1, 2)), V=EYE), "matrices", **SMALL),
        "Q and K must",
    ),
    ("one JKO step size", lambda: compare(CompareConfig(jko_steps=(8,))), "jko_steps must be at least two"),
    (
        "sizes decreasing",
        lambda: compare(CompareConfig(sizes=(64, 32))),
        "sizes must be at least two increasing",
    ),
    ("one repeat", lambda: compare(CompareConfig(repeats=1)), "repeats must be at least 2"),
    ("too few times", lambda: compare(CompareConfig(n_times=2)), "n_times must be at least 5"),
    ("one time", lambda: flow(FlowConfig(n_times=1)), "n_times must be at least 2"),
    ("steps on what", lambda: jko(JKOConfig(on="tensors")), "on must be one of"),
    ("one place", one_place, "tokens must not all be in one place"),
    ("one step size", lambda: jko(JKOConfig(steps=(4,))), "steps must be at least two"),
    ("text not there", lambda: trace(TraceConfig(text="/nonexistent")), "text file cannot be read"),
    ("text a folder", lambda: trace(TraceConfig(text="/")), "text file cannot be read"),
    ("text not UTF-8", text_file(b"caf\xe9"), r"text file is not UTF-8: .* \(byte 3\)"),
    ("text empty", text_file(b" \n"), "text file is empty"),
    ("model not there", text_file(b"a", model="/nonexistent"), "model must be a folder"),
    ("no draws", lambda: trace(TraceConfig(draws=0)), "draws must be at least 1"),
    ("no components", lambda: trace(TraceConfig(d=0)), "d must be at least 1"),
    ("negative seed", lambda: trace(TraceConfig(seed=-1)), "seed must be at least 0"),
    ("head for steps", lambda: jko(JKOConfig(preset="head0", **SMALL)), "must be of gradient type"),
]
