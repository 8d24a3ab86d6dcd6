"""Rows and work -> ForwardBatch: the flat arrays that a forward pass reads. Pure numpy; knows no device.

    T  tokens computed in this step, rows one after another        R  rows that compute
    S  rows for which a token is drawn (they compute their newest) B  longest block table among the R
    L  tokens whose logits are wanted: those of the S, and those scored for prompt logprobs

A prefill of many tokens and a decode of one are the same lines here: a row computes positions
num_computed .. num_computed + n - 1.
"""

from dataclasses import dataclass

import numpy as np

from executor_svc.rows import RowTable, Work
from executor_svc.sampling import SamplingBatch
from executor_svc.scoring import Scoring, find_scored


@dataclass(frozen=True, slots=True)
class ForwardBatch:
    rows: np.ndarray  # int32 [R], ascending
    token_ids: np.ndarray  # int32 [T]
    positions: np.ndarray  # int32 [T]
    slot_mapping: np.ndarray  # int64 [T]: block * block_size + offset
    cu_seqlens: np.ndarray  # int32 [R + 1]: row i computes tokens cu_seqlens[i] .. cu_seqlens[i + 1] - 1
    seq_lens: np.ndarray  # int32 [R]: tokens with K and V after this step
    block_tables: np.ndarray  # int32 [R, B]; entries past a row's own length are valid but meaningless
    sampled: np.ndarray  # bool [R]
    logits_index: np.ndarray  # int32 [L], ascending: the last token of each sampled row, and every scored one
    num_tokens: int  # T
    sampling: SamplingBatch
    scoring: Scoring | None = None  # None: L is S


def build_batch(rows: RowTable, work: Work) -> ForwardBatch:
    block_size = rows.geometry.block_size
    computed = rows.num_computed[work.rows]
    num_rows = len(work.rows)
    cu_seqlens = np.zeros(num_rows + 1, np.int32)
    np.cumsum(work.num_tokens, out=cu_seqlens[1:])
    num_tokens = int(cu_seqlens[-1])

    # Token i of the batch belongs to entry owner[i]; its position counts on from what the row has computed.
    owner = np.repeat(np.arange(num_rows), work.num_tokens)
    positions = np.arange(num_tokens, dtype=np.int32) + (computed - cu_seqlens[:-1])[owner]
    row_of_token = work.rows[owner]
    block = rows.block_table[row_of_token, positions // block_size]
    seq_lens = computed + work.num_tokens
    max_blocks = -(-int(seq_lens.max(initial=0)) // block_size)
    logits_index, scoring = find_scored(rows, work, cu_seqlens)
    return ForwardBatch(
        rows=work.rows,
        token_ids=rows.tokens[row_of_token, positions],
        positions=positions,
        slot_mapping=block.astype(np.int64) * block_size + positions % block_size,
        cu_seqlens=cu_seqlens,
        seq_lens=seq_lens,
        block_tables=rows.block_table[work.rows, :max_blocks],
        sampled=work.samples,
        logits_index=logits_index,
        num_tokens=num_tokens,
        sampling=rows.sampling.select(work.rows[work.samples], rows.tokens, rows.num_prompt, rows.num_known),
        scoring=scoring,
    )
