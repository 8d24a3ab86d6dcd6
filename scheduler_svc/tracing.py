"""Spans of one process, sent to an OTLP collector over HTTP by a thread of its own.

Knows nothing of requests. Its law: who makes a span never waits. The queue is bounded; what a slow or dead collector
does not take is dropped, and one line says so. OpenTelemetry is imported only where somebody asks for traces.
"""

import logging
import os
import re
import threading
from collections.abc import Mapping, Sequence
from importlib.metadata import version
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

from scheduler_svc.errors import StartupError

if TYPE_CHECKING:
    from opentelemetry.sdk.trace import ReadableSpan
    from opentelemetry.sdk.trace.export import SpanExporter, SpanExportResult
    from opentelemetry.trace import Span, SpanKind

logger = logging.getLogger(__name__)

# W3C trace context, version 00: trace id, parent span id, flags. Ids of zeros are invalid; the library ignores them.
TRACEPARENT = re.compile(r"00-[0-9a-f]{32}-[0-9a-f]{16}-[0-9a-f]{2}")
MAX_QUEUE = 4096
MAX_BATCH = 512
SEND_EVERY_MS = 1000
SEND_LIMIT_S = 3.0
# At the end of the process: for what is left in the queue.
CLOSE_LIMIT_S = 2.0

Attributes = Mapping[str, str | int | float | bool]


def traces_url(endpoint: str) -> str:
    """Where spans are sent. A URL without a path is a collector's base URL."""
    parts = urlsplit(endpoint)
    try:
        port_is_good = parts.port is None or parts.port > 0
    except ValueError:
        port_is_good = False
    if parts.scheme not in ("http", "https") or not parts.hostname or not port_is_good:
        raise StartupError(f"--trace-endpoint {endpoint!r} is not a URL like http://collector:4318")
    return endpoint if parts.path.strip("/") else f"{endpoint.rstrip('/')}/v1/traces"


def start_tracing(endpoint: str | None, service: str) -> "Tracing | None":
    """None: nobody asked. Raises StartupError for what is no URL, or where the packages are missing."""
    if not endpoint:
        return None
    url = traces_url(endpoint)
    try:
        from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
    except ImportError:
        raise StartupError("--trace-endpoint needs more packages: pip install 'stepwire[tracing]'") from None
    # What it has to say is said once, by Outbox.
    logging.getLogger("opentelemetry").setLevel(logging.CRITICAL)
    return Tracing(OTLPSpanExporter(endpoint=url, timeout=SEND_LIMIT_S), service)


class Tracing:
    """Makes spans. Times are seconds since 1970."""

    def __init__(self, exporter: "SpanExporter", service: str) -> None:
        from opentelemetry import trace
        from opentelemetry.sdk.resources import Resource
        from opentelemetry.sdk.trace import TracerProvider
        from opentelemetry.sdk.trace.export import BatchSpanProcessor
        from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

        resource = Resource.create(
            {"service.name": f"stepwire-{service}", "service.version": version("stepwire"), "process.pid": os.getpid()}
        )
        self._provider = TracerProvider(resource=resource, shutdown_on_exit=False)
        self._provider.add_span_processor(
            BatchSpanProcessor(
                Outbox(exporter),  # type: ignore[arg-type] # its base would import the library where nobody traces
                max_queue_size=MAX_QUEUE,
                max_export_batch_size=MAX_BATCH,
                schedule_delay_millis=SEND_EVERY_MS,
            )
        )
        self._tracer = self._provider.get_tracer("stepwire")
        self._propagator = TraceContextTextMapPropagator()
        self._in_context = trace.set_span_in_context
        self._kinds = trace.SpanKind

    @property
    def SERVER(self) -> "SpanKind":
        return self._kinds.SERVER

    @property
    def INTERNAL(self) -> "SpanKind":
        return self._kinds.INTERNAL

    def begin(
        self,
        name: str,
        *,
        parent: str = "",
        kind: "SpanKind | None" = None,
        at_s: float | None = None,
        attributes: Attributes | None = None,
    ) -> "Span":
        """A span that its caller ends. `parent` is a traceparent; an empty or wrong one begins a trace of its own."""
        context = self._propagator.extract({"traceparent": parent} if TRACEPARENT.fullmatch(parent) else {})
        return self._tracer.start_span(
            name,
            context,
            kind=kind or self._kinds.INTERNAL,
            start_time=None if at_s is None else nanoseconds(at_s),
            attributes=dict(attributes or {}),
        )

    def add(self, name: str, parent: "Span", began_s: float, ended_s: float, attributes: Attributes) -> None:
        """A span that is over."""
        span = self._tracer.start_span(
            name, self._in_context(parent), start_time=nanoseconds(began_s), attributes=dict(attributes)
        )
        span.end(nanoseconds(max(ended_s, began_s)))

    def traceparent(self, span: "Span") -> str:
        """For who goes on with the trace; empty when the span is not recorded."""
        carrier: dict[str, str] = {}
        if span.is_recording():
            self._propagator.inject(carrier, self._in_context(span))
        return carrier.get("traceparent", "")

    def close(self) -> None:
        """Sends what is left, as far as the collector takes it within the limit."""
        closing = threading.Thread(target=self._provider.shutdown, daemon=True)
        closing.start()
        closing.join(CLOSE_LIMIT_S)


def end(span: "Span", *, at_s: float | None = None, error: str = "") -> None:
    """`error`: what went wrong, in a word; no text of a user's."""
    if error:
        from opentelemetry.trace import StatusCode

        span.set_status(StatusCode.ERROR, error)
    span.end(None if at_s is None else nanoseconds(at_s))


def nanoseconds(seconds: float) -> int:
    return int(seconds * 1e9)


class Outbox:
    """An exporter that says when spans begin to be lost, and when they arrive again."""

    def __init__(self, exporter: "SpanExporter") -> None:
        self._exporter = exporter
        self._num_lost = 0

    def export(self, spans: "Sequence[ReadableSpan]") -> "SpanExportResult":
        result = self._exporter.export(spans)
        if not result.value:
            if self._num_lost:
                logger.warning("traces_arrive_again num_lost=%d", self._num_lost)
            self._num_lost = 0
        else:
            if not self._num_lost:
                logger.warning("traces_lost: the collector does not take them; requests are not held up")
            self._num_lost += len(spans)
        return result

    def shutdown(self) -> None:
        self._exporter.shutdown()

    def force_flush(self, timeout_millis: int = 30_000) -> bool:
        return self._exporter.force_flush(timeout_millis)
