"""`stepwire bench`: the same load against one address or several in turn, figures for each, ratios between them."""

import asyncio
import json
import time
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from scheduler_svc.client.bench_report import comparison, headline, table, title
from scheduler_svc.client.config import Access
from scheduler_svc.client.connection import OPEN
from scheduler_svc.client.load import Sending, Target
from scheduler_svc.client.measure import Record, as_row, summarise
from scheduler_svc.client.workload import Job, Room, Shape, make_jobs, read_trace
from scheduler_svc.errors import StartupError


@dataclass(frozen=True, slots=True)
class Bench:
    """A whole run. With a trace, lengths and arrivals come from the file."""

    targets: list[str]
    shape: Shape
    sending: Sending
    slo: dict[str, float]
    trace: Path | None = None
    num_warmup: int = 4
    json_file: Path | None = None
    # Not part of the sending: what is written of a run must not hold the key.
    access: Access = OPEN


def bench(plan: Bench) -> list[dict[str, Any]]:
    """Runs, prints a table a target and a comparison; returns what it also writes to the JSON file."""
    if not plan.targets:
        raise StartupError("bench needs at least one target: --targets HOST:PORT,HOST:PORT")
    results = []
    console = Console()
    for address in plan.targets:
        result = asyncio.run(_measure(address, plan))
        results.append(result)
        _show(console, result)
    if len(results) > 1:
        console.print(comparison(results))
    if plan.json_file is not None:
        _write(plan.json_file, plan, results)
    return results


async def _measure(address: str, plan: Bench) -> dict[str, Any]:
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TextColumn("{task.fields[rate]}"))
    console = Console(stderr=True)
    watched = console.is_terminal
    with Progress(*columns, TimeElapsedColumn(), console=console, transient=True, disable=not watched) as bars:
        meter = Meter(bars)
        async with Target(address, plan.sending, meter.heard, plan.access) as target:
            model, room = await target.describe()
            meter.begin(f"{address}: warming up", 0)
            await target.run(_warmup(plan, room))
            jobs = read_trace(plan.trace, room, plan.shape.seed) if plan.trace else make_jobs(plan.shape, room)
            meter.begin(address, len(jobs))
            cpu = time.process_time()
            records = await target.run(jobs)
            cpu = time.process_time() - cpu
    summary = summarise(records, plan.slo)
    # What this program itself costs: above about 0.8 the client is what is measured.
    summary["client_cpu_share"] = cpu / summary["duration_s"]
    summary["client_tokens_per_core_s"] = summary["output_tokens"] / cpu if cpu else None
    served = {"model": model.model, "device": model.device, "dtype": model.dtype, "block_size": model.block_size}
    return {"address": address, "served": served, "summary": summary, "requests": [as_row(r) for r in records]}


def _warmup(plan: Bench, room: Room) -> list[Job]:
    """Other prompts than those that are measured, so that no prefix is cached for them."""
    shape = replace(plan.shape, num_requests=max(1, plan.num_warmup), seed=plan.shape.seed ^ 0x5EED, rate=None)
    return make_jobs(replace(shape, output_tokens=min(8, shape.output_tokens)), room) if plan.num_warmup else []


def _show(console: Console, result: dict[str, Any]) -> None:
    # Addresses are no markup, and numbers need no colours of their own.
    console.print(title(result), style="bold", markup=False, highlight=False)
    console.print(table(result["summary"]))
    console.print(headline(result["summary"]), markup=False, highlight=False)


class Meter:
    """The progress bar: requests done, and output tokens a second since the run began."""

    def __init__(self, bars: Progress):
        self._bars = bars
        self._task = bars.add_task("connecting", total=None, rate="")
        self._num_tokens = 0
        self._num_done = 0
        self._since = time.perf_counter()

    def begin(self, label: str, total: int) -> None:
        self._num_tokens = self._num_done = 0
        self._since = time.perf_counter()
        self._bars.reset(self._task, description=label, total=total or None, rate="")

    def heard(self, record: Record, num_new: int) -> None:
        self._num_tokens += num_new
        if num_new == 0:
            self._num_done += 1
            rate = self._num_tokens / max(1e-9, time.perf_counter() - self._since)
            self._bars.update(self._task, completed=self._num_done, rate=f"{rate:,.0f} tok/s")


def _write(path: Path, plan: Bench, results: list[dict[str, Any]]) -> None:
    setting = {"shape": asdict(plan.shape), "sending": asdict(plan.sending), "trace": str(plan.trace or "")}
    try:
        path.write_text(json.dumps({"setting": setting, "targets": results}, indent=1) + "\n", encoding="utf-8")
    except OSError as error:
        raise StartupError(f"cannot write {path}: {error.strerror}") from None
