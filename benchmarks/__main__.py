"""Run every benchmark and print one table: ours against peers in the same run, with memory.

Each `benchmarks/bench_<topic>.py` has `run() -> list[dict]`, rows of
{"what", "ours", "peer", "peer_name", "ratio", "target", "memory", "note"}; times are seconds.
Each topic runs in a process of its own, so that no topic measures the memory or threads of another.

    python -m benchmarks              all topics
    python -m benchmarks bures flows  some
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

HERE = Path(__file__).parent
MARK = "ROWS:"
CODE = (
    "import json, sys, importlib; m = importlib.import_module(sys.argv[1]); print('{}' + json.dumps(m.run()))"
)


def topics() -> list[str]:
    return sorted(p.stem.removeprefix("bench_") for p in HERE.glob("bench_*.py"))


def run_topic(topic: str) -> list[dict[str, Any]]:
    done = subprocess.run(
        [sys.executable, "-c", CODE.format(MARK), f"benchmarks.bench_{topic}"],
        cwd=HERE.parent,
        capture_output=True,
        text=True,
        check=False,
    )
    for line in done.stdout.splitlines():
        if line.startswith(MARK):
            return json.loads(line.removeprefix(MARK))
    tail = done.stderr.strip().splitlines()[-1:] or ["no output"]
    return [{"what": topic, "note": f"failed: {tail[0]}"}]


def seconds(value: Any) -> str:
    if value is None:
        return ""
    return f"{value:.3g} s" if isinstance(value, int | float) else str(value)


def main(chosen: list[str]) -> int:
    unknown = set(chosen) - set(topics())
    if unknown:
        print(f"no such benchmark: {', '.join(sorted(unknown))}; there are {', '.join(topics())}")
        return 2
    console = Console(width=170)
    table = Table(title="ratio = peer / ours (larger is better)", show_lines=False)
    for name in ("what", "ours", "peer", "peer's name", "ratio", "target", "memory", "note"):
        table.add_column(name, overflow="fold")
    failed = False
    for topic in chosen or topics():
        console.print(f"running {topic} ...", style="dim")
        for row in run_topic(topic):
            ratio = row.get("ratio")
            failed |= str(row.get("note", "")).startswith("failed")
            table.add_row(
                str(row.get("what", "")),
                seconds(row.get("ours")),
                seconds(row.get("peer")),
                str(row.get("peer_name") or ""),
                "" if ratio is None else f"{ratio:.2f}",
                str(row.get("target") or ""),
                str(row.get("memory") or ""),
                str(row.get("note") or ""),
            )
    console.print(table)
    return int(failed)


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
