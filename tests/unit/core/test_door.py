"""The door alone: how long a newcomer would wait, and who is refused for it."""

import numpy as np
import pytest

from protos.stepwire.wire.v1 import step_pb2
from scheduler_svc.core.contract import Geometry, Limits, Policy, Request
from scheduler_svc.core.door import MIN_TURNS, Door
from scheduler_svc.core.scheduler import Scheduler
from scheduler_svc.core.sequence import RequestState
from scheduler_svc.errors import QueueFull
from tests.sim.hash_exec import HashExec


def request(number: int, **fields: object) -> Request:
    defaults: dict[str, object] = {"session": 0, "request_id": f"r{number}", "handle": number, "max_tokens": 1}
    prompt, sampling = np.array([number % 50, 1, 2], np.int32), step_pb2.Sampling()
    return Request(**(defaults | fields), prompt=prompt, sampling=sampling)  # type: ignore[arg-type]


NOW = float(MIN_TURNS)


def door(policy: Policy, *waiting: Request) -> Door:
    """One turn a second."""
    door = Door(policy)
    for second in range(MIN_TURNS + 1):
        door.turn(arrived=0.0 if second else -1.0, now=float(second))
    for one in waiting:
        door.enter(RequestState(one, 0, np.zeros(2, np.uint64), 0.0))
    return door


def test_under_fcfs_everybody_is_ahead() -> None:
    assert door(Policy.FCFS, request(1, priority=5), request(2)).wait_s(request(3), NOW) == 2


def test_under_priority_only_those_of_the_class_and_above_are_ahead() -> None:
    crowd = door(Policy.PRIORITY, request(1, priority=5), request(2, priority=0), request(3, priority=-1))
    assert [crowd.wait_s(request(9, priority=priority), NOW) for priority in (-2, -1, 0, 5)] == [0, 1, 2, 3]


def test_under_fair_tenants_take_turns() -> None:
    crowd = door(Policy.FAIR, *(request(i, tenant="many") for i in range(10)), request(11, tenant="few"))
    assert crowd.wait_s(request(12, tenant="many"), NOW) == 10 + 1
    assert crowd.wait_s(request(12, tenant="few"), NOW) == 1 + 2
    assert crowd.wait_s(request(12, tenant="new"), NOW) == 1 + 1


def test_nothing_is_predicted_from_too_few_turns_or_from_idleness() -> None:
    idle = Door(Policy.FCFS)
    for second in range(100):  # each arrives after the turn before: nobody waited
        idle.turn(arrived=second - 0.5, now=float(second))
    idle.enter(RequestState(request(1), 0, np.zeros(2, np.uint64), 0.0))
    assert idle.wait_s(request(2), 100.0) == 0
    assert idle.retry_after_s(1) == pytest.approx(0.1)


def test_the_past_fades() -> None:
    crowd = door(Policy.FCFS, request(1))
    for i in range(1000):
        crowd.turn(arrived=0.0, now=8.0 + i / 10)
    assert crowd.wait_s(request(2), 8.0 + 99.9) == pytest.approx(0.1, rel=0.05)


def test_a_turn_that_is_overdue_counts() -> None:
    crowd = door(Policy.FCFS, request(1))
    assert crowd.wait_s(request(2), NOW + 1.0) == pytest.approx(1.0)
    assert crowd.wait_s(request(2), NOW + 4.0) == pytest.approx(1.0 + 3.0)


def test_leaving_makes_room() -> None:
    crowd = door(Policy.FAIR)
    states = [RequestState(request(i, tenant="many"), i, np.zeros(2, np.uint64), 0.0) for i in range(2)]
    for state in states:
        crowd.enter(state)
    assert (crowd.num_waiting, crowd.num_waiting_tokens) == (2, 6)
    for state in states:
        crowd.leave(state)
    assert (crowd.num_waiting, crowd.num_waiting_tokens, crowd.wait_s(request(5), NOW)) == (0, 0, 0)


def test_whose_turn_would_come_too_late_is_refused_and_told_when() -> None:
    geometry = Geometry(64, 4, 1, 64, 16, 50)
    core = Scheduler(Limits(max_wait_s=5.0, pipeline_depth=1))
    core.reset(geometry, 1, 1)
    executor = HashExec(geometry, 1, 1)
    for number in range(12):
        core.submit(request(number), 0.0)
    now = 0.0
    for _ in range(9):  # one request a second starts
        now += 1.0
        plan = core.plan(now)
        assert plan is not None
        core.commit(executor.run(plan), now)
    for number in range(100, 103):
        core.submit(request(number), now)
    with pytest.raises(QueueFull, match=r"its turn would come in 6.0 s, the limit is 5.0 s") as refusal:
        core.submit(request(103), now)
    assert refusal.value.retry_after_s == pytest.approx(1.0)
    core.check()
