"""Two pictures of what benchmarks.serving found: throughput by workload, and latency under W4."""

from pathlib import Path
from typing import Any

import matplotlib as mpl

mpl.use("Agg")
from matplotlib import pyplot as plt

from benchmarks.pictures import BLUE, GREY, ORANGE, STYLE, save

Rows = list[dict[str, Any]]
COLOURS = (BLUE, ORANGE, GREY)


def draw(rows: Rows, folder: Path) -> None:
    """serving.png: medians over the repetitions. Rows of peers are in the peers' own table and are not drawn."""
    mine = [row for row in rows if "tok_s" in row and "workload" in row]
    if not mine:
        return
    folder.mkdir(parents=True, exist_ok=True)
    dtypes = list(dict.fromkeys(row["dtype"] for row in mine))
    with mpl.rc_context(STYLE):
        figure, (left, right) = plt.subplots(1, 2, figsize=(8, 2.9))
        bars(
            left, mine, dtypes, [n for n in ("W1", "W2", "W3", "W3-off", "W4") if any(r["workload"] == n for r in mine)]
        )
        late = [row for row in mine if row["workload"] == "W4"]
        for number, key in enumerate(("ttft_p50_s", "ttft_p99_s", "itl_p50_s", "itl_p99_s")):
            for index, dtype in enumerate(dtypes):
                values = [row[key] * 1e3 for row in late if row["dtype"] == dtype]
                if values:
                    width = 0.8 / len(dtypes)
                    right.bar(number + index * width, sorted(values)[len(values) // 2], width, color=COLOURS[index % 3])
        right.set_xticks(range(4), ["TTFT p50", "TTFT p99", "ITL p50", "ITL p99"])
        right.set_yscale("log")
        right.set_title("W4, 70 % of saturation: milliseconds")
        save(figure, folder / "serving.png")


def bars(axes: Any, rows: Rows, dtypes: list[str], names: list[str]) -> None:
    width = 0.8 / len(dtypes)
    for index, dtype in enumerate(dtypes):
        for place, name in enumerate(names):
            values = sorted(row["tok_s"] for row in rows if row["dtype"] == dtype and row["workload"] == name)
            if values:
                label = dtype if place == 0 else None
                axes.bar(place + index * width, values[len(values) // 2], width, color=COLOURS[index % 3], label=label)
    axes.set_xticks(range(len(names)), names)
    axes.set_title("Output tokens per second")
    axes.legend()
