"""One request, one connected trace over the real processes; and without --trace-endpoint not a byte."""

import json
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

from tests.e2e.server import Serve, greedy

PARENT = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"
LIMIT_S = 60.0
# Of one choice: who asks, what the scheduler did, what the executor did.
EXPECTED = {"generate", "schedule", "queue", "prefill", "decode", "execute"}


class Collector:
    """Takes OTLP over HTTP. `spans`: (service, span) in order of arrival."""

    def __init__(self) -> None:
        self.spans: list = []
        self.num_posts = 0
        self.changed = threading.Condition()
        collector = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = self.rfile.read(int(self.headers["Content-Length"]))
                collector.take(self.path, body)
                self.send_response(200)
                self.send_header("Content-Length", "0")
                self.end_headers()

            def log_message(self, *_: object) -> None:
                pass

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.server.server_port}"
        self._thread = threading.Thread(target=self.server.serve_forever)

    def take(self, path: str, body: bytes) -> None:
        with self.changed:
            self.num_posts += 1
            if path == "/v1/traces":
                for resource in ExportTraceServiceRequest.FromString(body).resource_spans:
                    (service,) = [a.value.string_value for a in resource.resource.attributes if a.key == "service.name"]
                    self.spans += [(service, span) for scope in resource.scope_spans for span in scope.spans]
            self.changed.notify_all()

    def __enter__(self) -> "Collector":
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.server.shutdown()
        self._thread.join()
        self.server.server_close()


@pytest.fixture
def collector():
    with Collector() as running:
        yield running


def test_a_request_is_one_connected_trace_and_the_log_is_json(tmp_path, default_model, collector):
    options = ("--model", str(default_model), "--backend", "simulated", "--verbose")
    options += ("--trace-endpoint", collector.url, "--log-format", "json")
    with Serve(tmp_path, *options) as serve, serve.stub() as stub:
        request = greedy([1, 2, 3], 8, ignore_eos=True)
        request.request_id = "traced-1"
        list(stub.Generate(request, metadata=(("traceparent", PARENT),), timeout=LIMIT_S))
        with collector.changed:
            assert collector.changed.wait_for(lambda: len(collector.spans) >= len(EXPECTED), LIMIT_S), collector.spans
    trace_id, parent_id = PARENT.split("-")[1:3]
    spans = {span.name: (service, span) for service, span in collector.spans}
    assert spans.keys() == EXPECTED
    assert len(collector.spans) == len(EXPECTED)
    ids = {name: span.span_id for name, (_, span) in spans.items()}
    parents = {name: span.parent_span_id for name, (_, span) in spans.items()}
    assert {span.trace_id.hex() for _, span in spans.values()} == {trace_id}
    assert parents["generate"].hex() == parent_id
    assert parents["schedule"] == ids["generate"]
    for name in ("queue", "prefill", "decode", "execute"):
        assert parents[name] == ids["schedule"]
    assert {name: service for name, (service, _) in spans.items()} == {
        **{"generate": "stepwire-frontend", "execute": "stepwire-executor"},
        **dict.fromkeys(("schedule", "queue", "prefill", "decode"), "stepwire-scheduler"),
    }
    lines = [json.loads(line) for line in serve.output().splitlines()]
    ended = [line for line in lines if line.get("request_id") == "traced-1"]
    assert [(line["service"], line["num_output_tokens"]) for line in ended] == [("frontend", 8)]
    assert {"scheduler", "executor", "frontend", "serve"} <= {line["service"] for line in lines}


def test_off_is_silence_whatever_opentelemetrys_own_variables_say(tmp_path, default_model, collector):
    env = {"OTEL_EXPORTER_OTLP_ENDPOINT": collector.url}
    with (
        Serve(tmp_path, "--model", str(default_model), "--backend", "simulated", env=env) as serve,
        serve.stub() as stub,
    ):
        list(stub.Generate(greedy([1, 2, 3], 4), metadata=(("traceparent", PARENT),), timeout=LIMIT_S))
    assert collector.num_posts == 0
