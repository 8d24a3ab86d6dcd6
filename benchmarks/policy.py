"""What each setting costs: the real scheduler core in virtual time, swept over settings and traffic.

    python -m benchmarks.policy [--only overload fairness ...] [--seeds 3] [--json FILE] [--pictures docs/pictures]

Throughput, time to first token, inter-token time, memory wasted, prefix hits, work done twice, and fairness; see
virtual.py for the server and its traffic. Goodput counts requests whose first token came within 2 s and each further
one within 200 ms; a refused request is a miss. Each number is the median over seeds, `NAME_range` the smallest and the
largest. Deterministic: the same arguments, the same numbers.
"""

import argparse
import json
import statistics
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

from benchmarks.virtual import Setting, simulate, vary
from scheduler_svc.core.contract import Policy

Rows = list[dict[str, Any]]

COLUMNS = {
    "goodput_per_s": "good/s",
    "tokens_per_s": "tok/s",
    "refused": "refused",
    "ttft_p50_s": "TTFT p50",
    "ttft_p99_s": "p99 s",
    "itl_p50_ms": "ITL p50",
    "itl_p99_ms": "p99 ms",
    "pool_used": "pool used",
    "kv_waste": "KV waste",
    "prefix_hits": "hits",
    "preemptions": "preempt.",
    "recomputed": "twice",
}
# One tenant that behaves and one that floods.
FAIR_COLUMNS = {
    "small_ttft_p50_s": "small TTFT p50",
    "small_ttft_p99_s": "p99 s",
    "small_refused": "small refused",
    "small_share_of_tokens": "small's tokens",
    "served_gap_tokens": "served gap",
    "goodput_per_s": "good/s",
    "refused": "refused",
    "tokens_per_s": "tok/s",
}
# What the server of `Setting` sustains within the objective, in requests a second: see the sweep of rates.
CAPACITY = 50.0


class Seeds:
    """One setting under several traffics, as many at a time as there are cores."""

    def __init__(self, pool: ProcessPoolExecutor, num_seeds: int):
        self._pool = pool
        self._seeds = range(1, num_seeds + 1)

    def __call__(self, setting: Setting) -> dict[str, Any]:
        found = list(self._pool.map(simulate, [vary(setting, seed=seed) for seed in self._seeds]))
        columns = {key: [row[key] for row in found] for key in found[0]}
        medians = {key: statistics.median(values) for key, values in columns.items()}
        return medians | {f"{key}_range": [min(values), max(values)] for key, values in columns.items()}


def sweep(run: Seeds, name: str, base: Setting, **values: tuple[object, ...]) -> Rows:
    """One run for each value of one field."""
    ((field, options),) = values.items()
    return [{"sweep": name, field: option, **run(vary(base, **{field: option}))} for option in options]


def rates(run: Seeds, base: Setting) -> Rows:
    return sweep(run, "arrival rate", base, rate=(10.0, 20.0, 30.0, 40.0, 45.0, 50.0, 55.0))


def block_sizes(run: Seeds, base: Setting) -> Rows:
    return sweep(run, "block size", base, block_size=(1, 8, 16, 32, 64, 128, 256))


def documents(base: Setting) -> Setting:
    """Chats, and now and then a prompt of 8,000 tokens."""
    return vary(base, rate=0.4 * CAPACITY, long=0.03, pool_tokens=120_000)


def budgets(run: Seeds, base: Setting) -> Rows:
    return sweep(run, "token budget", documents(base), budget=(256, 512, 1024, 2048, 4096, 8192))


def targets(run: Seeds, base: Setting) -> Rows:
    return sweep(
        run,
        "inter-token target",
        vary(documents(base), budget=8192),
        inter_token_target_s=(None, 0.05, 0.03, 0.02, 0.015),
    )


def pools(run: Seeds, base: Setting) -> Rows:
    return sweep(run, "pool, tokens", vary(base, max_wait_s=1.0), pool_tokens=(10_000, 20_000, 40_000, 60_000, 120_000))


def prefixes(run: Seeds, base: Setting) -> Rows:
    return sweep(run, "prefix caching", base, prefix_caching=(True, False))


def overload(run: Seeds, base: Setting) -> Rows:
    rows: Rows = []
    for max_wait_s in (1.0, None):
        for factor in (0.5, 1.0, 2.0, 5.0, 10.0):
            found = run(vary(base, rate=CAPACITY * factor, max_wait_s=max_wait_s))
            rows.append({"sweep": "overload", "max_wait_s": max_wait_s, "load": factor, **found})
    return rows


def fairness(run: Seeds, base: Setting) -> Rows:
    """One tenant sends ten times as much; the other one asks for less than half of the server, or for more."""
    rows: Rows = []
    for rate in (5.0, 30.0):
        for policy in (Policy.FCFS, Policy.FAIR):
            for max_wait_s in (None, 1.0):
                found = run(vary(base, rate=rate, flood=10.0, policy=policy, max_wait_s=max_wait_s))
                rows.append(
                    {"sweep": "flood of 10x", "rate": rate, "policy": policy.name, "max_wait_s": max_wait_s, **found}
                )
    return rows


SWEEPS: dict[str, Callable[[Seeds, Setting], Rows]] = {
    "rates": rates,
    "blocks": block_sizes,
    "budgets": budgets,
    "targets": targets,
    "pools": pools,
    "prefixes": prefixes,
    "overload": overload,
    "fairness": fairness,
}


def table(rows: Rows) -> str:
    columns = FAIR_COLUMNS if rows[0]["sweep"] == "flood of 10x" else COLUMNS
    keys = [key for key in rows[0] if key in Setting.__dataclass_fields__ or key == "load"]
    lines = [f"{rows[0]['sweep']:>20s}  " + "  ".join([*(f"{key:>10s}" for key in keys), *columns.values()])]
    for row in rows:
        cells = [f"{row[key]!s:>10s}" for key in keys]
        cells += [f"{row[key]!s:>{len(title)}s}" for key, title in columns.items()]
        lines.append(" " * 22 + "  ".join(cells))
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", choices=list(SWEEPS), default=list(SWEEPS))
    parser.add_argument("--seconds", type=float, default=60.0, help="of virtual time, for each point")
    parser.add_argument("--seeds", type=int, default=3, help="traffics for each point")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--pictures", type=Path, help="draw into this folder (needs matplotlib and every sweep)")
    options = parser.parse_args()
    base = Setting(rate=0.8 * CAPACITY, duration_s=options.seconds)
    found: dict[str, Rows] = {}
    with ProcessPoolExecutor() as pool:
        for name in options.only:
            found[name] = SWEEPS[name](Seeds(pool, options.seeds), base)
            print(table(found[name]), flush=True)
    peak = max((row["goodput_per_s"] for row in found.get("overload", []) if row["max_wait_s"]), default=None)
    if peak:
        last = next(row for row in found["overload"] if row["max_wait_s"] and row["load"] == 10.0)
        low, high = last["goodput_per_s_range"]
        print(f"goodput at 10x: {last['goodput_per_s'] / peak:.1%} of peak ({low / peak:.1%} to {high / peak:.1%})")
    if options.json:
        options.json.write_text(json.dumps(found, indent=1) + "\n")
    if options.pictures:
        from benchmarks.pictures import draw

        draw(found, options.pictures)


if __name__ == "__main__":
    main()
