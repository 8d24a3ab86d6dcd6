"""The interface between the worker loop and whatever computes.

A backend owns the KV contents and nothing else that outlives a step: its answer is a function of the batches it was
given since the last reset. It knows no plan, row table or link.
"""

from dataclasses import dataclass, field
from typing import Protocol

import numpy as np

from executor_svc.batch import ForwardBatch
from protos.stepwire.wire.v1 import step_pb2


@dataclass(frozen=True, slots=True)
class StepOutput:
    token_ids: np.ndarray  # int32 [S], in ascending row order
    logprobs: list[step_pb2.RowLogprobs] = field(default_factory=list)  # of the rows that asked, same order
    prompt_logprobs: list[step_pb2.PromptLogprobs] = field(default_factory=list)  # of the batch's `scoring`
    # Rows that could draw nothing; their entries in token_ids are any ids.
    faults: list[step_pb2.RowFault] = field(default_factory=list)


class Pending(Protocol):
    """A step that was launched."""

    def is_done(self) -> bool:
        """Without waiting."""

    def wait(self) -> StepOutput:
        """Raises ComputeFault, and whatever the device has to say about this step."""


@dataclass(frozen=True, slots=True)
class Done:
    output: StepOutput

    def is_done(self) -> bool:
        return True

    def wait(self) -> StepOutput:
        return self.output


class Backend(Protocol):
    name: str
    device: str
    geometry: step_pb2.Geometry
    identity: step_pb2.ModelIdentity

    def reset(self) -> None:
        """A new epoch: whatever the KV slots hold will not be read before it is written."""

    def copy_blocks(self, pairs: np.ndarray) -> None:
        """int32 [N, 2] of (source, destination), N >= 1; no destination is another's source or destination."""

    def launch(self, batch: ForwardBatch) -> Pending:
        """Stores K and V of the batch's tokens, then draws one token per sampled row. Raises ComputeFault.

        Steps run in the order in which they were launched. Where a step is not done when `launch` returns, the next
        one may come with NEWEST in place of the tokens that it draws; see `RowTable.needs_drawn` for who waits.
        """


class AtOnce:
    """What a backend that computes in the calling thread has instead: a step is done when `launch` returns."""

    def run(self, batch: ForwardBatch) -> StepOutput:
        raise NotImplementedError

    def launch(self, batch: ForwardBatch) -> Pending:
        return Done(self.run(batch))
