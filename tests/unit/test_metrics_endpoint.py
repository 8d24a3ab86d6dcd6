"""Whatever a scraper asks for, names arrive as they are. Both services have the same endpoint."""

import urllib.request
from pathlib import Path

import pytest
from prometheus_client import CollectorRegistry, Gauge

import executor_svc.metrics_endpoint
import scheduler_svc.metrics_endpoint

# What Prometheus 2 and 3 send.
PROMETHEUS_2 = "application/openmetrics-text;version=1.0.0,application/openmetrics-text;version=0.0.1;q=0.75,*/*;q=0.1"
PROMETHEUS_3 = "application/openmetrics-text;version=1.0.0;escaping=allow-utf-8;q=0.6,text/plain;version=0.0.4;q=0.3"


@pytest.mark.parametrize("module", [scheduler_svc.metrics_endpoint, executor_svc.metrics_endpoint])
def test_a_name_with_a_colon_stays_as_it_is(module):
    registry = CollectorRegistry()
    Gauge("vllm:num_requests_running", "x", registry=registry).set(3)
    port = module.serve_metrics(registry, "127.0.0.1", 0)
    for accept in (PROMETHEUS_2, PROMETHEUS_3, "text/plain", "*/*"):
        request = urllib.request.Request(f"http://127.0.0.1:{port}/metrics", headers={"Accept": accept})
        with urllib.request.urlopen(request, timeout=60) as reply:
            assert reply.headers["Content-Type"].startswith("text/plain; version=0.0.4")
            assert b"\nvllm:num_requests_running 3.0\n" in reply.read()
    with pytest.raises(OSError, match="in use"):
        module.serve_metrics(registry, "127.0.0.1", port)


def test_both_are_the_same():
    modules = (scheduler_svc.metrics_endpoint, executor_svc.metrics_endpoint)
    assert len({Path(module.__file__).read_text() for module in modules}) == 1
