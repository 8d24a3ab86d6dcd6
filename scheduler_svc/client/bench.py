"""`stepwire bench`: the same load against one address or several in turn, figures for each, ratios between them."""

import asyncio
import contextlib
import json
import math
import time
from collections.abc import AsyncIterator
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from scheduler_svc.client.bench_report import comparison, headline, sweep_table, table, title
from scheduler_svc.client.config import Access
from scheduler_svc.client.connection import OPEN
from scheduler_svc.client.load import LoadPoint, Sending, Target
from scheduler_svc.client.load_openai import OpenAI, OpenAITarget
from scheduler_svc.client.measure import Record, as_row, summarise
from scheduler_svc.client.workload import Job, Room, Shape, make_jobs, read_trace
from scheduler_svc.errors import StartupError

POLL_S = 0.25


@dataclass(frozen=True, slots=True)
class Bench:
    """A whole run. With a trace, lengths and arrivals come from the file; with rates, each target is measured at each.

    `duration_s`: of an open loop, for how long requests come, instead of a number of them; their tail is waited for.
    """

    targets: list[str]
    shape: Shape
    sending: Sending
    slo: dict[str, float]
    trace: Path | None = None
    rates: list[float] = field(default_factory=list)
    duration_s: float | None = None
    num_warmup: int = 4
    api: str = "auto"
    openai: OpenAI = field(default_factory=OpenAI)
    json_file: Path | None = None
    # Not part of the sending: what is written of a run must not hold the key.
    access: Access = OPEN
    picture: Path | None = None


def bench(plan: Bench) -> list[dict[str, Any]]:
    """Runs, prints a table a target and a comparison; returns what it also writes to the JSON file."""
    if not plan.targets:
        raise StartupError("bench needs at least one target: --targets HOST:PORT,HOST:PORT")
    if plan.picture is not None:
        from scheduler_svc.client.bench_picture import check

        check(plan.picture)
    results: list[dict[str, Any]] = []
    console = Console()
    for name, address in map(parse_target, plan.targets):
        of_target = []
        for rate in _rates(plan):
            of_target.append(asyncio.run(_measure(name, address, at_rate(plan, rate))))
            _show(console, of_target[-1])
        if len(of_target) > 1:
            console.print(sweep_table(of_target))
        results += of_target
    if len(plan.targets) > 1:
        for rate in _rates(plan):
            console.print(comparison([result for result in results if result["rate"] == rate]))
    if plan.json_file is not None:
        _write(plan.json_file, plan, results)
    if plan.picture is not None:
        from scheduler_svc.client.bench_picture import draw

        draw(results, plan.picture)
    return results


def parse_target(text: str) -> tuple[str, str]:
    """ "vllm=http://127.0.0.1:8000" -> its name and its address; without a name it is called by its address."""
    name, equals, address = text.partition("=")
    return (name, address) if equals and not set("/:") & set(name) else (text, text)


def parse_rates(text: str) -> list[float]:
    try:
        rates = [float(part) for part in text.replace(",", " ").split()]
    except ValueError:
        rates = [-1.0]
    if any(not 0 < rate < 1e6 for rate in rates):
        raise StartupError(f"--rate {text!r}: write requests a second, several with commas for a sweep, as in 1,2,4")
    return rates


def _rates(plan: Bench) -> list[float | None]:
    return [*plan.rates] or [plan.shape.rate]


def at_rate(plan: Bench, rate: float | None) -> Bench:
    shape = plan.shape if rate is None else replace(plan.shape, rate=rate)
    if plan.duration_s is not None and shape.rate is not None:
        shape = replace(shape, num_requests=max(1, math.ceil(shape.rate * plan.duration_s)))
    return replace(plan, shape=shape)


async def _measure(name: str, address: str, plan: Bench) -> dict[str, Any]:
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TextColumn("{task.fields[rate]}"))
    console = Console(stderr=True)
    watched = console.is_terminal
    with Progress(*columns, TimeElapsedColumn(), console=console, transient=True, disable=not watched) as bars:
        meter = Meter(bars)
        async with make_target(address, plan, meter) as target:
            served = await target.describe()
            meter.begin(f"{name}: warming up", 0)
            await target.run(_warmup(plan, served.room))
            jobs = make_jobs(plan.shape, served.room)
            if plan.trace is not None:
                jobs = read_trace(plan.trace, served.room, plan.shape.seed)
            meter.begin(name, sum(job.num_requests for job in jobs))
            async with _polling(target, wanted=plan.picture is not None) as timeline:
                cpu = time.process_time()
                records = await target.run(jobs)
                cpu = time.process_time() - cpu
    summary = summarise(records, plan.slo, is_open=plan.shape.rate is not None or plan.trace is not None)
    # What this program itself costs: above about 0.8 the client is what is measured.
    summary["client_cpu_share"] = cpu / summary["duration_s"]
    summary["client_tokens_per_core_s"] = summary["output_tokens"] / cpu if cpu else None
    about = {"model": served.model, "device": served.device, "dtype": served.dtype, "block_size": served.block_size}
    return {
        "name": name,
        "address": address,
        "rate": plan.shape.rate,
        "served": about,
        "summary": summary,
        "timeline": [asdict(point) for point in timeline],
        "requests": [as_row(r) for r in records],
    }


def make_target(address: str, plan: Bench, meter: "Meter") -> Target:
    """HTTP where the address says so or the operator does; gRPC otherwise."""
    is_url = "://" in address
    if is_url and (plan.api == "grpc" or not address.startswith(("http://", "https://"))):
        raise StartupError(f"--targets {address}: write HOST:PORT for gRPC, http://HOST:PORT for the OpenAI API")
    if is_url or plan.api.startswith("openai"):
        return OpenAITarget(address if is_url else f"http://{address}", plan.sending, meter.heard, plan.openai)
    return Target(address, plan.sending, meter.heard, plan.access)


@contextlib.asynccontextmanager
async def _polling(target: Target, *, wanted: bool) -> AsyncIterator[list[LoadPoint]]:
    """Asks the server what it is doing, a few times a second, while the block runs."""
    points: list[LoadPoint] = []

    async def poll() -> None:
        while (point := await target.load()) is not None:
            points.append(point)
            await asyncio.sleep(POLL_S)

    task = asyncio.create_task(poll()) if wanted else None
    try:
        yield points
    finally:
        if task is not None:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)


def _warmup(plan: Bench, room: Room) -> list[Job]:
    """Other prompts than those that are measured, so that no prefix is cached for them."""
    shape = replace(plan.shape, num_requests=max(1, plan.num_warmup), seed=plan.shape.seed ^ 0x5EED, rate=None)
    shape = replace(shape, output_tokens=min(8, shape.output_tokens), turns=1)
    return make_jobs(shape, room) if plan.num_warmup else []


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
    setting: dict[str, Any] = {
        "shape": asdict(plan.shape),
        "sending": asdict(plan.sending),
        "trace": str(plan.trace or ""),
    }
    setting |= {"rates": plan.rates, "duration_s": plan.duration_s}
    try:
        path.write_text(json.dumps({"setting": setting, "targets": results}, indent=1) + "\n", encoding="utf-8")
    except OSError as error:
        raise StartupError(f"cannot write {path}: {error.strerror}") from None
