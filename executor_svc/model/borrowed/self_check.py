"""A borrowed model proves itself before it serves: computed in pieces over pages, it must agree with itself alone.

What no look at a class can find out shows here: state between tokens, positions that are not what they are said to be,
attention that is not only causal, tokens that see their neighbours in the batch.
"""

from typing import Any

import numpy as np
import torch

from executor_svc.model.borrowed.decoder import BorrowedDecoder
from executor_svc.model.borrowed.interface import NAME, CannotBorrow

LENGTHS = (21, 10)
# Tokens of each sequence computed in each of the steps.
STEPS = ((13, 0), (7, 9), (1, 1))
BLOCK_SIZE, NUM_BLOCKS = 4, 16
TOLERANCE = {torch.float32: 1e-3}
WIDE_TOLERANCE = 0.1


class _Pages:
    """A pool of its own, poisoned: what nobody wrote must not be read."""

    def __init__(self, decoder: BorrowedDecoder):
        config = decoder.config
        shape = (NUM_BLOCKS, config.num_kv_heads, BLOCK_SIZE, config.head_dim)
        nan, dtype = float("nan"), decoder.kv_dtype
        self.block_size, self.num_blocks = BLOCK_SIZE, NUM_BLOCKS
        self.layers = [
            (torch.full(shape, nan, dtype=dtype), torch.full(shape, nan, dtype=dtype)) for _ in range(config.num_layers)
        ]


class _Batch:
    """The fields of a ForwardBatch that a decoder reads, of sequences computing `counts` tokens after `done`."""

    def __init__(self, tokens: list[np.ndarray], tables: np.ndarray, done: np.ndarray, counts: np.ndarray):
        rows = np.flatnonzero(counts)
        positions = [np.arange(done[row], done[row] + counts[row]) for row in rows]
        self.token_ids = np.concatenate([tokens[row][p] for row, p in zip(rows, positions, strict=True)])
        self.positions = np.concatenate(positions)
        self.slot_mapping = np.concatenate(
            [tables[row][p // BLOCK_SIZE] * BLOCK_SIZE + p % BLOCK_SIZE for row, p in zip(rows, positions, strict=True)]
        )
        self.cu_seqlens = np.concatenate([[0], np.cumsum(counts[rows])])
        self.seq_lens = (done + counts)[rows]
        self.block_tables = tables[rows]
        self.num_tokens = len(self.token_ids)
        self.logits_index = np.arange(self.num_tokens)


def check_itself(decoder: BorrowedDecoder) -> None:
    """Raises CannotBorrow where the pieces differ from the whole."""
    config = decoder.config
    rng = np.random.default_rng(0)
    lengths = [min(length, config.max_position) for length in LENGTHS]
    tokens = [rng.integers(0, config.vocab_size, length) for length in lengths]
    expected = _alone(decoder, tokens)
    found = _in_pieces(decoder, tokens, rng.permutation(NUM_BLOCKS))
    errors = torch.cat([(f - e).norm(dim=-1) / e.norm(dim=-1) for f, e in zip(found, expected, strict=True)])
    # The median: routers of experts may choose otherwise where types are coarse.
    if not float(errors.median()) <= TOLERANCE.get(decoder.kv_dtype, WIDE_TOLERANCE):
        raise CannotBorrow(
            f"computed in pieces over pages its logits are others than in one pass (by {float(errors.median()):.1e})"
        )


def _alone(decoder: BorrowedDecoder, tokens: list[np.ndarray]) -> list[torch.Tensor]:
    """Logits of each sequence in one pass of transformers' own attention."""
    model: Any = decoder.model
    model.set_attn_implementation("eager")
    try:
        with torch.inference_mode():
            results = [
                model(torch.from_numpy(ids)[None], use_cache=False, return_dict=True).logits[0] for ids in tokens
            ]
    finally:
        model.set_attn_implementation(NAME)
    return [logits[:, : decoder.config.vocab_size].float() for logits in results]


def _in_pieces(decoder: BorrowedDecoder, tokens: list[np.ndarray], blocks: np.ndarray) -> list[torch.Tensor]:
    lengths = np.array([len(ids) for ids in tokens])
    tables = np.stack([blocks[: NUM_BLOCKS // 2], blocks[NUM_BLOCKS // 2 :]])
    pages, done = _Pages(decoder), np.zeros(len(tokens), np.int64)
    pieces: list[list[torch.Tensor]] = [[] for _ in tokens]
    for step in STEPS:
        counts = np.minimum(step, lengths - done)
        if not counts.any():
            continue
        logits = iter(decoder.forward(_Batch(tokens, tables, done, counts), pages).split(counts[counts > 0].tolist()))
        for row in np.flatnonzero(counts):
            pieces[row].append(next(logits))
        done += counts
    return [torch.cat(parts) for parts in pieces]
