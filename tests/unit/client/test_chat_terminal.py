"""The terminal conversation: long messages, commands, an answer that is stopped, a server that refuses."""

from collections.abc import Callable, Iterator
from concurrent import futures

import grpc
import pytest

from protos.stepwire.inference.v1 import inference_pb2 as pb
from protos.stepwire.inference.v1 import inference_pb2_grpc
from scheduler_svc.client.chat import COMMANDS, chat, read_message
from scheduler_svc.errors import StartupError
from tests.unit.client.served import served


class Scripted(inference_pb2_grpc.InferenceServiceServicer):
    """Says back what it was told; 'forever' streams until it is cancelled, 'refuse' and 'gone' are refused."""

    def __init__(self):
        self.asked: list[list[tuple[str, str]]] = []
        self.ended = futures.Future()

    def GetModel(self, request, context):
        return pb.GetModelResponse(model="scripted")

    def Chat(self, request, context):
        self.asked.append([(message.role, message.content) for message in request.messages])
        last = request.messages[-1].content
        if last == "refuse":
            context.abort(grpc.StatusCode.INVALID_ARGUMENT, "messages is too long")
        if last == "gone":
            context.abort(grpc.StatusCode.UNAVAILABLE, "draining")
        if last == "forever":
            context.add_callback(lambda: self.ended.set_result(True))
            while context.is_active():
                yield pb.GenerateResponse(text="x", token_ids=[1])
        info = pb.PromptInfo(num_tokens=7, num_cached_tokens=4)
        yield pb.GenerateResponse(text="yes ", token_ids=[1], prompt=info)
        yield pb.GenerateResponse(text=last, token_ids=[2, 3])


@pytest.fixture
def server() -> Iterator[tuple[Scripted, str]]:
    service = Scripted()
    with served(service, inference_pb2_grpc.add_InferenceServiceServicer_to_server) as address:
        yield service, address


def reader(*lines: str | BaseException) -> Callable[[str], str]:
    left = iter(lines)

    def read(_prompt: str) -> str:
        line = next(left, EOFError())
        if isinstance(line, BaseException):
            raise line
        return line

    return read


def talk(address: str, *lines: str | BaseException, **options) -> str:
    written: list[str] = []
    chat(address, options.pop("template", pb.ChatRequest()), reader(*lines), written.append, **options)
    return "".join(written)


@pytest.mark.parametrize(
    ("lines", "expected"),
    [
        (["hello"], "hello"),
        (["  hello  "], "hello"),
        (["one \\", "two\\", "three"], "one \ntwo\nthree"),
        (['"""', "a", "", "  b\\", '"""'], "a\n\n  b\\"),
        (["half\\", KeyboardInterrupt(), "new"], "new"),
        (['"""', "half", KeyboardInterrupt(), "new"], "new"),
        ([KeyboardInterrupt()], None),
        ([], None),
        (["half\\"], None),
    ],
)
def test_messages_over_several_lines(lines, expected):
    assert read_message(reader(*lines), lambda _: None) == expected


def test_it_begins_with_the_model_and_where_it_is(server):
    _, address = server
    assert talk(address).startswith(f"scripted on {address}. Ctrl-C stops")


def test_without_a_server_nobody_types_in_vain():
    def read(_prompt: str) -> str:
        raise AssertionError("asked for a message")

    with pytest.raises(StartupError, match=r"^nothing answers on 127.0.0.1:1: start `stepwire serve`"):
        chat("127.0.0.1:1", pb.ChatRequest(), read, print)


def test_the_history_is_sent_each_time(server):
    service, address = server
    talk(address, "one", "", "two")
    assert service.asked == [[("user", "one")], [("user", "one"), ("assistant", "yes one"), ("user", "two")]]


def test_system_and_clear(server):
    service, address = server
    template = pb.ChatRequest(messages=[pb.ChatMessage(role="system", content="first")])
    talk(address, "a", "/clear", "b", "/system  be brief ", "c", "/clear", "d", "/system", "e", template=template)
    assert [asked[:-1] for asked in service.asked] == [
        [("system", "first")],
        [("system", "first")],
        [("system", "be brief")],
        [("system", "be brief")],
        [],
    ]


def test_help_and_unknown_commands(server):
    service, address = server
    text = talk(address, "/help", "/nope x")
    assert COMMANDS in text
    assert "[/nope is no command; /help shows them]" in text
    assert service.asked == []


def test_a_longer_text_may_begin_with_a_slash(server):
    service, address = server
    talk(address, '"""', "/etc/passwd", "what is it?", '"""')
    assert service.asked == [[("user", "/etc/passwd\nwhat is it?")]]


def test_stats_are_shown_when_asked_for(server):
    _, address = server
    shown = talk(address, "hi", stats=True)
    assert "[3 tokens, first after " in shown
    assert "prompt 7, 4 cached]" in shown
    assert "tokens" not in talk(address, "hi").partition("commands.")[2]
    assert talk(address, "/stats", "hi", "/stats", "hi").count("first after") == 1


def test_ctrl_c_stops_the_answer_only_and_frees_the_server(server):
    service, address = server
    written: list[str] = []

    def write(text: str) -> None:
        written.append(text)
        if text == "x" and written.count("x") == 3:
            raise KeyboardInterrupt

    chat(address, pb.ChatRequest(), reader("forever", "after"), write)
    assert service.ended.result(timeout=60)
    assert "[stopped]" in "".join(written)
    # The stopped turn is no part of the conversation.
    assert service.asked[-1] == [("user", "after")]


def test_a_refusal_leaves_the_conversation_alive(server):
    service, address = server
    text = talk(address, "refuse", "next")
    assert "INVALID_ARGUMENT: messages is too long]" in text
    assert service.asked[-1] == [("user", "next")]


def test_a_server_that_goes_away_ends_it_in_one_line(server):
    _, address = server
    with pytest.raises(StartupError, match="UNAVAILABLE: draining"):
        talk(address, "gone", "never sent")
