"""What a token costs a frontend, and how long it takes through it.

    python -m benchmarks.frontend [--cases own steady busy scale latency ruler] [--window 4] [--repeats 1]
        [--peer PROGRAM.py] [--json [FILE]]

    own      the frontend's own work on a token, in one process and without gRPC (benchmarks/frontend_path.py)
    steady   64 and 256 streams at a pace that leaves the frontend time: one token per message
    busy     the same with steps that take no time: tokens that find their stream still writing join its next message
    scale    256 streams over 1, 2 and 4 frontends
    latency  the age of tokens as the client gets them, below saturation; in steady and scale too
    peer     64 and 256 streams over vllm.grpc.engine.VllmEngine, ours and that of --peer PROGRAM.py in turn: a server
             over an engine without work, which takes the ruler's job (benchmarks/frontend_ruler.py)
    ruler    grpc.aio and uvloop alone, the same pace and the same client: what ratios are to

Scheduler, frontends, an executor without work and the client are processes of their own; the client has a core of its
own. CPU time is that of the frontend processes alone, from their accounts in the kernel. A token is the moment at which
its step ended (benchmarks/stamps.py); its age when the client has it holds both hops of ZeroMQ, the scheduler, the
frontend, gRPC on both sides, and the client's own queue.
"""

import argparse
import json
import os
import statistics
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from benchmarks import frontend_path
from benchmarks.frontend_rig import Rig, Ruler, model_palette, own_cores, run_client
from benchmarks.serving import percentile

CASES = ("own", "steady", "busy", "scale", "latency", "peer", "ruler")
MAX_TOKENS = 30_000
# Seconds of a step: about 8,000 tokens a second.
PACE = {16: 0.004, 64: 0.008, 256: 0.032}
LATENCY_STREAMS = 256
# A third of the pace, so that one step's messages have left long before the next step ends.
LATENCY_STEP_S = 0.1
# Streams, tokens a message, text, stop strings.
OWN = ((64, 1, True, False), (256, 1, True, False), (256, 8, True, False), (256, 1, False, False), (256, 1, True, True))
AIMS = {"steady": 40_000, "busy": 250_000}


def measure(rig: Rig | Ruler, streams: int, window_s: float, **job: Any) -> dict[str, Any]:
    """One window, as rates."""
    found = run_client(rig, streams=streams, window_s=window_s, **({"text": True, "max_tokens": MAX_TOKENS} | job))
    cpu, ages = sum(found["cpu_s"]), found["ages_ms"]
    return {
        "streams": streams,
        "frontends": len(rig.pids),
        "cores_apart": rig.cores.apart,
        "tok_s": found["tokens"] / found["seconds"],
        "tok_per_cpu_s": found["tokens"] / cpu,
        "msg_per_cpu_s": found["messages"] / cpu,
        "tok_per_message": found["tokens"] / max(1, found["messages"]),
        "frontend_cpu": cpu / found["seconds"],
        "client_cpu": found["client_cpu_s"] / found["seconds"],
        "age_p50_ms": percentile(ages, 0.5),
        "age_p99_ms": percentile(ages, 0.99),
    }


def served(
    options: argparse.Namespace, streams: int, frontends: int, step_s: float, api: str = "stepwire"
) -> dict[str, Any]:
    with (
        tempfile.TemporaryDirectory() as folder,
        Rig(Path(folder), frontends=frontends, rows=streams, step_s=step_s) as rig,
    ):
        return measure(rig, streams, options.window, api=api)


def ruled(options: argparse.Namespace, streams: int, step_s: float, palette: list[int]) -> dict[str, Any]:
    with Ruler(step_s=step_s, palette=palette) as ruler:
        return measure(ruler, streams, options.window)


def against_peer(options: argparse.Namespace, palette: list[int]) -> Iterator[dict[str, Any]]:
    for streams in options.streams:
        step_s, ours, theirs = PACE[streams], [], []
        for _ in range(options.repeats):
            ours.append(served(options, streams, 1, step_s, api="vllm"))
            with Ruler(step_s=step_s, palette=palette, program=(str(options.peer),)) as peer:
                theirs.append(measure(peer, streams, options.window, api="vllm"))
        head = {"case": "peer", "step_ms": step_s * 1e3}
        yield head | {"who": "stepwire"} | medians(ours)
        yield head | {"who": "peer"} | medians(theirs)


def medians(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """Of each number by itself."""
    return {
        key: statistics.median(row[key] for row in rows) if isinstance(value, float) else value
        for key, value in rows[0].items()
    }


def own(options: argparse.Namespace, palette: list[int]) -> Iterator[dict[str, Any]]:
    for streams, per_message, text, stop in OWN:
        runs = [
            frontend_path.measure(streams, per_message, palette, text=text, stop=stop)
            for _ in range(max(3, options.repeats))
        ]
        head = {"case": "own", "who": "stepwire", "streams": streams, "tok_per_message": per_message}
        yield head | {"text": text, "stop_strings": stop} | medians(runs)


def rows_of(options: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """Every measurement that was asked for; ours and the ruler's of one case take turns."""
    cases = set(options.cases)
    palette = model_palette()
    if "own" in cases:
        yield from own(options, palette)
    plain = [("steady", n, 1, PACE[n]) for n in options.streams] + [("busy", n, 1, 0.0) for n in options.streams]
    spread = [("scale", 256, n, PACE[256]) for n in (1, 2, 4)]
    for case, streams, frontends, step_s in [*plain, *spread, ("latency", LATENCY_STREAMS, 1, LATENCY_STEP_S)]:
        if case not in cases:
            continue
        head = {"case": case, "step_ms": step_s * 1e3}
        ours, rulers = [], []
        for _ in range(options.repeats):
            ours.append(served(options, streams, frontends, step_s))
            if "ruler" in cases and case != "scale" and step_s:
                rulers.append(ruled(options, streams, step_s, palette))
        yield head | {"who": "stepwire"} | medians(ours)
        if rulers:
            yield head | {"who": "ruler"} | medians(rulers)
    if "peer" in cases and options.peer is not None:
        yield from against_peer(options, palette)


def show(row: dict[str, Any]) -> str:
    name = f"{row['case']:8} {row['who']:9}"
    if row["case"] == "own":
        kind = ("text" if row["text"] else "ids") + (", stop strings" if row["stop_strings"] else "")
        return (
            f"{name}{row['streams']:4}     {row['us_per_token']:8.2f} us a token {row['tok_per_cpu_s']:8.0f} tok/cpu-s"
            f"  {row['tok_per_message']:5} tok/msg  {kind}"
        )
    return (
        f"{name}{row['streams']:4} x{row['frontends']}  {row['tok_s']:8.0f} tok/s"
        f"  {row['tok_per_cpu_s']:8.0f} tok/cpu-s  {row['msg_per_cpu_s']:7.0f} msg/cpu-s"
        f"  {row['tok_per_message']:5.1f} tok/msg"
        f"  age {row['age_p50_ms']:6.2f} / {row['age_p99_ms']:6.2f} ms"
        f"  cpu {row['frontend_cpu']:4.0%} client {row['client_cpu']:4.0%}"
    )


def verdicts(rows: list[dict[str, Any]]) -> Iterator[str]:
    """Against the aims, which were set for a machine about twice as fast, and against the ruler of the same run."""
    for row in rows:
        aim = AIMS.get(row["case"])
        if aim is None or row["who"] != "stepwire":
            continue
        least = [r for r in rows if r["who"] == "ruler" and (r["case"], r["streams"]) == (row["case"], row["streams"])]
        ruler = f", {row['tok_per_cpu_s'] / least[0]['tok_per_cpu_s']:.2f} of the ruler" if least else ""
        yield f"{row['case']} {row['streams']}: {row['tok_per_cpu_s'] / aim:.2f} of the aim of {aim}{ruler}"
    scale = {row["frontends"]: row for row in rows if row["case"] == "scale"}
    for number in sorted(scale.keys() - {1}):
        if 1 in scale:
            # What they could send if each had a core: their rate per CPU second, times their number. Messages, because
            # a frontend that gets too little of a shared core packs more tokens into each.
            each = scale[number]["msg_per_cpu_s"] / scale[1]["msg_per_cpu_s"]
            apart = "apart" if scale[number]["cores_apart"] else "sharing cores"
            yield f"{number} frontends ({apart}): {number * each:.2f} x one, by CPU time per message"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", nargs="+", choices=CASES, default=CASES)
    parser.add_argument("--streams", nargs="+", type=int, choices=PACE, default=[64, 256])
    parser.add_argument("--window", type=float, default=4.0, help="seconds that are measured")
    parser.add_argument("--repeats", type=int, default=1, help="medians of so many windows")
    parser.add_argument("--peer", type=Path, help="a program that takes the ruler's job and serves VllmEngine")
    parser.add_argument("--json", nargs="?", const="-", help="a FILE, or standard output as one object")
    options = parser.parse_args()
    machine = f"{len(own_cores())} cores, load average {os.getloadavg()[0]:.1f}"
    to_terminal = options.json != "-"
    print(machine, file=sys.stdout if to_terminal else sys.stderr)
    rows = []
    for row in rows_of(options):
        rows.append(row)
        print(show(row), file=sys.stdout if to_terminal else sys.stderr, flush=True)
    found = {"machine": machine, "rows": rows, "verdicts": list(verdicts(rows))}
    print(*found["verdicts"], sep="\n", file=sys.stdout if to_terminal else sys.stderr)
    if options.json == "-":
        json.dump(found, sys.stdout, indent=1)
    elif options.json:
        Path(options.json).write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
