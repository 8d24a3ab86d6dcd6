"""What went wrong elsewhere when requests were aborted, and when prompts were scored in pieces: the right values here.

Every test runs the real core against HashExec, whose tokens depend on everything the core could confuse.
"""

from collections import deque

import numpy as np
import pytest

from protos.stepwire.wire.v1 import step_pb2
from scheduler_svc.core.contract import Cause, Geometry, Limits, Output, Request
from scheduler_svc.core.scheduler import Scheduler
from tests.sim.hash_exec import HashExec, oracle, score

GEOMETRY = Geometry(64, 4, 4, 64, 16, 50)


class Life:
    """A core and its executor, `depth` plans in flight, and everything that was said."""

    def __init__(self, geometry: Geometry = GEOMETRY, *, depth: int = 2, hopeful: bool = False, **limits: object):
        self.core = Scheduler(Limits(pipeline_depth=depth, **limits))  # type: ignore[arg-type]
        if hopeful:  # it believes that every sequence is about to end, and has to preempt when none does
            self.core._lengths.to_come = np.ones_like  # type: ignore[method-assign]
        self.core.reset(geometry, 1, 1)
        self.geometry, self.depth = geometry, depth
        self.executor = HashExec(geometry, 1, 1)
        self.results: deque[step_pb2.StepResult] = deque()
        self.outputs: list[Output] = []
        self.requests: dict[int, Request] = {}
        self.blocks_at_start = self.free_blocks()

    def submit(self, number: int, num_prompt: int = 10, **fields: object) -> Request:
        sampling = fields.pop("sampling", step_pb2.Sampling(seed=number))
        prompt = fields.pop("prompt", (np.arange(num_prompt, dtype=np.int32) + number) % 50)
        defaults: dict[str, object] = {"session": 0, "request_id": f"r{number}", "handle": number * 100}
        request = Request(prompt=prompt, sampling=sampling, **({"max_tokens": 12} | defaults | fields))  # type: ignore[arg-type]
        self.requests[number] = request
        self.core.submit(request, 0.0)
        return request

    def plan(self, now: float = 0.0) -> bool:
        plan = self.core.plan(now)
        if plan is not None:
            self.results.append(self.executor.run(plan))
        self.core.check()
        return plan is not None

    def commit(self) -> None:
        self.outputs.append(self.core.commit(self.results.popleft(), 0.0))
        self.core.check()

    def step(self) -> bool:
        """As the service does: plans while there is room, then hears of the oldest. False: nothing was left to do."""
        planned = False
        while len(self.results) < self.depth and self.plan():
            planned = True
        if self.results:
            self.commit()
            return True
        return planned

    def finish(self) -> None:
        limit = 2000
        while self.step():
            limit -= 1
            assert limit, "it does not come to an end"
        self.outputs.append(self.core.take_output())
        self.core.check()

    def free_blocks(self) -> int:
        """Those that a new request could have."""
        stats = self.core.stats()
        return stats.blocks_free + stats.blocks_cached

    def tokens(self, number: int) -> list[int]:
        return [
            int(token)
            for output in self.outputs
            for handle, token in zip(output.handle, output.token, strict=True)
            if handle // 100 == number
        ]

    def ends(self, number: int) -> list[Cause]:
        return [event.cause for output in self.outputs for event in output.finished if event.handle // 100 == number]

    def scores(self, number: int) -> list[float]:
        """Asserts that they came in order, each once."""
        found: list[float] = []
        for output in self.outputs:
            for _, handle, values in output.prompt_logprobs:
                if handle // 100 == number:
                    assert values.first_position == len(found) + 1
                    found += np.frombuffer(values.logprobs, "<f4").tolist()
        return found

    def assert_clean(self) -> None:
        """Everything was given back, and who was not cancelled got what it would have had alone."""
        assert self.core.is_idle
        assert self.free_blocks() == self.blocks_at_start
        for number, request in self.requests.items():
            assert len(self.ends(number)) == 1, f"request {number} ended {self.ends(number)}"
            want, _ = oracle(request, 0, self.geometry)
            got = self.tokens(number)
            assert got == (want[: len(got)] if self.ends(number) == [Cause.CANCELLED] else want)


# ---- aborts -------------------------------------------------------------------------------------------------


def steps_until_decoding(life: Life, number: int) -> None:
    while not life.tokens(number):
        life.step()


STATES = ("queued", "mid prefill", "decoding", "preempted", "planned", "last step planned")


@pytest.mark.parametrize("state", STATES)
def test_an_abort_in_any_state_gives_everything_back_within_two_steps(state: str) -> None:
    life = Life(Geometry(12, 4, 4, 64, 8, 50) if state == "preempted" else GEOMETRY, hopeful=state == "preempted")
    life.submit(1, 16, max_tokens=24)
    match state:
        case "queued":
            pass
        case "mid prefill":
            life.submit(2, 40)
            life.step()
        case "decoding":
            steps_until_decoding(life, 1)
        case "preempted":
            life.submit(2, 16, max_tokens=24)
            while not life.core.stats().preemptions_total:
                assert life.step()
        case "planned":
            steps_until_decoding(life, 1)
            assert life.plan()
        case "last step planned":
            while len(life.tokens(1)) + len(life.results) < 24:
                life.plan() if len(life.results) < 2 else life.commit()
    victim = 2 if state in ("mid prefill", "preempted") else 1
    assert life.core.cancel_request(f"r{victim}")
    life.core.check()
    for _ in range(2):
        life.step()
    others = [number for number in life.requests if number != victim]
    if not others:
        assert life.free_blocks() == life.blocks_at_start
    life.finish()
    assert life.ends(victim) == [Cause.CANCELLED]
    life.assert_clean()


def test_a_prefix_that_was_found_for_a_request_that_expires_in_the_queue_can_be_evicted() -> None:
    life = Life(Geometry(8, 4, 1, 32, 16, 50))
    life.submit(1, 16, max_tokens=1)
    life.finish()
    life.submit(2, 12, max_tokens=16)  # holds the only row
    life.step()
    life.submit(3, prompt=np.arange(16, dtype=np.int32) + 1, deadline=0.010)
    life.step()
    assert life.core.expire(0.011) == 1
    life.core.check()
    life.finish()
    assert life.free_blocks() == life.blocks_at_start
    life.submit(4, 20, max_tokens=12)  # takes all eight blocks, those of the first prompt among them
    life.finish()
    assert (len(life.tokens(4)), life.ends(4)) == (12, [Cause.LENGTH])
    assert life.free_blocks() == life.blocks_at_start


def test_who_is_aborted_is_in_no_later_plan_and_its_results_are_dropped() -> None:
    life = Life()
    life.submit(1)
    life.submit(2)
    steps_until_decoding(life, 1)
    assert life.plan()
    before = life.tokens(1)
    [row] = [row for row, seated in life.executor.rows.items() if seated.sampling.seed == 1]
    life.core.cancel_request("r1")
    plan = life.core.plan(0.0)
    assert plan is not None
    assert np.frombuffer(plan.release, "<i4").tolist() == [row]
    assert not plan.admit
    life.results.append(life.executor.run(plan))
    assert row not in life.executor.rows
    life.finish()
    assert life.tokens(1) == before
    life.assert_clean()


@pytest.mark.parametrize("moment", ["before the plan", "after the plan", "before the result", "after the result"])
@pytest.mark.parametrize("depth", [1, 2])
def test_an_abort_that_races_the_end_has_one_winner_and_one_release(moment: str, depth: int) -> None:
    life = Life(depth=depth)
    life.submit(1, max_tokens=5)
    life.submit(2, max_tokens=20)
    while len(life.tokens(1)) + len(life.results) < 4:
        life.plan() if len(life.results) < depth else life.commit()
    while len(life.results) >= depth:
        life.commit()
    if moment == "before the plan":
        life.core.cancel_request("r1")
    assert life.plan()  # with the fifth token of the first
    if moment == "after the plan":
        life.core.cancel_request("r1")
    while len(life.results) > 1:
        life.commit()
    if moment == "before the result":
        life.core.cancel_request("r1")
    life.commit()
    was_there = life.core.cancel_request("r1")
    assert not was_there
    life.finish()
    assert life.ends(1) == [Cause.LENGTH if moment == "after the result" else Cause.CANCELLED]
    life.assert_clean()


@pytest.mark.parametrize("depth", [1, 2])
def test_when_everybody_is_aborted_nothing_is_planned_but_their_release(depth: int) -> None:
    life = Life(depth=depth)
    for number in range(1, 5):
        life.submit(number)
    for number in range(1, 5):
        steps_until_decoding(life, number)
    for number in range(1, 5):
        life.core.cancel_request(f"r{number}")
    plan = life.core.plan(0.0)
    assert plan is not None
    assert len(plan.release) == 4 * 4
    assert [plan.prefill, plan.grow, plan.copy, len(plan.admit)] == [b"", b"", b"", 0]
    life.results.append(life.executor.run(plan))
    assert life.core.plan(0.0) is None
    life.finish()
    assert life.core.plan(0.0) is None
    life.assert_clean()
    life.submit(5)
    life.finish()
    life.assert_clean()


@pytest.mark.parametrize("seed", range(8))
def test_the_end_is_found_at_the_same_token_whatever_the_depth(seed: int) -> None:
    found = []
    for depth in (1, 2, 4):
        life = Life(depth=depth)
        for number in range(1, 5):
            # About every third token ends it.
            life.submit(number + 10 * seed, max_tokens=20, stop_token_ids=frozenset(range(0, 50, 3)), min_tokens=2)
        life.finish()
        life.assert_clean()
        found.append({number: (life.tokens(number), life.ends(number)) for number in life.requests})
    assert found[0] == found[1] == found[2]
    assert any(ends == [Cause.STOP] for _, ends in found[0].values())


# ---- prompt logprobs ----------------------------------------------------------------------------------------


def asks(number: int) -> step_pb2.Sampling:
    return step_pb2.Sampling(seed=number, prompt_logprobs=1)


def wanted(prompt: np.ndarray) -> list[float]:
    return [score(prompt[:place], int(prompt[place])) for place in range(1, len(prompt))]


@pytest.mark.parametrize("chunk", range(1, 6))
def test_a_prompt_scored_in_chunks_has_every_score_once(chunk: int) -> None:
    """Each token but the first, the last one too: it is scored before anything is drawn."""
    life = Life(Geometry(64, 4, 4, 64, chunk, 50))
    for length in range(1, 10):
        life.submit(length, length, sampling=asks(length), max_tokens=2)
    life.finish()
    for length in range(1, 10):
        scores = life.scores(length)
        assert len(scores) == length - 1
        assert scores == wanted(life.requests[length].prompt)
        # Nothing is said before it: no message without a token of the vocabulary.
        drawn = next(i for i, o in enumerate(life.outputs) if length in {int(h) // 100 for h in o.handle})
        scored = [i for i, o in enumerate(life.outputs) for _, h, _ in o.prompt_logprobs if h // 100 == length]
        assert max(scored, default=0) <= drawn
    life.assert_clean()


@pytest.mark.parametrize("depth", [1, 2])
def test_a_prompt_that_is_preempted_while_it_is_scored_has_every_score_once(depth: int) -> None:
    """Chunks of two beside a stream that grows into the room of the rest."""
    life = Life(Geometry(31, 1, 2, 32, 3, 50), depth=depth, hopeful=True, prefix_caching=False)
    life.submit(1, 7, max_tokens=20)
    steps_until_decoding(life, 1)
    life.submit(2, 19, sampling=asks(2), max_tokens=4)
    while not life.core.stats().preemptions_total:
        assert life.step()
    assert 0 < len(life.scores(2)) < 18
    assert not life.tokens(2)
    life.finish()
    assert life.scores(2) == wanted(life.requests[2].prompt)
    life.assert_clean()


def test_no_token_comes_before_the_last_chunk() -> None:
    life = Life(Geometry(64, 4, 4, 64, 8, 50))
    life.submit(1, 40, max_tokens=6)
    told = []
    while not life.core.is_idle:
        life.step()
        told.append(len(life.outputs[-1].token) if life.outputs else 0)
    assert told[:4] == [0, 0, 0, 0]
    assert [n for n in told if n] == [1] * 6
    assert all(0 <= token < 50 for token in life.tokens(1))
    life.assert_clean()


def test_a_very_long_prompt_comes_to_its_end() -> None:
    life = Life(Geometry(2100, 4, 2, 8300, 512, 50))
    life.submit(1, 8192, max_tokens=10)
    life.finish()
    assert (len(life.tokens(1)), life.ends(1)) == (10, [Cause.LENGTH])
    life.assert_clean()
