"""The door alone: how long a newcomer would wait, and who is refused for it."""

import numpy as np
import pytest

from protos.stepwire.wire.v1 import step_pb2
from scheduler_svc.core import door as door_module
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
    door = Door(Limits(policy=policy))
    for second in range(MIN_TURNS + 1):
        door.turn(request(0, tenant="others"), arrived=0.0 if second else -1.0, now=float(second))
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


def test_under_fair_a_tenant_that_is_ahead_of_its_share_waits_at_its_own_pace() -> None:
    crowd = door(Policy.FAIR, *(request(i, tenant="flood") for i in range(3)))
    for turn in range(MIN_TURNS + 1):  # every fourth turn is theirs
        for _ in range(3):
            crowd.turn(request(0, tenant="others"), arrived=0.0, now=NOW + 4.0 * turn)
        crowd.turn(request(0, tenant="flood"), arrived=0.0, now=NOW + 4.0 * turn)
    now = NOW + 4.0 * MIN_TURNS
    assert crowd.wait_s(request(12, tenant="flood"), now) == pytest.approx(3 * 4.0)
    assert crowd.wait_s(request(12, tenant="flood"), now + 10.0) == pytest.approx(3 * 4.0 + 6.0)
    # It is not the first of a class that is above them.
    assert crowd.wait_s(request(12, tenant="flood", priority=-1), now) == 0
    assert crowd.wait_s(request(12, tenant="new"), now) < 4.0


def test_the_pace_of_idle_tenants_is_forgotten_in_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(door_module, "MAX_TENANTS", 2)
    crowd = door(Policy.FAIR, request(1, tenant="waits"))
    for tenant in "abcd":
        crowd.turn(request(0, tenant=tenant), arrived=0.0, now=NOW)
    assert set(crowd._pace_of_tenant) <= {"waits", "c", "d"}
    assert "waits" in crowd._pace_of_tenant


def test_nothing_is_predicted_from_too_few_turns_or_from_idleness() -> None:
    idle = Door(Limits())
    for second in range(100):  # each arrives after the turn before: nobody waited
        idle.turn(request(0), arrived=second - 0.5, now=float(second))
    idle.enter(RequestState(request(1), 0, np.zeros(2, np.uint64), 0.0))
    assert idle.wait_s(request(2), 100.0) == 0
    assert idle.retry_after_s(1) == pytest.approx(0.1)


def test_the_past_fades() -> None:
    crowd = door(Policy.FCFS, request(1))
    for i in range(1000):
        crowd.turn(request(0), arrived=0.0, now=8.0 + i / 10)
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
    with pytest.raises(QueueFull, match=r"its turn would come in 6.0 s, max_wait is 5 s") as refusal:
        core.submit(request(103), now)
    assert refusal.value.retry_after_s == pytest.approx(1.0)
    core.check()


def refusals(core: Scheduler, asked: list[Request], now: float = 0.0) -> list[str]:
    """What each was told; empty: it was let in."""
    told = [refusal_of(core, one, now) for one in asked]
    core.check()
    return told


def refusal_of(core: Scheduler, one: Request, now: float) -> str:
    try:
        core.submit(one, now)
    except QueueFull as refusal:
        return refusal.message if 0.1 <= (refusal.retry_after_s or 0) <= 60 else "no advice"
    return ""


def test_a_tenant_may_queue_so_many_requests_and_others_do_not_notice() -> None:
    core = Scheduler(Limits(max_waiting=4, max_waiting_per_tenant=2))
    asked = [request(i, tenant=tenant) for i, tenant in enumerate("aaabbbcc")]
    own, all_ = "the tenant's queue is full: max_waiting_per_tenant is 2 requests", ""
    full = "the queue is full: max_waiting is 4 requests"
    assert refusals(core, asked) == [all_, all_, own, all_, all_, full, full, full]
    core.cancel_request("r0")
    assert refusals(core, [request(8, tenant="b"), request(9, tenant="a"), request(10, tenant="a")]) == [own, "", full]


def test_a_tenant_may_queue_so_many_tokens_but_one_request_at_least() -> None:
    core = Scheduler(Limits(max_waiting_tokens=9, max_waiting_tokens_per_tenant=6))  # each has 3
    asked = [request(i, tenant=tenant) for i, tenant in enumerate("aaabb")]
    assert refusals(core, asked) == [
        *("", "", "the tenant's queue is full: max_waiting_tokens_per_tenant is 6 tokens"),
        *("", "the queue is full: max_waiting_tokens is 9 tokens"),
    ]
    alone = Scheduler(Limits(max_waiting_tokens=2, max_waiting_tokens_per_tenant=1))
    assert refusals(alone, [request(1)]) == [""]


def test_a_tenant_is_told_to_come_back_when_one_of_its_own_has_had_its_turn() -> None:
    crowd = door(
        Policy.FCFS, *(request(i, tenant="many") for i in range(8)), *(request(9 + i, tenant="few") for i in (0, 1))
    )
    limits = Limits(max_waiting_per_tenant=2)
    crowd._limits = limits
    with pytest.raises(QueueFull) as refusal:
        crowd.check(request(20, tenant="few"), NOW)
    assert refusal.value.retry_after_s == pytest.approx(10 / 2)  # a turn a second, one in five is theirs
    with pytest.raises(QueueFull) as refusal:
        crowd.check(request(20, tenant="many"), NOW)
    assert refusal.value.retry_after_s == pytest.approx(7 * 10 / 8)  # seven too many


def test_deadlines_pass_while_the_pipeline_is_full() -> None:
    geometry = Geometry(64, 4, 1, 64, 16, 50)
    core = Scheduler(Limits(pipeline_depth=1))
    core.reset(geometry, 1, 1)
    core.submit(request(1, max_tokens=9), 0.0)
    core.submit(request(2, deadline=3.0), 0.0)
    assert core.plan(0.0) is not None
    core.expire(2.9)
    assert core.take_output().finished == []
    core.expire(3.0)
    assert [end.cause.name for end in core.take_output().finished] == ["EXPIRED"]
    core.check()
