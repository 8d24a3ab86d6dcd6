"""The examples, and the first things that the README says, run as a reader would, against one server.

Its answers are hashes: equal prompts have equal ones.
"""

import json
import os
import re
import subprocess
import sys
import time
from pathlib import Path

import pytest
from typer.testing import CliRunner

from protos.stepwire.inference.v1 import inference_pb2 as pb
from scheduler_svc.cli import app
from tests.architecture.commands import commands
from tests.architecture.source import ROOT
from tests.e2e.proxy import TcpProxy
from tests.e2e.server import Serve, generate_all, greedy

LIMIT_S = 120.0
# A step takes this long, so that whoever is interrupted is in the middle of a stream.
SLOW = {"STEPWIRE_SIM_STEP_US": "5000"}
ENVIRONMENT = {**os.environ, "PYTHONPATH": str(ROOT)}


@pytest.fixture(scope="module")
def serve(tmp_path_factory, default_model):
    folder = tmp_path_factory.mktemp("serve")
    with Serve(folder, "--model", str(default_model), "--backend", "simulated", env=SLOW) as running:
        yield running


def test_what_the_readme_says_first(serve):
    said = [c.words[1:] for c in commands() if c.page == "README.md" and c.words[0] == ".venv/bin/stepwire"]
    done = [words for words in said if words[0] in ("health", "generate")]
    assert len(done) == 2
    for words in done:
        limit = time.monotonic() + LIMIT_S
        while not succeeds(words, serve.addresses[0]):  # a busy machine may be NOT_SERVING for a moment
            assert time.monotonic() < limit, words


def succeeds(words: tuple[str, ...], address: str) -> bool:
    result = CliRunner().invoke(app, list(words), env={"STEPWIRE_ADDRESS": address})
    print(words, result.exit_code, result.output)
    return result.exit_code == 0 and bool(result.output.strip())


def test_the_python_of_the_readme(serve, tmp_path):
    [text] = re.findall(r"```python\n(import asyncio.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)
    script = tmp_path / "first.py"
    script.write_text(text.replace("127.0.0.1:50051", serve.addresses[0]))
    told = subprocess.run([sys.executable, script], env=ENVIRONMENT, capture_output=True, timeout=LIMIT_S)
    assert (told.returncode, bool(told.stdout), told.stderr.decode()) == (0, True, "")


def start(address: str, name: str, *arguments: object) -> subprocess.Popen:
    command = [sys.executable, str(ROOT / "examples" / "python" / name), *map(str, arguments)]
    return subprocess.Popen(
        [*command, "--address", address],
        cwd=ROOT,
        env=ENVIRONMENT,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )


def run(serve: Serve, name: str, *arguments: object) -> tuple[int, str]:
    process = start(serve.addresses[0], name, *arguments)
    out, err = process.communicate(timeout=LIMIT_S)
    print(err.decode())
    return process.returncode, out.decode()


def read(path: Path) -> dict:
    found = [json.loads(line) for line in path.read_text().splitlines()]
    by_id = {row["id"]: row for row in found}
    assert len(by_id) == len(found), "a row was answered twice"
    return by_id


def test_many_streams(serve):
    status, out = run(serve, "many_streams.py", "one", "two", "three", "--max-tokens", 5)
    assert status == 0
    assert out.splitlines()[-1].startswith("3 answers, 15 tokens, ")
    # The answers are drawn: any quote may be part of one.
    assert sorted(re.match(r"\[.*? s\] (one|two|three)['\"]", line)[1] for line in out.splitlines()[:-1]) == [
        "one", "three", "two"
    ]  # fmt: skip


def test_a_batch_goes_on_where_it_ended(serve, tmp_path):
    source, target = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    prompts = [{"id": f"row {i}", "prompt": f"This is number {i}", "max_tokens": 3 + i} for i in range(20)]
    chat = {"messages": [{"role": "user", "content": "Hello"}], "max_tokens": 2}
    wrong = [{"id": "empty", "prompt": ""}, {"id": "neither"}]
    source.write_text("\n".join(json.dumps(row) for row in [*prompts, chat, *wrong]))
    # One was answered in an earlier run, which was killed while it wrote the next.
    target.write_text('{"id": "row 0", "text": "kept", "finish_reason": "length"}\n{"id": "row 1", "te')
    status, out = run(serve, "batch.py", source, target, "--concurrency", 4)
    assert status == 1
    assert out.startswith("23 rows: 1 were there, 2 errors, ")
    answers = read(target)
    assert answers["row 0"]["text"] == "kept"
    assert [answers[f"row {i}"]["tokens"] for i in range(1, 20)] == [3 + i for i in range(1, 20)]
    assert answers[21]["finish_reason"] == "length"  # without an id: the number of its line
    assert answers["empty"]["error"].startswith("INVALID_ARGUMENT")
    assert "prompt" in answers["neither"]["error"]


def test_an_interrupted_answer_is_the_answer(serve):
    """Its connection ends after so many bytes: more than come before the answer, fewer than those of all its tokens."""
    prompt, num_tokens, cut_after = "The sea is", 400, 2000
    with serve.stub() as stub:
        prompt_ids = list(stub.Tokenize(pb.TokenizeRequest(text=prompt)).token_ids)
    [undisturbed] = generate_all(serve.addresses, [greedy(prompt_ids, num_tokens)])
    with TcpProxy(int(serve.addresses[0].rpartition(":")[2]), cut_after) as network:
        process = start(f"127.0.0.1:{network.port}", "resume.py", prompt, "--max-tokens", num_tokens)
        out, err = process.communicate(timeout=LIMIT_S)
    print(err.decode())
    assert process.returncode == 0
    assert out.decode().rstrip("\n") == undisturbed.text.rstrip("\n")
    assert err.count(b"interrupted after") == 1
