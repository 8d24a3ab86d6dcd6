"""Prompt logprobs and faults in the core: what is computed for them, what is passed on, what is refused."""

import numpy as np
import pytest

from protos.stepwire.wire.v1 import step_pb2
from scheduler_svc.core.contract import Cause, Delivered, Geometry, Limits, Output, Request
from scheduler_svc.core.scheduler import Scheduler
from scheduler_svc.errors import ProtocolViolation
from tests.sim.hash_exec import HashExec, score

GEOMETRY = Geometry(64, 4, 4, 64, 16, 50)
PROMPT = np.array([3, 1, 4, 1, 5, 9, 2, 6, 5, 3], np.int32)
WANT = [score(PROMPT[:p], int(PROMPT[p])) for p in range(1, len(PROMPT))]


def request(number: int, *, asks: bool = True, **fields: object) -> Request:
    sampling = step_pb2.Sampling(seed=number, prompt_logprobs=0 if asks else None)
    defaults: dict[str, object] = {"session": 0, "request_id": f"r{number}", "handle": number * 100, "max_tokens": 2}
    return Request(**({"prompt": PROMPT, "sampling": sampling} | defaults | fields))  # type: ignore[arg-type]


def fresh(**limits: object) -> tuple[Scheduler, HashExec]:
    core = Scheduler(Limits(**limits))  # type: ignore[arg-type]
    core.reset(GEOMETRY, 1, 1)
    return core, HashExec(GEOMETRY, 1, 1)


def finish(core: Scheduler, executor: HashExec, most: int = 100) -> list[Output]:
    outputs = []
    while (plan := core.plan(0.0)) is not None and most:
        outputs.append(core.commit(executor.run(plan), 0.0))
        core.check()
        most -= 1
    return outputs


def scores_of(outputs: list[Output], number: int) -> list[float]:
    """Asserts that they came in order, each once."""
    found: list[float] = []
    for output in outputs:
        for _, handle, values in output.prompt_logprobs:
            if handle // 100 == number:
                assert values.first_position == len(found) + 1
                found += np.frombuffer(values.logprobs, "<f4").tolist()
    return found


@pytest.mark.parametrize("asks_before", [True, False])
def test_a_cached_prompt_is_computed_and_scored_all_the_same(asks_before: bool) -> None:
    core, executor = fresh()
    core.submit(request(1, asks=asks_before), 0.0)
    finish(core, executor)
    core.submit(request(2), 0.0)
    core.submit(request(3, asks=False), 0.0)
    outputs = finish(core, executor)
    assert scores_of(outputs, 2) == WANT
    cached = {event.handle // 100: event.num_cached_tokens for output in outputs for event in output.started}
    assert cached == {2: 0, 3: 8}


@pytest.mark.parametrize(("num_choices", "max_tokens"), [(1, 0), (3, 0), (3, 2)])
def test_the_choices_of_a_prompt_score_it_once(num_choices: int, max_tokens: int) -> None:
    core, executor = fresh()
    core.submit(request(1, num_choices=num_choices, max_tokens=max_tokens), 0.0)
    outputs = finish(core, executor)
    assert scores_of(outputs, 1) == WANT
    ended = [event.cause for output in outputs for event in output.finished]
    assert ended == [Cause.LENGTH] * num_choices
    last_score = max(i for i, output in enumerate(outputs) if output.prompt_logprobs)
    assert all(not len(output.token) for output in outputs[:last_score])


@pytest.mark.parametrize("num_told", range(len(PROMPT)))
def test_a_resumed_prompt_scores_the_rest(num_told: int) -> None:
    core, executor = fresh()
    core.submit(request(1, asks=False), 0.0)
    finish(core, executor)
    delivered = (Delivered(np.empty(0, np.int32)),)
    core.submit(request(2, num_prompt_logprobs=num_told, delivered=delivered), 0.0)
    outputs = finish(core, executor)
    told = [values for output in outputs for _, _, values in output.prompt_logprobs]
    assert sum(len(values.logprobs) // 4 for values in told) == len(PROMPT) - 1 - num_told
    assert not told or told[0].first_position == num_told + 1
    [cached] = [event.num_cached_tokens for output in outputs for event in output.started]
    assert cached == (8 if num_told == len(PROMPT) - 1 else num_told // 4 * 4)


def test_a_lost_executor_costs_no_score_and_repeats_none() -> None:
    core = Scheduler(Limits())
    outputs: list[Output] = []
    core.submit(request(1, prompt=np.arange(40, dtype=np.int32)), 0.0)
    for epoch in range(1, 4):
        core.reset(GEOMETRY, 1, epoch)
        executor = HashExec(GEOMETRY, 1, epoch)
        outputs += finish(core, executor, most=1 if epoch < 3 else 100)
        assert core.plan(0.0) is not None or epoch == 3  # in flight when the executor goes
    prompt = np.arange(40)
    assert scores_of(outputs, 1) == [score(prompt[:p], p) for p in range(1, 40)]


def spoilt(result: step_pb2.StepResult, how: str) -> step_pb2.StepResult:
    bad = step_pb2.StepResult()
    bad.CopyFrom(result)
    match how:
        case "missing":
            del bad.prompt_logprobs[-1]
        case "twice":
            bad.prompt_logprobs.append(bad.prompt_logprobs[0])
        case "another row":
            bad.prompt_logprobs[0].row = 3
        case "elsewhere":
            bad.prompt_logprobs[0].first_position += 1
        case "too short":
            bad.prompt_logprobs[1].logprobs = bad.prompt_logprobs[1].logprobs[:-4]
        case "candidates":
            bad.prompt_logprobs[0].num_top = 1
            bad.prompt_logprobs[0].top_token_ids = bad.prompt_logprobs[0].top_logprobs = b"\0\0\0\0"
    return bad


def test_what_was_not_planned_is_refused_and_changes_nothing() -> None:
    core, executor = fresh()
    core.submit(request(1), 0.0)
    plan = core.plan(0.0)
    assert plan is not None
    result = executor.run(plan)
    for how in ("missing", "twice", "another row", "elsewhere", "too short", "candidates"):
        with pytest.raises(ProtocolViolation, match=r"score|belong"):
            core.commit(spoilt(result, how), 0.0)
    assert scores_of([core.commit(result, 0.0)], 1) == WANT


# ---- faults -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("max_tokens", [1, 2, 9])
@pytest.mark.parametrize("depth", [1, 2])
def test_a_row_that_can_draw_nothing_ends_alone(max_tokens: int, depth: int) -> None:
    core, executor = fresh(pipeline_depth=depth)
    for number in (1, 2, 3):
        core.submit(request(number, prompt=PROMPT + number, max_tokens=max_tokens, asks=False), 0.0)
    outputs, results = [], []
    while (plan := core.plan(0.0)) is not None or results:
        if plan is not None:
            result = executor.run(plan)
            # Again and again: it is told until the row is released.
            for row, seated in executor.rows.items():
                if seated.sampling.seed == 2 and seated.num_computed == len(seated.tokens) - 1:
                    result.faults.add(row=row, message="no token")
            results.append(result)
        if len(results) == depth or plan is None:
            outputs.append(core.commit(results.pop(0), 0.0))
            core.check()
    ended = {event.handle // 100: event for output in outputs for event in output.finished}
    assert {number: event.cause for number, event in ended.items()} == {
        1: Cause.LENGTH, 2: Cause.INVALID, 3: Cause.LENGTH
    }  # fmt: skip
    assert ended[2].message == "no token"
    tokens = [int(handle) // 100 for output in outputs for handle in output.handle]
    assert (tokens.count(1), tokens.count(2), tokens.count(3)) == (max_tokens, 0, max_tokens)
    assert core.is_idle
