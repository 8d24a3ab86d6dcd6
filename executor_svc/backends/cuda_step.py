"""A ForwardBatch arranged for the device: decodes first, padding added, every index in one array for one upload.

    tokens    [0, nd)  one new token each: `decode_attention`       [nd, T)  the others: `prefill_attention`

Pure host logic in numpy; the device only sees the flat array and where its parts lie. Parts begin at multiples of 16
bytes: a kernel is compiled for aligned addresses, and must not be compiled again while serving.
"""

from dataclasses import dataclass, fields

import numpy as np
import torch

from executor_svc.batch import ForwardBatch
from kernels.attention_decode import num_splits
from kernels.attention_prefill import plan_prefill

_ALIGN = 4  # int32s in 16 bytes


@dataclass(frozen=True, slots=True)
class StepArrays:
    """int32 all. `nd` decoding entries (padding included) come first, `P` others follow; B = nd + P."""

    token_ids: np.ndarray  # [T], NEWEST allowed
    token_rows: np.ndarray  # [T]
    positions: np.ndarray  # [T]
    slots: np.ndarray  # [T], -1 is padding
    rows: np.ndarray  # [B]
    seq_lens: np.ndarray  # [B], 0 is padding
    cu_seqlens: np.ndarray  # [P + 1], of the tokens from nd on
    work: np.ndarray  # [items * 2]
    logits_index: np.ndarray  # [S], or empty where `all_logits`
    all_logits: bool  # every token's logits are wanted, in order

    @property
    def num_decode(self) -> int:
        return len(self.rows) - len(self.cu_seqlens) + 1

    def _parts(self) -> list[np.ndarray]:
        return [part for field in fields(self) if isinstance(part := getattr(self, field.name), np.ndarray)]

    def layout(self) -> tuple[int, ...]:
        return tuple(len(part) for part in self._parts())

    def flat(self) -> np.ndarray:
        """All parts one after another, each padded to 16 bytes."""
        parts = self._parts()
        flat = np.zeros(sum(_padded(len(part)) for part in parts), np.int32)
        begin = 0
        for part in parts:
            flat[begin : begin + len(part)] = part
            begin += _padded(len(part))
        return flat


@dataclass(frozen=True, slots=True)
class StepTensors:
    """The same parts as views of one device tensor, and what the host knows about them."""

    token_ids: torch.Tensor
    token_rows: torch.Tensor
    positions: torch.Tensor
    slots: torch.Tensor
    rows: torch.Tensor
    seq_lens: torch.Tensor
    cu_seqlens: torch.Tensor
    work: torch.Tensor
    logits_index: torch.Tensor | None  # None: every token's, in order
    num_decode: int
    max_splits: int

    @staticmethod
    def of(flat: torch.Tensor, layout: tuple[int, ...], *, all_logits: bool, max_splits: int) -> "StepTensors":
        views, begin = [], 0
        for length in layout:
            views.append(flat[begin : begin + length])
            begin += _padded(length)
        token_ids, token_rows, positions, slots, rows, seq_lens, cu_seqlens, work, logits_index = views
        return StepTensors(
            token_ids=token_ids,
            token_rows=token_rows,
            positions=positions,
            slots=slots,
            rows=rows,
            seq_lens=seq_lens,
            cu_seqlens=cu_seqlens,
            work=work.view(-1, 2),
            logits_index=None if all_logits else logits_index,
            num_decode=len(rows) - len(cu_seqlens) + 1,
            max_splits=max_splits,
        )


def _padded(length: int) -> int:
    return -(-length // _ALIGN) * _ALIGN


def is_decode_only(batch: ForwardBatch) -> bool:
    return batch.num_tokens == len(batch.rows)


def arrange(batch: ForwardBatch, *, block_q: int, pad_to: int | None = None) -> StepArrays:
    """`block_q` tokens of a prefill work item; `pad_to` rows of a decode-only step."""
    counts = np.diff(batch.cu_seqlens)
    decodes, others = np.flatnonzero(counts == 1), np.flatnonzero(counts > 1)
    order = np.concatenate([decodes, others])
    # Tokens in the new order: entry i brings cu_seqlens[i] .. cu_seqlens[i + 1] - 1.
    new_counts = counts[order]
    ends = np.cumsum(new_counts)
    source = np.arange(batch.num_tokens) + np.repeat(batch.cu_seqlens[:-1][order] - (ends - new_counts), new_counts)
    place = np.empty_like(source)
    place[source] = np.arange(batch.num_tokens)

    cu_seqlens = np.concatenate([[0], np.cumsum(counts[others])])
    token_rows = np.repeat(batch.rows[order], new_counts)
    all_sampled = is_decode_only(batch) and len(batch.logits_index) == batch.num_tokens
    arrays = StepArrays(
        token_ids=batch.token_ids[source],
        token_rows=token_rows,
        positions=batch.positions[source],
        slots=batch.slot_mapping[source].astype(np.int32),
        rows=batch.rows[order],
        seq_lens=batch.seq_lens[order],
        cu_seqlens=cu_seqlens,
        work=plan_prefill(cu_seqlens, batch.seq_lens[others], block_q).ravel(),
        logits_index=place[batch.logits_index][: 0 if all_sampled else None],
        all_logits=all_sampled,
    )
    return arrays if pad_to is None else _pad(arrays, pad_to)


def _pad(arrays: StepArrays, num_rows: int) -> StepArrays:
    """A decode-only step with rows that attend to nothing, store nothing and are not sampled."""
    missing = num_rows - len(arrays.rows)

    def extend(part: np.ndarray, value: int) -> np.ndarray:
        return np.concatenate([part, np.full(missing, value, np.int32)])

    return StepArrays(
        token_ids=extend(arrays.token_ids, 0),
        token_rows=extend(arrays.token_rows, 0),
        positions=extend(arrays.positions, 0),
        slots=extend(arrays.slots, -1),
        rows=extend(arrays.rows, 0),
        seq_lens=extend(arrays.seq_lens, 0),
        cu_seqlens=arrays.cu_seqlens,
        work=arrays.work,
        # A recording computes every row's logits; who is sampled is chosen outside it.
        logits_index=arrays.logits_index[:0],
        all_logits=True,
    )


def splits_needed(batch: ForwardBatch) -> int:
    """Splits of the longest decoding context."""
    decoding = batch.seq_lens[np.diff(batch.cu_seqlens) == 1]
    return num_splits(int(decoding.max(initial=1)))


class TableMirror:
    """What the device's block tables [rows, max_blocks] hold, so that only what changed is uploaded."""

    def __init__(self, num_rows: int, max_blocks: int):
        self.tables = np.zeros((num_rows, max_blocks), np.int32)

    def update(self, batch: ForwardBatch) -> np.ndarray:
        """int32 [n, 2] of (row * max_blocks + place, block) that the device has to write."""
        width = batch.block_tables.shape[1]
        held = self.tables[batch.rows, :width]
        entry, place = np.nonzero(held != batch.block_tables)
        if not entry.size:
            return np.empty((0, 2), np.int32)
        blocks = batch.block_tables[entry, place]
        self.tables[batch.rows[entry], place] = blocks
        return np.stack([batch.rows[entry] * self.tables.shape[1] + place, blocks], axis=1).astype(np.int32)
