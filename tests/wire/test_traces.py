"""One request's spans in the scheduler, over real sockets: connected, complete, and none for who is not traced."""

import asyncio

from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from protos.stepwire.wire.v1 import session_pb2, step_pb2
from scheduler_svc.tracing import Tracing
from tests.wire.cluster import SchedulerThread, collect, request
from tests.wire.peers import LIMIT_S, ExecutorThread, expected_output
from tests.wire.test_service import Gate, idle, opened, until

PARENT = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"


class Seen:
    """The traceparents that reach an executor."""

    def __init__(self) -> None:
        self.traceparents: list[str] = []

    def __call__(self, plan: step_pb2.StepPlan) -> None:
        self.traceparents += [admit.traceparent for admit in plan.admit]


def traced(exporter: InMemorySpanExporter) -> dict[str, list]:
    """By name, in order of their begin; the root is called schedule."""
    spans = sorted(exporter.get_finished_spans(), key=lambda span: span.start_time)
    return {span.name: [other for other in spans if other.name == span.name] for span in spans}


async def test_a_request_is_one_trace_and_one_without_a_parent_is_none(tmp_path):
    exporter = InMemorySpanExporter()
    tracing = Tracing(exporter, "scheduler")
    seen = Seen()
    with SchedulerThread(tmp_path, tracing=tracing), ExecutorThread(tmp_path) as executor:
        executor.before_step = seen
        async with opened(tmp_path) as made:
            tokens, _ = await collect(made.submit(request("a", [1, 2, 3], 5, traceparent=PARENT, num_choices=2)))
            await collect(made.submit(request("b", [4], 5)))
            await idle(made)
    tracing.close()
    assert tokens[0] == tokens[1] == expected_output([1, 2, 3], 5)
    spans = traced(exporter)
    (root,) = spans["schedule"]
    assert f"{root.parent.span_id:016x}" == PARENT.split("-")[2]
    own = f"00-{root.context.trace_id:032x}-{root.context.span_id:016x}-01"
    assert sorted(seen.traceparents) == ["", own, own]
    assert {name: len(found) for name, found in spans.items()} == {
        **{"schedule": 1, "queue": 2, "prefill": 2, "decode": 2}
    }
    for name in ("queue", "prefill", "decode"):
        assert [span.parent.span_id for span in spans[name]] == [root.context.span_id] * 2
        assert sorted(span.attributes["stepwire.choice"] for span in spans[name]) == [0, 1]
    assert root.attributes["stepwire.num_output_tokens"] == 10
    assert root.attributes["stepwire.finish_reason"] == "length"
    assert root.start_time <= spans["queue"][0].start_time
    assert spans["decode"][-1].end_time <= root.end_time


async def test_the_loss_of_an_executor_is_a_span(tmp_path):
    exporter = InMemorySpanExporter()
    tracing = Tracing(exporter, "scheduler")
    with SchedulerThread(tmp_path, tracing=tracing):
        async with opened(tmp_path) as made:
            with ExecutorThread(tmp_path) as first:
                gate = first.before_step = Gate(6)
                stream = made.submit(request("a", [1, 2, 3], 20, traceparent=PARENT))
                await stream.read()
                first.link.stop()
                gate.opened.set()
            await until(made, lambda: not made.ready)
            with ExecutorThread(tmp_path):
                _, ends = await collect(stream)
                assert ends[0].num_resumes == 1
    tracing.close()
    spans = traced(exporter)
    assert {name: len(found) for name, found in spans.items()} == {
        **{"schedule": 1, "queue": 1, "prefill": 2, "decode": 2, "executor lost": 1}
    }
    assert spans["schedule"][0].attributes["stepwire.num_resumes"] == 1


async def test_a_frontend_that_goes_and_a_scheduler_that_ends_leave_no_span_open(tmp_path):
    exporter = InMemorySpanExporter()
    tracing = Tracing(exporter, "scheduler")
    with SchedulerThread(tmp_path, tracing=tracing) as scheduler, ExecutorThread(tmp_path) as executor:
        gate = executor.before_step = Gate(4)
        async with opened(tmp_path) as stays:
            async with opened(tmp_path) as leaves:
                stream = leaves.submit(request("a", [1], 30, traceparent=PARENT))
                await stream.read()
                kept = stays.submit(request("b", [2], 30, traceparent=PARENT))
            async with asyncio.timeout(LIMIT_S):
                while (await stays.load()).num_frontends > 1:
                    pass
            gate.opened.set()
            _, ends = await collect(kept)
            assert ends[0].cause == session_pb2.FINISH_CAUSE_LENGTH
            await idle(stays)
        assert scheduler.service._traces is not None
        scheduler.service._traces.close(0.0)
    tracing.close()
    spans = traced(exporter)["schedule"]
    told = {span.status.description or span.attributes["stepwire.finish_reason"] for span in spans}
    assert len(spans) == 2
    # The one that goes cancels its requests; the end of its session may overtake that.
    assert told in ({"length", "the frontend is gone"}, {"length", "cancelled"})


async def test_off_nothing_of_it_reaches_an_executor(tmp_path):
    seen = Seen()
    with SchedulerThread(tmp_path), ExecutorThread(tmp_path) as executor:
        executor.before_step = seen
        async with opened(tmp_path) as made:
            await collect(made.submit(request("a", [1, 2, 3], 5, traceparent=PARENT)))
    assert seen.traceparents == [""]
