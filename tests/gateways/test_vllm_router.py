"""vllm-router in front of two frontends, speaking vllm.Inference, with simulated tokens behind."""

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from protos.stepwire.inference.v1 import inference_pb2 as pb
from tests.e2e.server import Serve, free_port
from tests.gateways.gateway import Gateway, hang_up
from tests.gateways.readme import command

MODEL = "SmolLM2-135M-Instruct"
QUESTION = "What is the capital of France?"
CHAT = "/v1/chat/completions"


@pytest.fixture(scope="module")
def router(
    simulated_service: Serve, router_bin: Path, default_model: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Gateway]:
    port = free_port()
    words = command("vllm-router --host")
    words[0] = str(router_bin)
    words[words.index("--port") + 1] = str(port)
    at = words.index("--worker-urls")
    words[at + 1 : at + 3] = [f"grpc://{address}" for address in simulated_service.addresses]
    words += ["--prometheus-host", "127.0.0.1", "--prometheus-port", str(free_port())]
    env = {**os.environ, "VLLM_ROUTER_TOKENIZER": str(default_model)}
    log = tmp_path_factory.mktemp("router") / "router.log"
    with Gateway(words, port, log, lambda gateway: bool(gateway.get("/v1/models")["data"]), env) as gateway:
        yield gateway


def chat(max_tokens: int, **fields: object) -> dict:
    messages = [{"role": "user", "content": QUESTION}]
    return {"model": MODEL, "messages": messages, "max_tokens": max_tokens, "temperature": 0, **fields}


def direct(simulated_service: Serve, max_tokens: int) -> tuple[str, int, int]:
    request = pb.ChatRequest(
        messages=[pb.ChatMessage(role="user", content=QUESTION)],
        sampling=pb.SamplingParams(temperature=0),
        stopping=pb.StoppingCriteria(max_tokens=max_tokens),
    )
    with simulated_service.stub() as stub:
        messages = list(stub.Chat(request))
    usage = messages[-1].usage
    return "".join(message.text for message in messages), usage.prompt_tokens, usage.completion_tokens


def test_chat_is_what_we_answer_directly(router: Gateway, simulated_service: Serve):
    text, num_prompt, num_output = direct(simulated_service, 8)
    for _ in range(2):  # one on each frontend
        status, answer = router.post(CHAT, chat(8))
        assert status == 200, answer
        assert answer["choices"][0]["message"]["content"] == text
        assert (answer["usage"]["prompt_tokens"], answer["usage"]["completion_tokens"]) == (num_prompt, num_output)
    connection = router.open_stream(CHAT, chat(8, stream=True))
    rest = connection.reply.read().decode()
    hang_up(connection)
    assert rest.rstrip().endswith("data: [DONE]")


def test_bad_requests_are_told_as_such(router: Gateway):
    status, answer = router.post(CHAT, chat(4, temperature=9.0))
    assert status == 400, answer


def test_a_client_that_hangs_up_frees_its_blocks(router: Gateway, simulated_service: Serve):
    stream = router.open_stream(CHAT, chat(8000, stream=True, ignore_eos=True))
    assert simulated_service.load().num_running == 1, "the first piece came before the last"
    hang_up(stream)
    simulated_service.wait_idle()
