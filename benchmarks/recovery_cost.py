"""What recovery costs when nobody dies: its share of the bytes on the wires, and of the time of a step.

One scheduler, one simulated executor and one frontend session in three threads of this process, over real sockets.
Bytes are those that would be gone if nothing could be lost: boot, epoch and step numbers, the digest, places of tokens,
heartbeats and leases. Time is CPU time of the calling thread inside the calls that exist only for recovery.
"""

import asyncio
import functools
import tempfile
import threading
import time
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Any

from executor_svc.backends.select import make_simulated
from executor_svc.config import BackendChoice, ExecutorConfig, SimulationSettings, SizeSettings
from executor_svc.link import BEAT_EVERY_S, ExecutorLink, LinkSettings
from executor_svc.serve import hello_of
from executor_svc.startup import Startup
from executor_svc.worker import Worker
from protos.stepwire.wire.v1 import session_pb2, step_pb2
from scheduler_svc.links.session import LEASE_EVERY_S, SchedulerSession
from scheduler_svc.links.streams import Choice
from tests.wire.cluster import SchedulerThread, collect, request

NUM_ROWS = 64
NUM_TOKENS = 400
PROMPT_TOKENS = 64
STEP_S = 0.005
CALLS_OF_THE_SCHEDULER = ("_is_next", "check", "receive_beats", "is_stalled", "next_executor")
CALLS_OF_THE_EXECUTOR = ("_look_around",)


class Meter:
    """CPU time and numbers of calls, by name."""

    def __init__(self) -> None:
        self.ns: dict[str, int] = defaultdict(int)
        self.calls: dict[str, int] = defaultdict(int)
        self.bytes: dict[str, list[int]] = defaultdict(lambda: [0, 0])

    def wrap(self, owner: Any, name: str, label: str) -> None:
        inner = getattr(owner, name)

        @functools.wraps(inner)
        def timed(*args: Any, **kwargs: Any) -> Any:
            began = time.thread_time_ns()
            try:
                return inner(*args, **kwargs)
            finally:
                self.ns[label] += time.thread_time_ns() - began
                self.calls[label] += 1

        setattr(owner, name, timed)

    def message(self, label: str, message: Any, strip: Callable[[Any], None]) -> None:
        """Counts `message` with and without what `strip` takes from a copy of it."""
        total = message.ByteSize()
        bare = type(message)()
        bare.CopyFrom(message)
        strip(bare)
        self.bytes[label][0] += total
        self.bytes[label][1] += total - bare.ByteSize()


def _strip_plan(plan: step_pb2.StepPlan) -> None:
    for name in ("boot_id", "epoch", "step_id"):
        plan.ClearField(name)


def _strip_result(result: step_pb2.StepResult) -> None:
    for name in ("boot_id", "epoch", "step_id", "num_rows", "num_stored_tokens"):
        result.ClearField(name)


def _strip_tokens(frame: session_pb2.ToFrontend) -> None:
    frame.tokens.ClearField("positions")


def _clock_cost_ns() -> float:
    """What measuring a call adds to it."""
    meter = Meter()
    holder = type("Holder", (), {"nothing": lambda self: None})()
    meter.wrap(holder, "nothing", "nothing")
    for _ in range(20_000):
        holder.nothing()
    return meter.ns["nothing"] / 20_000


def _executor(folder: Path) -> tuple[ExecutorLink, Worker]:
    sizes = SizeSettings(num_blocks=4096, block_size=16, max_num_seqs=NUM_ROWS, max_model_len=1024)
    simulation = SimulationSettings(vocab_size=1000)
    config = ExecutorConfig(backend=BackendChoice.SIMULATED, sizes=sizes, simulation=simulation)
    backend = make_simulated(config, Startup())
    hello = hello_of(backend)
    hello.model.fingerprint = "f1"
    link = ExecutorLink(hello, LinkSettings(f"ipc://{folder}/executor.sock", f"ipc://{folder}/beat.sock"))
    return link, Worker(backend)


def _measure(folder: Path, meter: Meter) -> tuple[int, float]:
    """(steps, seconds) of NUM_ROWS streams that all decode at once."""
    with SchedulerThread(folder) as scheduler:
        service, executors = scheduler.service, scheduler.service._executors
        for name in CALLS_OF_THE_SCHEDULER:
            meter.wrap(executors, name, f"scheduler {name}")
        meter.wrap(service, "_publish_truth", "scheduler _publish_truth")
        _count_bytes(service, meter)
        link, worker = _executor(folder)
        for owner, name in (
            *((link, name) for name in CALLS_OF_THE_EXECUTOR),
            *((link._heart, name) for name in ("step_began", "step_ended")),
            *((link._state, name) for name in ("on_message", "accepts")),
            (worker.rows, "digest"),
        ):
            meter.wrap(owner, name, f"executor {name}")
        thread = threading.Thread(target=_serve, args=(link, worker))
        thread.start()
        try:
            began = time.monotonic()
            asyncio.run(_streams(folder, meter))
            return meter.calls["plans"], time.monotonic() - began
        finally:
            link.stop()
            thread.join()


def _serve(link: ExecutorLink, worker: Worker) -> None:
    with link:
        worker.serve(link)


def _count_bytes(service: Any, meter: Meter) -> None:
    executors, frontends = service._executors, service._frontends
    send_plan, commit, send_frame = executors.send_plan, service._commit, frontends._send

    def plan(message: step_pb2.StepPlan, now: float) -> int:
        meter.calls["plans"] += 1
        meter.message("plans", message, _strip_plan)
        return send_plan(message, now)

    def result(message: step_pb2.StepResult, now: float) -> None:
        meter.message("results", message, _strip_result)
        commit(message, now)

    def frame(session: Any, data: bytes) -> None:
        message = session_pb2.ToFrontend.FromString(data)
        if message.WhichOneof("body") == "tokens":
            meter.message("token frames", message, _strip_tokens)
        send_frame(session, data)

    executors.send_plan, service._commit, frontends._send = plan, result, frame


async def _streams(folder: Path, meter: Meter) -> None:
    session = SchedulerSession(f"ipc://{folder}/frontend.sock", fingerprint="f1")
    await session.start()
    changed = asyncio.Event()
    session.on_change(changed.set)
    while not session.ready:
        changed.clear()
        await changed.wait()
    push = Choice.push
    try:
        meter.wrap(Choice, "push", "frontend push")
        made = [request(f"r{i}", [i + 1] * PROMPT_TOKENS, NUM_TOKENS) for i in range(NUM_ROWS)]
        streams = [session.submit(submit) for submit in made]
        await asyncio.gather(*(collect(stream) for stream in streams))
    finally:
        Choice.push = push  # type: ignore[method-assign]
        await session.close()


def report_cost() -> dict[str, object]:
    meter, clock_ns = Meter(), _clock_cost_ns()
    with tempfile.TemporaryDirectory() as folder:
        num_steps, seconds = _measure(Path(folder), meter)
    print(f"{NUM_ROWS} rows, {num_steps} steps, {1e3 * seconds / num_steps:.2f} ms a step here (simulated, no device)")
    beat = step_pb2.FromExecutor(beat=step_pb2.Beat(instance_id=2**63, step_id=num_steps, busy_ms=5)).ByteSize()
    lease = session_pb2.ToScheduler(lease=session_pb2.Lease()).ByteSize()
    welcome = 200  # with geometry and model names
    steady_bytes_s = 2 * beat / BEAT_EVERY_S + (lease + welcome) / LEASE_EVERY_S
    rows: list[dict[str, object]] = []
    total = sum(all_bytes for all_bytes, _ in meter.bytes.values()) / num_steps
    extra = sum(ours for _, ours in meter.bytes.values()) / num_steps
    for label, (all_bytes, ours) in meter.bytes.items():
        rows.append(_bytes_row(label, all_bytes / num_steps, ours / num_steps))
    beats = steady_bytes_s * STEP_S
    rows.append(_bytes_row(f"heartbeats and leases, at a step of {1e3 * STEP_S:g} ms", beats, beats))
    rows.append(_bytes_row("all", total + beats, extra + beats))
    for part in ("scheduler", "executor", "frontend"):
        labels = [label for label in meter.ns if label.startswith(part)]
        each = {label: max(0.0, meter.ns[label] - clock_ns * meter.calls[label]) / num_steps / 1e3 for label in labels}
        us = sum(each.values())
        share = us / (STEP_S * 1e6)
        rows.append({"what": f"CPU time, {part}", "us_a_step": round(us, 2), "share_of_step": round(share, 5)})
        parts = ", ".join(f"{label.split()[1]} {value:.1f}" for label, value in each.items())
        print(f"  {part:10} {us:7.1f} us a step, {share:.2%} of a step of {1e3 * STEP_S:g} ms ({parts})")
    return {"steps": num_steps, "num_rows": NUM_ROWS, "cost": rows}


def _bytes_row(label: str, total: float, extra: float) -> dict[str, object]:
    print(f"  {label:45} {total:8.1f} bytes a step, {extra:6.1f} of them for recovery ({extra / total:.1%})")
    return {"what": label, "bytes_a_step": round(total, 1), "for_recovery": round(extra, 1)}
