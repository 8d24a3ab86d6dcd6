"""What is counted, traced and logged of one stream, from the call's arrival to its end, however it ends.

Knows no gRPC and no text: numbers, names and outcomes only.
"""

import logging
import time
from typing import TYPE_CHECKING

from scheduler_svc.errors import RequestError
from scheduler_svc.frontend.generation import Generation
from scheduler_svc.frontend.metrics import FrontendMetrics
from scheduler_svc.frontend.submission import Resolved
from scheduler_svc.tracing import Tracing, end

if TYPE_CHECKING:
    from opentelemetry.trace import Span

log = logging.getLogger(__name__)


class StreamRecord:
    def __init__(self, method: str, model: str, metrics: FrontendMetrics, tracing: Tracing | None, traceparent: str):
        """`traceparent`: what the caller sent; `tracing` None: nobody traces."""
        self.outcome = "failed"  # until something better is known
        self._method = method
        self._metrics = metrics
        self._tracing = tracing
        self._began_at = time.monotonic()
        self._first_token_at: float | None = None
        self._last_at: list[float] = []
        self._resolved: Resolved | None = None
        self._generation: Generation | None = None
        self._num_cached_tokens = 0
        self._error = ""
        self._span: Span | None = None
        if tracing is not None:
            attributes = {"rpc.system": "grpc", "rpc.method": method, "stepwire.model": model}
            self._span = tracing.begin(method, parent=traceparent, kind=tracing.SERVER, attributes=attributes)

    @property
    def traceparent(self) -> str:
        """For the scheduler; empty when nothing is recorded."""
        return self._tracing.traceparent(self._span) if self._tracing is not None and self._span is not None else ""

    def submitted(self, resolved: Resolved, generation: Generation) -> None:
        self._resolved, self._generation = resolved, generation
        self._last_at = [0.0] * len(generation.choices)
        self._metrics.opened()

    def tokens(self, index: int, num_tokens: int, num_cached_tokens: int) -> None:
        """`num_tokens` more of choice `index`, now. Those that came together share the time since the ones before."""
        self._num_cached_tokens = num_cached_tokens
        if not num_tokens:
            return
        now = time.monotonic()
        last = self._last_at[index]
        if last == 0:
            self._metrics.first_token(now - self._began_at)
            if self._first_token_at is None:
                self._first_token_at = now
                if self._span is not None:
                    self._span.add_event("first token")
            num_tokens -= 1
        if num_tokens:
            self._metrics.tokens(now - (last or now), num_tokens, now)
        self._last_at[index] = now

    def refused(self, error: RequestError) -> None:
        """It ends with an error of ours."""
        self._error = error.status
        if self._resolved is None:
            log.info("request_refused method=%s status=%s field=%s", self._method, error.status, error.field or "-")

    def close(self) -> None:
        resolved, generation = self._resolved, self._generation
        if resolved is not None and generation is not None:
            self._metrics.closed(self.outcome)
            self._tell(resolved, generation)
        if self._span is not None:
            is_fault = self._error or (resolved is not None and self.outcome in ("failed", "deadline"))
            end(self._span, error=(self._error or self.outcome) if is_fault else "")

    def _tell(self, resolved: Resolved, generation: Generation) -> None:
        num_tokens = sum(choice.num_tokens for choice in generation.choices)
        waited_s = (self._first_token_at or time.monotonic()) - self._began_at
        log.info(
            "request_ended request_id=%r method=%s finish_reason=%s num_prompt_tokens=%d num_cached_tokens=%d "
            "num_output_tokens=%d first_token_s=%.6f total_s=%.6f",
            *(resolved.request_id, self._method, self.outcome, len(resolved.prompt), self._num_cached_tokens),
            *(num_tokens, waited_s, time.monotonic() - self._began_at),
        )
        if self._span is None:
            return
        values: dict[str, str | int] = {
            "stepwire.request_id": resolved.request_id,
            "stepwire.num_prompt_tokens": len(resolved.prompt),
            "stepwire.num_cached_tokens": self._num_cached_tokens,
            "stepwire.num_output_tokens": num_tokens,
            "stepwire.num_choices": len(generation.choices),
            "stepwire.finish_reason": self.outcome,
        }
        for name, value in values.items():
            self._span.set_attribute(name, value)
