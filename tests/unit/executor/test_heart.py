"""A device that hangs cannot be noticed by the thread that waits for it: the heartbeat's thread ends the process."""

import threading
import time

import pytest
import zmq

from executor_svc.link import EXIT_HUNG, LATE_S, Heart, LinkSettings
from protos.stepwire.wire.v1 import step_pb2

LIMIT_S = 60.0
# Longer than a busy machine stands still. What takes longer still is written into the heart, not waited for.
HUNG_S = 600.0


@pytest.fixture
def scheduler(tmp_path):
    """The scheduler's end of the heartbeat, and a context for the executor's."""
    with zmq.Context() as context, context.socket(zmq.ROUTER) as socket:
        socket.linger = 0
        endpoint = f"ipc://{tmp_path}/beat.sock"
        socket.bind(endpoint)
        yield context, socket, LinkSettings("", endpoint, hung_after_s=HUNG_S)


def hear(socket: zmq.Socket) -> tuple[bytes, step_pb2.Beat]:
    assert socket.poll(round(LIMIT_S * 1000))
    identity, frame = socket.recv_multipart()
    return identity, step_pb2.FromExecutor.FromString(frame).beat


def age(heart: Heart, by_s: float, *, heard: bool = False) -> None:
    """As if so much time had passed: since the step began and, unless `heard`, since the scheduler was last heard."""
    newest, running, began = heart._steps
    heart._steps = (newest, running, None if began is None else began - by_s)
    if not heard:
        heart.last_heard -= by_s


def test_busy_and_unheard_ends_the_process(scheduler):
    context, socket, settings = scheduler
    ended, statuses = threading.Event(), []
    heart = Heart(context, settings, 7, lambda status: (statuses.append(status), ended.set()))
    heart.start()
    heart.step_began(3)
    assert hear(socket)[1].instance_id == 7
    assert not ended.is_set()
    age(heart, 2 * HUNG_S)
    assert ended.wait(LIMIT_S)
    assert statuses == [EXIT_HUNG]
    heart.stop()


def test_idle_and_unheard_or_busy_and_heard_goes_on(scheduler):
    context, socket, settings = scheduler
    statuses: list[int] = []
    heart = Heart(context, settings, 7, statuses.append)
    heart.start()
    age(heart, 2 * HUNG_S)  # idle, no answer
    for _ in range(3):  # each beat after the first follows a look at the age
        identity, beat = hear(socket)
    assert not statuses
    answer = step_pb2.ToExecutor(beat=step_pb2.Beat(instance_id=9))
    socket.send_multipart((identity, answer.SerializeToString()))
    limit = time.monotonic() + LIMIT_S
    while heart.scheduler_boot_id != 9:
        assert time.monotonic() < limit
        time.sleep(0.01)
    heart.step_began(4)
    age(heart, 2 * HUNG_S, heard=True)  # busy, answered
    for _ in range(3):
        identity, beat = hear(socket)
        assert beat.instance_id == 7
    assert beat.busy_ms > HUNG_S * 1000
    heart.step_ended()
    assert not statuses
    assert heart.scheduler_boot_id == 9
    heart.stop()


def test_a_pause_of_its_own_is_not_the_schedulers_silence(scheduler):
    """Neither before the thread that listens has run again, nor after."""
    context, _, settings = scheduler
    heart = Heart(context, settings, 7)
    began = heart.last_heard
    assert heart.silent_s(began + 0.9) == pytest.approx(0.9)
    assert heart.silent_s(began + 500.0) <= LATE_S
    heart._ran_at -= 500.0
    heart.last_heard -= 501.0
    heart._run_on()
    assert 1.0 <= time.monotonic() - heart.last_heard < 500.0
    heart.last_heard -= 500.0
    assert heart.silent_s(time.monotonic()) > 500.0


def test_a_step_behind_one_that_ended_is_under_way(scheduler):
    """Two steps launched, one answered: what hangs then is the second, and its beats say so."""
    context, socket, settings = scheduler
    ended, statuses = threading.Event(), []
    heart = Heart(context, settings, 7, lambda status: (statuses.append(status), ended.set()))
    heart.step_began(3)
    heart.step_began(4)
    heart.step_ended()
    heart.start()
    assert hear(socket)[1].step_id == 4
    age(heart, 2 * HUNG_S)
    assert ended.wait(LIMIT_S)
    heart.stop()
    idle = Heart(context, settings, 8, statuses.append)
    for begin in (5, 6):
        idle.step_began(begin)
    for _ in range(2):
        idle.step_ended()
    idle.start()
    while (beat := hear(socket)[1]).instance_id != 8:
        pass
    assert (beat.step_id, beat.busy_ms) == (6, 0)
    idle.stop()
    assert statuses == [EXIT_HUNG]
