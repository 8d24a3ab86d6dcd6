"""The scheduler's side of executors: who serves, when an epoch ends, what is dropped. The clock is an argument."""

import numpy as np
import pytest

from protos.stepwire.wire.v1 import step_pb2
from scheduler_svc.errors import EndReason, ExecutorLost, ProtocolViolation
from scheduler_svc.links import OLDEST_PROTOCOL_VERSION, PROTOCOL_VERSION
from scheduler_svc.links.budget import StepBudget
from scheduler_svc.links.executors import ExecutorLink
from scheduler_svc.links.transport import BadFrames, Wire
from tests.wire.peers import LIMIT_S, RawExecutor, executor_hello, raw_context

BOOT_ID = 0xB007


@pytest.fixture
def link(tmp_path):
    wire = Wire()
    endpoints = (f"ipc://{tmp_path}/executor.sock", f"ipc://{tmp_path}/beat.sock")
    yield ExecutorLink(wire, endpoints, BOOT_ID, BadFrames(), StepBudget(5.0))
    wire.close()


@pytest.fixture
def peer(tmp_path):
    with raw_context() as context:
        yield RawExecutor(context, tmp_path)


def hear(link: ExecutorLink, now: float = 0.0) -> list[step_pb2.StepResult]:
    assert link.socket.poll(round(LIMIT_S * 1000)), "nothing arrived"
    return list(link.receive(now))


def start(link: ExecutorLink, peer: RawExecutor, now: float = 0.0, **hello) -> step_pb2.StartEpoch:
    peer.hello(**hello)
    hear(link, now)
    link.start_epoch(link.next_executor(now), now)
    return peer.receive_body("start_epoch")


def plan(link: ExecutorLink, step_id: int, prefill: tuple[int, ...] = ()) -> step_pb2.StepPlan:
    data = np.asarray(prefill, "<i4").tobytes()
    return step_pb2.StepPlan(boot_id=BOOT_ID, epoch=link.epoch, step_id=step_id, prefill=data)


def answer(peer: RawExecutor, step_id: int, epoch: int = 1, boot_id: int = BOOT_ID) -> None:
    peer.send(step_pb2.FromExecutor(result=step_pb2.StepResult(boot_id=boot_id, epoch=epoch, step_id=step_id)))


def test_hello_starts_an_epoch_and_a_second_executor_stands_by(link, peer, tmp_path):
    begun = start(link, peer)
    assert (begun.boot_id, begun.epoch) == (BOOT_ID, 1)
    with raw_context() as context:
        second = RawExecutor(context, tmp_path)
        second.hello(instance_id=6)
        assert hear(link) == []
        refusal = second.receive_body("refusal")
        assert not refusal.fatal
        assert link.next_executor(0.0) is None
        link.end_epoch("a test", 0.0)
        assert "a test" in peer.receive_body("refusal").reason
        link.start_epoch(link.next_executor(0.0), 0.0)
        assert second.receive_body("start_epoch").epoch == 2


def test_a_standby_that_went_silent_is_not_chosen(link, peer):
    peer.hello()
    hear(link, now=10.0)
    assert link.next_executor(13.0) is not None
    assert link.next_executor(13.1) is None
    assert link.num_standby == 0


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"fingerprint": "f2"}, ("fingerprint", "'f1'", "'f2'")),
        ({"block_size": 8}, ("block_size", "4", "8")),
        ({"num_blocks": 0}, ("num_blocks",)),
        ({"num_blocks": 2**30}, ("slots",)),
    ],
)
def test_another_model_or_block_size_is_refused_naming_both(link, peer, changes, words):
    start(link, peer)
    link.end_epoch("a test", 0.0)
    peer.receive_body("refusal")
    peer.hello(executor_hello(**changes))
    assert hear(link) == []
    refusal = peer.receive_body("refusal")
    assert refusal.fatal
    assert all(word in refusal.reason for word in words), refusal.reason
    assert link.next_executor(0.0) is None


@pytest.mark.parametrize("version", [0, PROTOCOL_VERSION + 1])
def test_another_protocol_is_refused_naming_both(link, peer, version):
    peer.hello(version=version)
    assert hear(link) == []
    refusal = peer.receive_body("refusal")
    assert refusal.fatal
    assert f"versions {OLDEST_PROTOCOL_VERSION} to {PROTOCOL_VERSION}" in refusal.reason
    assert f"{version} to {version}" in refusal.reason


@pytest.mark.parametrize("version", [PROTOCOL_VERSION - 1, PROTOCOL_VERSION])
def test_an_executor_of_this_version_and_of_the_one_before_is_served(link, peer, version):
    start(link, peer, version=version)
    link.send_plan(plan(link, 1), 0.0)
    answer(peer, 1)
    assert [result.step_id for result in hear(link)] == [1]
    peer.hello(version=version, known=(BOOT_ID, 1) if version == PROTOCOL_VERSION else (0, 0))
    with pytest.raises(ExecutorLost, match="hello again") as raised:
        hear(link)
    assert raised.value.reason is EndReason.HELLO_AGAIN


@pytest.mark.parametrize("known", [(0, 0), (BOOT_ID, 1), (7, 2)])
def test_a_hello_that_crosses_the_start_of_an_epoch_ends_nothing(link, peer, known):
    start(link, peer)
    link.end_epoch("a test", 0.0)
    peer.hello(known=(BOOT_ID, 1))
    hear(link)
    link.start_epoch(link.next_executor(0.0), 0.0)
    peer.hello(known=known)
    assert hear(link) == []
    assert (link.epoch, link.num_standby) == (2, 0)
    link.send_plan(plan(link, 1), 0.0)
    answer(peer, 1, epoch=2)
    assert len(hear(link)) == 1


def test_a_hello_on_another_connection_ends_the_epoch(link, peer, tmp_path):
    start(link, peer)
    with raw_context() as context:
        RawExecutor(context, tmp_path).hello()
        with pytest.raises(ExecutorLost, match="hello again"):
            hear(link)


@pytest.mark.parametrize(
    ("kind", "reason"),
    [
        (step_pb2.FAULT_KIND_UNSPECIFIED, EndReason.FAULT),
        (step_pb2.FAULT_KIND_PLAN_REFUSED, EndReason.PLAN_REFUSED),
        (step_pb2.FAULT_KIND_NOT_FINITE, EndReason.NOT_FINITE),
        (step_pb2.FAULT_KIND_COMPUTE, EndReason.BAD_COMPUTE),
        (step_pb2.FAULT_KIND_CRASH, EndReason.CRASH),
    ],
)
def test_what_an_executor_reports_has_a_name(link, peer, kind, reason):
    start(link, peer)
    peer.send(step_pb2.FromExecutor(fault=step_pb2.Fault(boot_id=BOOT_ID, epoch=1, kind=kind)))
    with pytest.raises(ExecutorLost) as raised:
        hear(link)
    assert raised.value.reason is reason


def test_fewer_blocks_after_a_restart_are_welcome(link, peer):
    start(link, peer)
    link.end_epoch("a test", 0.0)
    peer.hello(executor_hello(num_blocks=10))
    hear(link)
    assert link.next_executor(0.0).hello.geometry.num_blocks == 10


def test_results_are_taken_once_in_order_and_of_this_epoch_only(link, peer):
    start(link, peer)
    link.send_plan(plan(link, 1), 0.0)
    link.send_plan(plan(link, 2), 0.0)
    answer(peer, 1, epoch=0)
    answer(peer, 1, boot_id=1)
    answer(peer, 1)
    answer(peer, 1)
    answer(peer, 2)
    answer(peer, 2)
    taken: list[int] = []
    while link.num_stale < 4:
        taken += [result.step_id for result in hear(link)]
    assert taken == [1, 2]
    assert link.num_stale == 4


def test_a_gap_ends_the_epoch(link, peer):
    start(link, peer)
    link.send_plan(plan(link, 1), 0.0)
    link.send_plan(plan(link, 2), 0.0)
    answer(peer, 2)
    with pytest.raises(ProtocolViolation, match="step 2, expected 1"):
        hear(link)


def test_a_result_of_the_epoch_before_is_dropped(link, peer):
    start(link, peer)
    link.send_plan(plan(link, 1), 0.0)
    link.end_epoch("a test", 0.0)
    peer.hello()
    hear(link)
    link.start_epoch(link.next_executor(0.0), 0.0)
    link.send_plan(plan(link, 1), 10.0)
    answer(peer, 1, epoch=1)
    assert hear(link) == []
    assert link.num_stale == 1
    answer(peer, 1, epoch=2)
    assert [result.epoch for result in hear(link)] == [2]


def test_another_executor_cannot_answer(link, peer, tmp_path):
    start(link, peer)
    link.send_plan(plan(link, 1), 0.0)
    with raw_context() as context:
        impostor = RawExecutor(context, tmp_path)
        answer(impostor, 1)
        assert hear(link) == []
    assert link.num_stale == 1


def test_garbage_from_a_stranger_is_dropped_and_from_the_executor_ends_the_epoch(link, peer, tmp_path):
    start(link, peer)
    with raw_context() as context:
        RawExecutor(context, tmp_path).send(b"\xff" * 100)
        assert hear(link) == []
    assert link._bad_frames.counts["executor"] == link._bad_frames.total == 1
    peer.send(b"\xff" * 100)
    with pytest.raises(ProtocolViolation):
        hear(link)


def test_a_fault_ends_the_epoch_and_a_late_one_does_not(link, peer):
    start(link, peer)
    peer.send(step_pb2.FromExecutor(fault=step_pb2.Fault(boot_id=BOOT_ID, epoch=0, message="old")))
    assert hear(link) == []
    peer.send(step_pb2.FromExecutor(fault=step_pb2.Fault(boot_id=BOOT_ID, epoch=1, step_id=4, message="device")))
    with pytest.raises(ExecutorLost, match="step 4: device"):
        hear(link)


def test_heartbeats_are_answered_and_their_absence_ends_the_epoch(link, peer):
    start(link, peer, now=100.0)
    link.check(102.9)
    peer.beat()
    assert link.beat_socket.poll(round(LIMIT_S * 1000))
    link.receive_beats(102.9)
    assert peer.beats.receive_body("beat").instance_id == BOOT_ID
    link.check(105.9)
    with pytest.raises(ExecutorLost, match="heartbeat"):
        link.check(106.0)


def test_a_stranger_gets_no_heartbeat(link, peer):
    start(link, peer)
    peer.beat(instance_id=99)
    peer.beat(instance_id=5)
    while not peer.beats.socket.poll(10):
        link.receive_beats(0.0)
    peer.beats.receive_body("beat")
    assert not peer.beats.socket.poll(50)


def test_a_lost_connection_ends_the_epoch_at_once(link, peer):
    start(link, peer)
    peer.socket.close(linger=0)
    assert link.monitor.poll(round(LIMIT_S * 1000))

    def look() -> None:
        for i in range(1000):
            link.check(i * 0.001)
            link.socket.poll(5)

    with pytest.raises(ExecutorLost, match="connection"):
        look()


def test_the_first_step_may_compile_and_later_ones_may_not(link, peer):
    start(link, peer)

    def is_lost(at: float) -> bool:
        link.active.heard_at = at
        try:
            link.check(at)
        except ExecutorLost:
            return True
        return False

    link.send_plan(plan(link, 1, prefill=(0, 100)), 0.0)
    assert not is_lost(299.9)
    assert link.is_stalled(31.0)
    assert is_lost(300.1)
    answer(peer, 1)
    assert len(hear(link, now=0.1)) == 1  # 1 ms a token
    link.send_plan(plan(link, 2, prefill=(0, 10)), 10.0)
    assert not is_lost(14.9)
    assert is_lost(15.1)
    answer(peer, 2)
    assert len(hear(link, now=10.01)) == 1
    link.send_plan(plan(link, 3, prefill=(0, 1000)), 20.0)  # expected 1 s, allowed 20 times that
    assert not is_lost(39.9)
    assert is_lost(40.1)


def test_an_executor_that_dies_on_every_first_step_is_asked_less_and_less_often(link, peer):
    now, waits = 0.0, []
    for _ in range(5):
        peer.hello()
        hear(link, now)
        asked = now
        while link.next_executor(now) is None:
            now += 0.05
            peer.hello()
            hear(link, now)
        waits.append(round(now - asked, 2))
        link.start_epoch(link.next_executor(now), now)
        link.send_plan(plan(link, 1), now)
        link.end_epoch("a test", now)
    assert waits[0] == waits[1] == 0
    assert waits == sorted(waits)
    assert waits[-1] >= 1
