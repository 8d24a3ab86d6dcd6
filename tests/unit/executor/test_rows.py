"""Every way in which a plan can break the contract, and what a correct one does to the rows."""

import random

import numpy as np
import pytest

from executor_svc.errors import ComputeFault, PlanViolation
from executor_svc.rows import RowTable, Work
from tests.unit.executor.plans import admit, geometry, greedy, ints, plan


def floats(*values: float) -> bytes:
    return np.array(values, "<f4").tobytes()


def seated(**changes: int) -> RowTable:
    """Row 0 has 5 known and 0 computed tokens in 2 blocks; row 2 is decoding in one full block."""
    rows = RowTable(geometry(**changes))
    work = rows.apply(
        plan(admit=[admit(0, [1, 2, 3, 4, 5], [10, 11]), admit(2, [6, 7, 8], [20])], prefill=ints(0, 0, 2, 3))
    )
    rows.append(work, np.array([9], np.int32))
    return rows


def apply(rows: RowTable, **fields: object) -> Work:
    fields.setdefault("prefill", ints(0, 0))
    return rows.apply(plan(2, **fields))


VIOLATIONS = {
    "release: not int32s": ({"release": b"\0\0\0"}, "3 bytes"),
    "release: row out of range": ({"release": ints(8)}, "not within 0..7"),
    "release: negative row": ({"release": ints(-1)}, "not within 0..7"),
    "release: free row": ({"release": ints(1)}, "not live"),
    "release: twice": ({"release": ints(2, 2)}, "twice"),
    "copy: not pairs": ({"copy": ints(1)}, "not pairs"),
    "copy: block out of range": ({"copy": ints(1, 64)}, "not within 0..63"),
    "copy: negative block": ({"copy": ints(-1, 3)}, "not within 0..63"),
    "copy: destination twice": ({"copy": ints(1, 3, 2, 3)}, "twice"),
    "copy: chain": ({"copy": ints(1, 2, 2, 3)}, "also a source"),
    "copy: onto itself": ({"copy": ints(1, 1)}, "also a source"),
    "grow: not pairs": ({"grow": ints(0, 1, 2)}, "not pairs"),
    "grow: row out of range": ({"grow": ints(8, 1)}, "not within 0..7"),
    "grow: free row": ({"grow": ints(1, 1)}, "not live"),
    "grow: released row": ({"release": ints(0), "grow": ints(0, 1), "prefill": b""}, "not live"),
    "grow: block out of range": ({"grow": ints(0, 64)}, "not within 0..63"),
    "grow: negative block": ({"grow": ints(0, -64)}, "not within 0..63"),
    "grow: table full": ({"grow": ints(*[0, 1] * 15)}, "more than 16 blocks"),
    "prefill: not pairs": ({"prefill": ints(0)}, "not pairs"),
    "prefill: row out of range": ({"prefill": ints(8, 1)}, "not within 0..7"),
    "prefill: free row": ({"prefill": ints(0, 0, 1, 1)}, "not live"),
    "prefill: released row": ({"release": ints(0), "prefill": ints(0, 0)}, "not live"),
    "prefill: not ascending": ({"prefill": ints(2, 0, 0, 0)}, "not ascending"),
    "prefill: twice": ({"prefill": ints(0, 0, 0, 1)}, "not ascending"),
    "prefill: negative": ({"prefill": ints(0, -1)}, "negative"),
    "prefill: more than is left": ({"prefill": ints(0, 6)}, "than the row has left"),
    "prefill: more than is left of a decoding row": ({"prefill": ints(0, 0, 2, 2)}, "than the row has left"),
    "prefill: catching up but not named": ({"prefill": b""}, "not named"),
}


@pytest.mark.parametrize("name", VIOLATIONS)
def test_violation(name):
    fields, message = VIOLATIONS[name]
    with pytest.raises(PlanViolation, match=message):
        apply(seated(), **fields)


SEATS = {
    "row out of range": ({"row": 8}, "not below 8"),
    "row far out of range": ({"row": 2**32 - 1}, "not below 8"),
    "row taken": ({"row": 2}, "is taken"),
    "no tokens": ({"token_ids": b""}, "0 tokens"),
    "too many tokens": ({"token_ids": ints(*[1] * 65)}, "65 tokens"),
    "token ids not int32s": ({"token_ids": b"\0"}, "1 bytes"),
    "token out of vocabulary": ({"token_ids": ints(1, 1000)}, "not within 0..999"),
    "negative token": ({"token_ids": ints(1, -1)}, "not within 0..999"),
    "no prompt": ({"num_prompt_tokens": 0}, "0 prompt tokens"),
    "prompt longer than known": ({"num_prompt_tokens": 3}, "3 prompt tokens of 2"),
    "block ids not int32s": ({"block_ids": b"\0"}, "1 bytes"),
    "block out of range": ({"block_ids": ints(64)}, "not within 0..63"),
    "negative block": ({"block_ids": ints(-1)}, "not within 0..63"),
    "too many blocks": ({"block_ids": ints(*range(17))}, "17 blocks"),
    "everything computed": ({"num_computed_tokens": 2}, "2 computed tokens of 2"),
    "computed without a block": ({"num_computed_tokens": 1, "block_ids": b""}, "in 0 blocks"),
    "temperature": ({"sampling": greedy(temperature=-0.1)}, "temperature"),
    "temperature nan": ({"sampling": greedy(temperature=float("nan"))}, "temperature"),
    "temperature inf": ({"sampling": greedy(temperature=float("inf"))}, "temperature"),
    "top_p 0": ({"sampling": greedy(top_p=0)}, "top_p"),
    "top_p above 1": ({"sampling": greedy(top_p=1.01)}, "top_p"),
    "top_k": ({"sampling": greedy(top_k=1001)}, "top_k"),
    "min_p": ({"sampling": greedy(min_p=1.01)}, "min_p"),
    "presence": ({"sampling": greedy(presence_penalty=float("nan"))}, "presence_penalty"),
    "frequency": ({"sampling": greedy(frequency_penalty=float("inf"))}, "frequency_penalty"),
    "repetition": ({"sampling": greedy(repetition_penalty=0)}, "repetition_penalty"),
    "logprobs": ({"sampling": greedy(logprobs=21)}, "logprobs"),
    "min_tokens": ({"sampling": greedy(min_tokens=2**31)}, "min_tokens"),
    "stop id": ({"sampling": greedy(stop_token_ids=ints(1000))}, "stop_token_ids"),
    "stop ids not int32s": ({"sampling": greedy(stop_token_ids=b"\0")}, "stop_token_ids"),
    "allowed id": ({"sampling": greedy(allowed_token_ids=ints(-1))}, "allowed_token_ids"),
    "bias id": ({"sampling": greedy(bias_token_ids=ints(1000), bias_values=floats(1))}, "bias_token_ids"),
    "bias lengths": ({"sampling": greedy(bias_token_ids=ints(1))}, "differ in length"),
    "bias nan": ({"sampling": greedy(bias_token_ids=ints(1), bias_values=floats(np.nan))}, "not finite"),
    "bias twice": ({"sampling": greedy(bias_token_ids=ints(1, 1), bias_values=floats(1, 2))}, "two biases"),
}


@pytest.mark.parametrize("name", SEATS)
def test_violation_in_admit(name):
    fields, message = SEATS[name]
    seat = admit(1, [1, 2], [30])
    for key, value in fields.items():
        if key == "sampling":
            seat.sampling.CopyFrom(value)
        else:
            setattr(seat, key, value)
    with pytest.raises(PlanViolation, match=message):
        apply(seated(), admit=[seat], prefill=ints(0, 0, 1, 0))


def test_the_same_row_twice_in_one_plan():
    with pytest.raises(PlanViolation, match="taken"):
        apply(seated(), admit=[admit(1, [1], [30]), admit(1, [1], [31])])


@pytest.mark.parametrize(("tokens", "fits"), [(7, True), (8, True), (9, False)])
def test_a_row_computes_up_to_the_end_of_its_blocks(tokens, fits):
    rows = RowTable(geometry())
    message = plan(admit=[admit(0, [1] * tokens, [1, 2])], prefill=ints(0, tokens))
    if fits:
        assert rows.apply(message).num_tokens.tolist() == [tokens]
    else:
        with pytest.raises(PlanViolation, match="beyond the end of its block table"):
            rows.apply(message)


@pytest.mark.parametrize(("limit", "fits"), [(7, False), (8, True), (9, True)])
def test_the_token_budget(limit, fits):
    rows = RowTable(geometry(max_num_batched_tokens=limit))
    message = plan(admit=[admit(0, [1] * 5, [1, 2]), admit(1, [1] * 3, [3])], prefill=ints(0, 5, 1, 3))
    if fits:
        rows.apply(message)
    else:
        with pytest.raises(PlanViolation, match=f"more than {limit} tokens"):
            rows.apply(message)


def test_a_full_row_may_draw_its_last_token_but_no_more():
    rows = RowTable(geometry(max_model_len=4, block_size=4))
    work = rows.apply(plan(admit=[admit(0, [1, 2, 3, 4], [1])], prefill=ints(0, 4)))
    rows.append(work, np.array([5], np.int32))
    with pytest.raises(PlanViolation):
        rows.apply(plan(2))


def test_released_rows_are_free_in_the_same_plan():
    rows = seated()
    apply(rows, release=ints(2), admit=[admit(2, [30, 31], [40])], prefill=ints(0, 0, 2, 1))
    assert rows.live.tolist() == [True, False, True] + [False] * 5
    assert rows.tokens[2, :2].tolist() == [30, 31]
    assert rows.num_prompt[2] == 2


def test_a_block_may_grow_in_the_plan_that_admits_the_row():
    rows = seated()
    work = apply(rows, admit=[admit(1, [1] * 6, [40])], grow=ints(1, 41), prefill=ints(0, 0, 1, 6))
    assert work.rows.tolist() == [1, 2]
    assert work.samples.tolist() == [True, True]
    assert rows.block_table[1, :2].tolist() == [40, 41]


@pytest.mark.parametrize("seed", range(10))
def test_grow_keeps_the_order_of_each_row(seed):
    rng = random.Random(seed)
    rows = RowTable(geometry())
    rows.apply(plan(admit=[admit(r, [1], [r]) for r in range(8)], prefill=ints(*(n for r in range(8) for n in (r, 0)))))
    expected = {r: [r] for r in range(8)}
    for _ in range(3):
        pairs = [(rng.randrange(8), rng.randrange(64)) for _ in range(rng.randint(0, 20))]
        pairs = [p for i, p in enumerate(pairs) if sum(q[0] == p[0] for q in pairs[:i]) + len(expected[p[0]]) < 16]
        for row, block in pairs:
            expected[row].append(block)
        rows.apply(
            plan(
                grow=ints(*(n for p in pairs for n in p)),
                prefill=ints(*(n for r in range(8) for n in (r, 0))),
            )
        )
        for row, blocks in expected.items():
            assert rows.block_table[row, : rows.num_blocks[row]].tolist() == blocks, f"seed {seed}"


def test_append_counts_and_stores():
    rows = seated()
    work = apply(rows, prefill=ints(0, 4))
    assert (work.rows.tolist(), work.num_tokens.tolist(), work.samples.tolist()) == ([0, 2], [4, 1], [False, True])
    rows.append(work, np.array([77], np.int32))
    assert rows.num_computed[[0, 2]].tolist() == [4, 4]
    assert rows.num_known[[0, 2]].tolist() == [5, 5]
    assert rows.tokens[2, :5].tolist() == [6, 7, 8, 9, 77]
    assert rows.digest() == (2, 8)


@pytest.mark.parametrize("tokens", [[], [1, 2]])
def test_append_wants_one_token_per_sampled_row(tokens):
    rows = seated()
    work = apply(rows)
    with pytest.raises(ComputeFault):
        rows.append(work, np.array(tokens, np.int32))


def test_reset_forgets_every_row():
    rows = seated()
    rows.reset()
    assert rows.digest() == (0, 0)
    assert rows.apply(plan()).rows.tolist() == []


def test_random_bytes_never_do_anything_but_violate():
    rng = random.Random(1)
    refused = 0
    for _ in range(400):
        rows = seated()
        fields = {
            name: rng.randbytes(rng.choice([4, 8, 16])) if rng.random() < 0.5 else ints(*rng.choices(range(9), k=2))
            for name in rng.sample(["release", "copy", "grow", "prefill"], 2)
        }
        try:
            rows.apply(plan(2, **fields))
        except PlanViolation:
            refused += 1
        assert (rows.block_table >= 0).all()
        assert (rows.block_table < 64).all()
        assert (rows.num_blocks <= rows.max_blocks).all()
    assert refused > 200
