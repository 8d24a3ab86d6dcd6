"""How fast the whole service is: four workloads through gRPC, from a client process of its own.

    python -m benchmarks.serving [--dtypes bfloat16 int8] [--workloads W1 W2 W3 W3-off W4] [--repeats 3]
        [--peers ov-bf16 vllm-bf16 ... --peers-root DIR] [--json FILE] [--pictures DIR]

    W1      64 requests at once, prompts around 128 tokens in 16..512, outputs around 122 in 16..384
    W2      one stream, 128 tokens in and out
    W3      32 requests that share 512 tokens, 32 of their own, 64 out; one request before them fills the cache
    W3-off  the same without prefix caching
    W4      requests like W1's, arriving at random at 70 % of the rate at which W1 was served

The default model, greedy, no early stop, the same lengths and arrivals every time; the first eight ids of a prompt are
fresh in every repetition, so that no cache answers. Peers are driven by the script that their set-up put into
--peers-root, in their own environments, and so are we then: same client, same requests, round by round in turn.
"""

import argparse
import json
import os
import random
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import psutil

from benchmarks.peers import compare
from benchmarks.workload import Item, mixed, shared_prefix
from scheduler_svc.models.store import resolve_model
from tests.e2e.server import Serve

LOAD = 0.7  # of saturation, in W4
SLO_TTFT_S, SLO_TPOT_S = 1.0, 0.1
CLIENT_LIMIT_S = 900.0

Answers = list[dict[str, Any]]


@dataclass(frozen=True, slots=True)
class Timed:
    """A request and when it arrives, in seconds after the first."""

    due_s: float
    item: Item


def at_once(items: list[Item]) -> list[Timed]:
    return [Timed(0.0, item) for item in items]


def poisson(items: list[Item], rate: float, seed: int) -> list[Timed]:
    """Arrivals with exponential gaps, scaled so that the realised rate is the nominal one."""
    draw, now, due = random.Random(seed), 0.0, []
    for _ in items:
        now += draw.expovariate(rate)
        due.append(now)
    scale = len(items) / rate / now
    return [Timed(t * scale, item) for t, item in zip(due, items, strict=True)]


def freshen(items: list[Item], draw: random.Random) -> list[Item]:
    """The same lengths, other first ids: nothing of them is in the prefix cache."""
    return [
        Item([draw.randrange(100, 40_000) for _ in item.prompt[:8]] + item.prompt[8:], item.num_output)
        for item in items
    ]


def percentile(values: list[float], q: float) -> float:
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(q * len(ordered)))]


def summary(answers: Answers) -> dict[str, float]:
    """Seconds and rates of one run. Gaps inside a message that carries several tokens are shared out."""
    finish = [answer["stamps"][-1][0] for answer in answers]
    tokens = [sum(count for _, count in answer["stamps"]) for answer in answers]
    ttft = [answer["stamps"][0][0] - answer["due_s"] for answer in answers]
    gaps = [
        (b - a) / count
        for answer in answers
        for (a, _), (b, count) in zip(answer["stamps"], answer["stamps"][1:], strict=False)
        for _ in range(count)
    ]
    tpot = [
        (answer["stamps"][-1][0] - answer["stamps"][0][0]) / max(1, n - 1)
        for answer, n in zip(answers, tokens, strict=True)
    ]
    good = sum(a <= SLO_TTFT_S and b <= SLO_TPOT_S for a, b in zip(ttft, tpot, strict=True))
    return {
        "seconds": max(finish),
        "tok_s": sum(tokens) / max(finish),
        "req_s": len(answers) / max(finish),
        "ttft_p50_s": percentile(ttft, 0.5),
        "ttft_p99_s": percentile(ttft, 0.99),
        "itl_p50_s": percentile(gaps, 0.5) if gaps else 0.0,
        "itl_p99_s": percentile(gaps, 0.99) if gaps else 0.0,
        "goodput_req_s": good / max(finish),
    }


def measure(address: str, requests: list[Timed]) -> Answers:
    """One run of the client process."""
    items = [{"due_s": r.due_s} | asdict(r.item) for r in requests]
    done = subprocess.run(
        [sys.executable, "-m", "benchmarks.client"],
        input=json.dumps({"address": address, "items": items}),
        stdout=subprocess.PIPE,
        text=True,
        check=True,
        timeout=CLIENT_LIMIT_S,
    )
    return json.loads(done.stdout)


def run_workload(name: str, address: str, seed: int, repeat: int, rate: float) -> Answers:
    """The answers of one repetition; `rate` in requests per second matters to W4 alone."""
    fresh = random.Random(seed * 1000 + repeat)
    if name == "W1":
        return measure(address, at_once(freshen(mixed(64, seed), fresh)))
    if name == "W2":
        return measure(address, at_once([Item([fresh.randrange(100, 40_000) for _ in range(128)], 128)]))
    if name.startswith("W3"):
        items = shared_prefix(33, seed * 1000 + repeat)
        measure(address, at_once([Item(items[0].prompt, 1)]))
        return measure(address, at_once(items[1:]))
    return measure(address, poisson(freshen(mixed(64, seed + 3), fresh), rate, seed))


def memory_mb(pids: dict[str, Any]) -> dict[str, float]:
    """Peak resident memory of every service, in MB."""
    found = {}
    for name, value in pids.items():
        for index, pid in enumerate(value if isinstance(value, list) else [value]):
            status = Path(f"/proc/{pid}/status").read_text(encoding="utf-8")
            peak = next(line for line in status.splitlines() if line.startswith("VmHWM"))
            found[f"{name}{index or ''}"] = int(peak.split()[1]) / 1000
    return found


def serve_and_run(dtype: str, options: argparse.Namespace, act: Callable[[Serve], None], *extra: str) -> dict[str, Any]:
    """Starts the service, lets `act` use it, and says how long the start took and how large the services got."""
    with tempfile.TemporaryDirectory() as folder:
        begin = time.perf_counter()
        model = str(resolve_model(""))
        with Serve(Path(folder), "--model", model, "--dtype", dtype, *options.serve_args.split(), *extra) as serve:
            start = time.perf_counter() - begin
            measure(serve.addresses[0], at_once(mixed(4, options.seed + 77)))
            act(serve)
            return {"start_s": start, "peak_mb": memory_mb(serve.ready["pids"])}


def run_own(dtype: str, options: argparse.Namespace) -> list[dict[str, Any]]:
    """Every workload of one type of weights, `repeats` times in turn."""
    rows: list[dict[str, Any]] = []

    def act(serve: Serve, names: list[str]) -> None:
        for repeat in range(options.repeats):
            for name in names:
                served = [row["req_s"] for row in rows if row["workload"] == "W1"]
                rate = options.rate or (LOAD * statistics.median(served) if served else 0.0)
                if name == "W4" and not rate:
                    raise SystemExit("W4 needs W1 before it, or --rate")
                load = os.getloadavg()[0]
                answers = run_workload(name, serve.addresses[0], options.seed, repeat, rate)
                row = {"dtype": dtype, "workload": name, "repeat": repeat, "load_average": load, **summary(answers)}
                rows.append(row | ({"offered_req_s": rate} if name == "W4" else {}))
                print(show(rows[-1]), flush=True)

    cached = [name for name in options.workloads if name != "W3-off"]
    life = serve_and_run(dtype, options, lambda serve: act(serve, cached))
    if "W3-off" in options.workloads:
        serve_and_run(dtype, options, lambda serve: act(serve, ["W3-off"]), "--no-prefix-caching")
    peak = ", ".join(f"{name} {size:.0f}" for name, size in life["peak_mb"].items())
    print(f"{dtype}: ready after {life['start_s']:.1f} s; peak MB: {peak}")
    return [*rows, {"dtype": dtype, "workload": "start", **life}]


def show(row: dict[str, Any]) -> str:
    return (
        f"{row['dtype']:9} {row['workload']:7} {row['seconds']:6.1f} s {row['tok_s']:6.0f} tok/s  "
        f"TTFT {row['ttft_p50_s'] * 1e3:6.0f} / {row['ttft_p99_s'] * 1e3:6.0f} ms  "
        f"ITL {row['itl_p50_s'] * 1e3:6.1f} / {row['itl_p99_s'] * 1e3:6.1f} ms  goodput {row['goodput_req_s']:.2f}/s"
        f"  (load {row['load_average']:.1f})"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dtypes", nargs="+", default=["bfloat16"], help="what ours computes in")
    parser.add_argument("--workloads", nargs="+", default=["W1", "W2", "W3", "W3-off", "W4"])
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--rate", type=float, help="requests per second that W4 offers; else 70 %% of W1's")
    parser.add_argument("--serve-args", default="", help="more options of `stepwire serve`, in one string")
    parser.add_argument("--peers", nargs="+", default=[], help="names of the peers' script, as ov-bf16 or vllm-bf16")
    parser.add_argument("--peers-root", type=Path, help="where the peers are installed")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--pictures", type=Path)
    options = parser.parse_args()
    cores = f"{psutil.cpu_count()} cores, load average {os.getloadavg()[0]:.1f}"
    print(cores)
    if options.peers:
        if options.peers_root is None:
            parser.error("--peers needs --peers-root")
        rows = compare(options, serve_and_run)
    else:
        rows = [row for dtype in options.dtypes for row in run_own(dtype, options)]
    if options.json:
        options.json.write_text(json.dumps({"machine": cores, "rows": rows}, indent=1) + "\n", encoding="utf-8")
    if options.pictures:
        from benchmarks.pictures_serving import draw

        draw(rows, options.pictures)


if __name__ == "__main__":
    main()
