"""End to end: an 8B-shaped model of noise behind the real scheduler and the real wire; tokens a second, device idle.

    this process: the executor, its link and worker        a child: the scheduler        another: the clients

Idle is the time between the end of one step on the device and the beginning of the next, as a share of the time from
the first to the last. A step launched while its predecessor runs begins when that one ends: no gap. What passes within
a step while the host still launches parts of it counts as work.
"""

import json
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path

import torch

from benchmarks.gpu_bench import Bench
from benchmarks.gpu_load import FINGERPRINT
from benchmarks.gpu_step import make_backend
from executor_svc.backends.cuda import CudaBackend, Pending
from executor_svc.backends.cuda_warm_up import warm_up_batches
from executor_svc.batch import ForwardBatch
from executor_svc.link import ExecutorLink, LinkSettings
from executor_svc.serve import hello_of
from executor_svc.worker import Worker

LIMIT_S = 240.0


class Timeline:
    """When the device begins and ends each step."""

    def __init__(self, backend: CudaBackend, *, on_device: bool) -> None:
        self.steps: list[tuple[float | torch.cuda.Event, float | torch.cuda.Event]] = []
        self._launch = backend.launch
        self._now: Callable[[], float | torch.cuda.Event] = _event if on_device else time.perf_counter
        backend.launch = self._timed  # type: ignore[method-assign]

    def _timed(self, batch: ForwardBatch) -> Pending:
        began = self._now()
        pending = self._launch(batch)
        self.steps.append((began, self._now()))
        return pending

    def idle_share(self) -> float:
        if not self.steps:
            return float("nan")
        gaps = [_between(end, begin) for (_, end), (begin, _) in zip(self.steps, self.steps[1:], strict=False)]
        return sum(max(0.0, gap) for gap in gaps) / _between(self.steps[0][0], self.steps[-1][1])


def _event() -> "torch.cuda.Event":
    event = torch.cuda.Event(enable_timing=True)
    event.record()
    return event


def _between(begin: "float | torch.cuda.Event", end: "float | torch.cuda.Event") -> float:
    if isinstance(begin, float) and isinstance(end, float):
        return end - begin
    assert not isinstance(begin, float)
    assert not isinstance(end, float)
    return begin.elapsed_time(end) / 1e3


def serving(bench: Bench) -> None:
    """(streams at once, prompt tokens, output tokens)"""
    loads = bench.pick([(128, 512, 256), (32, 512, 256), (1, 128, 128)], [(2, 5, 3)])
    rows, length = max(streams for streams, _, _ in loads), max(prompt + output for _, prompt, output in loads)
    backend = make_backend(bench, rows, length + 16, batched_tokens=bench.pick([8192], [16])[0])
    backend.identity.fingerprint = FINGERPRINT
    if not bench.dry:
        backend.warm_up()
        bench.add("serving", "no launch makes the host wait", ok=launches_never_wait(backend))
    with tempfile.TemporaryDirectory() as folder:
        scheduler = _start_scheduler(Path(folder))
        try:
            _serve(bench, backend, loads, Path(folder) / "run")
        finally:
            scheduler.terminate()
            scheduler.wait(LIMIT_S)


def launches_never_wait(backend: CudaBackend) -> bool:
    """Every kind of step, with torch told to raise where it would synchronise. Only reading a result may wait."""
    for batch in warm_up_batches(backend.geometry):
        torch.cuda.set_sync_debug_mode("error")
        try:
            pending = backend.launch(batch)
        except RuntimeError as error:
            print(f"a launch waits: {error}", file=sys.stderr)
            return False
        finally:
            torch.cuda.set_sync_debug_mode("default")
        pending.wait()
    backend.reset()
    return True


def _start_scheduler(folder: Path) -> "subprocess.Popen[bytes]":
    ready = folder / "ready.json"
    command = [sys.executable, "-m", "scheduler_svc", "--runtime-dir", str(folder / "run"), "--ready-file", str(ready)]
    # Prompts are random, and a first step may be slow: neither is what is measured.
    process = subprocess.Popen([*command, "--step-timeout", "60"])
    limit = time.monotonic() + LIMIT_S
    while not ready.exists():
        if process.poll() is not None or time.monotonic() > limit:
            raise RuntimeError("the scheduler did not start")
        time.sleep(0.02)
    return process


def _serve(bench: Bench, backend: CudaBackend, loads: list[tuple[int, int, int]], run: Path) -> None:
    link = ExecutorLink(hello_of(backend), LinkSettings(f"ipc://{run}/executor.sock", f"ipc://{run}/beat.sock"))
    worker = Worker(backend)
    thread = threading.Thread(target=_obey, args=(link, worker))
    thread.start()
    timeline = Timeline(backend, on_device=not bench.dry)
    try:
        for number, (streams, prompt, output) in enumerate(bench.within(loads)):
            timeline.steps.clear()
            asked = {"streams": streams, "prompt": prompt, "output": output}
            found = _load(f"ipc://{run}/frontend.sock", asked, backend.geometry.vocab_size, number)
            bench.synchronise()
            bench.add(
                "serving",
                f"{streams} streams, {prompt} in, {output} out",
                tokens_s=bench.figure(found["tokens"] / found["seconds"]),
                last_first_token_s=bench.figure(found["last_first_token_s"], 2),
                steps=len(timeline.steps),
                idle=f"{timeline.idle_share():.1%}",
                ok=found["tokens"] == streams * output and not backend.num_compilations,
            )
    finally:
        link.stop()
        thread.join(LIMIT_S)


def _obey(link: ExecutorLink, worker: Worker) -> None:
    with link:
        worker.serve(link)


def _load(endpoint: str, asked: dict[str, int], vocab: int, seed: int) -> dict[str, float]:
    command = [sys.executable, "-m", "benchmarks.gpu_load", endpoint]
    for name, value in {**asked, "vocab": vocab, "seed": seed}.items():
        command += [f"--{name}", str(value)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=LIMIT_S, check=True)
    return json.loads(done.stdout)
