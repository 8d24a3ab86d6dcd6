"""Peers for protocol tests: raw sockets that say anything, and an executor whose every answer can be checked.

The arithmetic executor keeps token lists, no blocks: the next token of a sequence is a function of its whole token list
(`next_token`), so an oracle needs nothing but the prompt.
"""

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import zmq

from executor_svc.link import ExecutorLink, LinkSettings
from executor_svc.protocol import PROTOCOL_VERSION, EpochStarted
from protos.stepwire.wire.v1 import session_pb2, step_pb2

LIMIT_S = 60.0
VOCAB_SIZE = 1000


def geometry(**changes: int) -> step_pb2.Geometry:
    values = {"num_blocks": 64, "block_size": 4, "max_num_seqs": 8, "max_model_len": 128}
    return step_pb2.Geometry(**{**values, "max_num_batched_tokens": 32, "vocab_size": VOCAB_SIZE, **changes})


def executor_hello(fingerprint: str = "f1", **changes: int) -> step_pb2.ExecutorHello:
    model = step_pb2.ModelIdentity(architecture="arithmetic", dtype="int", kv_dtype="int", fingerprint=fingerprint)
    return step_pb2.ExecutorHello(geometry=geometry(**changes), model=model, device="test", backend="test")


def next_token(token_ids: list[int]) -> int:
    value = 17
    for token_id in token_ids:
        value = (value * 31 + token_id + 7) % 1_000_003
    return value % VOCAB_SIZE


def expected_output(prompt: list[int], max_tokens: int) -> list[int]:
    tokens = list(prompt)
    for _ in range(max_tokens):
        tokens.append(next_token(tokens))
    return tokens[len(prompt) :]


class Arithmetic:
    """Executes plans on token lists; the digest is counted, not believed."""

    def __init__(self) -> None:
        self.rows: dict[int, list[int]] = {}
        self.computed: dict[int, int] = {}

    def reset(self) -> None:
        self.rows.clear()
        self.computed.clear()

    def execute(self, plan: step_pb2.StepPlan) -> step_pb2.StepResult:
        for row in np.frombuffer(plan.release, "<i4").tolist():
            del self.rows[row], self.computed[row]
        for admit in plan.admit:
            assert admit.row not in self.rows
            self.rows[admit.row] = np.frombuffer(admit.token_ids, "<i4").tolist()
            self.computed[admit.row] = admit.num_computed_tokens
        counts = dict(np.frombuffer(plan.prefill, "<i4").reshape(-1, 2).tolist())
        sampled = []
        for row in sorted(self.rows):
            self.computed[row] += counts.get(row, 1)
            assert self.computed[row] <= len(self.rows[row])
            if counts.get(row, 1) and self.computed[row] == len(self.rows[row]):
                sampled.append(next_token(self.rows[row]))
                self.rows[row].append(sampled[-1])
        return step_pb2.StepResult(
            boot_id=plan.boot_id,
            epoch=plan.epoch,
            step_id=plan.step_id,
            token_ids=np.asarray(sampled, "<i4").tobytes(),
            forward_us=10,
            num_rows=len(self.rows),
            num_stored_tokens=sum(self.computed.values()),
        )


class ExecutorThread:
    """A real ExecutorLink with the arithmetic executor behind it, in a thread."""

    def __init__(
        self,
        folder: Path,
        hello: step_pb2.ExecutorHello | None = None,
        endpoints: tuple[str, str] | None = None,
        **settings: object,
    ) -> None:
        endpoints = endpoints or (f"ipc://{folder}/executor.sock", f"ipc://{folder}/beat.sock")
        self.link = ExecutorLink(hello or executor_hello(), LinkSettings(*endpoints, **settings))
        self.model = Arithmetic()
        self.epochs: list[EpochStarted] = []
        self.error: Exception | None = None
        # Called with each plan before it runs: may wait, may raise.
        self.before_step: Callable[[step_pb2.StepPlan], None] = lambda plan: None
        # Called with each result before it leaves.
        self.change_result: Callable[[step_pb2.StepResult], step_pb2.StepResult] = lambda result: result
        self._thread = threading.Thread(target=self._run)

    def __enter__(self) -> "ExecutorThread":
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.link.stop()
        self._thread.join(LIMIT_S)
        assert not self._thread.is_alive()

    def _run(self) -> None:
        try:
            with self.link:
                while (event := self.link.receive()) is not None:
                    if isinstance(event, EpochStarted):
                        self.epochs.append(event)
                        self.model.reset()
                        continue
                    self.before_step(event)
                    self.link.send_result(self.change_result(self.model.execute(event)))
        except Exception as error:
            self.error = error


class RawContext:
    """Keeps its sockets: one that is collected before it is closed would hold up the end of its context for ever."""

    def __init__(self) -> None:
        self._context = zmq.Context()
        self._sockets: list[zmq.Socket] = []

    def dealer(self, endpoint: str) -> zmq.Socket:
        socket = self._context.socket(zmq.DEALER)
        socket.setsockopt(zmq.LINGER, 0)
        socket.connect(endpoint)
        self._sockets.append(socket)
        return socket

    def close(self) -> None:
        for socket in self._sockets:
            socket.close()
        self._context.term()


class RawDealer:
    """A peer that says what it is told to say."""

    def __init__(self, context: RawContext, endpoint: str, kind: type) -> None:
        self.socket = context.dealer(endpoint)
        self._kind = kind

    def send(self, message: object) -> None:
        self.socket.send(message if isinstance(message, bytes) else message.SerializeToString())

    def receive(self, limit_s: float = LIMIT_S) -> object:
        assert self.socket.poll(round(limit_s * 1000)), "no answer"
        return self._kind.FromString(self.socket.recv())

    def receive_body(self, body: str) -> object:
        """The next message with this body; others are passed over."""
        limit = time.monotonic() + LIMIT_S
        while True:
            message = self.receive(limit - time.monotonic())
            if message.WhichOneof("body") == body:
                return getattr(message, body)


class RawFrontend(RawDealer):
    def __init__(self, context: RawContext, folder: Path) -> None:
        super().__init__(context, f"ipc://{folder}/frontend.sock", session_pb2.ToFrontend)

    def hello(self, instance_id: int = 1, fingerprint: str = "f1", version: int = 1, oldest: int = 1) -> None:
        hello = session_pb2.FrontendHello(
            protocol_version=version, oldest_protocol_version=oldest, instance_id=instance_id, fingerprint=fingerprint
        )
        self.send(session_pb2.ToScheduler(hello=hello))


class RawExecutor(RawDealer):
    def __init__(self, context: RawContext, folder: Path) -> None:
        super().__init__(context, f"ipc://{folder}/executor.sock", step_pb2.ToExecutor)
        self.beats = RawDealer(context, f"ipc://{folder}/beat.sock", step_pb2.ToExecutor)

    def hello(
        self,
        hello: step_pb2.ExecutorHello | None = None,
        instance_id: int = 5,
        version: int = PROTOCOL_VERSION,
        known: tuple[int, int] = (0, 0),
    ) -> None:
        """`known`: boot id and number of the newest epoch it was told to begin."""
        hello = hello or executor_hello()
        hello.instance_id, hello.protocol_version, hello.oldest_protocol_version = instance_id, version, version
        hello.boot_id, hello.epoch = known
        self.send(step_pb2.FromExecutor(hello=hello))

    def beat(self, instance_id: int = 5) -> None:
        self.beats.send(step_pb2.FromExecutor(beat=step_pb2.Beat(instance_id=instance_id)))


@contextmanager
def raw_context() -> Iterator["RawContext"]:
    context = RawContext()
    try:
        yield context
    finally:
        context.close()


def wait_for(condition: Callable[[], object], what: str) -> None:
    """Gives a condition of another thread time to come true."""
    limit = time.monotonic() + LIMIT_S
    while not condition():
        assert time.monotonic() < limit, f"still waiting for {what}"
        time.sleep(0.005)
