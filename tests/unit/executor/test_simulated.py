"""The simulated backend against its own documentation, spelled out in plain integers."""

import random

import numpy as np
import pytest

from executor_svc.backends.simulated import SimulatedBackend, StepTime, next_token
from executor_svc.batch import build_batch
from executor_svc.errors import ComputeFault
from executor_svc.rows import RowTable
from protos.stepwire.wire.v1 import step_pb2
from tests.unit.executor.plans import admit, geometry, greedy, ints, plan

M = 2**64


def mix(x: int) -> int:
    x = (x + 0x9E3779B97F4A7C15) % M
    x = (x ^ x >> 30) * 0xBF58476D1CE4E5B9 % M
    x = (x ^ x >> 27) * 0x94D049BB133111EB % M
    return x ^ x >> 31


def spelled_out(
    tokens: list[int], vocab_size: int, sampling: step_pb2.Sampling | None = None, position: int = 0
) -> int:
    context = sum((token + 1) * pow(0x9E3779B97F4A7C55, p + 1, M) for p, token in enumerate(tokens)) % M
    if sampling is not None and sampling.temperature > 0:
        context ^= mix(mix(mix(sampling.seed) ^ sampling.choice) ^ position)
    return mix(context) % vocab_size


def run(backend: SimulatedBackend, rows: RowTable, message: step_pb2.StepPlan):
    work = rows.apply(message)
    output = backend.run(build_batch(rows, work))
    rows.append(work, output.token_ids)
    return output


def make(**changes: int) -> tuple[SimulatedBackend, RowTable]:
    shape = geometry(**changes)
    return SimulatedBackend(shape, step_pb2.ModelIdentity()), RowTable(shape)


@pytest.mark.parametrize("position", [0, 1, 7])
def test_next_token_is_what_the_docstring_says(position):
    rng = random.Random(position)
    tokens = [rng.randrange(50_000) for _ in range(100)]
    for sampling in (None, greedy(), greedy(temperature=0.7, seed=2**64 - 1, choice=3)):
        assert next_token(np.array(tokens), 49_152, sampling, position) == spelled_out(
            tokens, 49_152, sampling, position
        )


@pytest.mark.parametrize("length", [1, 3, 4, 5, 63])
def test_a_prompt_through_a_shuffled_block_table(length):
    rng = random.Random(length)
    backend, rows = make()
    prompt = [rng.randrange(1000) for _ in range(length)]
    blocks = rng.sample(range(64), -(-length // 4))
    output = run(backend, rows, plan(admit=[admit(3, prompt, blocks)], prefill=ints(3, length)))
    assert output.token_ids.tolist() == [spelled_out(prompt, 1000)]


def test_a_wrong_block_is_noticed():
    backend, rows = make()
    run(backend, rows, plan(admit=[admit(0, [1, 2, 3, 4], [5, 6])], prefill=ints(0, 4)))
    rows.block_table[0, 0] = 7
    with pytest.raises(ComputeFault, match="block table is wrong"):
        run(backend, rows, plan(2))


def test_another_token_at_the_right_place_changes_the_draw():
    backend, rows = make()
    run(backend, rows, plan(admit=[admit(0, [1, 2, 3, 4], [5])], prefill=ints(0, 4)))
    run(backend, rows, plan(2, admit=[admit(1, [1, 2, 3, 9], [6])], prefill=ints(0, 0, 1, 4)))
    stolen = run(
        backend,
        rows,
        plan(3, admit=[admit(2, [1, 2, 3, 4, 7], [6, 8], num_computed_tokens=4)], prefill=ints(0, 0, 1, 0, 2, 1)),
    )
    assert stolen.token_ids.tolist() == [spelled_out([1, 2, 3, 9, 7], 1000)]


def test_allowed_and_barred_tokens():
    backend, rows = make(vocab_size=10)
    natural = spelled_out([1, 2], 10)
    barred = greedy(min_tokens=2, stop_token_ids=ints(natural, (natural + 1) % 10))
    allowed = greedy(allowed_token_ids=ints(3, 8))
    both = greedy(allowed_token_ids=ints(3), stop_token_ids=ints(3), min_tokens=1)
    seats = [admit(i, [1, 2], [i], sampling=s) for i, s in enumerate((barred, allowed, both))]
    output = run(backend, rows, plan(admit=seats, prefill=ints(0, 2, 1, 2, 2, 2)))
    assert output.token_ids[0] == (natural + 2) % 10
    assert output.token_ids[1] in (3, 8)
    assert output.token_ids[2] == 3


def test_logprobs_are_invented_but_well_formed():
    backend, rows = make(vocab_size=10)
    seats = [
        admit(0, [1], [0], sampling=greedy(logprobs=3)),
        admit(1, [2], [1]),
        admit(2, [3], [2], sampling=greedy(logprobs=0)),
    ]
    output = run(backend, rows, plan(admit=seats, prefill=ints(0, 1, 1, 1, 2, 1)))
    assert [entry.row for entry in output.logprobs] == [0, 2]
    top = np.frombuffer(output.logprobs[0].top_token_ids, "<i4")
    assert top[0] == output.token_ids[0]
    assert np.frombuffer(output.logprobs[0].top_logprobs, "<f4").tolist() == [0, -1, -2]
    assert output.logprobs[1].top_token_ids == b""


def test_step_time_counts_steps_tokens_and_stored_tokens():
    backend, rows = make()
    batch = build_batch(rows, rows.apply(plan(admit=[admit(0, [1, 2, 3], [0])], prefill=ints(0, 3))))
    backend.run(batch)
    assert StepTime(100, 10, 1).seconds(batch) == pytest.approx(133e-6)
    assert StepTime().seconds(batch) == 0
