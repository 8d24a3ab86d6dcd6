"""smg in front of two frontends, with the real openai and anthropic clients before it, the real model behind it.

The oracle of every text is our own Chat or Generate, asked directly.
"""

import json
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from protos.stepwire.inference.v1 import inference_pb2 as pb
from tests.e2e.server import Serve
from tests.gateways import readme
from tests.gateways.conftest import smg_in_front_of
from tests.gateways.gateway import Gateway, until

QUESTION = "What is the capital of France?"
MODEL = "SmolLM2-135M-Instruct"


@pytest.fixture(scope="module")
def smg(service: Serve, smg_bin: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Gateway]:
    with smg_in_front_of(smg_bin, service.addresses, tmp_path_factory.mktemp("smg")) as gateway:
        yield gateway


@pytest.fixture(scope="module")
def direct(service: Serve) -> dict[str, tuple[str, list[int]]]:
    """Greedy answers without a gateway: text, [prompt tokens, completion tokens]."""
    sampling = pb.SamplingParams(temperature=0)
    chat = pb.ChatRequest(
        messages=[pb.ChatMessage(role="user", content=QUESTION)],
        sampling=sampling,
        stopping=pb.StoppingCriteria(max_tokens=12),
    )
    plain = pb.GenerateRequest(text=QUESTION, sampling=sampling, stopping=pb.StoppingCriteria(max_tokens=8))
    with service.stub() as stub:
        answers = {"chat": list(stub.Chat(chat)), "completion": list(stub.Generate(plain))}
    return {
        name: (
            "".join(message.text for message in messages),
            [messages[-1].usage.prompt_tokens, messages[-1].usage.completion_tokens],
        )
        for name, messages in answers.items()
    }


@pytest.fixture(scope="module")
def got(smg: Gateway, direct, clients_python: Path) -> dict:
    """What the clients got, case by case."""
    stop = direct["chat"][0].split()[2]
    script = Path(__file__).with_name("openai_cases.py")
    command = [str(clients_python), str(script), smg.url, MODEL, QUESTION, stop]
    done = subprocess.run(command, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stderr[-3000:] + smg.output()[-2000:]
    return {**json.loads(done.stdout), "stop string": stop}


def test_the_program_of_the_readme_gets_an_answer(smg: Gateway, clients_python: Path) -> None:
    program = readme.program()
    assert "http://127.0.0.1:30000/" in program
    program = program.replace("http://127.0.0.1:30000/", f"{smg.url}/")
    done = subprocess.run([str(clients_python), "-c", program], capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stderr[-3000:] + smg.output()[-2000:]
    assert done.stdout.strip()


def test_chat_whole_and_streamed_is_what_we_answer_directly(got, direct):
    text, usage = direct["chat"]
    assert (got["chat"]["text"], got["chat"]["usage"]) == (text, usage)
    assert (got["chat stream"]["text"], got["chat stream"]["usage"]) == (text, usage)
    assert got["chat"]["finish"] == got["chat stream"]["finish"]


def test_two_choices_with_a_seed(got):
    first, again = got["n"]
    assert [index for index, _ in first] == [0, 1]
    assert first == again == got["n stream"]
    assert first[0][1] != first[1][1]
    assert got["n usage"][1] > 12


def test_logprobs_are_of_the_tokens_of_the_text(got, direct):
    assert "".join(token for token, _, _ in got["logprobs"] if not token.startswith("<|")) == direct["chat"][0]
    for token, logprob, top in got["logprobs"]:
        assert len(top) == 2
        assert top[0] == [token, logprob]  # greedy
        assert top[0][1] >= top[1][1]


def test_a_stop_string_cuts_the_text_and_the_work(got, direct):
    text, usage = direct["chat"]
    assert got["stop"]["text"] == text[: text.index(got["stop string"])]
    assert got["stop"]["finish"] == "stop"
    assert got["stop"]["usage"][1] < usage[1]


def test_completions_take_plain_text(got, direct):
    text, usage = direct["completion"]
    assert (got["completion"]["text"], got["completion"]["usage"]) == (text, usage)
    assert got["completion stream"] == text


def test_what_we_refuse_arrives_as_a_bad_request(got):
    status, message = got["refused"]
    assert status == 400
    assert "8192" in message


def test_anthropic_messages(got, direct):
    text, usage = direct["chat"]
    assert (got["message"]["text"], got["message"]["usage"]) == (text, usage)
    assert got["message"]["finish"] in ("max_tokens", "end_turn")
    assert got["message stream"] == text


def test_the_gateway_knows_the_load_and_the_model(got, smg: Gateway, service: Serve):
    until(lambda: all("engine_load" in worker for worker in smg.get("/workers")["workers"]))  # smg asks now and then
    workers = smg.get("/workers")["workers"]
    assert {worker["model_id"] for worker in workers} == {MODEL}
    assert {worker["connection_mode"] for worker in workers} == {"grpc"}
    assert all(worker["engine_load"]["loads"][0]["max_total_num_tokens"] == 256 * 16 for worker in workers)
    service.wait_idle()
