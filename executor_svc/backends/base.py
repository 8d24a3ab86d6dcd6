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


class Backend(Protocol):
    name: str
    device: str
    geometry: step_pb2.Geometry
    identity: step_pb2.ModelIdentity

    def reset(self) -> None:
        """A new epoch: whatever the KV slots hold will not be read before it is written."""

    def copy_blocks(self, pairs: np.ndarray) -> None:
        """int32 [N, 2] of (source, destination), N >= 1; no destination is another's source or destination."""

    def run(self, batch: ForwardBatch) -> StepOutput:
        """Stores K and V of the batch's tokens, then draws one token per sampled row. Raises ComputeFault."""
