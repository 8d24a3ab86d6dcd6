"""What a step in flight scores of prompts: told to the executor when a row is admitted, checked in the result.

Knows nothing of how far the scores of a request were delivered beyond whether any are owed: that is `prompt_scores`.
"""

from typing import NamedTuple

from protos.stepwire.wire.v1 import step_pb2
from scheduler_svc.core.sequence import Sequence
from scheduler_svc.errors import ProtocolViolation


class ScoredChunk(NamedTuple):
    """What a step in flight scores in one row: `num_scored` tokens of the prompt from `first` on."""

    row: int
    sequence: Sequence
    first: int
    num_scored: int


def instruct(sequence: Sequence, admit: step_pb2.Admit) -> None:
    """Tells the executor to score what it computes of the prompt, or that nobody wants to know any more."""
    sequence.is_scored = sequence.state_of_request.scores.is_owed
    if not sequence.is_scored:
        admit.sampling.ClearField("prompt_logprobs")


def chunk_of(sequence: Sequence, begin: int, end: int) -> list[ScoredChunk]:
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
