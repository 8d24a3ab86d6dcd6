"""A span for each stay of a traced sequence in a row: from its Admit to its release, with the steps between.

Costs a plan that seats or frees nobody nothing but a look. Knows nothing of what rows hold.
"""

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from executor_svc.tracing import Attributes, Tracing, end
from protos.stepwire.wire.v1 import step_pb2

if TYPE_CHECKING:
    from opentelemetry.trace import Span


@dataclass(frozen=True, slots=True)
class Stay:
    span: "Span"
    first_step: int


class RowTraces:
    def __init__(self, tracing: Tracing, backend: str, clock: Callable[[], float] = time.time) -> None:
        self._tracing = tracing
        self._backend = backend
        self._clock = clock
        self._stays: dict[int, Stay] = {}

    def beside(
        self, observe: Callable[[step_pb2.StepResult], None]
    ) -> Callable[[step_pb2.StepPlan, step_pb2.StepResult], None]:
        """For a worker: what it observes, and the spans."""

        def both(plan: step_pb2.StepPlan, result: step_pb2.StepResult) -> None:
            observe(result)
            self.step(plan, result)

        return both

    def step(self, plan: step_pb2.StepPlan, result: step_pb2.StepResult) -> None:
        """A plan that was carried out, just now: it named only rows that there are."""
        if plan.release and self._stays:
            began_s = self._clock() - result.forward_us / 1e6
            for row in np.frombuffer(plan.release, "<i4").tolist():
                stay = self._stays.pop(row, None)
                if stay is not None:
                    stay.span.set_attribute("stepwire.num_steps", plan.step_id - stay.first_step)
                    end(stay.span, at_s=began_s)
        for admit in plan.admit:
            if admit.traceparent:
                self._begin(plan, admit, self._clock() - result.forward_us / 1e6)

    def reset(self) -> None:
        """Every row is forgotten: the epoch is over."""
        for stay in self._stays.values():
            end(stay.span, error="the epoch ended")
        self._stays.clear()

    def _begin(self, plan: step_pb2.StepPlan, admit: step_pb2.Admit, at_s: float) -> None:
        attributes: Attributes = {
            "stepwire.row": admit.row,
            "stepwire.choice": admit.sampling.choice,
            "stepwire.epoch": plan.epoch,
            "stepwire.num_known_tokens": len(admit.token_ids) // 4,
            "stepwire.num_cached_tokens": admit.num_computed_tokens,
            "stepwire.backend": self._backend,
        }
        span = self._tracing.begin("execute", parent=admit.traceparent, at_s=at_s, attributes=attributes)
        self._stays[admit.row] = Stay(span, plan.step_id)
