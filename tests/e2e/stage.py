"""A scheduler and one frontend as processes, executors by hand: processes or threads that may lie.

Executors connect over TCP, so that a test can put a network in between.
"""

import contextlib
import threading
from collections.abc import Callable
from pathlib import Path

from executor_svc.backends.select import make_simulated
from executor_svc.config import BackendChoice, ExecutorConfig, SimulationSettings
from executor_svc.link import ExecutorLink, LinkSettings
from executor_svc.protocol import EpochStarted
from executor_svc.serve import hello_of
from executor_svc.startup import Startup
from executor_svc.worker import Worker
from protos.stepwire.wire.v1 import step_pb2
from tests.e2e.process import EXECUTOR, FRONTEND, LIMIT_S, SCHEDULER, Process
from tests.e2e.server import Answering, free_port

STEP_TIMEOUT_S = 2.0

# Result in, and what is sent instead: another result, bytes, or nothing.
Spoil = Callable[[step_pb2.StepResult], step_pb2.StepResult | bytes | None]


class Stage(Answering):
    """`with Stage(folder, model) as stage`: ready for executors. It asks them for one step after the other."""

    def __init__(self, folder: Path, model: Path):
        self.model = model
        self._folder = folder
        self._parts = contextlib.ExitStack()

    def __enter__(self) -> "Stage":
        first = free_port(6)
        self.spare_port = first + 5
        self.executor_port, self.beat_port, port = first, first + 1, first + 2
        self.addresses = [f"127.0.0.1:{port}"]
        self.metrics_urls = [f"http://127.0.0.1:{first + 3}/metrics", f"http://127.0.0.1:{first + 4}/metrics"]
        run, enter = self._folder / "run", self._parts.enter_context
        self.frontend_socket = f"ipc://{run}/frontend.sock"
        self.scheduler = enter(
            Process(
                *(self._folder, "scheduler", *SCHEDULER, "--runtime-dir", run),
                *("--bind-executor", f"tcp://127.0.0.1:{self.executor_port}"),
                *("--bind-beat", f"tcp://127.0.0.1:{self.beat_port}"),
                *("--step-timeout", STEP_TIMEOUT_S, "--metrics-port", first + 3),
            )
        )
        self.frontend = enter(
            Process(
                *(self._folder, "frontend", *FRONTEND, "--connect", self.frontend_socket, "--port", port),
                *("--model", self.model, "--metrics-port", first + 4),
            )
        )
        self.scheduler.wait_until_it_says("scheduler_ready")
        self.frontend.wait_until_it_says("listening on")
        return self

    def __exit__(self, *_: object) -> None:
        self._parts.close()

    def output(self) -> str:
        return self.scheduler.output() + self.frontend.output()

    def executor(
        self, name: str, *options: object, ports: tuple[int, int] | None = None, env: dict[str, str] | None = None
    ) -> Process:
        """A real one, not started yet. `ports`: where it finds the scheduler, when not at its own."""
        port, beat_port = ports or (self.executor_port, self.beat_port)
        return Process(
            *(self._folder, name, *EXECUTOR, "--backend", "simulated", "--model", self.model),
            *("--connect", f"tcp://127.0.0.1:{port}", "--connect-beat", f"tcp://127.0.0.1:{beat_port}", *options),
            env=env,
        )

    def thread(self, spoil: Spoil | None = None, after: int = 0) -> "ExecutorThread":
        """One in this process: honest, or a liar after so many steps."""
        settings = LinkSettings(f"tcp://127.0.0.1:{self.executor_port}", f"tcp://127.0.0.1:{self.beat_port}")
        return ExecutorThread(self.model, settings, spoil, after)


class ExecutorThread:
    """The simulated executor, slow. With `spoil` it answers `after` steps rightly, then one so, and none after it."""

    def __init__(self, model: Path, settings: LinkSettings, spoil: Spoil | None, after: int):
        simulation = SimulationSettings(step_us=5000)
        config = ExecutorConfig(model=model, backend=BackendChoice.SIMULATED, simulation=simulation)
        self.num_steps = 0
        self.has_lied = threading.Event()
        self._ended = threading.Event()
        self._backend = make_simulated(config, Startup())
        self._settings, self._spoil, self._after = settings, spoil, after
        self._link: ExecutorLink | None = None
        self._thread = threading.Thread(target=self._run, name="executor", daemon=True)

    def __enter__(self) -> "ExecutorThread":
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ended.set()
        if self._link is not None:
            self._link.stop()
        self._thread.join(LIMIT_S)
        assert not self._thread.is_alive()

    def _run(self) -> None:
        worker = Worker(self._backend)
        with ExecutorLink(hello_of(self._backend), self._settings) as self._link:
            while not self.has_lied.is_set() and (event := self._link.receive()) is not None:
                if isinstance(event, EpochStarted):
                    worker.reset()
                    continue
                result = worker.execute(event)
                self.num_steps += 1
                if self._spoil is None or self.num_steps <= self._after:
                    self._link.send_result(result)
                    continue
                lie = self._spoil(result)
                if isinstance(lie, step_pb2.StepResult):
                    lie = step_pb2.FromExecutor(result=lie).SerializeToString()
                if lie is not None:
                    self._link._socket.send(lie)
                self.has_lied.set()
            # It lives on and beats, and asks for nothing: only what it said tells of the fault.
            self._ended.wait()
