"""Steps that together run every kernel in every form that serving will ask for. Knows no device."""

from collections.abc import Iterator

import numpy as np

from executor_svc.batch import ForwardBatch, build_batch
from executor_svc.rows import RowTable
from kernels.paged import SPLIT
from protos.stepwire.wire.v1 import step_pb2

GREEDY = step_pb2.Sampling(temperature=0, top_p=1, repetition_penalty=1)


def _everything() -> step_pb2.Sampling:
    """Every filter, rule and report at once."""
    return step_pb2.Sampling(
        temperature=0.8,
        top_p=0.9,
        top_k=2,
        min_p=0.01,
        presence_penalty=0.1,
        frequency_penalty=0.1,
        repetition_penalty=1.1,
        min_tokens=1,
        stop_token_ids=_ints([0]),
        bias_token_ids=_ints([1]),
        bias_values=np.array([0.5], "<f4").tobytes(),
        allowed_token_ids=_ints([0, 1, 2]),
        logprobs=2,
    )


def _ints(values: list[int] | np.ndarray) -> bytes:
    return np.asarray(values, "<i4").tobytes()


def warm_up_batches(geometry: step_pb2.Geometry) -> Iterator[ForwardBatch]:
    """Prefill alone; prefill beside a decode; decodes alone; the same with a context of several splits."""
    rows = RowTable(geometry)
    known = [3, 2, SPLIT + 2, 2]
    plans = [
        ([0], [(0, 3)]),
        ([1], [(1, 2)]),
        ([], []),
        ([2], []),
        ([3], [(3, 2)]),
    ]
    for admitted, prefill in plans:
        plan = step_pb2.StepPlan(prefill=_ints(np.array(prefill, np.int32)))
        for row in admitted:
            if not _fits(geometry, row, known[row]):
                return
            plan.admit.append(_admit(geometry, row, known[row]))
        work = rows.apply(plan)
        yield build_batch(rows, work)
        rows.append(work, np.zeros(int(work.samples.sum()), np.int32))


def widest_batch(geometry: step_pb2.Geometry) -> ForwardBatch:
    """As many tokens and as many drawing rows as a step can have, every rule and report asked for. All in block 0."""
    rows = RowTable(geometry)
    num_rows = min(geometry.max_num_seqs, geometry.max_num_batched_tokens)
    share, extra = divmod(geometry.max_num_batched_tokens, num_rows)
    plan = step_pb2.StepPlan()
    counts = [min(share + (row < extra), geometry.max_model_len) for row in range(num_rows)]
    for row, count in enumerate(counts):
        blocks = np.zeros(-(-count // geometry.block_size))
        seated = step_pb2.Admit(row=row, token_ids=_ints(np.zeros(count)), num_prompt_tokens=count)
        seated.block_ids = _ints(blocks)
        seated.sampling.CopyFrom(_everything() if geometry.vocab_size >= 3 else GREEDY)
        plan.admit.append(seated)
    plan.prefill = _ints(np.array(list(enumerate(counts))))
    return build_batch(rows, rows.apply(plan))


def _fits(geometry: step_pb2.Geometry, row: int, known: int) -> bool:
    # Room for the token that each later step adds.
    longest = min(geometry.max_model_len, geometry.num_blocks * geometry.block_size)
    return row < geometry.max_num_seqs and known + 5 <= longest and geometry.max_num_batched_tokens >= row + 3


def _admit(geometry: step_pb2.Geometry, row: int, known: int) -> step_pb2.Admit:
    """A short row prefills; a long one comes with all but its newest token computed. Rows share blocks: who cares."""
    num_blocks = -(-(known + 5) // geometry.block_size)
    return step_pb2.Admit(
        row=row,
        token_ids=_ints(np.zeros(known, np.int32)),
        num_prompt_tokens=known,
        block_ids=_ints(np.arange(num_blocks)),
        num_computed_tokens=known - 1 if known > SPLIT else 0,
        sampling=_everything() if row == 1 and geometry.vocab_size >= 3 else GREEDY,
    )
