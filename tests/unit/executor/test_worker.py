"""The worker over an in-memory link: plans in, results out, against an oracle that never batches."""

import random

import numpy as np
import pytest

from executor_svc.backends.simulated import SimulatedBackend
from executor_svc.errors import ComputeFault, NotFinite
from executor_svc.protocol import EpochStarted
from executor_svc.worker import Worker
from protos.stepwire.wire.v1 import step_pb2
from tests.unit.executor.plans import ToyScheduler, ToySequence, admit, geometry, greedy, ints, plan
from tests.unit.executor.test_simulated import spelled_out


class MemoryLink:
    """Plays a list of events; after a fault, plans are dropped until the next epoch, as on the real link."""

    def __init__(self, events: list[object]):
        self.events = list(events)
        self.sent: list[step_pb2.StepResult | str] = []
        self.kinds: list[int] = []
        self.serving = False

    def receive(self, timeout_s: float | None = None) -> object | None:
        while self.events:
            event = self.events.pop(0)
            if isinstance(event, EpochStarted):
                self.serving = True
            if self.serving:
                return event
        return None

    def send_result(self, result: step_pb2.StepResult) -> None:
        self.sent.append(result)

    def drop_result(self) -> None:
        raise AssertionError("nothing is under way when an epoch ends")

    def fault(self, message: str, kind: int) -> None:
        self.serving = False
        self.sent.append(message)
        self.kinds.append(kind)


def make_worker(**changes: int) -> Worker:
    return Worker(SimulatedBackend(geometry(**changes), step_pb2.ModelIdentity()))


def serve(events: list[object], worker: Worker | None = None) -> list:
    link = MemoryLink(events)
    (worker or make_worker()).serve(link)
    return link.sent


def tokens_of(result: step_pb2.StepResult) -> list[int]:
    return np.frombuffer(result.token_ids, "<i4").tolist()


def test_a_hand_made_sequence_of_plans():
    prompt = [5, 6, 7, 8, 9, 10]
    first = spelled_out(prompt, 1000)
    second = spelled_out([*prompt, first], 1000)
    sent = serve(
        [
            EpochStarted(1, 1),
            plan(1, admit=[admit(2, prompt, [60])], prefill=ints(2, 4)),
            plan(2, grow=ints(2, 3), prefill=ints(2, 2)),
            plan(3, prefill=ints(2, 0)),
            plan(4),
            plan(5, release=ints(2)),
        ]
    )
    assert [tokens_of(result) for result in sent] == [[], [first], [], [second], []]
    assert [(r.num_rows, r.num_stored_tokens) for r in sent] == [(1, 4), (1, 6), (1, 6), (1, 7), (0, 0)]
    assert [(r.boot_id, r.epoch, r.step_id) for r in sent] == [(1, 1, step) for step in range(1, 6)]


def test_a_fork_copies_the_last_block_and_shares_the_full_one():
    prompt = [1, 2, 3, 4, 5, 6]
    seed_0, seed_1 = (greedy(temperature=1.0, seed=7, choice=choice) for choice in (0, 1))
    sent = serve(
        [
            EpochStarted(1, 1),
            plan(1, admit=[admit(0, prompt, [9, 4], sampling=seed_0)], prefill=ints(0, 6)),
            plan(
                2,
                admit=[admit(1, prompt, [9, 5], num_computed_tokens=5, sampling=seed_1)],
                copy=ints(4, 5),
                prefill=ints(1, 1),
            ),
        ]
    )
    first = spelled_out(prompt, 1000, seed_0)
    assert tokens_of(sent[0]) == [first]
    assert tokens_of(sent[1]) == [spelled_out([*prompt, first], 1000, seed_0, 1), spelled_out(prompt, 1000, seed_1)]


@pytest.mark.parametrize("seed", range(20))
def test_scheduling_does_not_change_tokens(seed):
    rng = random.Random(seed)
    shape = geometry(num_blocks=320, block_size=rng.choice([1, 3, 4, 16]), max_num_batched_tokens=24)
    sequences = [toy_sequence(rng, seed * 100 + i) for i in range(12)]
    worker = Worker(SimulatedBackend(shape, step_pb2.ModelIdentity()))
    worker.reset()
    scheduler = ToyScheduler(rng, shape, sequences)
    for _ in range(3000):
        if not scheduler.waiting and not scheduler.running:
            break
        message, sampled = scheduler.plan()
        result = worker.execute(message)
        assert (result.num_rows, result.num_stored_tokens) == scheduler.digest(), f"seed {seed}"
        scheduler.commit(sampled, tokens_of(result))
    for sequence in sequences:
        prompt = sequence.tokens[: sequence.num_prompt]
        assert sequence.tokens == alone(prompt, sequence.want, sequence.sampling), f"seed {seed}"


def toy_sequence(rng: random.Random, name: int) -> ToySequence:
    prompt = [rng.randrange(1000) for _ in range(rng.randint(1, 30))]
    sampling = greedy(temperature=rng.choice([0.0, 1.0]), seed=name, choice=rng.randint(0, 3))
    return ToySequence(prompt, len(prompt), rng.randint(1, 8), sampling)


def alone(prompt: list[int], want: int, sampling: step_pb2.Sampling) -> list[int]:
    tokens = list(prompt)
    for position in range(want):
        tokens.append(spelled_out(tokens, 1000, sampling, position))
    return tokens


def test_a_broken_plan_ends_the_epoch_and_the_next_epoch_starts_clean():
    seat = plan(1, admit=[admit(0, [1, 2], [0])], prefill=ints(0, 2))
    sent = serve([EpochStarted(1, 1), seat, plan(2, release=ints(1)), plan(3), EpochStarted(1, 1), seat])
    assert isinstance(sent[0], step_pb2.StepResult)
    assert sent[1] == "release: a row is not live"
    assert tokens_of(sent[2]) == tokens_of(sent[0])
    assert len(sent) == 3


def test_a_slot_of_another_epoch_is_not_read():
    hit = plan(1, admit=[admit(0, [1, 2, 3], [0], num_computed_tokens=2)], prefill=ints(0, 1))
    fill = plan(1, admit=[admit(0, [1, 2, 3], [0])], prefill=ints(0, 3))
    sent = serve([EpochStarted(1, 1), fill, EpochStarted(1, 1), hit])
    assert "block table is wrong" in sent[1]


class Broken(SimulatedBackend):
    def __init__(self, answer: object):
        super().__init__(geometry(), step_pb2.ModelIdentity())
        self.answer = answer

    def run(self, batch):
        if isinstance(self.answer, Exception):
            raise self.answer
        output = super().run(batch)
        output.token_ids[:] = self.answer
        return output


@pytest.mark.parametrize("token", [-2, 1000, 2**31 - 1])
def test_a_token_outside_the_vocabulary_is_a_fault(token):
    seat = plan(1, admit=[admit(0, [1, 2], [0])], prefill=ints(0, 2))
    assert serve([EpochStarted(1, 1), seat], Worker(Broken(token))) == [
        "the backend drew a token outside the vocabulary"
    ]


def test_faults_say_of_which_kind_they_are():
    seat = plan(1, admit=[admit(0, [1, 2], [0])], prefill=ints(0, 2))
    for broken, kind in (
        (Broken(-1), step_pb2.FAULT_KIND_NOT_FINITE),
        (Broken(NotFinite("nan")), step_pb2.FAULT_KIND_NOT_FINITE),
        (Broken(1000), step_pb2.FAULT_KIND_COMPUTE),
    ):
        link = MemoryLink([EpochStarted(1, 1), seat])
        Worker(broken).serve(link)
        assert link.kinds == [kind]
    link = MemoryLink([EpochStarted(1, 1), plan(1, release=ints(0))])
    make_worker().serve(link)
    assert link.kinds == [step_pb2.FAULT_KIND_PLAN_REFUSED]
    link = MemoryLink([EpochStarted(1, 1), seat])
    with pytest.raises(RuntimeError):
        Worker(Broken(RuntimeError("a path and more"))).serve(link)
    assert (link.kinds, link.sent) == ([step_pb2.FAULT_KIND_CRASH], ["the process ends: RuntimeError"])


def test_nonsense_from_the_device_is_a_fault_and_any_other_error_ends_the_process():
    seat = plan(1, admit=[admit(0, [1, 2], [0])], prefill=ints(0, 2))
    assert serve([EpochStarted(1, 1), seat], Worker(Broken(ComputeFault("nan")))) == ["nan"]
    with pytest.raises(RuntimeError, match="the device is gone"):
        serve([EpochStarted(1, 1), seat], Worker(Broken(RuntimeError("the device is gone"))))
