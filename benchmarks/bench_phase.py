"""A phase diagram of 10,000 trajectories in batched solves, against one call a trajectory."""

from __future__ import annotations

import time
from functools import partial

import numpy as np

from ot_transformers import Gaussian, SoftmaxAttention, solve
from ot_transformers.analysis import phase_diagram
from ot_transformers.studies.phase import _build


def _peak() -> str:
    with open("/proc/self/status") as lines:
        peak = next(line for line in lines if line.startswith("VmHWM"))
    return f"peak {int(peak.split()[1]) // 1024} MB of the process"


def run() -> list[dict[str, object]]:
    build = partial(_build, "softmax", 1.0)
    values = np.linspace(-1.0, 1.0, 50).tolist()
    start = time.perf_counter()
    diagram = phase_diagram(build, {"a": values, "b": values}, t_end=1e4, n_draws=4)
    ours = time.perf_counter() - start
    rng = np.random.default_rng(0)
    few = 10
    attention, gaussian = build({k: rng.uniform(-1, 1, few) for k in "ab"}, rng)
    assert isinstance(attention, SoftmaxAttention)
    times = np.concatenate([[0.0], np.geomspace(10.0, 1e4, 25)])
    start = time.perf_counter()
    for i in range(few):
        one = SoftmaxAttention(attention.A[i], attention.V[i])
        solve(one, Gaussian(gaussian.mean[i], gaussian.cov[i]), 1e4, rtol=1e-7, atol=1e-9, save_at=times)
    peer = (time.perf_counter() - start) / few * diagram.code.size
    undecided = int((diagram.code == 0).sum())
    return [
        {
            "what": f"phase diagram, {diagram.code.size:,} softmax flows (d = 2) to t = 10,000, chunks of 1,000",
            "ours": ours,
            "peer": peer,
            "peer_name": f"one call a flow ({few} timed, scaled)",
            "ratio": peer / ours,
            "target": "seconds",
            "memory": _peak(),
            "note": f"{undecided} undecided",
        }
    ]
