"""A step arranged for the device, against one token after another in plain Python. Nothing is compiled here."""

import numpy as np
import pytest
import torch

from executor_svc.backends.cuda_step import StepArrays, StepTensors, arrange, is_decode_only, splits_needed
from executor_svc.batch import ForwardBatch, build_batch
from executor_svc.rows import RowTable
from kernels.paged import SPLIT
from tests.unit.executor.plans import admit, geometry, ints, plan

SHAPE = geometry(num_blocks=64, block_size=4, max_model_len=2 * SPLIT, max_num_batched_tokens=64)
PARTS = ("token_ids", "token_rows", "positions", "slots", "rows", "seq_lens", "cu_seqlens", "work", "logits_index")


def batch_of(*lens: tuple[int, int]) -> ForwardBatch:
    """Row i computes `new` of its `known` tokens: (new, known). All but its last token are stored or computed."""
    rows, message = RowTable(SHAPE), plan(1)
    for row, (new, known) in enumerate(lens):
        blocks = [(7 * row + i) % 64 for i in range(-(-known // 4))]
        computed = max(0, known - new) if new else 0
        message.admit.append(admit(row, [row * 100 + i for i in range(known)], blocks, num_computed_tokens=computed))
    message.prefill = ints(*(n for row, (new, _) in enumerate(lens) for n in (row, new)))
    return build_batch(rows, rows.apply(message))


def test_decodes_come_first_and_every_token_keeps_its_place_in_its_row() -> None:
    batch = batch_of((3, 3), (1, 9), (5, 13), (1, 1))
    arrays = arrange(batch, block_q=4)
    assert (arrays.rows.tolist(), arrays.num_decode) == ([1, 3, 0, 2], 2)
    assert arrays.seq_lens.tolist() == [9, 1, 3, 13]
    assert arrays.cu_seqlens.tolist() == [0, 3, 8]
    expected = []
    for entry in (1, 3, 0, 2):
        for token in range(batch.cu_seqlens[entry], batch.cu_seqlens[entry + 1]):
            row = int(batch.rows[entry])
            expected.append((batch.token_ids[token], row, batch.positions[token], batch.slot_mapping[token]))
    got = zip(arrays.token_ids, arrays.token_rows, arrays.positions, arrays.slots, strict=True)
    assert [tuple(map(int, item)) for item in got] == [tuple(map(int, item)) for item in expected]
    # The last token of each row, where it went, in the order of the rows: who samples is row 0's token first.
    assert arrays.logits_index.tolist() == [4, 0, 9, 1]
    assert not arrays.all_logits
    # Items of four queries, longest context first: (sequence among the prefills, first query).
    assert arrays.work.reshape(-1, 2).tolist() == [[1, 4], [1, 0], [0, 0]]


def test_who_draws_nothing_is_told_from_who_wants_everything() -> None:
    nobody = RowTable(SHAPE)
    chunk = build_batch(nobody, nobody.apply(plan(1, admit=[admit(0, [1] * 9, [0, 1, 2])], prefill=ints(0, 8))))
    everybody = batch_of((1, 9), (1, 2))
    for batch, all_logits in ((chunk, False), (everybody, True)):
        arrays = arrange(batch, block_q=4)
        assert (len(arrays.logits_index), arrays.all_logits) == (0, all_logits)
        tensors = unpack(arrays)
        assert (tensors.logits_index is None) == all_logits


def unpack(arrays: StepArrays) -> StepTensors:
    flat = torch.from_numpy(arrays.flat())
    return StepTensors.of(flat, arrays.layout(), all_logits=arrays.all_logits, max_splits=1)


@pytest.mark.parametrize("lens", [[(3, 3), (1, 9), (5, 13), (1, 1)], [(1, 9)], [(1, 9)] * 4, [(5, 5)]])
def test_one_upload_holds_all_parts_each_at_sixteen_bytes(lens: list[tuple[int, int]]) -> None:
    arrays = arrange(batch_of(*lens), block_q=4)
    tensors = unpack(arrays)
    for name in PARTS:
        part, view = getattr(arrays, name), getattr(tensors, name)
        if view is not None:
            assert view.flatten().tolist() == part.tolist(), name
            assert view.storage_offset() % 4 == 0, name
    assert tensors.num_decode == arrays.num_decode


def test_padding_attends_to_nothing_and_stores_nothing() -> None:
    batch = batch_of((1, 9), (1, 2), (1, 30))
    plain, padded = arrange(batch, block_q=4), arrange(batch, block_q=4, pad_to=5)
    for name in ("token_ids", "token_rows", "positions", "slots", "rows", "seq_lens"):
        assert getattr(padded, name)[:3].tolist() == getattr(plain, name).tolist()
        assert getattr(padded, name)[3:].tolist() == [-1 if name == "slots" else 0] * 2
    assert padded.all_logits
    assert padded.layout() == (5,) * 6 + (1, 0, 0)


def test_only_decoding_contexts_ask_for_splits() -> None:
    assert splits_needed(batch_of((1, SPLIT))) == 1
    assert splits_needed(batch_of((1, SPLIT + 1))) == 2
    mixed = batch_of((2, SPLIT + 2), (1, 5))
    assert (splits_needed(mixed), is_decode_only(mixed)) == (1, False)
    assert is_decode_only(batch_of((1, SPLIT), (1, 5)))
    assert np.diff(mixed.cu_seqlens).tolist() == [2, 1]
