"""`stepwire generate` as a shell sees it: stdin, stdout, exit status."""

import json
import signal
import subprocess
import sys
from collections.abc import Iterator
from concurrent import futures

import grpc
import pytest

from protos.stepwire.inference.v1 import inference_pb2 as pb
from protos.stepwire.inference.v1 import inference_pb2_grpc
from tests.unit.client.served import served


class Server(inference_pb2_grpc.InferenceServiceServicer):
    def __init__(self):
        self.request: pb.GenerateRequest | None = None
        self.cancelled = futures.Future()

    def Generate(self, request, context):
        self.request = request
        if request.text == "refuse":
            context.abort(grpc.StatusCode.INVALID_ARGUMENT, "sampling.top_k is too large")
        if request.text == "forever":
            context.add_callback(lambda: self.cancelled.set_result(True))
            while context.is_active():
                yield pb.GenerateResponse(text="x")
        yield pb.GenerateResponse(text=request.text.upper())


@pytest.fixture
def server() -> Iterator[tuple[Server, list[str]]]:
    """The service, and the command that talks to it."""
    service = Server()
    with served(service, inference_pb2_grpc.add_InferenceServiceServicer_to_server) as address:
        yield service, [sys.executable, "-m", "scheduler_svc.cli", "generate", "--address", address]


def run(command: list[str], text: str = "") -> subprocess.CompletedProcess:
    return subprocess.run(command, input=text, capture_output=True, text=True, timeout=60)


@pytest.mark.parametrize("argument", [["-"], []])
def test_a_piped_prompt(server, argument):
    service, command = server
    result = run([*command, *argument], "two\nlines")
    assert (result.returncode, result.stdout, result.stderr) == (0, "TWO\nLINES\n", "")
    assert service.request.text == "two\nlines"


def test_options_reach_the_request(server):
    service, command = server
    options = ["--max-tokens", "7", "--temperature", "0", "--top-p", "0.5", "--top-k", "3", "--seed", "9"]
    result = run([*command, "hi", *options, "--stop", "a", "--stop", "b", "--ignore-eos", "--json"])
    assert json.loads(result.stdout) == {"text": "HI"}
    asked = service.request
    assert (asked.stopping.max_tokens, list(asked.stopping.stop), asked.stopping.ignore_eos) == (7, ["a", "b"], True)
    sampling = asked.sampling
    assert (sampling.temperature, sampling.top_p, sampling.top_k, sampling.seed) == (0.0, 0.5, 3, 9)


def test_what_is_not_given_is_not_sent(server):
    service, command = server
    run([*command, "hi"])
    assert service.request == pb.GenerateRequest(text="hi", sampling={}, stopping={})


def test_a_refusal_is_one_line_and_status_1(server):
    _, command = server
    result = run([*command, "refuse"])
    assert (result.returncode, result.stdout) == (1, "")
    assert len(result.stderr.splitlines()) == 1
    assert "INVALID_ARGUMENT: sampling.top_k is too large" in result.stderr


def test_ctrl_c_is_status_130_and_cancels(server):
    service, command = server
    process = subprocess.Popen([*command, "forever"], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    assert process.stdout.read(1) == "x"
    process.send_signal(signal.SIGINT)
    _, stderr = process.communicate(timeout=60)
    assert process.returncode == 130
    assert "Traceback" not in stderr
    assert service.cancelled.result(timeout=60)


def test_a_reader_that_has_had_enough_is_no_error(server):
    service, command = server
    process = subprocess.Popen([*command, "forever"], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    assert process.stdout.read(1) == "x"
    process.stdout.close()
    assert process.stderr.read() == ""
    assert process.wait(timeout=60) == 0
    process.stderr.close()
    assert service.cancelled.result(timeout=60)
