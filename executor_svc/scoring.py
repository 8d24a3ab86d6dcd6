"""Prompt logprobs: which tokens of a step are scored, and the passes that keep their logits few.

A row that was asked for them scores each token that it computes and that has a successor in its prompt: the logits
there say how likely the successor was. A long prompt would need as many rows of logits as it has tokens, so a step is
cut into passes, each a step of its own to the backend, with at most MAX_SCORED of them. Knows no device.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from executor_svc.rows import RowTable, Work
from executor_svc.sampling import NO_LOGPROBS
from protos.stepwire.wire.v1 import step_pb2

# Rows of logits of one pass beside those that draw.
MAX_SCORED = 64


@dataclass(frozen=True, slots=True)
class Scoring:
    """The scored tokens of a pass, in its order: P of its L rows of logits."""

    index: np.ndarray  # int64 [P], ascending: which of the L
    others: np.ndarray  # int64 [S]: the rest, those that draw
    rows: np.ndarray  # int32 [P]
    positions: np.ndarray  # int32 [P]: places in the prompt of the successors
    targets: np.ndarray  # int32 [P]: the successors
    counts: np.ndarray  # int32 [P]: candidates to report


def num_scored(rows: RowTable, work: Work) -> np.ndarray:
    """int64 [R]: how many of its tokens each row scores, always its first ones."""
    asked = rows.sampling.num_prompt_logprobs(work.rows) != NO_LOGPROBS
    behind = rows.num_prompt[work.rows] - 1 - rows.num_computed[work.rows]
    return np.where(asked, np.clip(behind, 0, work.num_tokens), 0)


def find_scored(rows: RowTable, work: Work, cu_seqlens: np.ndarray) -> tuple[np.ndarray, Scoring | None]:
    """(logits_index [L], what of it is scored; None: nothing)."""
    drawing = cu_seqlens[1:][work.samples] - 1
    scored = num_scored(rows, work)
    if not scored.any():
        return drawing, None
    owner = np.repeat(np.arange(len(scored)), scored)
    offset = np.arange(len(owner)) - np.repeat(np.cumsum(scored) - scored, scored)
    tokens = cu_seqlens[:-1][owner] + offset
    logits_index = np.sort(np.concatenate([drawing, tokens])).astype(np.int32)
    owners = work.rows[owner]
    positions = (rows.num_computed[owners] + offset + 1).astype(np.int32)
    return logits_index, Scoring(
        index=np.searchsorted(logits_index, tokens),
        others=np.searchsorted(logits_index, drawing),
        rows=owners,
        positions=positions,
        targets=rows.tokens[owners, positions],
        counts=rows.sampling.num_prompt_logprobs(owners),
    )


def passes(rows: RowTable, work: Work) -> Iterator[Work]:
    """The step in order; between two passes the caller notes what the first one computed."""
    scored = num_scored(rows, work)
    remaining = work.num_tokens.copy()
    while scored.sum() > MAX_SCORED:
        ends = np.minimum(np.cumsum(scored), MAX_SCORED)
        taken = np.diff(ends, prepend=0)
        active = taken > 0
        nobody = np.zeros(int(active.sum()), bool)
        yield Work(work.rows[active], taken[active].astype(np.int32), nobody, work.copy[:0])
        scored = scored - taken
        remaining -= taken.astype(np.int32)
    active = remaining > 0
    yield Work(work.rows[active], remaining[active], work.samples[active], work.copy[:0])


def messages(
    scoring: Scoring, logprobs: np.ndarray, ranks: np.ndarray, top_ids: np.ndarray, top_logprobs: np.ndarray
) -> Iterator[step_pb2.PromptLogprobs]:
    """One message a row. logprobs float32 [P], ranks int32 [P]; top_* [P, k] with k at least each row's count."""
    begins = np.flatnonzero(np.diff(scoring.rows, prepend=-1))
    for begin, end in zip(begins.tolist(), [*begins[1:].tolist(), len(scoring.rows)], strict=True):
        count = min(int(scoring.counts[begin]), top_ids.shape[1])
        yield step_pb2.PromptLogprobs(
            row=int(scoring.rows[begin]),
            first_position=int(scoring.positions[begin]),
            logprobs=logprobs[begin:end].astype("<f4").tobytes(),
            ranks=ranks[begin:end].astype("<i4").tobytes(),
            num_top=count,
            top_token_ids=top_ids[begin:end, :count].astype("<i4").tobytes(),
            top_logprobs=top_logprobs[begin:end, :count].astype("<f4").tobytes(),
        )
