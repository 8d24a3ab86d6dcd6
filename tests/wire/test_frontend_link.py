"""The scheduler's side of frontends: sessions, leases, slow readers, garbage. The clock is an argument."""

import numpy as np
import pytest

from protos.stepwire.wire.v1 import session_pb2, step_pb2
from scheduler_svc.core.contract import Cause, Finished, Output, Started
from scheduler_svc.errors import QueueFull
from scheduler_svc.links import OLDEST_PROTOCOL_VERSION, PROTOCOL_VERSION
from scheduler_svc.links import frontends as frontends_module
from scheduler_svc.links.frontends import Cancelled, FrontendLink, LoadAsked, SessionEnded, Submitted
from scheduler_svc.links.transport import BadFrames, Wire
from tests.wire.peers import LIMIT_S, RawFrontend, raw_context

BOOT_ID = 0xB007


@pytest.fixture
def link(tmp_path):
    wire = Wire()
    yield FrontendLink(wire, f"ipc://{tmp_path}/frontend.sock", BOOT_ID, BadFrames())
    wire.close()


@pytest.fixture
def context():
    with raw_context() as made:
        yield made


def hear(link: FrontendLink, now: float = 0.0) -> list[object]:
    """What the next arrivals bring."""
    assert link.socket.poll(round(LIMIT_S * 1000)), "nothing arrived"
    return list(link.receive(now))


def connect(link, context, tmp_path, now=0.0, **hello) -> RawFrontend:
    peer = RawFrontend(context, tmp_path)
    peer.hello(**hello)
    hear(link, now)
    return peer


def say(peer: RawFrontend, **body: object) -> None:
    peer.send(session_pb2.ToScheduler(**body))


def tokens(session: int, count: int, handle: int = 1) -> Output:
    return Output(
        session=np.full(count, session, np.int32),
        handle=np.full(count, handle, np.uint64),
        token=np.arange(count, dtype=np.int32),
        position=np.arange(count, dtype=np.int32),
    )


def test_hello_and_every_lease_are_answered_with_the_truth(link, context, tmp_path):
    peer = connect(link, context, tmp_path)
    welcome = peer.receive_body("welcome")
    assert (welcome.boot_id, welcome.lease_ms, welcome.executor_ready) == (BOOT_ID, 5000, False)
    link.welcome.executor_ready = True
    link.publish()
    assert peer.receive_body("welcome").executor_ready
    say(peer, lease=session_pb2.Lease())
    assert hear(link) == []
    assert peer.receive_body("welcome").executor_ready


def test_messages_become_events_in_order(link, context, tmp_path):
    peer = connect(link, context, tmp_path)
    say(peer, submit=session_pb2.Submit(request_id="a", handle=7))
    say(peer, cancel=session_pb2.Cancel(request_id="a"))
    say(peer, cancel=session_pb2.Cancel(handle=7))
    say(peer, load_query=session_pb2.LoadQuery(query_id=9))
    say(peer, goodbye=session_pb2.Goodbye())
    events: list[object] = []
    while len(events) < 5:
        events += hear(link)
    assert events == [
        Submitted(1, session_pb2.Submit(request_id="a", handle=7)),
        Cancelled(1, "a", None),
        Cancelled(1, None, 7),
        LoadAsked(1, 9),
        SessionEnded(1, "it said goodbye"),
    ]
    assert link.num_sessions == 0


@pytest.mark.parametrize(
    ("version", "oldest", "taken"),
    [
        (PROTOCOL_VERSION, OLDEST_PROTOCOL_VERSION, True),
        (PROTOCOL_VERSION - 1, PROTOCOL_VERSION - 1, True),
        (PROTOCOL_VERSION + 1, PROTOCOL_VERSION, True),
        (PROTOCOL_VERSION + 1, PROTOCOL_VERSION + 1, False),
        (OLDEST_PROTOCOL_VERSION - 1, OLDEST_PROTOCOL_VERSION - 1, False),
    ],
)
def test_protocol_versions_must_overlap(link, context, tmp_path, version, oldest, taken):
    peer = connect(link, context, tmp_path, version=version, oldest=oldest)
    if taken:
        assert peer.receive_body("welcome").protocol_version == PROTOCOL_VERSION
    else:
        refusal = peer.receive_body("refusal")
        assert refusal.fatal
        assert f"the peer {oldest} to {version}" in refusal.reason
        assert link.num_sessions == 0


def test_another_tokenizer_is_refused_naming_both(link, context, tmp_path):
    early = connect(link, context, tmp_path, instance_id=1, fingerprint="aaaa")
    early.receive_body("welcome")
    link.welcome.model.fingerprint = "bbbb"
    link.publish()
    late = connect(link, context, tmp_path, instance_id=2, fingerprint="cccc")
    for peer, theirs in ((early, "aaaa"), (late, "cccc")):
        refusal = peer.receive_body("refusal")
        assert refusal.fatal
        assert "bbbb" in refusal.reason
        assert theirs in refusal.reason
    assert list(link.expire(0.0)) == []  # the ends were told with the events of the second hello
    right = connect(link, context, tmp_path, instance_id=3, fingerprint="bbbb")
    assert right.receive_body("welcome").model.fingerprint == "bbbb"


def test_a_stranger_is_told_to_say_hello(link, context, tmp_path):
    peer = RawFrontend(context, tmp_path)
    say(peer, submit=session_pb2.Submit(request_id="a"))
    assert hear(link) == []
    refusal = peer.receive_body("refusal")
    assert not refusal.fatal
    assert "hello" in refusal.reason


def test_a_lease_runs_out_after_five_seconds_of_silence(link, context, tmp_path):
    peer = connect(link, context, tmp_path, now=100.0)
    assert list(link.expire(104.999)) == []
    say(peer, lease=session_pb2.Lease())
    hear(link, now=103.0)
    assert list(link.expire(107.999)) == []
    (ended,) = link.expire(108.0)
    assert ended.session == 1
    assert "lease" in ended.reason
    say(peer, lease=session_pb2.Lease())
    hear(link, now=109.0)
    assert not peer.receive_body("refusal").fatal


def test_hello_again_ends_the_session_before_anything_new_is_heard(link, context, tmp_path):
    peer = connect(link, context, tmp_path)
    peer.hello()
    say(peer, submit=session_pb2.Submit(request_id="a"))
    events: list[object] = []
    while len(events) < 2:
        events += hear(link)
    assert [type(event) for event in events] == [SessionEnded, Submitted]
    assert (events[0].session, events[1].session) == (1, 2)


def test_the_same_frontend_on_a_new_connection_replaces_the_old_one(link, context, tmp_path):
    connect(link, context, tmp_path, instance_id=4)
    other = RawFrontend(context, tmp_path)
    other.hello(instance_id=4)
    (ended,) = hear(link)
    assert ended.session == 1
    assert link.num_sessions == 1


def test_a_frontend_that_is_gone_loses_its_session(link, context, tmp_path):
    peer = connect(link, context, tmp_path)
    peer.receive_body("welcome")
    peer.socket.close(linger=0)
    ended: list[SessionEnded] = []
    for _ in range(2000):
        link.send_output(tokens(1, 1))
        ended += link.expire(0.0)
        if ended:
            break
        link.socket.poll(5)
    assert [e.session for e in ended] == [1]


def test_garbage_is_counted_and_dropped(link, context, tmp_path):
    peer = RawFrontend(context, tmp_path)
    garbage = [b"", b"\x00" * 7, b"\xff" * 1000, b"cos\nsystem\n(S'true'\ntR.", b"\x9a\x06\x00"]
    for frame in garbage:
        peer.send(frame)
    peer.socket.send_multipart([b"one", b"two"])
    peer.hello()
    while link.num_sessions == 0:
        hear(link)
    assert link._bad_frames.counts["frontend"] == link._bad_frames.total == len(garbage) + 1
    peer.receive_body("welcome")


def test_each_frontend_gets_its_own_tokens_in_one_frame(link, context, tmp_path):
    peers = [connect(link, context, tmp_path, instance_id=i) for i in (1, 2)]
    output = Output(
        session=np.array([2, 1, 2, 1], np.int32),
        handle=np.array([20, 10, 21, 2**63], np.uint64),
        token=np.array([5, 6, 7, 8], np.int32),
        position=np.array([0, 1, 2, 3], np.int32),
        logprobs=[(2, step_pb2.RowLogprobs(row=3)), (3, step_pb2.RowLogprobs(row=4))],
        started=[Started(2, 20, 16)],
        finished=[Finished(1, 10, Cause.STOP, 6, 2, 0, 1, 0)],
    )
    link.send_output(output)
    one, two = (peer.receive_body("tokens") for peer in peers)
    assert np.frombuffer(one.handles, "<u8").tolist() == [10, 2**63]
    assert np.frombuffer(one.token_ids, "<i4").tolist() == [6, 8]
    assert np.frombuffer(one.positions, "<i4").tolist() == [1, 3]
    assert [(e.entry, e.values.row) for e in one.logprobs] == [(1, 4)]
    assert [(f.handle, f.cause, f.stop_token_id) for f in one.finished] == [(10, session_pb2.FINISH_CAUSE_STOP, 6)]
    assert np.frombuffer(two.token_ids, "<i4").tolist() == [5, 7]
    assert [(e.entry, e.values.row) for e in two.logprobs] == [(1, 3)]
    assert [(s.handle, s.num_cached_tokens) for s in two.started] == [(20, 16)]


def test_a_slow_reader_gets_every_frame_in_order(link, context, tmp_path):
    peer = connect(link, context, tmp_path)
    peer.receive_body("welcome")
    count = 2000
    for position in range(count):
        output = tokens(1, 1)
        output.position[0] = position
        link.send_output(output)
    got: list[int] = []
    while len(got) < count:
        link.flush()
        got += np.frombuffer(peer.receive_body("tokens").positions, "<i4").tolist()
    assert got == list(range(count))
    assert not link.has_pending


def test_a_reader_that_never_reads_is_dropped_and_memory_is_bounded(link, context, tmp_path, monkeypatch):
    monkeypatch.setattr(frontends_module, "MAX_PENDING_FRAMES", 100)
    deaf = RawFrontend(context, tmp_path)
    deaf.hello(instance_id=1)
    hear(link)
    other = connect(link, context, tmp_path, instance_id=2)
    other.receive_body("welcome")
    ended: list[SessionEnded] = []
    for _ in range(20_000):
        link.send_output(tokens(1, 4096))
        ended += link.expire(0.0)
        if ended:
            break
    assert [e.session for e in ended] == [1]
    assert "does not read" in ended[0].reason
    link.send_output(tokens(2, 1))
    assert len(other.receive_body("tokens").token_ids) == 4


def test_a_rejection_carries_status_field_and_advice(link, context, tmp_path):
    peer = connect(link, context, tmp_path)
    link.reject(1, 77, QueueFull("too many", field="x", retry_after_s=1.5))
    rejected = peer.receive_body("rejected")
    assert (rejected.handle, rejected.status, rejected.message) == (77, "RESOURCE_EXHAUSTED", "too many")
    assert (rejected.field, rejected.retry_after_ms) == ("x", 1500)
