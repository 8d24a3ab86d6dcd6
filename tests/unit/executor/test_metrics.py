"""What the executor counts, and its endpoint."""

import urllib.request

import pytest
from prometheus_client import CollectorRegistry

from executor_svc.errors import StartupError
from executor_svc.metrics import ExecutorMetrics
from protos.stepwire.wire.v1 import step_pb2


def test_steps_are_counted_and_rows_are_the_latest():
    registry = CollectorRegistry()
    metrics = ExecutorMetrics(registry)
    assert registry.get_sample_value("stepwire_executor_loaded") == 0
    metrics.loaded()
    for rows, tokens in ((3, 3), (2, 1), (0, 0)):
        metrics.step(
            step_pb2.StepResult(
                token_ids=bytes(4 * tokens), num_rows=rows, num_stored_tokens=10 * rows, forward_us=1500
            )
        )
    assert registry.get_sample_value("stepwire_executor_loaded") == 1
    assert registry.get_sample_value("stepwire_executor_sampled_tokens_total") == 4
    assert registry.get_sample_value("stepwire_executor_rows") == 0
    assert registry.get_sample_value("stepwire_executor_stored_tokens") == 0
    assert registry.get_sample_value("stepwire_executor_forward_seconds_count") == 3
    assert registry.get_sample_value("stepwire_executor_forward_seconds_sum") == pytest.approx(0.0045)
    assert registry.get_sample_value("stepwire_executor_forward_seconds_bucket", {"le": "0.001"}) == 0
    assert registry.get_sample_value("stepwire_executor_forward_seconds_bucket", {"le": "0.002"}) == 3


def test_the_endpoint_answers_and_a_taken_port_is_a_clear_error():
    metrics = ExecutorMetrics(CollectorRegistry())
    port = metrics.serve("127.0.0.1", 0)
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=60) as reply:
        assert b"stepwire_executor_loaded 0.0" in reply.read()
    with pytest.raises(StartupError, match="choose another --metrics-port"):
        ExecutorMetrics(CollectorRegistry()).serve("127.0.0.1", port)
