"""`stepwire serve` as a whole: it streams, drains, survives kills, and its ready file tells the truth."""

import os
import signal
import threading
import time
from collections.abc import Callable

import grpc
import pytest

from protos.stepwire.inference.v1 import inference_pb2 as pb
from tests.e2e.server import Serve, greedy

LIMIT_S = 90.0
# Slow enough that a kill lands in the middle of a stream: the simulated device takes this long for a step.
SLOW = {"STEPWIRE_SIM_STEP_US": "5000"}


def until(condition: Callable[[], object]) -> object:
    deadline = time.monotonic() + LIMIT_S
    while not (value := condition()):
        assert time.monotonic() < deadline, "not in time"
        time.sleep(0.02)
    return value


def is_alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


def all_pids(report: dict) -> list[int]:
    return [report["pids"]["scheduler"], *report["pids"]["executor"], *report["pids"]["frontend"]]


@pytest.fixture(scope="module")
def shared_serve(tmp_path_factory, default_model):
    """For tests that end none but its children."""
    folder = tmp_path_factory.mktemp("serve")
    with Serve(folder, "--model", str(default_model), "--backend", "simulated", frontends=2, env=SLOW) as running:
        yield running


@pytest.fixture
def slow_serve(tmp_path, default_model):
    with Serve(tmp_path, "--model", str(default_model), "--backend", "simulated", frontends=2, env=SLOW) as running:
        yield running


class Stream:
    """One stream in a thread of its own; `begun` once it has its first tokens."""

    def __init__(self, serve: Serve, request: pb.GenerateRequest, frontend: int = 0):
        self.token_ids: list[int] = []
        self.finish_reason = 0
        self.usage: pb.Usage | None = None
        self.error: grpc.RpcError | None = None
        self.begun = threading.Event()
        self._thread = threading.Thread(target=self._read, args=(serve, request, frontend))
        self._thread.start()

    def _read(self, serve: Serve, request: pb.GenerateRequest, frontend: int) -> None:
        try:
            with serve.stub(frontend) as stub:
                for message in stub.Generate(request):
                    self.token_ids.extend(message.token_ids)
                    self.begun.set()
                    if message.finish_reason:
                        self.finish_reason = message.finish_reason
                        self.usage = message.usage
        except grpc.RpcError as error:
            self.error = error
        finally:
            self.begun.set()

    def end(self) -> "Stream":
        self._thread.join(LIMIT_S)
        assert not self._thread.is_alive(), "the stream did not end"
        assert self.error is None, self.error
        return self


def test_the_ready_file_tells_addresses_metrics_and_living_pids(shared_serve):
    def generated() -> float:
        return shared_serve.metric("stepwire_generation_tokens_total")

    report, before = shared_serve.ready, generated()
    assert set(report) == {"grpc", "metrics", "pids"}
    assert report["grpc"] == [f"127.0.0.1:{shared_serve.port}", f"127.0.0.1:{shared_serve.port + 1}"]
    assert all(is_alive(pid) for pid in all_pids(report))
    assert len(set(all_pids(report))) == 4
    for frontend in (0, 1):
        stream = Stream(shared_serve, greedy([1, 2, 3], 10, ignore_eos=True), frontend).end()
        assert len(stream.token_ids) == 10
    until(lambda: generated() == before + 20)


@pytest.mark.parametrize("part", ["executor", "scheduler"])
def test_a_stream_survives_a_killed_tier_with_the_same_tokens(shared_serve, part):
    request = greedy([7, 8, 9], 150, ignore_eos=True)
    undisturbed = Stream(shared_serve, request).end()
    before = shared_serve.ready
    disturbed = Stream(shared_serve, request)
    assert disturbed.begun.wait(LIMIT_S)
    victim = before["pids"][part]
    os.kill(victim if part == "scheduler" else victim[0], signal.SIGKILL)
    assert disturbed.end().token_ids == undisturbed.token_ids
    assert disturbed.usage is not None
    assert disturbed.usage.completion_tokens == 150
    after = until(lambda: (report := shared_serve.ready)["pids"][part] != before["pids"][part] and report)
    assert [p for p in before["pids"] if before["pids"][p] != after["pids"][p]] == [part]
    assert after["grpc"] == before["grpc"]
    shared_serve.wait_idle()


def test_a_killed_frontend_comes_back_on_its_port_and_the_others_notice_nothing(shared_serve):
    before = shared_serve.ready
    other = Stream(shared_serve, greedy([4, 5], 150, ignore_eos=True), frontend=1)
    assert other.begun.wait(LIMIT_S)
    os.kill(before["pids"]["frontend"][0], signal.SIGKILL)
    assert len(other.end().token_ids) == 150
    after = until(lambda: (report := shared_serve.ready)["pids"]["frontend"] != before["pids"]["frontend"] and report)
    assert after["pids"]["frontend"][1] == before["pids"]["frontend"][1]
    assert len(Stream(shared_serve, greedy([4, 5], 5, ignore_eos=True), frontend=0).end().token_ids) == 5


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_drain_lets_streams_finish_and_ends_with_status_0(slow_serve, number):
    stream = Stream(slow_serve, greedy([3, 2, 1], 150, ignore_eos=True))
    assert stream.begun.wait(LIMIT_S)
    pids = all_pids(slow_serve.ready)
    slow_serve.process.send_signal(number)
    assert len(stream.end().token_ids) == 150
    assert stream.finish_reason == pb.FINISH_REASON_LENGTH
    assert slow_serve.process.wait(LIMIT_S) == 0, slow_serve.output()
    assert not slow_serve.ready_file.exists()
    assert not any(is_alive(pid) for pid in pids)


def test_nothing_outlives_a_killed_serve(slow_serve):
    pids = all_pids(slow_serve.ready)
    slow_serve.process.kill()
    slow_serve.process.wait()
    until(lambda: not any(is_alive(pid) for pid in pids))
