"""10,000 Bures-Wasserstein distances in d = 8 against POT's batched call, and the accuracy of both."""

from __future__ import annotations

import time
import tracemalloc
from collections.abc import Callable
from typing import Any

import mpmath
import numpy as np
import ot
import torch

from ot_transformers.metrics import bures_distance
from ot_transformers.numerics.bures import bures_squared

N, D = 10_000, 8


def timed(functions: dict[str, Callable[[], Any]], repeats: int = 7) -> dict[str, float]:
    """Best of interleaved repetitions: all see the same noise."""
    best = dict.fromkeys(functions, np.inf)
    for _ in range(repeats):
        for name, function in functions.items():
            start = time.perf_counter()
            function()
            best[name] = min(best[name], time.perf_counter() - start)
    return best


def exact(a: np.ndarray, b: np.ndarray) -> float:
    with mpmath.workdps(60):
        L = mpmath.cholesky(mpmath.matrix(a.tolist()))
        M = mpmath.cholesky(mpmath.matrix(b.tolist()))
        s = mpmath.svd_r(L.T * M, compute_uv=False)
        trace = sum(mpmath.mpf(float(v)) for v in (*np.diag(a), *np.diag(b)))
        return float(mpmath.sqrt(trace - 2 * sum(s)))


def pairs(rng: np.random.Generator) -> dict[str, tuple[np.ndarray, np.ndarray]]:
    X, Y = rng.standard_normal((2, D, 12))
    Q = np.linalg.qr(rng.standard_normal((D, D)))[0]
    a, b = X @ X.T, Y @ Y.T
    steep = Q @ np.diag(np.geomspace(1, 1e-10, D)) @ Q.T
    return {"random": (a, b), "1e-6 apart": (a, a + 1e-6 * b), "condition 1e10": (0.5 * (steep + steep.T), b)}


def run() -> list[dict[str, Any]]:
    rng = np.random.default_rng(0)
    X, Y = rng.standard_normal((2, N, D, 12))
    a, b = X @ X.transpose(0, 2, 1) / 12, Y @ Y.transpose(0, 2, 1) / 12
    ta, tb, zero = torch.from_numpy(a), torch.from_numpy(b), np.zeros((N, D))
    tz = torch.zeros(N, D, dtype=torch.float64)
    call = ot.gaussian.bures_wasserstein_distance
    seconds = timed(
        {
            "ours": lambda: bures_distance(a, b),
            "raw": lambda: bures_squared(ta, tb),
            "numpy": lambda: call(zero, zero, a, b, paired=True),
            "torch": lambda: call(tz, tz, ta, tb, paired=True),
        }
    )
    tracemalloc.start()
    bures_distance(a, b)
    memory = f"{tracemalloc.get_traced_memory()[1] / 1e6:.0f} MB of NumPy"
    tracemalloc.stop()
    errors = []
    for name, (p, q) in pairs(rng).items():
        truth = exact(p, q)
        ours = abs(float(bures_distance(p, q)) / truth - 1)
        pot = abs(float(call(np.zeros(D), np.zeros(D), p, q)) / truth - 1)
        errors.append(f"{name}: ours {ours:.0e}, POT {pot:.0e}")
    return [
        {
            "what": f"{N:,} BW distances, d = {D}" + ("" if ours == "ours" else ", without validation"),
            "ours": seconds[ours],
            "peer": seconds[peer],
            "peer_name": f"POT paired=True ({peer})",
            "ratio": seconds[peer] / seconds[ours],
            "target": ">= 3",
            "memory": memory,
            "note": "relative errors: " + "; ".join(errors),
        }
        for ours in ("ours", "raw")
        for peer in ("torch", "numpy")
    ]
