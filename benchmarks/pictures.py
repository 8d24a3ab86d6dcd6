"""Pictures of what benchmarks.policy found. Small on purpose: they live in the repository."""

from io import BytesIO
from pathlib import Path
from typing import Any

import matplotlib as mpl

mpl.use("Agg")
from matplotlib import pyplot as plt
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from PIL import Image

from benchmarks.virtual import SLO_TTFT_S

BLUE, ORANGE, GREY = "#2b6cb0", "#dd6b20", "#a0aec0"
STYLE: dict[Any, Any] = {
    "font.size": 9,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "axes.axisbelow": True,
    "grid.color": "#e2e8f0",
    "axes.titlesize": 10,
    "axes.titlelocation": "left",
    "lines.linewidth": 1.8,
    "lines.markersize": 4,
}

Rows = list[dict[str, Any]]


def draw(found: dict[str, Rows], folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    with mpl.rc_context(STYLE):
        if "overload" in found:
            save(_overload(found["overload"]), folder / "policy_overload.png")
        if "fairness" in found:
            save(_fairness(found["fairness"]), folder / "policy_fairness.png")
        if {"rates", "blocks", "budgets", "pools"} <= set(found):
            save(_settings(found), folder / "policy_settings.png")


def save(figure: Figure, path: Path) -> None:
    drawn = BytesIO()
    figure.savefig(drawn, dpi=90, bbox_inches="tight")
    plt.close(figure)
    Image.open(drawn).convert("RGB").quantize(64).save(path, optimize=True)


def _column(rows: Rows, key: str) -> list[float]:
    return [float(row[key]) for row in rows]


def _line(axis: Axes, places: list[Any], rows: Rows, key: str, colour: str, style: str = "o-", label: str = "") -> None:
    """The median over seeds, and how far they spread."""
    axis.plot(places, _column(rows, key), style, color=colour, label=label or None)
    low, high = zip(*(row[f"{key}_range"] for row in rows), strict=True)
    axis.fill_between(places, low, high, color=colour, alpha=0.18, linewidth=0)


def _overload(rows: Rows) -> Figure:
    figure, (left, right) = plt.subplots(1, 2, figsize=(8, 2.9))
    for wait, colour, label in ((1.0, BLUE, "refuses beyond 1 s of wait"), (None, ORANGE, "queue of 1,024")):
        mine = [row for row in rows if row["max_wait_s"] == wait]
        load = _column(mine, "load")
        _line(left, load, mine, "goodput_per_s", colour, label=label)
        _line(right, load, mine, "ttft_p50_s", colour, label=label)
    peak = max(_column([row for row in rows if row["max_wait_s"]], "goodput_per_s"))
    left.axhline(0.9 * peak, color=GREY, linestyle="--", linewidth=1)
    left.text(10, 0.9 * peak, "90 % of peak", ha="right", va="top", color="#718096")
    left.set(title="Goodput, requests/s in time", xlabel="load, times what is sustained", ylim=(0, None))
    right.axhline(SLO_TTFT_S, color=GREY, linestyle="--", linewidth=1)
    right.set(title="Median time to first token, s", xlabel="load, times what is sustained", yscale="log")
    right.legend(frameon=False)
    return figure


def _fairness(rows: Rows) -> Figure:
    figure, axes = plt.subplots(1, 3, figsize=(9, 2.7))
    rows = [row for row in rows if row["max_wait_s"]]
    for axis, key, title in zip(
        axes,
        ("small_ttft_p99_s", "small_refused", "small_share_of_tokens"),
        ("its TTFT p99, s", "its requests refused", "its share of the tokens"),
        strict=True,
    ):
        for offset, policy, colour in ((-0.18, "FCFS", ORANGE), (0.18, "FAIR", BLUE)):
            mine = [row for row in rows if row["policy"] == policy]
            places = [i + offset for i in range(len(mine))]
            bars = axis.bar(places, _column(mine, key), width=0.34, color=colour, label=policy.lower())
            axis.bar_label(bars, fmt="%.2f", fontsize=8, padding=4)
            low, high = zip(*(row[f"{key}_range"] for row in mine), strict=True)
            axis.vlines(places, low, high, color="#2d3748", linewidth=1)
        axis.set_xticks(range(2), [f"asks for {row['rate']:.0f}/s" for row in rows if row["policy"] == "FAIR"])
        axis.set_title(title)
        axis.grid(axis="x", visible=False)
        axis.margins(y=0.15)
    axes[0].legend(frameon=False)
    figure.suptitle("A tenant beside one that sends ten times as much", x=0.07, y=1.04, ha="left", fontsize=10)
    return figure


def _pair(axis: Axes, rows: Rows, x: str, left: tuple[str, str], right: tuple[str, str]) -> None:
    """Two quantities over the options of one setting, each with an axis of its own."""
    options = [str(row[x]) if not isinstance(row[x], float) else f"{row[x]:.0f}" for row in rows]
    _line(axis, options, rows, left[0], BLUE)
    axis.set_ylabel(left[1], color=BLUE)
    axis.set_ylim(0, None)
    other = axis.twinx()
    _line(other, options, rows, right[0], ORANGE, "s--")
    other.set_ylabel(right[1], color=ORANGE)
    other.set_ylim(0, None)
    other.grid(visible=False)
    other.spines["right"].set_visible(True)


def _settings(found: dict[str, Rows]) -> Figure:
    figure, ((a, b), (c, d)) = plt.subplots(2, 2, figsize=(9, 5.4))
    figure.subplots_adjust(hspace=0.5, wspace=0.5)
    _pair(a, found["rates"], "rate", ("tokens_per_s", "tokens/s"), ("ttft_p99_s", "TTFT p99, s"))
    a.set(title="Arrival rate", xlabel="requests/s")
    _pair(b, found["blocks"], "block_size", ("kv_waste", "KV slots wasted"), ("prefix_hits", "prefix hits"))
    b.set(title="Block size", xlabel="tokens")
    _pair(c, found["budgets"], "budget", ("ttft_p99_s", "TTFT p99, s"), ("itl_p99_ms", "ITL p99, ms"))
    c.set(title="Token budget of a step", xlabel="tokens")
    _pair(d, found["pools"], "pool_tokens", ("goodput_per_s", "goodput, requests/s"), ("ttft_p99_s", "TTFT p99, s"))
    d.set(title="Pool", xlabel="tokens")
    return figure
