"""Pictures of what bench measured: latency over rate, the timeline of one run, targets side by side.

Draws with matplotlib, imported when a picture is wanted. White ground and a shape a series: it reads on any page, and
without colours.
"""

from pathlib import Path
from typing import Any

import numpy as np

from scheduler_svc.errors import StartupError

COLOURS = ("#2b6cb0", "#dd6b20", "#2f855a", "#805ad5", "#c53030", "#718096")
MARKERS = ("o", "s", "^", "D", "v", "P")
HATCHES = ("", "//", "..", "xx", "\\\\", "++")
STYLE: dict[Any, Any] = {
    "font.size": 9,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "axes.axisbelow": True,
    "grid.color": "#e2e8f0",
    "axes.titlesize": 10,
    "axes.titlelocation": "left",
    "lines.linewidth": 1.6,
    "lines.markersize": 4,
    "svg.hashsalt": "stepwire",
}
BARS = (
    ("Output tokens/s", ("output_tokens_per_s",)),
    ("TTFT p50, ms", ("ttft_ms", "p50")),
    ("TTFT p99, ms", ("ttft_ms", "p99")),
    ("ITL p50, ms", ("itl_ms", "p50")),
    ("ITL p99, ms", ("itl_ms", "p99")),
)
NUM_BINS = 60
# Line and filling of the marker: what is drawn first of a pair, and what is drawn second.
FIRST: dict[str, Any] = {"linestyle": "-"}
SECOND: dict[str, Any] = {"linestyle": "--", "markerfacecolor": "white"}


def check(path: Path) -> None:
    """Better before the load than after it."""
    if path.suffix not in (".png", ".svg"):
        raise StartupError(f"--picture {path}: name it .png or .svg")
    if not path.absolute().parent.is_dir():
        raise StartupError(f"--picture {path}: there is no such folder")
    try:
        import matplotlib as mpl
    except ImportError:
        raise StartupError("--picture draws with matplotlib: pip install 'stepwire[bench]'") from None
    mpl.use("Agg")


def draw(results: list[dict[str, Any]], path: Path) -> None:
    import matplotlib as mpl
    from matplotlib import pyplot as plt

    with mpl.rc_context(STYLE):
        names = list(dict.fromkeys(result["name"] for result in results))
        if len(results) > len(names):
            figure = _sweep(plt, results, names)
        elif len(names) > 1:
            figure = _side_by_side(plt, results)
        else:
            figure = _timeline(plt, results[0])
        try:
            figure.savefig(path, dpi=110, bbox_inches="tight", metadata={"Date": None} if path.suffix == ".svg" else {})
        except OSError as error:
            raise StartupError(f"cannot write {path}: {error.strerror}") from None
        finally:
            plt.close(figure)


def _sweep(plt: Any, results: list[dict[str, Any]], names: list[str]) -> Any:
    has_goodput = "goodput_per_s" in results[0]["summary"]
    figure, axes = plt.subplots(1, 3, figsize=(10, 3.1), constrained_layout=True)
    for name, colour, marker in zip(names, COLOURS * len(names), MARKERS * len(names), strict=False):
        mine = [result for result in results if result["name"] == name]
        rates = [result["rate"] for result in mine]
        for axis, key in ((axes[0], "ttft_ms"), (axes[1], "itl_ms")):
            for quantile, line in (("p50", FIRST), ("p99", SECOND)):
                values = [(result["summary"][key] or {}).get(quantile, np.nan) for result in mine]
                axis.plot(rates, values, marker=marker, color=colour, label=f"{name} {quantile}", **line)
        served = [result["summary"]["requests_per_s"] for result in mine]
        axes[2].plot(rates, served, marker=marker, color=colour, label=f"{name} served", **FIRST)
        if has_goodput:
            good = [result["summary"]["goodput_per_s"] for result in mine]
            axes[2].plot(rates, good, marker=marker, color=colour, label=f"{name} in time", **SECOND)
    # Chance makes a short run's arrivals more or fewer than was asked for; every target gets the same.
    first = [result for result in results if result["name"] == names[0]]
    offered = [result["summary"].get("offered_per_s", result["rate"]) for result in first]
    axes[2].plot([result["rate"] for result in first], offered, ":", color="#718096", label="offered")
    for axis, title in zip(axes, ("Time to first token, ms", "Between tokens, ms", "Requests/s"), strict=True):
        axis.set(title=title, xlabel="requests/s asked for", ylim=(0, None))
    for axis in axes[:2]:
        if _spans(axis):
            axis.set_yscale("log")
    for axis in axes:
        axis.legend(frameon=False, fontsize=7, handlelength=4)
    return figure


def _spans(axis: Any) -> bool:
    """Whether one scale would hide the small ones."""
    values = np.concatenate([np.asarray(line.get_ydata(), float) for line in axis.lines])
    values = values[np.isfinite(values) & (values > 0)]
    return len(values) > 0 and values.max() > 30 * values.min()


def _side_by_side(plt: Any, results: list[dict[str, Any]]) -> Any:
    figure, axes = plt.subplots(1, len(BARS), figsize=(11, 2.6 + 0.1 * len(results)), constrained_layout=True)
    places = range(len(results))
    for axis, (title, keys) in zip(axes, BARS, strict=True):
        for place, result in zip(places, results, strict=True):
            value: Any = result["summary"]
            for key in keys:
                value = value.get(key) if value else None
            style = {"color": COLOURS[place % 6], "hatch": HATCHES[place % 6], "edgecolor": "white"}
            bars = axis.bar([place], [value or 0.0], width=0.7, **style)
            axis.bar_label(bars, fmt="%.0f" if (value or 0) >= 100 else "%.1f", fontsize=8)
        axis.set_title(title)
        axis.set_xticks(list(places), [result["name"] for result in results], rotation=35, ha="right")
        axis.grid(axis="x", visible=False)
        axis.margins(y=0.15)
    return figure


def _timeline(plt: Any, result: dict[str, Any]) -> Any:
    points = result["timeline"]
    figure, axes = plt.subplots(3 if points else 1, 1, figsize=(8, 6 if points else 2.6), sharex=True, squeeze=False)
    end_s = max((request["end_s"] for request in result["requests"]), default=1.0)
    edges = np.linspace(0, end_s, NUM_BINS + 1)
    # A message may hold several tokens; its share of the request's is what counts.
    times, weights = [], []
    for request in result["requests"]:
        stamps = request["message_s"]
        times += stamps
        weights += [request["num_output"] / len(stamps)] * len(stamps)
    tokens = np.histogram(times, edges, weights=weights)[0] / np.diff(edges)
    axes[0, 0].step(edges[:-1], tokens, where="post", color=COLOURS[0])
    axes[0, 0].set(title=f"Output tokens/s: {result['name']}", ylim=(0, None))
    if points:
        at = [point["at_s"] for point in points]
        axes[1, 0].plot(at, [point["num_running"] for point in points], "-", color=COLOURS[0], label="running")
        axes[1, 0].plot(at, [point["num_waiting"] for point in points], "--", color=COLOURS[1], label="waiting")
        axes[1, 0].set(title="Sequences", ylim=(0, None))
        used = np.array([100 * point["blocks_used"] for point in points])
        cached = np.array([100 * point["blocks_cached"] for point in points])
        labels, colours = ("owned", "cached"), (COLOURS[2], "#bee3f8")
        axes[2, 0].stackplot(at, used, cached, labels=labels, colors=colours)
        axes[2, 0].set(title="KV blocks, % of the pool", ylim=(0, 100))
        for axis in axes[1:, 0]:
            axis.legend(framealpha=0.8, edgecolor="none", fontsize=8, loc="upper right")
    axes[-1, 0].set_xlabel("seconds")
    figure.tight_layout()
    return figure
