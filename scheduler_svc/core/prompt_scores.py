"""Prompt scores: the logprobs of its own prompt that a request asked for, and how far they were delivered.

They come from the computation of the prompt, so what is still owed cannot be taken from the prefix index. Whichever
choice computes the prompt brings them, in order; after a preemption or the loss of an executor only the rest is
computed for them, and what comes twice is cut off. Knows nothing of blocks, rows or candidates.
"""

from dataclasses import dataclass

from protos.stepwire.wire.v1 import step_pb2

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
