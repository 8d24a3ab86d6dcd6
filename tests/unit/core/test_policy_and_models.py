"""Order, admission and step time, each alone."""

import numpy as np
import pytest

from protos.stepwire.wire.v1 import step_pb2
from scheduler_svc.core import policy, registry
from scheduler_svc.core.admission import LengthHistogram, bucket_of, peak_tokens
from scheduler_svc.core.contract import Delivered, Geometry, Limits, Policy, Request
from scheduler_svc.core.policy import AGEING
from scheduler_svc.core.prefix_index import root
from scheduler_svc.core.scheduler import Scheduler
from scheduler_svc.core.step_time import StepTimeModel
from scheduler_svc.errors import AlreadyExists, InvalidArgument, ProtocolViolation, QueueFull
from tests.sim.hash_exec import HashExec

GEOMETRY = Geometry(64, 4, 1, 64, 16, 50)


def request(number: int, **fields: object) -> Request:
    defaults: dict[str, object] = {
        "session": 0,
        "request_id": f"r{number}",
        "handle": number * 100,
        "prompt": np.array([number % 50, 1, 2], np.int32),
        "sampling": step_pb2.Sampling(),
        "max_tokens": 1,
    }
    return Request(**(defaults | fields))  # type: ignore[arg-type]


def scheduler(**limits: object) -> tuple[Scheduler, HashExec]:
    core = Scheduler(Limits(**limits))  # type: ignore[arg-type]
    core.reset(GEOMETRY, 1, 1)
    return core, HashExec(GEOMETRY, 1, 1)


def start_order(core: Scheduler, executor: HashExec, count: int) -> list[int]:
    started: list[int] = []
    while len(started) < count:
        plan = core.plan(0.0)
        assert plan is not None
        started += [event.handle // 100 for event in core.commit(executor.run(plan), 0.0).started]
    return started


def test_a_low_class_is_overtaken_a_bounded_number_of_times() -> None:
    core, executor = scheduler(policy=Policy.PRIORITY)
    core.submit(request(0, priority=5), 0.0)
    for number in range(1, 60):
        core.submit(request(number, priority=0), 0.0)
    assert start_order(core, executor, 60).index(0) == AGEING


def test_a_tenant_that_sends_ten_times_as_much_gets_no_more() -> None:
    core, executor = scheduler(policy=Policy.FAIR)
    for number in range(50):
        core.submit(request(number, tenant="many"), 0.0)
    for number in range(50, 55):
        core.submit(request(number, tenant="few"), 0.0)
    order = start_order(core, executor, 12)
    assert 4 <= sum(number >= 50 for number in order) <= 6


def test_idleness_saves_up_no_claim() -> None:
    core, executor = scheduler(policy=Policy.FAIR)
    for number in range(20):
        core.submit(request(number, tenant="busy"), 0.0)
    start_order(core, executor, 10)
    for number in range(20, 30):
        core.submit(request(number, tenant="late"), 0.0)
    assert 3 <= sum(number >= 20 for number in start_order(core, executor, 8)) <= 5


def test_the_peak_is_the_most_that_is_ever_held() -> None:
    random = np.random.default_rng(3)
    for _ in range(200):
        count = int(random.integers(1, 8))
        held, to_come = random.integers(0, 50, count), random.integers(1, 50, count)
        naive = max(int(sum(h + t for h, r in zip(held, to_come, strict=True) if r >= t)) for t in to_come)
        assert peak_tokens(held, to_come) == naive


def test_lengths_are_learned_and_conditional() -> None:
    lengths = LengthHistogram()
    for _ in range(1000):
        lengths.learn(100)
        lengths.learn(10)
    early, late = lengths.to_come(np.array([0, 50])).tolist()
    assert 90 <= early <= 125
    assert 40 <= late <= 75
    assert lengths.to_come(np.array([100_000]))[0] > 1000
    assert bucket_of(np.array([0, 1, 3, 7])).tolist() == [0, 4, 8, 12]


def test_step_time_is_fitted() -> None:
    model = StepTimeModel()
    assert model.budget(1000, 0) is None
    random = np.random.default_rng(5)
    for _ in range(300):
        tokens, stored = int(random.integers(1, 2000)), int(random.integers(0, 100_000))
        model.learn(tokens, stored, int(500 + 10 * tokens + 0.02 * stored))
    assert model.predict_us(100, 1000) == pytest.approx(1520, rel=0.02)
    budget = model.budget(2520, 1000)
    assert budget == pytest.approx(200, abs=4)
    assert model.budget(1, 0) == 0


def test_what_is_refused_changes_nothing() -> None:
    core, _ = scheduler(max_waiting=2, max_waiting_tokens=8)
    core.submit(request(1), 0.0)
    before = core.stats()
    refusals: list[tuple[type[Exception], dict[str, object]]] = [
        (InvalidArgument, {"prompt": np.empty(0, np.int32)}),
        (InvalidArgument, {"num_choices": 0}),
        (InvalidArgument, {"num_choices": 17}),
        (InvalidArgument, {"max_tokens": -1}),
        (InvalidArgument, {"prompt": np.array([50], np.int32)}),
        (InvalidArgument, {"prompt": np.array([-1], np.int32)}),
        (InvalidArgument, {"prompt": np.zeros(64, np.int32)}),
        (InvalidArgument, {"stop_token_ids": frozenset((50,))}),
        (InvalidArgument, {"delivered": ()}),
        (InvalidArgument, {"delivered": (Delivered(np.array([99], np.int32)),)}),
        (AlreadyExists, {"request_id": "r1"}),
        (AlreadyExists, {"handle": 100}),
        (QueueFull, {"prompt": np.zeros(6, np.int32)}),
    ]
    for error, fields in refusals:
        with pytest.raises(error):
            core.submit(request(2, **fields), 0.0)
        assert core.stats() == before
        core.check()
    core.submit(request(3), 0.0)
    with pytest.raises(QueueFull):
        core.submit(request(4), 0.0)


def test_a_resume_whose_last_token_was_delivered_ends_at_once() -> None:
    core, _ = scheduler()
    token = np.array([7], np.int32)
    core.submit(request(1, max_tokens=5, stop_token_ids=frozenset((7,)), delivered=(Delivered(token),)), 0.0)
    core.submit(request(2, max_tokens=1, delivered=(Delivered(token),)), 0.0)
    core.submit(request(3, delivered=(Delivered(token, finished=True),)), 0.0)
    ends = {end.handle: end.cause.name for end in core.take_output().finished}
    assert ends == {100: "STOP", 200: "LENGTH"}
    assert core.is_idle
    core.check()


def test_without_an_executor_nothing_is_planned_and_no_result_taken() -> None:
    core = Scheduler(Limits())
    core.submit(request(1), 0.0)
    assert core.plan(0.0) is None
    with pytest.raises(ProtocolViolation):
        core.commit(step_pb2.StepResult(), 0.0)
    core.executor_lost()
    core.reset(GEOMETRY, 1, 1)
    with pytest.raises(ProtocolViolation):
        core.commit(step_pb2.StepResult(boot_id=1, epoch=1), 0.0)
    core.check()
    assert core.story("r1") == ["before any step: choice 0 was submitted with 3 tokens"]
    assert core.story("nobody") == []


def test_roots_of_tenants_and_salts_never_run_together() -> None:
    pairs = [("a", b"b"), ("ab", b""), ("", b"ab"), ("a", b""), ("", b"a"), ("", b"")]
    assert len({root(b"k", tenant, salt).tobytes() for tenant, salt in pairs}) == len(pairs)
    assert root(b"k", "a", b"").tobytes() != root(b"l", "a", b"").tobytes()


def test_the_past_fades() -> None:
    lengths = LengthHistogram()
    lengths.learn(1000, count=2000)
    for _ in range(6000):
        lengths.learn(10)
    assert lengths.to_come(np.array([0]))[0] < 20


def test_geometry_is_what_the_executor_said() -> None:
    message = step_pb2.Geometry(
        num_blocks=64, block_size=4, max_num_seqs=1, max_model_len=64, max_num_batched_tokens=16, vocab_size=50
    )
    assert Geometry.from_wire(message) == GEOMETRY


def test_what_is_over_is_forgotten_in_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(registry, "NUM_OLD_STORIES", 1)
    monkeypatch.setattr(policy, "MAX_TENANTS", 1)
    core, executor = scheduler(policy=Policy.FAIR)
    for number in range(3):
        core.submit(request(number, tenant=f"t{number}"), 0.0)
    start_order(core, executor, 3)
    assert core.story("r0") == []
    assert core.story("r2") != []
    assert len(core._queue.service) == 1
    core.check()


def test_what_happened_and_who_sits_where() -> None:
    core, executor = scheduler()
    core.submit(request(1, max_tokens=2), 0.0)
    plan = core.plan(0.0)
    assert plan is not None
    assert core.seated(plan.admit[0].row) == ("r1", 0)
    core.commit(executor.run(plan), 0.0)
    assert core.transitions("r1") == [
        (0, 0, "submitted", (3,)),
        (1, 0, "admitted to row", (plan.admit[0].row, 0, 3)),
        (1, 0, "caught up", (3,)),
    ]
    assert core.transitions("nobody") == []
    row = plan.admit[0].row
    last = core.plan(0.0)
    assert last is not None
    assert core.plan(0.0) is not None  # the row is given up before the last result is here
    core.commit(executor.run(last), 0.0)
    assert core.story("r1") == [
        "step 1:0: choice 0 was submitted with 3 tokens",
        f"step 1:1: choice 0 was admitted to row {row}: 0 of its 3 tokens were cached",
        "step 1:1: choice 0 caught up: 3 tokens are computed, it decodes",
        "step 1:2: choice 0 finished LENGTH after 2 output tokens",
        f"step 1:3: choice 0 left row {row}, its last token was planned before",
    ]


def test_a_story_goes_on_in_the_next_epoch() -> None:
    core, executor = scheduler()
    core.submit(request(1, max_tokens=9), 0.0)
    plan = core.plan(0.0)
    assert plan is not None
    core.commit(executor.run(plan), 0.0)
    assert core.plan(0.0) is not None
    core.executor_lost()
    assert core.cancel_request("r1")
    row = plan.admit[0].row
    assert core.story("r1")[3:] == [
        "step 1:3: choice 0 was at work when an executor died, 4 tokens computed; deaths so far: 1",
        f"step 1:3: choice 0 lost its executor in row {row}",
        "step 1:3: choice 0 finished CANCELLED after 1 output tokens",
    ]
