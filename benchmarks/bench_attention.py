"""Velocities on n = 16,384 tokens in d = 16, float32: against torch.softmax on the dense matrix, in one run.

Repetitions are interleaved and the smallest time is taken, for the machine is shared. Memory is the peak
resident size of a process of its own, with what importing the package takes said beside it.
"""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor

from ot_transformers import (
    L2Attention,
    LinearAttention,
    MaskedAttention,
    Particles,
    PositionedParticles,
    SigmoidAttention,
    SoftmaxAttention,
    UnnormalisedAttention,
)
from ot_transformers.attention import Attention

N, D, REPEAT = 16_384, 16, 2

PROBE = r"""
import re, torch
from ot_transformers import *
# Not ru_maxrss: a child process inherits that of its parent.
peak = lambda: int(re.search(r"VmHWM:\s+(\d+)", open("/proc/self/status").read())[1]) / 1024
n, A, V = {n}, torch.eye(16) / 4, torch.eye(16)
x = torch.randn(n, 16)
s = {positions}
before = peak()
{attention}.velocity(Particles(x) if s is None else PositionedParticles(x, s))
print(f"{{peak():.0f}} MB peak ({{before:.0f}} MB at import)")
"""


def memory(attention: str, n: int = N, positions: str = "None") -> str:
    code = PROBE.format(n=n, attention=attention, positions=positions)
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    return done.stdout.strip()


def interleaved(*calls: Callable[[], object]) -> list[float]:
    best = [float("inf")] * len(calls)
    for _ in range(REPEAT):
        for i, call in enumerate(calls):
            start = time.perf_counter()
            call()
            best[i] = min(best[i], time.perf_counter() - start)
    return best


def row(
    what: str, ours: float, peer: float | None, peer_name: str, memory: str, **more: Any
) -> dict[str, Any]:
    ratio = None if peer is None else peer / ours
    return {
        "what": what,
        "ours": ours,
        "peer": peer,
        "peer_name": peer_name,
        "ratio": ratio,
        "memory": memory,
        **more,
    }


def run() -> list[dict[str, Any]]:
    torch.manual_seed(0)
    x = torch.randn(N, D)
    A, V = torch.eye(D) / 4 + 0.05 * torch.randn(D, D), torch.eye(D)
    s = torch.linspace(0, 1, N)
    ties = torch.arange(N) // 64 / (N // 64)
    mu = Particles(x)
    hidden = torch.ones(N, N, dtype=torch.bool).triu(1)

    def dense() -> Tensor:
        return torch.softmax((x @ A.mT) @ x.mT, -1) @ x @ V.mT

    def dense_causal() -> Tensor:
        return torch.softmax(((x @ A.mT) @ x.mT).masked_fill(hidden, -torch.inf), -1) @ x @ V.mT

    softmax = SoftmaxAttention(A, V)
    masked = MaskedAttention(softmax)
    at, tied = PositionedParticles(x, s), PositionedParticles(x, ties)
    fast, plain = interleaved(lambda: softmax.velocity(mu), dense)
    gap = float((softmax.velocity(mu) - dense()).abs().max())
    causal, in_groups, plain_causal = interleaved(
        lambda: masked.velocity(at), lambda: masked.velocity(tied), dense_causal
    )
    gap_causal = float((masked.velocity(at) - dense_causal()).abs().max())
    size, name = f"n = {N:,}, d = {D}, float32", "torch.softmax on the dense matrix"
    rows = [
        row(
            f"softmax velocity, {size}",
            fast,
            plain,
            name,
            memory("SoftmaxAttention(A, V)"),
            target=">= 3x",
            note=f"largest difference {gap:.1e}",
        ),
        row(
            f"masked softmax velocity, {size}, distinct positions",
            causal,
            plain_causal,
            name + ", masked",
            memory("MaskedAttention(SoftmaxAttention(A, V))", positions="torch.linspace(0, 1, n)"),
            target="seconds, < 1 GB",
            note=f"largest difference {gap_causal:.1e}",
        ),
        row(
            f"masked softmax velocity, {size}, positions in groups of 64",
            in_groups,
            plain_causal,
            name + ", masked",
            memory("MaskedAttention(SoftmaxAttention(A, V))", positions="torch.arange(n) // 64 / 256"),
            target="seconds, < 1 GB",
            note="ties see one another",
        ),
    ]
    start = time.perf_counter()
    softmax.velocity(torch.randn(4 * N, D))
    spent = time.perf_counter() - start
    note = "the dense matrix alone would take 17 GB"
    big = memory("SoftmaxAttention(A, V)", n=4 * N)
    rows.append(
        row(
            f"softmax velocity, n = {4 * N:,}, d = {D}, float32",
            spent,
            None,
            "",
            big,
            target="< 1 GB",
            note=note,
        )
    )
    others: dict[str, Attention] = {
        "L2Attention(2 * A, 2 * A, V)": L2Attention(2 * A, 2 * A, V),
        "LinearAttention(A, V)": LinearAttention(A, V),
        "UnnormalisedAttention(A, V)": UnnormalisedAttention(A, V),
        "SigmoidAttention(A, V)": SigmoidAttention(A, V),
    }
    for text, attention in others.items():
        what = f"{type(attention).__name__} velocity, {size}"
        free, under = interleaved(
            partial(attention.velocity, mu), partial(MaskedAttention(attention).velocity, tied)
        )
        rows.append(row(what, free, None, "", memory(text), note=f"masked, in groups of 64: {under:.3g} s"))
    return rows
