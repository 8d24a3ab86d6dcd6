"""build_batch against a per-token loop."""

import random

import numpy as np
import pytest

from executor_svc.batch import ForwardBatch, build_batch
from executor_svc.rows import RowTable, Work
from tests.unit.executor.plans import admit, geometry, greedy, ints, plan


def naive(rows: RowTable, work: Work, block_size: int) -> dict:
    """What the fields mean, one token at a time, in plain lists."""
    expected: dict = {name: [] for name in ("token_ids", "positions", "slot_mapping", "seq_lens", "logits_index")}
    cu_seqlens = [0]
    for row, count, samples in zip(work.rows.tolist(), work.num_tokens.tolist(), work.samples.tolist(), strict=True):
        for _ in range(count):
            position = int(rows.num_computed[row]) + len(expected["token_ids"]) - cu_seqlens[-1]
            block = int(rows.block_table[row][position // block_size])
            expected["token_ids"].append(int(rows.tokens[row][position]))
            expected["positions"].append(position)
            expected["slot_mapping"].append(block * block_size + position % block_size)
        cu_seqlens.append(cu_seqlens[-1] + count)
        expected["seq_lens"].append(int(rows.num_computed[row]) + count)
        if samples:
            expected["logits_index"].append(cu_seqlens[-1] - 1)
    return {**expected, "cu_seqlens": cu_seqlens}


def check(rows: RowTable, work: Work, batch: ForwardBatch, block_size: int) -> None:
    for name, values in naive(rows, work, block_size).items():
        assert getattr(batch, name).tolist() == values, name
    assert batch.num_tokens == len(batch.token_ids)
    for entry, row in enumerate(batch.rows.tolist()):
        used = -(-int(batch.seq_lens[entry]) // block_size)
        assert batch.block_tables[entry, :used].tolist() == rows.block_table[row, :used].tolist()
    assert batch.block_tables.shape[1] == max(-(-int(n) // block_size) for n in batch.seq_lens)


@pytest.mark.parametrize("seed", range(30))
def test_random_rows(seed):
    rng = random.Random(seed)
    block_size = rng.choice([1, 2, 4, 16])
    rows = RowTable(geometry(block_size=block_size, max_num_seqs=16, max_num_batched_tokens=10_000))
    seats, prefill = [], []
    for row in sorted(rng.sample(range(16), rng.randint(1, 16))):
        length = rng.randint(1, 60)
        blocks = [rng.randrange(64) for _ in range(-(-length // block_size))]
        computed = rng.randrange(length)
        tokens = [rng.randrange(1000) for _ in range(length)]
        seats.append(admit(row, tokens, blocks, num_computed_tokens=computed, num_prompt_tokens=rng.randint(1, length)))
        prefill.append((row, rng.randint(0, length - computed)))
    prefill[0] = (prefill[0][0], max(1, prefill[0][1]))
    work = rows.apply(plan(admit=seats, prefill=ints(*(n for pair in prefill for n in pair))))
    check(rows, work, build_batch(rows, work), block_size)


def test_dtypes_are_what_the_kernels_read():
    rows = RowTable(geometry())
    work = rows.apply(plan(admit=[admit(0, [1, 2], [0])], prefill=ints(0, 2)))
    batch = build_batch(rows, work)
    assert batch.slot_mapping.dtype == np.int64
    assert batch.sampled.dtype == bool
    for name in ("rows", "token_ids", "positions", "cu_seqlens", "seq_lens", "block_tables", "logits_index"):
        assert getattr(batch, name).dtype == np.int32, name


def test_a_step_in_which_nothing_is_sampled():
    rows = RowTable(geometry())
    batch = build_batch(rows, rows.apply(plan(admit=[admit(0, [1, 2, 3], [0])], prefill=ints(0, 2))))
    assert batch.logits_index.tolist() == []
    assert len(batch.sampling.rows) == 0


def test_the_sampling_columns_belong_to_the_sampled_rows():
    rows = RowTable(geometry())
    penalised = greedy(presence_penalty=0.5, seed=5)
    seats = [
        admit(1, [1, 2, 3, 4], [0], sampling=greedy(seed=3, choice=2), num_prompt_tokens=2),
        admit(4, [1, 2, 3, 4], [1], sampling=greedy(seed=4)),
        admit(6, [7, 8, 9], [2], sampling=penalised, num_prompt_tokens=1),
    ]
    batch = build_batch(rows, rows.apply(plan(admit=seats, prefill=ints(1, 4, 4, 2, 6, 3))))
    assert batch.sampled.tolist() == [True, False, True]
    assert batch.sampling.rows.tolist() == [1, 6]
    assert batch.sampling.positions.tolist() == [2, 2]
    assert batch.sampling.parameters["seed"].tolist() == [3, 5]
    [history] = batch.sampling.histories
    assert (history.index, history.prompt.tolist(), history.output.tolist()) == (1, [7], [8, 9])
