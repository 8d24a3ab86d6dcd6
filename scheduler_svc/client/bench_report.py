"""Bench figures as tables that fit 80 columns. Knows nothing of how they were measured."""

from typing import Any

from rich.table import Table

LATENCIES = (("TTFT", "ttft_ms"), ("ITL", "itl_ms"), ("TPOT", "tpot_ms"), ("E2E", "e2e_ms"))
RATIOS = (
    ("output tokens/s", ("output_tokens_per_s",)),
    ("requests/s", ("requests_per_s",)),
    ("TTFT p50 ms", ("ttft_ms", "p50")),
    ("TTFT p99 ms", ("ttft_ms", "p99")),
    ("ITL p50 ms", ("itl_ms", "p50")),
    ("ITL p99 ms", ("itl_ms", "p99")),
    ("E2E p50 ms", ("e2e_ms", "p50")),
    ("goodput/s", ("goodput_per_s",)),
)


def title(result: dict[str, Any]) -> str:
    served = result["served"]
    name, address, rate = result.get("name", result["address"]), result["address"], result.get("rate")
    where = name if name == address else f"{name} ({address})"
    what = served["model"] if served["dtype"] == "?" else f"{served['model']}, {served['dtype']} on {served['device']}"
    return f"{where}: {what}" + (f", {rate:g} requests/s asked for" if rate else "")


def table(summary: dict[str, Any]) -> Table:
    made = Table()
    made.add_column("ms")
    for name in ("mean", "p50", "p90", "p99"):
        made.add_column(name, justify="right")
    for label, key in LATENCIES:
        values = summary[key] or {}
        made.add_row(label, *(figure(values.get(name)) for name in ("mean", "p50", "p90", "p99")))
    return made


def headline(summary: dict[str, Any]) -> str:
    lines = [
        f"{summary['output_tokens_per_s']:,.1f} output tokens/s, {summary['requests_per_s']:.2f} requests/s, "
        f"{summary['prompt_tokens_per_s']:,.0f} prompt tokens/s",
        f"{summary['num_whole']} of {summary['num_requests']} requests in {summary['duration_s']:.1f} s; "
        f"{summary['cached_tokens']:,} of {summary['prompt_tokens']:,} prompt tokens from cache",
        f"this client: {100 * summary['client_cpu_share']:.0f} % of a core, "
        f"{summary['tokens_per_message']:.2f} tokens a message",
    ]
    if "offered_per_s" in summary:
        lines.insert(
            1, f"offered: {summary['offered_per_s']:.2f} requests/s, for {summary['arrivals_s']:.1f} s; then the tail"
        )
    if summary["errors"]:
        lines.append("errors: " + ", ".join(f"{name} {count}" for name, count in sorted(summary["errors"].items())))
    if "goodput_per_s" in summary:
        limits = " ".join(f"{name}:{limit:g}" for name, limit in summary["slo_ms"].items())
        lines.append(
            f"goodput {summary['goodput_per_s']:.2f} requests/s: {100 * summary['slo_met']:.1f} % met {limits} ms"
        )
        if "itl" in summary["slo_ms"]:
            lines.append("a request meets itl when the 99th percentile of its own gaps does")
    return "\n".join(lines)


def comparison(results: list[dict[str, Any]]) -> Table:
    """Each further target beside the first, with its ratio to it."""
    made = Table()
    made.add_column("x: ratio to the first")
    for result in results:
        made.add_column(result.get("name", result["address"]), justify="right")
    for label, keys in RATIOS:
        values = [_value(result["summary"], keys) for result in results]
        if all(value is None for value in values):
            continue
        first = values[0]
        made.add_row(label, figure(first), *(_with_ratio(value, first) for value in values[1:]))
    return made


def sweep_table(results: list[dict[str, Any]]) -> Table:
    """One target at several rates, a line each."""
    made = Table()
    made.add_column("rate", justify="right")
    for heading in ("served/s", "tokens/s", "TTFT p50", "p99", "ITL p50", "p99", "goodput"):
        made.add_column(heading, justify="right")
    for result in results:
        summary = result["summary"]
        keys = (("ttft_ms", "p50"), ("ttft_ms", "p99"), ("itl_ms", "p50"), ("itl_ms", "p99"), ("goodput_per_s",))
        cells = [figure(summary["requests_per_s"]), figure(summary["output_tokens_per_s"])]
        made.add_row(f"{result['rate']:g}", *cells, *(figure(_value(summary, key)) for key in keys))
    return made


def figure(value: float | None) -> str:
    if value is None or value != value:
        return "-"
    return f"{value:,.2f}" if value < 100 else f"{value:,.0f}"


def _value(summary: dict[str, Any], keys: tuple[str, ...]) -> float | None:
    value: Any = summary
    for key in keys:
        value = value.get(key) if value else None
    return value


def _with_ratio(value: float | None, first: float | None) -> str:
    return figure(value) + (f"  {value / first:.2f}x" if value is not None and first else "")
