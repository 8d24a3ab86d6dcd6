"""Clients that know our API by its .proto file or by reflection alone: buf curl, and Node with @grpc/grpc-js."""

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.architecture.source import ROOT
from tests.e2e.server import Serve, greedy
from tests.gateways import tools
from tests.gateways.readme import command

BUF = Path(sys.executable).with_name("buf")


def direct(simulated_service: Serve, prompt: str, max_tokens: int) -> str:
    with simulated_service.stub() as stub:
        return "".join(message.text for message in stub.Generate(greedy(prompt, max_tokens)))


def buf_curl(simulated_service: Serve, method: str, body: dict, *options: str) -> subprocess.CompletedProcess[str]:
    words = command("buf curl")
    words[0] = str(BUF)
    words[words.index("-d") + 1] = json.dumps(body)
    words[-1] = f"http://{simulated_service.addresses[0]}/{method}"
    return subprocess.run([*words, *options], capture_output=True, text=True, timeout=120)


def test_buf_curl_over_reflection(simulated_service: Serve):
    asked = {"text": "The sea is", "sampling": {"temperature": 0}, "stopping": {"maxTokens": 6}}
    done = buf_curl(simulated_service, "stepwire.inference.v1.InferenceService/Generate", asked)
    assert done.returncode == 0, done.stderr
    decoder, text, at = json.JSONDecoder(), "", 0
    while at < len(done.stdout.rstrip()):
        message, at = decoder.raw_decode(done.stdout, at)
        text += message.get("text", "")
        at += len(done.stdout[at:]) - len(done.stdout[at:].lstrip())
    assert text == direct(simulated_service, "The sea is", 6)
    assert message["finishReason"] == "FINISH_REASON_LENGTH"
    for method in ("vllm.Control/GetModelInfo", "vllm.grpc.engine.VllmEngine/HealthCheck"):
        done = buf_curl(simulated_service, method, {})
        assert done.returncode == 0, done.stderr
    bad = {**asked, "sampling": {"temperature": 9}}
    done = buf_curl(simulated_service, "stepwire.inference.v1.InferenceService/Generate", bad)
    assert "sampling.temperature is 9" in done.stderr


@pytest.fixture(scope="module")
def node_client(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The example as it stands, beside its packages."""
    packages = tools.node_packages(ROOT / "examples" / "node")
    folder = tmp_path_factory.mktemp("checkout")
    shutil.copytree(
        ROOT / "examples" / "node", folder / "examples" / "node", ignore=shutil.ignore_patterns("node_modules")
    )
    shutil.copytree(ROOT / "protos", folder / "protos", ignore=shutil.ignore_patterns("*.py", "__pycache__"))
    (folder / "examples" / "node" / "node_modules").symlink_to(packages / "node_modules")
    return folder / "examples" / "node" / "client.mjs"


def test_a_node_client_from_the_proto_file(simulated_service: Serve, node_client: Path):
    words = command("node examples/node/client.mjs")
    words[1:3] = [str(node_client), simulated_service.addresses[0]]
    done = subprocess.run(words, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert done.stdout == direct(simulated_service, "The sea is", 20)
    end = json.loads(done.stderr)
    assert end["finishReason"] == "FINISH_REASON_LENGTH"
    assert end["usage"]["completionTokens"] == 20
    words[-2] = ""
    done = subprocess.run(words, capture_output=True, text=True, timeout=120)
    assert done.returncode == 1
    assert done.stderr.startswith("INVALID_ARGUMENT")
