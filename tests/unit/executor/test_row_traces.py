"""One span a stay in a row: from its Admit to its release, and nothing for who is not traced."""

from itertools import count

from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from executor_svc.backends.simulated import SimulatedBackend
from executor_svc.row_traces import RowTraces
from executor_svc.tracing import Tracing
from executor_svc.worker import Worker
from protos.stepwire.wire.v1 import step_pb2
from tests.unit.executor.plans import admit, geometry, ints, plan

PARENT = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"


class Told:
    """A link that hands out what it is given and keeps the results."""

    def __init__(self, *events: object) -> None:
        self._events = list(events)
        self.results: list[step_pb2.StepResult] = []

    def receive(self, timeout_s=None):
        return self._events.pop(0) if self._events else None

    def send_result(self, result):
        self.results.append(result)

    def fault(self, message, kind):
        raise AssertionError(message)


def spans_of(*events: object) -> tuple[list, list[step_pb2.StepResult]]:
    exporter = InMemorySpanExporter()
    tracing = Tracing(exporter, "executor")
    observed: list[step_pb2.StepResult] = []
    traces = RowTraces(tracing, "simulated", clock=count(100.0, 60.0).__next__)  # a minute is longer than any step
    backend = SimulatedBackend(geometry(), step_pb2.ModelIdentity())
    Worker(backend, None, traces.beside(observed.append), traces.reset).serve(Told(*events))
    traces.reset()
    tracing.close()
    return list(exporter.get_finished_spans()), observed


def test_a_traced_stay_is_a_span_and_another_is_not():
    plans = [
        plan(1, admit=[admit(0, [1, 2], [0], traceparent=PARENT), admit(1, [3, 4], [1])], prefill=ints(0, 2, 1, 2)),
        plan(2),
        plan(3),
        plan(4, release=ints(0, 1)),
    ]
    (span,), observed = spans_of(*plans)
    assert len(observed) == 4
    assert span.name == "execute"
    assert f"{span.parent.span_id:016x}" == PARENT.split("-")[2]
    assert span.attributes["stepwire.num_steps"] == 3
    assert span.attributes["stepwire.num_known_tokens"] == 2
    assert span.attributes["stepwire.backend"] == "simulated"
    # It began with the first plan and ended with the one that released it, whatever the steps themselves took.
    assert 40 < span.start_time / 1e9 <= 100 < span.end_time / 1e9 <= 160
    assert span.status.description is None


def test_a_row_that_changes_hands_in_one_plan_has_two_stays():
    plans = [
        plan(1, admit=[admit(0, [1, 2], [0], traceparent=PARENT)], prefill=ints(0, 2)),
        plan(2, release=ints(0), admit=[admit(0, [5], [1], traceparent=PARENT)]),
        plan(3, release=ints(0)),
    ]
    spans, _ = spans_of(*plans)
    assert [span.attributes["stepwire.num_steps"] for span in spans] == [1, 1]


def test_the_end_of_an_epoch_ends_every_stay():
    spans, _ = spans_of(plan(1, admit=[admit(0, [1, 2], [0], traceparent=PARENT)], prefill=ints(0, 2)))
    assert [span.status.description for span in spans] == ["the epoch ended"]
