"""Pictures of what `benchmarks.gpu` found: decode against the copy rate, prefill beside torch's kernels."""

from pathlib import Path
from typing import Any

import matplotlib as mpl
from matplotlib import pyplot as plt
from matplotlib.axes import Axes

from benchmarks.pictures import BLUE, GREY, ORANGE, STYLE, save

COLOURS = (BLUE, ORANGE, GREY, "#2f855a", "#6b46c1")


def draw(rows: list[dict[str, Any]], copy_rate: float, path: Path) -> None:
    """`copy_rate` in bytes a second; rows without numbers are left out."""
    with mpl.rc_context(STYLE):
        figure, (left, right) = plt.subplots(1, 2, figsize=(9, 3.2))
        left.set_title("decode, tokens read at once: GB/s")
        _lines(left, rows, "decode", "GB_s")
        left.axhline(copy_rate / 1e9, color=GREY, linestyle=":", label="copy")
        right.set_title("causal prefill by length: TFLOP/s")
        _lines(right, rows, "prefill", "TFLOP_s")
        for axis in (left, right):
            axis.set_xscale("log", base=2)
            axis.set_ylim(bottom=0)
            axis.legend(frameon=False, fontsize=7)
        save(figure, path)


def _lines(axis: Axes, rows: list[dict[str, Any]], kind: str, unit: str) -> None:
    """One line for each label; its points are (`at`, number)."""
    lines: dict[str, list[tuple[float, float]]] = {}
    for row in rows:
        if row.get("plot") == kind and row.get(unit) is not None:
            lines.setdefault(row["label"], []).append((row["at"], row[unit]))
    for (label, points), colour in zip(lines.items(), COLOURS * 3, strict=False):
        places, values = zip(*sorted(points), strict=True)
        axis.plot(places, values, "o-", color=colour, label=label)
