"""The command line's clients against a small server in this process that answers what it was asked."""

import json
from collections.abc import Iterator

import grpc
import pytest

from protos.stepwire.inference.v1 import inference_pb2 as pb
from protos.stepwire.inference.v1 import inference_pb2_grpc
from scheduler_svc.client.chat import HELP, chat
from scheduler_svc.client.generate import generate
from scheduler_svc.client.health import advice, ask
from scheduler_svc.errors import StartupError
from tests.unit.client.served import served


class Echo(inference_pb2_grpc.InferenceServiceServicer):
    """Generate streams the prompt word by word; Chat tells how many messages it got and what the last one said."""

    def Generate(self, request, context):
        if not request.text:
            context.abort(grpc.StatusCode.INVALID_ARGUMENT, "prompt: is empty")
        for word in request.text.split(" "):
            yield pb.GenerateResponse(text=word)
        yield pb.GenerateResponse(finish_reason=pb.FINISH_REASON_LENGTH)

    def GetModel(self, request, context):
        return pb.GetModelResponse(model="echo")

    def Chat(self, request, context):
        yield pb.GenerateResponse(text=f"{len(request.messages)}:")
        yield pb.GenerateResponse(text=request.messages[-1].content)


@pytest.fixture(scope="module")
def address() -> Iterator[str]:
    with served(Echo(), inference_pb2_grpc.add_InferenceServiceServicer_to_server) as running:
        yield running


def test_text_is_written_as_it_comes(address):
    written: list[str] = []
    generate(address, pb.GenerateRequest(text="the sea is"), written.append, as_json=False)
    assert written == ["the", "sea", "is", "", "\n"]


def test_json_is_one_object_a_message(address):
    written: list[str] = []
    generate(address, pb.GenerateRequest(text="a b"), written.append, as_json=True)
    assert [json.loads(line) for line in written] == [
        {"text": "a"},
        {"text": "b"},
        {"finish_reason": "FINISH_REASON_LENGTH"},
    ]


def test_a_refusal_is_one_line_with_the_status(address):
    with pytest.raises(StartupError) as caught:
        generate(address, pb.GenerateRequest(), print, as_json=False)
    assert str(caught.value) == f"{address} answered INVALID_ARGUMENT: prompt: is empty"


def test_nobody_there_is_said_plainly():
    with pytest.raises(StartupError, match=r"nothing answers on 127.0.0.1:1: start `stepwire serve`"):
        generate("127.0.0.1:1", pb.GenerateRequest(text="x"), print, as_json=False)
    answer, words = ask("127.0.0.1:1", "", 60.0)
    assert answer == "UNAVAILABLE"
    assert words.startswith("nothing answers on 127.0.0.1:1: start `stepwire serve`")


def test_only_answers_that_are_not_serving_come_with_advice():
    assert advice("SERVING", "h:1", "") == ""
    for answer in ("NOT_SERVING", "DEADLINE_EXCEEDED"):
        assert advice(answer, "h:1", "").startswith("h:1 ")
    assert "'stepwire.X'" in advice("NOT_FOUND", "h:1", "stepwire.X")


def test_a_conversation_grows_and_can_be_forgotten(address):
    lines = iter(["hello", "", "again", "/reset", "new"])
    written: list[str] = []

    def read(prompt: str) -> str:
        try:
            return next(lines)
        except StopIteration:
            raise EOFError from None

    template = pb.ChatRequest(messages=[pb.ChatMessage(role="system", content="be brief")])
    chat(address, template, read, written.append)
    assert "".join(written) == f"echo on {address}. {HELP}\n2:hello\n4:again\n2:new\n\n"
