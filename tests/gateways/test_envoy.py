"""Envoy, by the configuration that is shipped, before three simulated frontends."""

import os
import signal
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import grpc
import pytest

from protos.stepwire.inference.v1 import inference_pb2 as pb
from protos.stepwire.inference.v1 import inference_pb2_grpc
from tests.architecture.source import ROOT
from tests.e2e.server import Serve, free_port, greedy
from tests.gateways.gateway import Gateway, until
from tests.gateways.readme import command

# At twenty a second: longer than any test waits.
ENDLESS = 8000


@pytest.fixture
def serve(tmp_path: Path) -> Iterator[Serve]:
    env = {"STEPWIRE_SIM_STEP_US": "50000"}
    with Serve(tmp_path, "--backend", "simulated", "--drain-timeout", "120", frontends=3, env=env) as started:
        yield started


@pytest.fixture
def envoy(serve: Serve, envoy_bin: Path, tmp_path: Path) -> Iterator[Gateway]:
    words = command("envoy -c")
    admin, port = free_port(), free_port()
    text = (ROOT / words[2]).read_text()
    assert text.count("50050") == text.count("9901") == 1
    text = text.replace("50050", str(port)).replace("9901", str(admin))
    for i, address in enumerate(serve.addresses):
        assert text.count(f"port_value: {50051 + i}") == 1
        text = text.replace(f"port_value: {50051 + i}", f"port_value: {address.rpartition(':')[2]}")
    # Shipped for machines that answer within a second: here one that is busy is no frontend that is gone.
    assert text.count("timeout: 1s") == 2
    text = text.replace("timeout: 1s", "timeout: 60s")
    config = tmp_path / "envoy.yaml"
    config.write_text(text)
    words[0], words[2] = str(envoy_bin), str(config)
    words += ["--concurrency", "1", "--base-id", str(os.getpid() % 10_000), "--log-level", "warn"]

    def is_ready(gateway: Gateway) -> bool:
        return healthy(gateway) == 3

    gateway = Gateway(words, admin, tmp_path / "envoy.log", is_ready)
    with gateway:
        gateway.grpc_address = f"127.0.0.1:{port}"  # type: ignore[attr-defined]
        yield gateway


def healthy(gateway: Gateway) -> int:
    clusters = gateway.get("/clusters?format=json")["cluster_statuses"][0].get("host_statuses", [])
    return sum(host["health_status"].get("eds_health_status") == "HEALTHY" and len(host["health_status"]) == 1
               for host in clusters)  # fmt: skip


def test_envoy_balances_and_everything_passes_through(serve: Serve, envoy: Gateway):
    with grpc.insecure_channel(envoy.grpc_address) as channel:
        stub = inference_pb2_grpc.InferenceServiceStub(channel)
        least_requests_first(stub, envoy)
        a_cancel_passes_through(serve, stub)
        a_deadline_passes_through(serve, stub)
        refusals_keep_their_details(stub)
        a_drained_frontend_is_left_out(serve, envoy, stub)


def requests_by_host(envoy: Gateway) -> Counter[int]:
    found: Counter[int] = Counter()
    for host in envoy.get("/clusters?format=json")["cluster_statuses"][0]["host_statuses"]:
        port = host["address"]["socket_address"]["port_value"]
        found[port] = next(int(s.get("value", 0)) for s in host["stats"] if s["name"] == "rq_active")
    return found


def least_requests_first(stub, envoy: Gateway) -> None:
    streams = [begun(stub, ENDLESS) for _ in range(9)]
    counts = requests_by_host(envoy)
    for stream in streams:
        stream.cancel()
    assert list(counts.values()) == [3, 3, 3], counts


def begun(stub, max_tokens: int):
    """One after the other: Envoy counts a request when its connection is there, and of a burst it knows nothing."""
    stream = stub.Generate(greedy("Hello", max_tokens, ignore_eos=True))
    next(stream)
    return stream


def a_cancel_passes_through(serve: Serve, stub) -> None:
    serve.wait_idle()
    stream = begun(stub, ENDLESS)
    assert serve.load().num_running == 1
    stream.cancel()
    serve.wait_idle()


def a_deadline_passes_through(serve: Serve, stub) -> None:
    with pytest.raises(grpc.RpcError) as caught:
        list(stub.Generate(greedy("Hello", ENDLESS, ignore_eos=True), timeout=1.0))
    assert caught.value.code() is grpc.StatusCode.DEADLINE_EXCEEDED
    serve.wait_idle()


def refusals_keep_their_details(stub) -> None:
    with pytest.raises(grpc.RpcError) as caught:
        list(stub.Generate(pb.GenerateRequest(text="Hello", sampling=pb.SamplingParams(temperature=9))))
    assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert "grpc-status-details-bin" in dict(caught.value.trailing_metadata())


def a_drained_frontend_is_left_out(serve: Serve, envoy: Gateway, stub) -> None:
    # One on each that does not end, so that the first drains until we have seen it; and some that do.
    endless = [begun(stub, ENDLESS) for _ in range(3)]
    assert list(requests_by_host(envoy).values()) == [1, 1, 1]
    ending = [begun(stub, 40) for _ in range(3)]
    first = serve.ready["pids"]["frontend"][0]
    os.kill(first, signal.SIGTERM)
    until(lambda: healthy(envoy) == 2)
    for _ in range(6):
        assert list(stub.Generate(greedy("Hello", 1)))[-1].finish_reason == pb.FINISH_REASON_LENGTH
    for stream in ending:  # what ran on it ends as it should
        assert list(stream)[-1].finish_reason == pb.FINISH_REASON_LENGTH
    for stream in endless:
        stream.cancel()
    until(lambda: healthy(envoy) == 3)
