"""Bad words against an oracle that compares lists, and through a sampler."""

import random

import numpy as np
import pytest

from executor_svc.bad_words import MAX_LENGTH, MAX_SEQUENCES, BadWords, parse
from executor_svc.errors import PlanViolation
from tests.unit.executor.plans import greedy, ints
from tests.unit.executor.test_sampler import V, random_logits, sample


def on_the_wire(sequences: list[list[int]]) -> bytes:
    return ints(*(value for sequence in sequences for value in (len(sequence), *sequence)))


def banned(sequences: list[list[int]], output: list[int]) -> set[int]:
    found = set()
    for *before, last in sequences:
        if not before or output[-len(before) :] == before:
            found.add(last)
    return found


@pytest.mark.parametrize("seed", range(30))
def test_against_lists(seed):
    rng = random.Random(seed)
    sequences = [[rng.randrange(3) for _ in range(rng.randint(1, 5))] for _ in range(rng.randint(0, 8))]
    words = parse(on_the_wire(sequences), 3)
    assert len(words) == len(sequences)
    for _ in range(40):
        output = [rng.randrange(3) for _ in range(rng.randint(0, 7))]
        assert set(words.banned(np.array(output, np.int32)).tolist()) == banned(sequences, output), f"seed {seed}"


def test_only_output_counts_and_a_single_token_is_always_barred():
    logits = np.zeros((1, V), np.float32)
    logits[0, [7, 8, 9]] = [3, 2, 1]
    ask = greedy(bad_words=on_the_wire([[5, 7], [8]]))
    assert sample(logits, [ask], [[5]], [[]]).token_ids.tolist() == [7]
    assert sample(logits, [ask], [[1]], [[5]]).token_ids.tolist() == [9]


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_stream_never_contains_one(temperature):
    rng = random.Random(3)
    sequences = [[rng.randrange(6) for _ in range(rng.randint(2, 3))] for _ in range(6)]
    logits, output = random_logits(1, 1, spread=1.0), []
    logits[0, 6:] = -20
    for _ in range(100):
        ask = greedy(temperature=temperature, seed=1, bad_words=on_the_wire(sequences), frequency_penalty=0.3)
        output.append(int(sample(logits, [ask], outputs=[output]).token_ids[0]))
        assert not any(output[-len(word) :] == word for word in sequences)


def test_nothing_left_is_the_rows_own_fault():
    logits = random_logits(2, 2)
    ask = greedy(temperature=1.0, allowed_token_ids=ints(4, 5), bad_words=on_the_wire([[4], [5]]))
    output = sample(logits, [ask, greedy()], rows=[3, 6])
    assert [(fault.row, "leave no token" in fault.message) for fault in output.faults] == [(3, True)]
    assert output.token_ids[1] == logits[1].argmax()


def test_min_tokens_gives_way_to_bad_words():
    ask = greedy(min_tokens=4, stop_token_ids=ints(9), allowed_token_ids=ints(8, 9), bad_words=on_the_wire([[8]]))
    assert sample(random_logits(2), [ask]).token_ids.tolist() == [9]


@pytest.mark.parametrize(
    "data",
    [b"\0", ints(0), ints(2, 1), ints(-1, 1), ints(1, V), ints(1, -1), ints(2**31 - 1, 1),
     on_the_wire([[1]] * (MAX_SEQUENCES + 1)), on_the_wire([[1] * (MAX_LENGTH + 1)])],
)  # fmt: skip
def test_what_is_not_a_list_of_sequences_breaks_the_contract(data):
    with pytest.raises(PlanViolation, match="bad_words"):
        parse(data, V)


def test_as_many_and_as_long_as_may_be():
    words = parse(on_the_wire([[1] * MAX_LENGTH] * MAX_SEQUENCES), V)
    assert words.banned(np.ones(MAX_LENGTH - 2, np.int32)).tolist() == []
    assert set(words.banned(np.ones(MAX_LENGTH - 1, np.int32)).tolist()) == {1}
    assert len(BadWords([])) == 0
