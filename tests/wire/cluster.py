"""A scheduler service in a thread, with the real core, for tests of the whole path over real sockets."""

import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from prometheus_client import CollectorRegistry

from protos.stepwire.wire.v1 import session_pb2, step_pb2
from scheduler_svc.config import SchedulerConfig, endpoints
from scheduler_svc.links.session import RequestStream, SchedulerSession
from scheduler_svc.metrics import SchedulerMetrics
from scheduler_svc.process import open_service
from scheduler_svc.tracing import Tracing
from tests.wire.peers import LIMIT_S


class SchedulerThread:
    """The service, as its process runs it. `kill()` ends it as SIGKILL would: nobody is told."""

    def __init__(self, folder: Path, *, tracing: Tracing | None = None, **options: object) -> None:
        self._tracing = tracing
        places = endpoints(folder)
        binds = {"bind_frontend": places.frontend, "bind_executor": places.executor, "bind_beat": places.beat}
        self._config = SchedulerConfig(**{**binds, **options})
        self.registry = CollectorRegistry()
        self.error: BaseException | None = None
        self._killed = False
        self._bound = threading.Event()
        self._thread = threading.Thread(target=self._run)

    def __enter__(self) -> "SchedulerThread":
        self._thread.start()
        assert self._bound.wait(LIMIT_S)
        assert self.error is None, self.error
        return self

    def __exit__(self, *_: object) -> None:
        if self._thread.is_alive():
            self.kill()
        assert self.error is None, self.error

    def kill(self) -> None:
        self._killed = True
        self.join()

    def drain(self) -> None:
        self.service.stop()

    def join(self) -> None:
        self._thread.join(LIMIT_S)
        assert not self._thread.is_alive()

    def metric(self, name: str, **labels: str) -> float:
        return self.registry.get_sample_value(name, labels) or 0.0

    def _run(self) -> None:
        try:
            with open_service(self._config, SchedulerMetrics(self.registry), self._tracing) as self.service:
                self._bound.set()
                while not self._killed and self.service.turn():
                    pass
                if not self._killed:
                    self.service._core.check()
        except BaseException as error:
            self.error = error
            self._bound.set()


class PatientSession(SchedulerSession):
    """Waits for answers as long as a busy machine may take."""

    async def _ask(self, question: Callable[[int], bytes], timeout_s: float) -> Any:
        return await super()._ask(question, max(timeout_s, LIMIT_S))


def session(folder: Path, **options: object) -> SchedulerSession:
    return PatientSession(endpoints(folder).frontend, fingerprint="f1", **options)


def request(request_id: str, prompt: list[int], max_tokens: int, **changes: object) -> session_pb2.Submit:
    values = {"num_choices": 1, "sampling": step_pb2.Sampling(repetition_penalty=1.0, top_p=1.0), **changes}
    return session_pb2.Submit(
        request_id=request_id, prompt_token_ids=np.asarray(prompt, "<i4").tobytes(), max_tokens=max_tokens, **values
    )


async def collect(stream: RequestStream) -> tuple[dict[int, list[int]], dict[int, session_pb2.Finished]]:
    """Reads to the end: tokens and endings by choice."""
    tokens: dict[int, list[int]] = {choice.index: [] for choice in stream.choices}
    ends: dict[int, session_pb2.Finished] = {}
    while deltas := await stream.read():
        for delta in deltas:
            assert delta.index not in ends
            tokens[delta.index] += delta.token_ids
            if delta.finished is not None:
                ends[delta.index] = delta.finished
    return tokens, ends
