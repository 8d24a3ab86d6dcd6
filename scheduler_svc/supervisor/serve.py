"""The command itself: model, runtime directory, children, ready file, metrics, drain. It decides what runs and in which
order, not for how long.

Order of a start: everything that can be refused is refused first (options, ports), then the model is there or is made,
then all children start at once and find each other through the sockets of the runtime directory.
Order of an end: frontends finish their streams, then the scheduler, then the executor.
"""

import asyncio
import shutil
import signal
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from scheduler_svc.errors import StartupError
from scheduler_svc.supervisor import ports, ready
from scheduler_svc.supervisor.child import ChildSpec, Report
from scheduler_svc.supervisor.config import (
    DEFAULT_METRICS_PORT,
    DEFAULT_PORT,
    ServeConfig,
    child_environment,
    runtime_root,
)
from scheduler_svc.supervisor.console import Console
from scheduler_svc.supervisor.model import ResolvedModel
from scheduler_svc.supervisor.options import EXECUTOR, FRONTEND, SCHEDULER
from scheduler_svc.supervisor.restart import RestartPolicy
from scheduler_svc.supervisor.supervisor import KeepsDying, Supervisor

# A frontend ends its streams within the drain timeout; this is for what comes after.
DRAIN_MARGIN_S = 5.0
# The others have nothing left to finish by then; a scheduler may wait out a dead frontend's lease.
STOP_GRACE_S = 10.0
STATUS_PERIOD_S = 0.2
# A socket address holds 108 bytes, the longest file name (executor.sock), a slash and a zero byte included.
MAX_DIRECTORY_LENGTH = 90

Launch = Callable[[str], list[str]]
Resolve = Callable[[str, Console], ResolvedModel]


def python_module(part: str) -> list[str]:
    modules = {SCHEDULER: "scheduler_svc", EXECUTOR: "executor_svc", FRONTEND: "scheduler_svc.frontend"}
    return [sys.executable, "-m", modules[part]]


def run(config: ServeConfig, resolve: Resolve, launch: Launch = python_module) -> int:
    """The exit status. `resolve` turns what the operator named into a model, `launch` a part into its command."""
    console = Console(as_json=config.json_lines)
    for i, port in enumerate(config.ports):
        ports.check_free(config.host, port, "--port" if i == 0 else "--port or fewer --frontends")
    metrics_port = _metrics_port(config, console)
    if config.ready_file:
        _prepare(config.ready_file)
    model = resolve(config.model, console)
    console.line("model", f"{model.name} {console.elapsed_s:.1f} s")
    with _runtime_directory() as directory:
        service = Service(config, console, directory, model, metrics_port, launch)
        return asyncio.run(service.run())


@dataclass(slots=True)
class Service:
    """One `stepwire serve`, from the start of the children to the end of the last."""

    config: ServeConfig
    console: Console
    directory: Path
    model: ResolvedModel
    metrics_port: int
    launch: Launch
    _supervisor: Supervisor = field(init=False)
    _metrics_url: str = ""
    _announced: bool = False
    _num_signals: int = 0
    _stop: asyncio.Event = field(default_factory=asyncio.Event)
    _kill: asyncio.Event = field(default_factory=asyncio.Event)

    async def run(self) -> int:
        from scheduler_svc.supervisor.metrics import MergedMetrics

        counters = self.directory / "metrics"
        counters.mkdir()
        metrics = MergedMetrics(counters)
        port = metrics.serve(self.config.host, self.metrics_port)
        self._metrics_url = f"http://{ports.join(ports.reachable(self.config.host), port)}/metrics"
        specs = make_specs(self.config, self.directory, self.model, {metrics.VARIABLE: str(counters)}, self.launch)
        self._supervisor = Supervisor(
            specs,
            self.console.line,
            on_change=self._changed,
            on_death=metrics.died,
            policy=partial(
                RestartPolicy, max_restarts=self.config.restart_limit, window_s=self.config.restart_window_s
            ),
            silence_limit_s=self.config.silence_limit_s,
            verbose=self.config.verbose,
        )
        loop = asyncio.get_running_loop()
        for number in (signal.SIGINT, signal.SIGTERM):
            loop.add_signal_handler(number, self._signalled)
        try:
            return await self._until_the_end()
        finally:
            self.console.status("")
            self._supervisor.kill()
            if self.config.ready_file:
                self.config.ready_file.unlink(missing_ok=True)

    async def _until_the_end(self) -> int:
        self._supervisor.start()
        alive = asyncio.create_task(self._supervisor.run())
        stop = asyncio.create_task(self._stop.wait())
        status = asyncio.create_task(self._show_status())
        await asyncio.wait([alive, stop], return_when=asyncio.FIRST_COMPLETED)
        status.cancel()
        self.console.status("")
        if alive.done() and (fault := alive.exception()):
            # Streams can be finished only while what computes them lives.
            hurry = isinstance(fault, KeepsDying) and fault.part != FRONTEND
            await self._end("ending" if self._announced else "", hurry=hurry)
            raise fault
        streams = "draining: streams may finish" if self._announced else "ending before it was ready"
        return await self._end(f"{streams}; Ctrl-C again ends at once")

    async def _end(self, why: str, *, hurry: bool = False) -> int:
        """Drains; the exit status. A second signal on the way kills."""
        if why:
            self.console.say(why)
        drain = asyncio.create_task(self._supervisor.stop((FRONTEND, SCHEDULER, EXECUTOR), hurry=hurry))
        kill = asyncio.create_task(self._kill.wait())
        await asyncio.wait([drain, kill], return_when=asyncio.FIRST_COMPLETED)
        if self._kill.is_set():
            self._supervisor.kill()
            await drain
            self.console.say("ended at once")
            return 130
        kill.cancel()
        clean = drain.result()
        if self._announced:
            self.console.say("drained" if clean else "ended, but not every child in time")
        return 0 if clean else 1

    def _signalled(self) -> None:
        self._num_signals += 1
        (self._stop if self._num_signals == 1 else self._kill).set()

    def _changed(self) -> None:
        """A child answers now, for the first time or again."""
        if not self._announced and self._supervisor.all_ready:
            self._announced = True
            self.console.status("")
            self.console.say(self._announcement())
        if self._announced and self.config.ready_file:
            try:
                ready.write(self.config.ready_file, self.report())
            except OSError as error:  # a full disk, say: who reads the file sees the pids before, and serving goes on
                self.console.say(f"cannot write --ready-file {self.config.ready_file}: {error.strerror}")

    def report(self) -> dict[str, Any]:
        """The content of the ready file."""
        by_part: dict[str, list[Any]] = {SCHEDULER: [], EXECUTOR: [], FRONTEND: []}
        for child in self._supervisor.children:
            by_part[child.spec.part].append(child.pid)
        pids = {SCHEDULER: by_part[SCHEDULER][0], EXECUTOR: by_part[EXECUTOR], FRONTEND: by_part[FRONTEND]}
        return {"grpc": self._addresses(), "metrics": self._metrics_url, "pids": pids}

    def _addresses(self) -> list[str]:
        return [c.report["grpc"] for c in self._supervisor.children if c.spec.part == FRONTEND]

    def _announcement(self) -> str:
        addresses, name = self._addresses(), self.config.served_model_name or self.model.name
        target = "" if addresses[0].endswith(f":{DEFAULT_PORT}") else f" --address {addresses[0]}"
        target += " --tls-ca FILE" if self.config.wants_tls else ""
        target += " --api-key KEY" if self.config.wants_key else ""
        places = ", ".join(addresses)
        return (
            f"ready in {self.console.elapsed_s:.1f} s: {name} on {places}, metrics on {self._metrics_url}\n"
            f"try: {own_command(sys.argv[0])} chat{target}    (Ctrl-C here ends the service)"
        )

    async def _show_status(self) -> None:
        """While it starts: who is not ready yet, and what it said last."""
        while not self._announced:
            waiting = [
                f"{child.spec.name} {child.last_line or 'starting'}"[:60]
                for child in self._supervisor.children
                if not child.is_ready
            ]
            self.console.status(f"{self.console.elapsed_s:.1f} s · {' · '.join(waiting)} …")
            await asyncio.sleep(STATUS_PERIOD_S)


def make_specs(
    config: ServeConfig, directory: Path, model: ResolvedModel, environ: dict[str, str], launch: Launch
) -> list[ChildSpec]:
    """What runs. Every child gets what the operator set for it and how to find the others, nothing else."""

    def spec(
        name: str, part: str, arguments: Callable[[Report], list[str]], grace_s: float = STOP_GRACE_S
    ) -> ChildSpec:
        ready_file = directory / f"{name}.ready"
        fixed = ["--ready-file", str(ready_file), *config.forwarded.get(part, ())]
        return ChildSpec(
            name,
            part,
            command=lambda report: [*launch(part), *arguments(report), *fixed],
            environ=child_environment(part, environ),
            ready_file=ready_file,
            stop_grace_s=grace_s,
        )

    def frontend(port: int) -> Callable[[Report], list[str]]:
        return lambda report: [
            *("--connect", f"ipc://{directory}/frontend.sock"),
            *("--host", config.host),
            # Chosen by the system in its first life, kept in the next ones: clients know the address.
            *("--port", str(port) if port or not report else report["grpc"].rpartition(":")[2]),
            *("--model", str(model.directory)),
            *("--served-model-name", config.served_model_name or model.name),
        ]

    executor = ["--connect", f"ipc://{directory}/executor.sock", "--connect-beat", f"ipc://{directory}/beat.sock"]
    specs = [
        spec(name, EXECUTOR, lambda report: [*executor, "--model", str(model.directory)])
        for name in names("executor", config.executors)
    ]
    specs.append(spec("scheduler", SCHEDULER, lambda report: ["--runtime-dir", str(directory)]))
    for name, port in zip(names("frontend", config.frontends), config.ports, strict=True):
        specs.append(spec(name, FRONTEND, frontend(port), config.drain_timeout_s + DRAIN_MARGIN_S))
    return specs


def names(part: str, count: int) -> list[str]:
    """Of the children of a part: numbered when there are several."""
    return [part] if count == 1 else [f"{part}-{i}" for i in range(count)]


def own_command(started_as: str) -> str:
    """How the operator, in the same directory, starts a command of ours: `stepwire` may not be on the path."""
    path = Path(started_as)
    if path.name != "stepwire" or not path.is_file():
        return "stepwire"
    found = shutil.which("stepwire")
    if found is not None and Path(found).samefile(path):
        return "stepwire"
    return str(path.relative_to(Path.cwd()) if path.is_relative_to(Path.cwd()) else path)


def _prepare(ready_file: Path) -> None:
    """An old file would tell of another life; a missing folder should not be noticed at the end of a start."""
    try:
        ready_file.unlink(missing_ok=True)
        with tempfile.NamedTemporaryFile(prefix=f".{ready_file.name}-", dir=ready_file.parent):
            pass
    except OSError as error:
        raise StartupError(f"--ready-file {ready_file} cannot be written ({error.strerror}): choose another") from None


def _metrics_port(config: ServeConfig, console: Console) -> int:
    if config.metrics_port is not None:
        ports.check_free(config.host, config.metrics_port, "--metrics-port")
        return config.metrics_port
    if ports.is_free(config.host, DEFAULT_METRICS_PORT):
        return DEFAULT_METRICS_PORT
    console.say(f"port {DEFAULT_METRICS_PORT} is taken: metrics go to a free one")
    return 0


@contextmanager
def _runtime_directory() -> Iterator[Path]:
    """Private (mkdtemp makes it 0700) and short enough for socket addresses."""
    root = runtime_root()
    if root is not None and len(str(root)) + len("/stepwire-xxxxxxxx") > MAX_DIRECTORY_LENGTH:
        root = None
    directory = Path(tempfile.mkdtemp(prefix="stepwire-", dir=root))
    if len(str(directory)) > MAX_DIRECTORY_LENGTH:
        directory.rmdir()
        raise StartupError(f"{directory} is too long for a socket address: set XDG_RUNTIME_DIR to a shorter directory")
    try:
        yield directory
    finally:
        shutil.rmtree(directory, ignore_errors=True)
