"""Other services side by side with ours: each is run by its set-up's own script, a process in its own environment.

The script (bench_peer.py below the root) makes the same requests for everybody, one repetition of every workload per
call, and appends one JSON row per workload to results/NAME.jsonl. Ours is running already and is told by its address.
"""

import argparse
import json
import statistics
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

from benchmarks.config import environment_with
from tests.e2e.server import Serve

LIMIT_S = 900.0
ENVIRONMENTS = {"ov": "ov"}  # peers that run inside the script need their own; servers are started by it
OURS = {"bfloat16": "stepwire-bf16", "float32": "stepwire-fp32", "int8": "stepwire-int8"}
COLUMNS = (
    ("W1 tok/s", "W1", "tok_s", 1.0),
    ("W2 TTFT ms", "W2", "ttft50", 1e3),
    ("W2 ITL ms", "W2", "itl50", 1e3),
    ("W3 tok/s", "W3", "tok_s", 1.0),
    ("W4 offered/s", "W4", "rate", 1.0),
    ("W4 TTFT p99 ms", "W4", "ttft99", 1e3),
    ("W4 ITL p99 ms", "W4", "itl99", 1e3),
    ("peak MB", "rss", "peak_rss_mb", 1.0),
)

ServeAndRun = Callable[..., dict[str, Any]]
Rows = list[dict[str, Any]]


def script(root: Path, environment: str, arguments: list[str], name: str) -> Rows:
    """One call of the script; the rows it added."""
    results = root / "results" / f"{name}.jsonl"
    before = len(results.read_text(encoding="utf-8").splitlines()) if results.exists() else 0
    command = [str(root / "venv" / environment / "bin" / "python"), str(root / "bench_peer.py"), *arguments]
    variables = environment_with(PEERS_ROOT=str(root.resolve()), HF_HUB_OFFLINE="1")
    done = subprocess.run(command, env=variables, timeout=LIMIT_S, stdout=subprocess.PIPE, text=True, check=False)
    if done.returncode:
        print(f"{name}: the script ended with {done.returncode}")
    lines = results.read_text(encoding="utf-8").splitlines()[before:] if results.exists() else []
    return [json.loads(line) for line in lines]


def compare(options: argparse.Namespace, serve_and_run: ServeAndRun) -> Rows:
    """Every round starts each peer and each type of ours afresh; prints medians and ratios."""
    rows: Rows = []
    common = ["--reps", "1", "--wl", ",".join(options.workloads)]
    if options.rate:
        common += ["--w4-rate", str(options.rate)]
    for _ in range(options.repeats):
        for dtype in options.dtypes:
            name = OURS.get(dtype, f"stepwire-{dtype}")

            def ours(serve: Serve, name: str = name) -> None:
                target = ["url", serve.addresses[0], "--api", "grpc", "--name", name, "--pid", str(serve.process.pid)]
                rows.extend(script(options.peers_root, "hf", [*target, *common], name))

            serve_and_run(dtype, options, ours)
        for peer in options.peers:
            environment = ENVIRONMENTS.get(peer.partition("-")[0], "hf")
            rows.extend(script(options.peers_root, environment, ["run", peer, *common], peer))
        print(table(rows), flush=True)
    return rows


def table(rows: Rows) -> str:
    """Medians per peer, and how many times the best peer's W1 rate ours is."""
    names = list(dict.fromkeys(row["peer"] for row in rows))
    lines = ["| | " + " | ".join(column for column, *_ in COLUMNS) + " |", "|---|" + "---|" * len(COLUMNS)]
    medians: dict[tuple[str, str], float] = {}
    for name in names:
        cells = []
        for column, workload, key, factor in COLUMNS:
            found = [
                row[key] * factor for row in rows if row["peer"] == name and row["wl"] == workload and row.get(key)
            ]
            medians[name, column] = statistics.median(found) if found else 0.0
            cells.append(f"{medians[name, column]:.4g}" if found else "-")
        lines.append(f"| {name} | " + " | ".join(cells) + " |")
    best = max((medians[n, "W1 tok/s"] for n in names if not n.startswith("stepwire-")), default=0.0)
    ours = [name for name in names if name.startswith("stepwire-") and best and medians[name, "W1 tok/s"]]
    lines += [f"{name}: W1 {medians[name, 'W1 tok/s'] / best:.2f}x the best peer" for name in ours]
    return "\n".join(lines)
