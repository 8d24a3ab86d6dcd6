"""The processes of a frontend benchmark, each on cores of its own where there are enough.

Services are the real ones, started as an operator starts them; the executor is the stamping one. Knows nothing of what
is measured.
"""

import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

from benchmarks.config import environment_with
from benchmarks.stamps import palette_of
from scheduler_svc.config import endpoints
from scheduler_svc.frontend.model_files import ModelFiles
from scheduler_svc.models.store import resolve_model
from tests.e2e.server import free_port

START_LIMIT_S = 60.0
CLIENT_LIMIT_S = 120.0


@dataclass(frozen=True, slots=True)
class Cores:
    """Who runs where. `apart`: every frontend has a core that nobody else runs on."""

    engine: frozenset[int]
    frontends: tuple[frozenset[int], ...]
    client: frozenset[int]
    apart: bool


def share(cores: list[int], num_frontends: int) -> Cores:
    """One core for scheduler and executor, one a frontend, the rest for the client; with fewer, the services share
    all cores but the last, which is the client's; with one core, everything shares it."""
    if len(cores) >= num_frontends + 2:
        own = tuple(frozenset((core,)) for core in cores[1 : num_frontends + 1])
        return Cores(frozenset(cores[:1]), own, frozenset(cores[num_frontends + 1 :]), True)
    services, client = frozenset(cores[:-1] or cores), frozenset(cores[-1:])
    return Cores(services, (services,) * num_frontends, client, False)


def own_cores() -> list[int]:
    return sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else list(range(os.cpu_count() or 1))


def model_palette() -> list[int]:
    """Of the default model."""
    return palette_of(ModelFiles.load(resolve_model("")).tokenizer)


class Rig:
    """Runs until the block ends. `addresses` and `pids` are the frontends'."""

    def __init__(self, folder: Path, *, frontends: int, rows: int, step_s: float):
        self.directory = resolve_model("")
        self.palette = model_palette()
        self.cores = share(own_cores(), frontends)
        self._folder, self._rows, self._step_s = folder, rows, step_s
        self._children: list[subprocess.Popen[bytes]] = []
        self._ports = [free_port() for _ in range(frontends)]
        self.addresses = [f"127.0.0.1:{port}" for port in self._ports]
        self.pids: list[int] = []
        self.scheduler_flags: tuple[str, ...] = ()

    def __enter__(self) -> Self:
        try:
            self._start()
        except BaseException:
            self.__exit__()
            raise
        return self

    def _start(self) -> None:
        places = endpoints(self._folder)
        limits = ("--no-prefix-caching", "--runtime-dir", str(self._folder))
        self._scheduler = self._run(
            self.cores.engine, "scheduler_svc", *limits, "--log-level", "warning", *self.scheduler_flags
        )
        job = {"endpoint": places.executor, "beat": places.beat, "model": str(self.directory)}
        self._start_executor(job)
        ready = []
        for number, port in enumerate(self._ports):
            file = self._folder / f"frontend{number}.json"
            flags = ("--model", str(self.directory), "--connect", places.frontend, "--port", str(port))
            more = ("--ready-file", str(file), "--drain-timeout", "1", "--log-level", "warning")
            child = self._run(self.cores.frontends[number], "scheduler_svc.frontend", *flags, *more)
            self.pids.append(child.pid)
            ready.append(file)
        self._wait_for(lambda: all(file.exists() for file in ready))

    def _start_executor(self, job: dict[str, Any]) -> None:
        work = {"palette": self.palette, "step_s": self._step_s, "rows": self._rows}
        self._run(self.cores.engine, "benchmarks.frontend_executor", job=job | work)

    def __exit__(self, *_: object) -> None:
        for child in reversed(self._children):
            child.send_signal(signal.SIGTERM)
        for child in reversed(self._children):
            try:
                child.wait(15)
            except subprocess.TimeoutExpired:
                child.kill()
                child.wait()

    def _run(self, cores: frozenset[int], module: str, *flags: str, job: Any = None) -> subprocess.Popen[bytes]:
        child = start(cores, "-m", module, *flags, job=job)
        self._children.append(child)
        return child

    def _wait_for(self, condition: Callable[[], bool]) -> None:
        limit = time.monotonic() + START_LIMIT_S
        while not condition():
            ended = [child.args for child in self._children if child.poll() is not None]
            if ended or time.monotonic() > limit:
                raise SystemExit(f"the services did not start: {ended or 'out of time'}")
            time.sleep(0.02)


class Ruler:
    """The bare server, or a program that takes the same job, with the face of a Rig."""

    def __init__(
        self, *, step_s: float, palette: list[int], program: Sequence[str] = ("-m", "benchmarks.frontend_ruler")
    ):
        self._program = program
        self.cores = share(own_cores(), 1)
        self.palette = palette
        port = free_port()
        self.addresses = [f"127.0.0.1:{port}"]
        self._job = {"palette": palette, "step_s": step_s, "port": port}

    def __enter__(self) -> "Ruler":
        self._child = start(self.cores.frontends[0], *self._program, job=self._job)
        self.pids = [self._child.pid]
        limit = time.monotonic() + START_LIMIT_S
        while True:
            with socket.socket() as probe:
                if probe.connect_ex(("127.0.0.1", self._job["port"])) == 0:
                    return self
            if time.monotonic() > limit:
                raise SystemExit("the ruler did not start")
            time.sleep(0.02)

    def __exit__(self, *_: object) -> None:
        self._child.terminate()
        self._child.wait(15)


def start(cores: frozenset[int], *arguments: str, job: Any = None) -> subprocess.Popen[bytes]:
    """A Python process on these cores from its first instruction on; `job` goes to its standard input."""
    mine = frozenset(own_cores())
    _pin(cores)
    try:
        child = subprocess.Popen(
            [sys.executable, *arguments],
            stdin=subprocess.PIPE if job is not None else subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            env=environment_with(PYTHONUNBUFFERED="1"),
        )
    finally:
        _pin(mine)
    if job is not None:
        assert child.stdin is not None
        child.stdin.write(json.dumps(job).encode())
        child.stdin.close()
    return child


def _pin(cores: frozenset[int]) -> None:
    if hasattr(os, "sched_setaffinity"):
        os.sched_setaffinity(0, cores)


def run_client(rig: Rig | Ruler, **job: Any) -> dict[str, Any]:
    """What one client found."""
    base = {"addresses": rig.addresses, "pids": rig.pids, "palette": rig.palette, "prompt": rig.palette[:8]}
    base |= {"api": "stepwire"}
    mine = frozenset(own_cores())
    _pin(rig.cores.client)
    try:
        done = subprocess.run(
            [sys.executable, "-m", "benchmarks.frontend_client"],
            input=json.dumps(base | job),
            stdout=subprocess.PIPE,
            text=True,
            check=True,
            timeout=CLIENT_LIMIT_S,
        )
    finally:
        _pin(mine)
    return json.loads(done.stdout)
