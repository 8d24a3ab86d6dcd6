"""Prompt scores: the logprobs of its own prompt that a request asked for, and how far they were delivered.

They come from the computation of the prompt, so what is still owed cannot be taken from the prefix index. Whichever
choice computes the prompt brings them, in order; after a preemption or the loss of an executor only the rest is
computed for them, and what comes twice is cut off. Knows nothing of blocks, rows or candidates.
"""

from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

from protos.stepwire.wire.v1 import step_pb2
from scheduler_svc.errors import ProtocolViolation

if TYPE_CHECKING:
    from scheduler_svc.core.sequence import Sequence

EVERYTHING = 2**31 - 1


@dataclass(slots=True)
class PromptScores:
    """Of one request. Scored is each token of the prompt that has one before it: positions 1 .. num_wanted."""

    num_wanted: int  # 0: not asked
    num_delivered: int

    @property
    def is_owed(self) -> bool:
        return self.num_delivered < self.num_wanted

    @property
    def num_skippable(self) -> int:
        """Leading tokens that need not be computed for the scores: the one at p scores the one at p + 1."""
        return self.num_delivered if self.is_owed else EVERYTHING

    def take(self, values: step_pb2.PromptLogprobs) -> step_pb2.PromptLogprobs | None:
        """The part of `values` that was not delivered before. None: all of it was."""
        count = len(values.logprobs) // 4
        known = self.num_delivered + 1 - values.first_position
        if known >= count:
            return None
        self.num_delivered = values.first_position + count - 1
        if known <= 0:
            return values
        width = 4 * values.num_top
        return step_pb2.PromptLogprobs(
            row=values.row,
            first_position=values.first_position + known,
            logprobs=values.logprobs[4 * known :],
            ranks=values.ranks[4 * known :],
            num_top=values.num_top,
            top_token_ids=values.top_token_ids[width * known :],
            top_logprobs=values.top_logprobs[width * known :],
        )


class ScoredChunk(NamedTuple):
    """What a step in flight scores in one row: `num_scored` tokens of the prompt from `first` on."""

    row: int
    sequence: "Sequence"
    first: int
    num_scored: int


def instruct(sequence: "Sequence", admit: step_pb2.Admit) -> None:
    """Tells the executor to score what it computes of the prompt, or that nobody wants to know any more."""
    sequence.is_scored = sequence.state_of_request.scores.is_owed
    if not sequence.is_scored:
        admit.sampling.ClearField("prompt_logprobs")


def chunk_of(sequence: "Sequence", begin: int, end: int) -> "list[ScoredChunk]":
    """What computing its tokens begin .. end - 1 scores: one chunk or none."""
    count = min(end, sequence.num_prompt - 1) - begin
    return [ScoredChunk(sequence.row, sequence, begin + 1, count)] if sequence.is_scored and count > 0 else []


def check(result: step_pb2.StepResult, chunks: tuple[ScoredChunk, ...]) -> None:
    """Raises ProtocolViolation if the result does not score exactly what was planned. A row may come in parts."""
    due: dict[int, tuple[int, int, ScoredChunk | None]] = {
        chunk.row: (chunk.first, chunk.first + chunk.num_scored, chunk) for chunk in chunks
    }
    for values in result.prompt_logprobs:
        begin, end, chunk = due.get(values.row, (0, 0, None))
        count = len(values.logprobs) // 4
        asked = chunk.sequence.request.sampling.prompt_logprobs if chunk is not None else 0
        if values.first_position != begin or not 1 <= count <= end - begin or values.num_top > asked:
            raise ProtocolViolation(f"step {result.step_id} scored prompt tokens that it was not asked to score")
        sizes = (len(values.logprobs), len(values.ranks), len(values.top_token_ids), len(values.top_logprobs))
        if sizes != (4 * count, 4 * count, 4 * count * values.num_top, 4 * count * values.num_top):
            raise ProtocolViolation(f"step {result.step_id}: prompt logprobs of {sizes} bytes do not belong together")
        due[values.row] = (begin + count, end, chunk)
    if any(begin != end for begin, end, _ in due.values()):
        raise ProtocolViolation(f"step {result.step_id} did not score all that it was asked to score")
