"""What a stream leaves behind: a span that goes on with the caller's trace, and one line in the log."""

import logging

import grpc
import pytest
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from protos.stepwire.inference.v1 import inference_pb2 as pb
from scheduler_svc.errors import RequestFailed
from scheduler_svc.tracing import Tracing
from tests.unit.frontend.grpc_rig import rig
from tests.unit.frontend.test_grpc_generate import until

PARENT = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"
WORDS = "the words of a user"


def generate(**fields) -> pb.GenerateRequest:
    return pb.GenerateRequest(**{"text": WORDS, "stopping": pb.StoppingCriteria(max_tokens=3), **fields})


@pytest.fixture
def exporter():
    return InMemorySpanExporter()


@pytest.fixture
def tracing(exporter):
    made = Tracing(exporter, "frontend")
    yield made
    made.close()


def finished(exporter, tracing) -> list:
    tracing._provider.force_flush()
    return list(exporter.get_finished_spans())


async def test_a_span_goes_on_with_the_callers_trace_and_the_scheduler_goes_on_with_it(tmp_path, exporter, tracing):
    async with rig(tmp_path, tracing=tracing) as r:
        submits = []
        submit = r.session.submit
        r.session.submit = lambda message: (submits.append(message), submit(message))[1]
        await r.collect(generate(request_id="r1"), metadata=(("traceparent", PARENT),))
        await r.collect(
            pb.ChatRequest(messages=[pb.ChatMessage(role="user", content=WORDS)], stopping={"max_tokens": 2})
        )
    first, second = finished(exporter, tracing)
    assert (first.name, second.name) == ("generate", "chat")
    assert f"{first.context.trace_id:032x}-{first.parent.span_id:016x}" == PARENT[3:-3]
    assert second.parent is None
    for span, message in zip((first, second), submits, strict=True):
        assert message.traceparent[:-2] == f"00-{span.context.trace_id:032x}-{span.context.span_id:016x}-"
        assert [event.name for event in span.events] == ["first token"]
        assert WORDS not in str(span.to_json())
    assert (
        dict(first.attributes).items()
        >= {
            "stepwire.request_id": "r1",
            "stepwire.model": "tiny",
            "stepwire.num_output_tokens": 3,
            "stepwire.finish_reason": "length",
        }.items()
    )


async def test_a_refusal_and_a_failure_are_errors(tmp_path, exporter, tracing):
    async with rig(tmp_path, tracing=tracing) as r:
        await r.refusal(generate(sampling=pb.SamplingParams(top_p=5.0)))
        r.session.gate.clear()
        call = r.stub.Generate(generate(request_id="r2"))
        await until(lambda: r.session.live)
        next(iter(r.session.live.values())).fail(RequestFailed("lost"))
        with pytest.raises(grpc.aio.AioRpcError):
            await call.read()
    assert [span.status.description for span in finished(exporter, tracing)] == ["INVALID_ARGUMENT", "INTERNAL"]


async def test_one_line_a_request_with_its_id_and_without_its_words(tmp_path, caplog):
    caplog.set_level(logging.INFO, logger="scheduler_svc.frontend.stream_record")
    async with rig(tmp_path) as r:
        await r.collect(generate(request_id="r1"))
        await r.refusal(generate(sampling=pb.SamplingParams(top_p=5.0)))
        assert not r.session.live
    lines = [x.getMessage() for x in caplog.records if x.name == "scheduler_svc.frontend.stream_record"]
    assert lines[0].startswith("request_ended request_id='r1' method=generate finish_reason=length num_prompt_tokens=")
    assert lines[1] == "request_refused method=generate status=INVALID_ARGUMENT field=sampling.top_p"
    assert len(lines) == 2
    assert WORDS not in caplog.text
