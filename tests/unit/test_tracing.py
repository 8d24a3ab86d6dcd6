"""Spans leave by a thread of their own: the maker never waits, and a dead collector costs it nothing. Both services."""

import logging
import subprocess
import sys
import threading

import pytest
from opentelemetry.sdk.trace.export import SpanExporter, SpanExportResult
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

import executor_svc.errors
import executor_svc.tracing
import scheduler_svc.errors
import scheduler_svc.tracing

MODULES = [(scheduler_svc.tracing, scheduler_svc.errors), (executor_svc.tracing, executor_svc.errors)]
both = pytest.mark.parametrize(("module", "errors"), MODULES)
PARENT = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"
LIMIT_S = 60.0


class Gated(SpanExporter):
    """Takes nothing until it is opened."""

    def __init__(self) -> None:
        self.opened = threading.Event()
        self.num_taken = 0

    def export(self, spans):
        assert self.opened.wait(LIMIT_S)
        self.num_taken += len(spans)
        return SpanExportResult.SUCCESS


class Flaky(SpanExporter):
    def __init__(self, *results: SpanExportResult) -> None:
        self._results = list(results)

    def export(self, spans):
        return self._results.pop(0)


@both
def test_off_is_nothing_and_imports_nothing(module, errors):
    assert module.start_tracing(None, "x") is module.start_tracing("", "x") is None
    service = module.__name__.partition(".")[0]
    code = f"import sys, {service}.tracing as t, {service}.__main__; assert t.start_tracing(None, 'x') is None; "
    code += "assert not [name for name in sys.modules if name.startswith('opentelemetry')]"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=LIMIT_S, check=False)
    assert done.returncode == 0, done.stderr


@both
def test_a_base_url_gets_the_path_of_otlp_and_a_whole_one_stays(module, errors):
    assert module.traces_url("http://collector:4318") == "http://collector:4318/v1/traces"
    assert module.traces_url("https://[::1]:4318/") == "https://[::1]:4318/v1/traces"
    assert module.traces_url("http://gateway/otlp/v1/traces") == "http://gateway/otlp/v1/traces"


@both
@pytest.mark.parametrize("endpoint", ["collector:4318", "ftp://x", "http://", "http://x:port", "http://x:99999", " "])
def test_what_is_no_url_stops_the_start(module, errors, endpoint):
    with pytest.raises(errors.StartupError, match="--trace-endpoint"):
        module.start_tracing(endpoint, "x")


@both
def test_a_span_goes_on_with_the_callers_trace(module, errors):
    exporter = InMemorySpanExporter()
    tracing = module.Tracing(exporter, "test")
    span = tracing.begin("outer", parent=PARENT, kind=tracing.SERVER, at_s=10.0, attributes={"n": 1})
    traceparent = tracing.traceparent(span)
    tracing.add("inner", span, 11.0, 12.5, {"m": "x"})
    module.end(span, at_s=13.0, error="lost")
    tracing.close()
    inner, outer = sorted(exporter.get_finished_spans(), key=lambda s: s.name)
    assert f"{outer.context.trace_id:032x}" == PARENT.split("-")[1]
    assert f"{outer.parent.span_id:016x}" == PARENT.split("-")[2]
    assert inner.parent.span_id == outer.context.span_id
    assert traceparent == f"00-{outer.context.trace_id:032x}-{outer.context.span_id:016x}-01"
    assert (outer.start_time, outer.end_time) == (10 * 10**9, 13 * 10**9)
    assert (inner.start_time, inner.end_time) == (11 * 10**9, 12_500_000_000)
    assert (dict(outer.attributes), dict(inner.attributes)) == ({"n": 1}, {"m": "x"})
    assert (outer.status.description, outer.kind.name) == ("lost", "SERVER")
    assert outer.resource.attributes["service.name"] == "stepwire-test"


@both
@pytest.mark.parametrize(
    "parent", ["", "nonsense", PARENT.upper(), PARENT + "\n", PARENT.replace("b7ad6b7169203331", "0" * 16)]
)
def test_a_wrong_traceparent_begins_a_trace_of_its_own(module, errors, parent):
    exporter = InMemorySpanExporter()
    tracing = module.Tracing(exporter, "test")
    module.end(tracing.begin("outer", parent=parent))
    tracing.close()
    (span,) = exporter.get_finished_spans()
    assert span.parent is None


@both
def test_what_the_caller_does_not_sample_is_not_recorded_and_not_handed_on(module, errors):
    exporter = InMemorySpanExporter()
    tracing = module.Tracing(exporter, "test")
    span = tracing.begin("outer", parent=PARENT.removesuffix("01") + "00")
    assert tracing.traceparent(span) == ""
    tracing.add("inner", span, 1.0, 2.0, {})
    module.end(span)
    tracing.close()
    assert exporter.get_finished_spans() == ()


@both
def test_a_collector_that_stands_still_loses_spans_and_holds_nobody_up(module, errors, monkeypatch):
    monkeypatch.setattr(module, "MAX_QUEUE", 64)
    monkeypatch.setattr(module, "MAX_BATCH", 16)
    exporter = Gated()
    tracing = module.Tracing(exporter, "test")
    logging.getLogger("opentelemetry").setLevel(logging.CRITICAL)
    span = tracing.begin("outer")
    num_made = 4 * module.MAX_QUEUE
    for _ in range(num_made):  # a maker that waited would wait for ever: the gate opens after
        tracing.add("inner", span, 1.0, 2.0, {})
    exporter.opened.set()
    tracing.close()
    assert 0 < exporter.num_taken <= module.MAX_QUEUE + module.MAX_BATCH < num_made


@both
def test_lost_spans_are_one_line_and_another_once_they_arrive(module, errors, caplog):
    lost, taken = SpanExportResult.FAILURE, SpanExportResult.SUCCESS
    outbox = module.Outbox(Flaky(taken, lost, lost, taken, taken))
    for _ in range(5):
        outbox.export(["a span"])
    assert [record.getMessage().split(":")[0] for record in caplog.records] == [
        "traces_lost",
        "traces_arrive_again num_lost=2",
    ]
