"""The dashboard as a picture, where there is no Grafana: its panels, its queries, asked of a Prometheus.

    python deploy/observability/render.py http://127.0.0.1:9090 dashboard.png --seconds 120

Reads grafana/dashboards/stepwire.json: each panel's place, title, unit and queries are Grafana's own, and
`$__rate_interval` is what Grafana makes of it, four scrapes. Drawn with matplotlib.
"""

import argparse
import json
import math
import time
import urllib.parse
import urllib.request
from pathlib import Path
from typing import Any

import matplotlib as mpl

mpl.use("Agg")
import matplotlib.pyplot as plt

DASHBOARD = Path(__file__).with_name("grafana") / "dashboards" / "stepwire.json"
COLOURS = ("#2f6db5", "#e0752d", "#3f9c4f", "#9a5fb0", "#c23b3b", "#7a6a58")
GRID_ROWS = 8  # of Grafana's grid, a panel's height
STEP_S = 1.0


def query_range(server: str, expression: str, start: float, end: float) -> list[dict[str, Any]]:
    arguments = {"query": expression, "start": f"{start:.3f}", "end": f"{end:.3f}", "step": str(STEP_S)}
    with urllib.request.urlopen(
        f"{server}/api/v1/query_range?{urllib.parse.urlencode(arguments)}", timeout=30
    ) as reply:
        return json.load(reply)["data"]["result"]


def with_gaps(points: list[tuple[float, float]]) -> list[tuple[float, float]]:
    """No line is drawn over a time without values."""
    drawn: list[tuple[float, float]] = []
    for t, v in points:
        if drawn and t - drawn[-1][0] > 2 * STEP_S:
            drawn.append((t, math.nan))
        drawn.append((t, v))
    return drawn


def legend(target: dict[str, Any], labels: dict[str, str]) -> str:
    text = target.get("legendFormat") or target["expr"]
    for name, value in labels.items():
        text = text.replace("{{" + name + "}}", value)
    return text


def draw(axes: Any, panel: dict[str, Any], server: str, start: float, end: float, rate_interval: str) -> None:
    is_seconds = panel["fieldConfig"]["defaults"].get("unit") == "s"
    stacked = panel["fieldConfig"]["defaults"].get("custom", {}).get("stacking", {}).get("mode") == "normal"
    lines = []
    for target in panel["targets"]:
        for series in query_range(server, target["expr"].replace("$__rate_interval", rate_interval), start, end):
            points = [(float(t) - start, float(v)) for t, v in series["values"]]
            points = with_gaps([(t, v) for t, v in points if math.isfinite(v)])
            # A line that is nothing all the time says nothing.
            if points and (panel["id"] == 8 or any(v > 0 for _, v in points) or len(panel["targets"]) > 2):
                lines.append((legend(target, series["metric"]), points))
    most = max((v for _, points in lines for _, v in points if math.isfinite(v)), default=0.0)
    unit, scale = (" (ms)", 1000.0) if is_seconds and (most < 2 or panel["id"] == 6) else (" (s)" * is_seconds, 1.0)
    for i, (name, points) in enumerate(lines):
        x, y = zip(*points, strict=True)
        axes.plot(x, [v * scale for v in y], label=name, color=COLOURS[i % len(COLOURS)], linewidth=1.6)
        if stacked:
            axes.fill_between(x, [v * scale for v in y], color=COLOURS[i % len(COLOURS)], alpha=0.15)
    axes.set_title(panel["title"] + unit, loc="left", fontsize=11, fontweight="bold")
    axes.set_xlim(0, end - start)
    if panel["id"] == 6:  # device and scheduler are orders of magnitude apart
        axes.set_yscale("log")
        axes.set_ylim(top=30 * axes.get_ylim()[1])
    else:
        axes.set_ylim(0, 1.35 * max(axes.get_ylim()[1], 0.1))  # room for the legend
    axes.grid(alpha=0.25)
    axes.spines[["top", "right"]].set_visible(False)
    axes.tick_params(labelsize=8)
    if lines:
        axes.legend(fontsize=8, frameon=False, loc="upper left", ncols=1 if len(lines) < 4 else 2)


def main() -> None:
    parser = argparse.ArgumentParser(description="Draws the Grafana dashboard from a Prometheus.")
    parser.add_argument("server", help="http://host:9090")
    parser.add_argument("output", type=Path)
    parser.add_argument("--seconds", type=float, default=120.0, help="How much of the past.")
    parser.add_argument("--end", type=float, default=None, help="Seconds since 1970; without it: now.")
    parser.add_argument("--scrape-interval", type=float, default=2.0, help="As in prometheus.yml.")
    args = parser.parse_args()
    end = args.end if args.end is not None else time.time()
    panels = json.loads(DASHBOARD.read_text())["panels"]
    num_rows = max(panel["gridPos"]["y"] for panel in panels) // GRID_ROWS + 1
    figure, grid = plt.subplots(num_rows, 3, figsize=(15, 3.3 * num_rows), layout="constrained", squeeze=False)
    for panel in panels:
        place = panel["gridPos"]
        axes = grid[place["y"] // GRID_ROWS][place["x"] // place["w"]]
        draw(axes, panel, args.server, end - args.seconds, end, f"{4 * args.scrape_interval:g}s")
    for axes in grid[-1]:
        axes.set_xlabel("seconds", fontsize=8)
    figure.savefig(args.output, dpi=80)


if __name__ == "__main__":
    main()
