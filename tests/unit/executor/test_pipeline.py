"""The worker's pipeline on a device that answers later than it is asked, as CUDA does: plan k+1 is launched before the
result of step k is read, and everything that leaves is what a worker without a pipeline sends.
"""

import random

import numpy as np
import pytest

from executor_svc.backends.base import StepOutput
from executor_svc.backends.simulated import SimulatedBackend
from executor_svc.batch import ForwardBatch
from executor_svc.protocol import EpochStarted
from executor_svc.rows import NEWEST, RowTable
from executor_svc.worker import DEPTH, Worker
from protos.stepwire.wire.v1 import step_pb2
from tests.unit.executor.plans import ToyScheduler, admit, geometry, greedy, ints, plan
from tests.unit.executor.test_worker import tokens_of, toy_sequence

SEAT = plan(1, admit=[admit(0, [5, 6], [1, 2])], prefill=ints(0, 2))


class Later:
    """A launched step. The device has computed it; the host does not see that before it looks `glances` times."""

    def __init__(self, device: "LateDevice", name: int, outcome: StepOutput | Exception, glances: int):
        self.device, self.name, self.outcome, self.glances = device, name, outcome, glances

    def is_done(self) -> bool:
        self.glances -= 1
        return self.glances < 0

    def wait(self) -> StepOutput:
        self.device.log.append(("wait", self.name))
        if isinstance(self.outcome, Exception):
            raise self.outcome
        return self.outcome


class LateDevice(SimulatedBackend):
    """Keeps the newest token of each row, so that a step may be launched before the host has seen the last one.

    `breaks` maps the number of a launch, from 0, to the tokens or the error that it ends in.
    """

    def __init__(self, glances: int = 1000, breaks: dict[int, int | Exception] | None = None, **changes: int):
        super().__init__(geometry(**changes), step_pb2.ModelIdentity())
        self.glances, self.breaks = glances, breaks or {}
        self.log: list[tuple[str, int]] = []
        self.num_launched = 0
        self.newest = np.zeros(self.geometry.max_num_seqs, np.int32)

    def launch(self, batch: ForwardBatch) -> Later:
        name, self.num_launched = self.num_launched, self.num_launched + 1
        self.log.append(("launch", name))
        owner = np.repeat(batch.rows, np.diff(batch.cu_seqlens))
        batch.token_ids[:] = np.where(batch.token_ids == NEWEST, self.newest[owner], batch.token_ids)
        outcome: StepOutput | Exception = self.run(batch)
        broken = self.breaks.get(name)
        if isinstance(broken, Exception):
            outcome = broken
        else:
            if broken is not None:
                outcome.token_ids[:] = broken
            self.newest[batch.sampling.rows] = outcome.token_ids
        return Later(self, name, outcome, self.glances)


class Wire:
    """Lets DEPTH plans be under way, as the scheduler does; `patient` keeps the second one until the first is read."""

    def __init__(self, events: list[object], *, patient: bool = False):
        self.events, self.patient = list(events), patient
        self.under_way = 0
        self.most_under_way = 0
        self.sent: list[step_pb2.StepResult | str] = []
        self.kinds: list[int] = []
        self.num_dropped = 0
        self.serving = False

    def receive(self, timeout_s: float | None = None) -> object | None:
        while self.events:
            if isinstance(self.events[0], EpochStarted):
                self.serving = True
                return self.events.pop(0)
            if not self.serving:
                self.events.pop(0)
            elif self.under_way < (1 if self.patient else DEPTH):
                self.under_way += 1
                self.most_under_way = max(self.most_under_way, self.under_way)
                return self.events.pop(0)
            else:
                assert timeout_s is not None, "the worker waits for a plan that comes after a result it holds"
                return None
        return None

    def send_result(self, result: step_pb2.StepResult) -> None:
        self.under_way -= 1
        copy = step_pb2.StepResult.FromString(result.SerializeToString())
        copy.forward_us = 0
        self.sent.append(copy)

    def drop_result(self) -> None:
        self.under_way -= 1
        self.num_dropped += 1

    def fault(self, message: str, kind: int) -> None:
        self.under_way -= 1
        self.serving = False
        self.sent.append(message)
        self.kinds.append(kind)


def random_life(seed: int, sampling: dict | None = None) -> tuple[dict, list[object], list[step_pb2.StepResult]]:
    """(geometry, plans, the results of a worker that looks at one plan at a time)."""
    rng = random.Random(seed)
    shape = {"num_blocks": 320, "block_size": rng.choice([1, 4, 16]), "max_num_batched_tokens": 24}
    sequences = [toy_sequence(rng, seed * 100 + i) for i in range(12)]
    for sequence in sequences[::3]:
        sequence.sampling.MergeFrom(step_pb2.Sampling(**(sampling or {})))
    worker = Worker(SimulatedBackend(geometry(**shape), step_pb2.ModelIdentity()))
    scheduler = ToyScheduler(rng, geometry(**shape), sequences)
    plans, results = [], []
    while scheduler.waiting or scheduler.running:
        message, sampled = scheduler.plan()
        result = worker.execute(message)
        scheduler.commit(sampled, tokens_of(result))
        result.forward_us = 0
        plans.append(message)
        results.append(result)
    return shape, plans, results


@pytest.mark.parametrize("glances", [0, 1, 1000])
@pytest.mark.parametrize("seed", range(4))
def test_a_pipeline_changes_nothing_that_leaves(seed: int, glances: int) -> None:
    shape, plans, results = random_life(seed)
    device, wire = LateDevice(glances, **shape), Wire([EpochStarted(1, 1), *plans])
    Worker(device).serve(wire)
    assert wire.sent == results, f"seed {seed}"
    assert wire.most_under_way == (DEPTH if glances else 1)


def test_a_step_is_launched_before_the_last_one_is_read() -> None:
    events = [EpochStarted(1, 1), SEAT, plan(2), plan(3)]
    device = LateDevice()
    Worker(device).serve(Wire(events))
    assert device.log == [("launch", 0), ("launch", 1), ("wait", 0), ("launch", 2), ("wait", 1), ("wait", 2)]
    device, wire = LateDevice(glances=3), Wire(events, patient=True)
    Worker(device).serve(wire)
    assert device.log == [(what, step) for step in range(3) for what in ("launch", "wait")]


@pytest.mark.parametrize("seed", range(3))
def test_rows_whose_next_draw_depends_on_the_last_one_wait_for_it(seed: int) -> None:
    """Every third sequence may not repeat an odd token: only a host that knows the last token can tell."""
    pairs = [value for token in range(1, 400, 2) for value in (2, token, (token * 7) % 1000)]
    bad_words = {"bad_words": ints(*pairs)}
    shape, plans, results = random_life(seed, bad_words)
    device, wire = LateDevice(**shape), Wire([EpochStarted(1, 1), *plans])
    Worker(device).serve(wire)
    assert wire.sent == results, f"seed {seed}"


def test_only_rows_with_changing_masks_wait() -> None:
    for sampling, waits in ((greedy(bad_words=ints(1, 3)), True), (greedy(allowed_token_ids=ints(1, 3)), False)):
        device = LateDevice()
        seat = plan(1, admit=[admit(0, [5, 6], [1], sampling=sampling)], prefill=ints(0, 2))
        Worker(device).serve(Wire([EpochStarted(1, 1), seat, plan(2)]))
        assert (device.log.index(("wait", 0)) < device.log.index(("launch", 1))) == waits


def four_steps() -> list:
    """Of one row, in an epoch of their own."""
    seat = plan(1, admit=[admit(0, [5, 6], [1, 2])], prefill=ints(0, 2))
    return [EpochStarted(1, 1), seat, plan(2), plan(3), plan(4)]


def test_a_fault_is_told_after_the_steps_before_it_and_those_behind_it_are_dropped() -> None:
    life = four_steps()
    clean = Wire(life)
    Worker(LateDevice()).serve(clean)
    again = [EpochStarted(1, 2), *life[1:]]
    device, wire = LateDevice(breaks={1: -1}), Wire([*life, *again])
    Worker(device).serve(wire)
    assert wire.sent == [clean.sent[0], "the model's logits are not finite", *clean.sent]
    assert wire.kinds == [step_pb2.FAULT_KIND_NOT_FINITE]
    assert (wire.num_dropped, wire.under_way) == (1, 0)
    # Step 3 was launched behind the broken one and is waited for before the next life's first launch.
    assert device.log.index(("wait", 2)) < device.log.index(("launch", 3))


def test_an_error_of_the_device_is_raised_at_its_step_and_ends_the_process() -> None:
    life = four_steps()
    device, wire = LateDevice(breaks={1: RuntimeError("the device is gone")}), Wire(life)
    with pytest.raises(RuntimeError, match="the device is gone"):
        Worker(device).serve(wire)
    assert [type(sent) for sent in wire.sent] == [step_pb2.StepResult, str]
    assert (wire.kinds, wire.sent[1]) == ([step_pb2.FAULT_KIND_CRASH], "the process ends: RuntimeError")
    assert device.num_launched == 3


def test_a_refused_plan_drops_the_step_before_it() -> None:
    life = [EpochStarted(1, 1), SEAT, plan(2, release=ints(7))]
    wire = Wire(life)
    Worker(LateDevice()).serve(wire)
    assert (wire.sent, wire.num_dropped, wire.under_way) == (["release: a row is not live"], 1, 0)


def test_what_runs_when_another_epoch_begins_is_nobodys() -> None:
    other = plan(1, admit=[admit(0, [8, 9, 7], [2, 3])], prefill=ints(0, 3))
    alone, device = Wire([EpochStarted(1, 2), other, plan(2)]), LateDevice(breaks={0: -1})
    Worker(LateDevice()).serve(alone)
    wire = Wire([EpochStarted(1, 1), SEAT, EpochStarted(1, 2), other, plan(2)])
    Worker(device).serve(wire)
    assert (wire.sent, wire.num_dropped) == (alone.sent, 1)


def test_a_token_of_someone_who_left_belongs_nowhere() -> None:
    rows = RowTable(geometry())
    seat = plan(1, admit=[admit(3, [5, 6], [1])], prefill=ints(3, 2))
    due = rows.advance(rows.apply(seat))
    assert rows.tokens[3, 2] == NEWEST
    follow = plan(2, release=ints(3), admit=[admit(3, [8, 9, 7, 4], [2])], prefill=ints(3, 4))
    later = rows.advance(rows.apply(follow))
    rows.settle(due, np.array([77], np.int32))
    assert rows.tokens[3, :4].tolist() == [8, 9, 7, 4]
    rows.settle(later, np.array([78], np.int32))
    assert rows.tokens[3, :5].tolist() == [8, 9, 7, 4, 78]
