"""The executor's end of the wire against a scheduler that says what it is told to say."""

import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import zmq

from executor_svc.errors import Refused, StartupError
from executor_svc.link import ExecutorLink, LinkClosed, LinkSettings
from executor_svc.protocol import (
    OLDEST_PROTOCOL_VERSION,
    PROTOCOL_VERSION,
    EpochStarted,
    NotServed,
    ProtocolState,
    Violation,
)
from protos.stepwire.wire.v1 import step_pb2
from tests.wire.peers import LIMIT_S, executor_hello, wait_for

BOOT = 11
# For links that are not tested for it: longer than any test.
FENCE_S = 3600.0


class RawScheduler:
    """Two ROUTERs; answers heartbeats only when told to."""

    def __init__(self, folder: Path) -> None:
        self._context = zmq.Context()
        self.socket = self._bind(f"ipc://{folder}/executor.sock")
        self.beat_socket = self._bind(f"ipc://{folder}/beat.sock")
        self.identity = b""

    def _bind(self, endpoint: str) -> zmq.Socket:
        socket = self._context.socket(zmq.ROUTER)
        socket.setsockopt(zmq.LINGER, 0)
        socket.bind(endpoint)
        return socket

    def receive(self) -> step_pb2.FromExecutor:
        assert self.socket.poll(round(LIMIT_S * 1000)), "the executor says nothing"
        self.identity, frame = self.socket.recv_multipart()
        return step_pb2.FromExecutor.FromString(frame)

    def send(self, frame: bytes | None = None, **body: object) -> None:
        frame = step_pb2.ToExecutor(**body).SerializeToString() if frame is None else frame
        self.socket.send_multipart([self.identity, frame])

    def start_epoch(self, epoch: int, boot_id: int = BOOT) -> None:
        self.send(start_epoch=step_pb2.StartEpoch(boot_id=boot_id, epoch=epoch))

    def beat(self, boot_id: int = BOOT) -> step_pb2.Beat:
        """Answers the next heartbeat, and returns it."""
        assert self.beat_socket.poll(round(LIMIT_S * 1000))
        identity, frame = self.beat_socket.recv_multipart()
        answer = step_pb2.ToExecutor(beat=step_pb2.Beat(instance_id=boot_id))
        self.beat_socket.send_multipart([identity, answer.SerializeToString()])
        return step_pb2.FromExecutor.FromString(frame).beat

    def close(self) -> None:
        self.socket.close()
        self.beat_socket.close()
        self._context.term()


@pytest.fixture
def scheduler(tmp_path) -> Iterator[RawScheduler]:
    made = RawScheduler(tmp_path)
    yield made
    made.close()


def link_to(folder: Path, **settings: object) -> ExecutorLink:
    endpoints = (f"ipc://{folder}/executor.sock", f"ipc://{folder}/beat.sock")
    return ExecutorLink(executor_hello(), LinkSettings(*endpoints, **{"fence_after_s": FENCE_S, **settings}))


@pytest.fixture
def link(tmp_path, scheduler) -> Iterator[ExecutorLink]:
    with link_to(tmp_path) as made:
        yield made


def hear(link: ExecutorLink, scheduler: RawScheduler) -> step_pb2.FromExecutor:
    """What the executor says while it waits for something to do."""
    limit = time.monotonic() + LIMIT_S
    while time.monotonic() < limit:
        assert link.receive(timeout_s=0.02) is None
        if scheduler.socket.poll(0):
            return scheduler.receive()
    raise AssertionError("the executor says nothing")


def serve(link: ExecutorLink, scheduler: RawScheduler, epoch: int = 1, boot_id: int = BOOT) -> None:
    assert hear(link, scheduler).WhichOneof("body") == "hello"
    scheduler.start_epoch(epoch, boot_id)
    assert link.receive(LIMIT_S) == EpochStarted(boot_id, epoch)


def plan(step_id: int, epoch: int = 1, boot_id: int = BOOT) -> step_pb2.StepPlan:
    return step_pb2.StepPlan(boot_id=boot_id, epoch=epoch, step_id=step_id)


def result(step_id: int, epoch: int = 1) -> step_pb2.StepResult:
    return step_pb2.StepResult(boot_id=BOOT, epoch=epoch, step_id=step_id)


def test_hello_is_said_until_an_epoch_begins(link, scheduler):
    hello = hear(link, scheduler).hello
    assert (hello.protocol_version, hello.oldest_protocol_version) == (PROTOCOL_VERSION, OLDEST_PROTOCOL_VERSION)
    assert (hello.instance_id, hello.boot_id, hello.epoch) == (link.instance_id, 0, 0)
    assert hello.geometry.block_size == 4
    assert hear(link, scheduler).WhichOneof("body") == "hello"
    serve(link, scheduler)
    scheduler.send(plan=plan(1))
    scheduler.send(plan=plan(2))
    assert [link.receive(LIMIT_S).step_id, link.receive(LIMIT_S).step_id] == [1, 2]
    link.send_result(result(1))
    assert scheduler.receive().result.step_id == 1


@pytest.mark.parametrize("bad", [plan(2), plan(0), plan(1, epoch=2), plan(1, boot_id=12)])
def test_a_plan_that_is_not_the_next_one_is_a_fault_and_never_runs(link, scheduler, bad):
    serve(link, scheduler)
    scheduler.send(plan=bad)
    fault = hear(link, scheduler).fault
    assert (fault.boot_id, fault.epoch, fault.step_id) == (BOOT, 1, 0)
    assert "expected" in fault.message
    assert fault.kind == step_pb2.FAULT_KIND_PLAN_REFUSED
    scheduler.send(plan=plan(1))  # sent before the fault was read: void
    serve(link, scheduler, epoch=2)


def test_results_of_an_epoch_that_is_over_are_not_sent(link, scheduler):
    serve(link, scheduler)
    scheduler.send(plan=plan(1))
    assert link.receive(LIMIT_S).step_id == 1
    scheduler.send(refusal=step_pb2.Refusal(reason="epoch 1 is over"))
    wait_for(lambda: link.receive(0.02) is None and not link.serving, "the end of the epoch")
    link.send_result(result(1))
    serve(link, scheduler, epoch=2)
    link.send_result(result(1))
    assert link.receive(0.05) is None
    assert not scheduler.socket.poll(50)


def test_an_old_start_is_ignored_and_a_newer_one_obeyed(link, scheduler):
    serve(link, scheduler, epoch=4)
    scheduler.start_epoch(4)
    scheduler.start_epoch(3)
    scheduler.start_epoch(5)
    assert link.receive(LIMIT_S) == EpochStarted(BOOT, 5)


def test_garbage_is_counted_and_dropped(link, scheduler):
    serve(link, scheduler)
    for frame in (b"", b"\xff" * 100, b"\0"):
        scheduler.send(frame)
    scheduler.send(plan=plan(1))
    assert link.receive(LIMIT_S).step_id == 1
    assert link.num_bad_frames == 3


def test_a_fatal_refusal_ends_the_executor(link, scheduler):
    hear(link, scheduler)
    scheduler.send(refusal=step_pb2.Refusal(reason="model mismatch: a, b", fatal=True))
    with pytest.raises(Refused, match="model mismatch: a, b"):
        link.receive(LIMIT_S)


def test_heartbeats_tell_the_step_and_how_long_it_takes(link, scheduler):
    serve(link, scheduler)
    assert scheduler.beat().busy_ms == 0
    scheduler.send(plan=plan(1))
    link.receive(LIMIT_S)
    beats = []
    wait_for(lambda: beats.append(scheduler.beat()) or beats[-1].busy_ms, "a busy heartbeat")
    assert (beats[-1].instance_id, beats[-1].step_id) == (link.instance_id, 1)
    link.send_result(result(1))
    wait_for(lambda: scheduler.beat().busy_ms == 0, "an idle heartbeat")


def test_another_scheduler_answering_heartbeats_ends_the_epoch(link, scheduler):
    serve(link, scheduler)
    scheduler.beat(boot_id=99)
    assert hear(link, scheduler).WhichOneof("body") == "hello"
    assert not link.serving
    scheduler.start_epoch(1, boot_id=99)
    assert link.receive(LIMIT_S) == EpochStarted(99, 1)


def test_silence_ends_the_epoch(tmp_path, scheduler):
    with link_to(tmp_path, fence_after_s=0.3) as link:
        serve(link, scheduler)
        assert hear(link, scheduler).WhichOneof("body") == "hello"
        assert not link.serving
        serve(link, scheduler, epoch=2)


def test_a_fenced_executor_runs_no_plan_that_waits_and_sends_no_result(link, scheduler):
    serve(link, scheduler)
    scheduler.send(plan=plan(1))
    assert link.receive(LIMIT_S).step_id == 1
    scheduler.send(plan=plan(2))
    wait_for(lambda: link._socket.poll(0), "the second plan")
    link._heart.last_heard -= 2 * FENCE_S
    assert hear(link, scheduler).WhichOneof("body") == "hello"
    link.send_result(result(1))
    serve(link, scheduler, epoch=2)


def test_hello_names_the_epoch_it_has_known(link, scheduler):
    serve(link, scheduler, epoch=7)
    scheduler.send(refusal=step_pb2.Refusal(reason="epoch 7 is over"))
    hello = hear(link, scheduler).hello
    assert (hello.boot_id, hello.epoch) == (BOOT, 7)


def test_a_lost_connection_ends_the_epoch_and_hello_follows_on_the_next(tmp_path):
    first = RawScheduler(tmp_path)
    with link_to(tmp_path) as link:
        serve(link, first)
        first.close()
        wait_for(lambda: link.receive(0.02) is None and not link.serving, "the end of the epoch")
        second = RawScheduler(tmp_path)
        serve(link, second, epoch=1, boot_id=12)
        second.close()


def test_a_dead_parent_ends_the_process(tmp_path, scheduler):
    with link_to(tmp_path, parent_pid=-1) as link, pytest.raises(LinkClosed, match="parent"):
        link.receive(LIMIT_S)


def test_stop_ends_receive(link):
    link.stop()
    assert link.receive() is None


def test_plain_tcp_beyond_this_host_is_refused():
    with pytest.raises(StartupError, match="--insecure-wire"):
        ExecutorLink(executor_hello(), LinkSettings("tcp://scheduler:1", "tcp://scheduler:2"))


def test_protocol_state_alone():
    state = ProtocolState()
    assert state.on_message(step_pb2.ToExecutor(plan=plan(1))) is None
    start = step_pb2.ToExecutor(start_epoch=step_pb2.StartEpoch(boot_id=BOOT, epoch=1))
    assert state.on_message(start) == EpochStarted(BOOT, 1)
    assert state.accepts(result(1))
    assert not state.accepts(result(1, epoch=2))
    refusal = step_pb2.ToExecutor(refusal=step_pb2.Refusal(reason="standby"))
    assert state.on_message(refusal) == NotServed("standby", False)
    assert isinstance(state.on_message(step_pb2.ToExecutor(plan=plan(3))), Violation)
    assert not state.accepts(result(1))
    assert not state.fence()
