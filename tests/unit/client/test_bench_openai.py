"""The load generator over HTTP, against a small server of the OpenAI API whose ways can be chosen."""

import asyncio
import json
from contextlib import asynccontextmanager

import pytest

from scheduler_svc.client.bench import Bench, make_target, parse_rates, parse_target
from scheduler_svc.client.load import Sending
from scheduler_svc.client.load_openai import OpenAI, OpenAITarget
from scheduler_svc.client.workload import Job, Shape, Turn, as_text
from scheduler_svc.errors import StartupError


class Talker:
    """Answers /v1/models, and streams as many chunks as tokens were asked for."""

    def __init__(self):
        self.asked: list[tuple[str, dict, dict]] = []
        self.with_ids = True
        self.with_usage = True
        self.status = 200
        self.models: object = {"data": [{"id": "m", "max_model_len": 512}]}
        self.cut_after: int | None = None

    async def handle(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while True:
                head = (await reader.readuntil(b"\r\n\r\n")).decode()
                lines = head.split("\r\n")
                fields = dict(line.lower().split(": ", 1) for line in lines[1:] if line)
                body = await reader.readexactly(int(fields.get("content-length", 0)))
                path = lines[0].split(" ")[1]
                if path == "/v1/models":
                    self._reply(writer, json.dumps(self.models).encode(), "application/json")
                else:
                    asked = json.loads(body)
                    self.asked.append((path, asked, fields))
                    self._reply(writer, "".join(self._events(path, asked)).encode(), "text/event-stream")
                await writer.drain()
        except (asyncio.IncompleteReadError, ConnectionError):
            writer.close()

    def _reply(self, writer: asyncio.StreamWriter, body: bytes, kind: str) -> None:
        head = f"HTTP/1.1 {self.status} X\r\ncontent-type: {kind}\r\ncontent-length: {len(body)}\r\n\r\n"
        writer.write(head.encode() + body)

    def _events(self, path: str, asked: dict):
        count = asked["max_tokens"] if self.cut_after is None else self.cut_after
        for number in range(count):
            words = {"delta": {"content": " w"}} if "chat" in path else {"text": " w"}
            ids = {"token_ids": [number]} if self.with_ids else {}
            yield f"data: {json.dumps({'choices': [{'index': 0, **words, **ids}]})}\n\n"
        yield ": a comment\n\n"
        if self.with_usage:
            told = {"completion_tokens": count, "prompt_tokens": 9, "prompt_tokens_details": {"cached_tokens": 4}}
            yield f"data: {json.dumps({'choices': [], 'usage': told})}\n\n"
        yield "data: [DONE]\n\n"


@asynccontextmanager
async def talking():
    talker = Talker()
    server = await asyncio.start_server(talker.handle, "127.0.0.1", 0)
    async with server:
        yield talker, f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"


async def run(url: str, jobs: list[Job], options: OpenAI | None = None, *, words: bool = False):
    async with OpenAITarget(url, Sending(2, as_text=words), lambda *_: None, options or OpenAI()) as target:
        served = await target.describe()
        return await target.run(jobs), served


@pytest.mark.parametrize(("with_ids", "with_usage"), [(True, True), (True, False), (False, True), (False, False)])
async def test_tokens_are_counted_whatever_the_server_tells(with_ids, with_usage):
    async with talking() as (talker, url):
        talker.with_ids, talker.with_usage = with_ids, with_usage
        records, served = await run(url, [Job(None, [300, 301], 5)] * 3)
        assert [(record.num_output, record.error) for record in records] == [(5, "")] * 3
        assert all(len(record.message_s) == 5 for record in records)
        assert records[0].num_prompt == (9 if with_usage else 2)
        assert records[0].num_cached == (4 if with_usage else 0)
        assert served.room.max_model_len == 512
        path, asked, _ = talker.asked[0]
        assert path == "/v1/completions"
        assert asked["prompt"] == [300, 301]
        assert (asked["max_tokens"], asked["stream"], asked["ignore_eos"], asked["model"]) == (5, True, True, "m")


async def test_chat_sends_the_conversation_as_messages():
    async with talking() as (talker, url):
        job = Job(None, [300, 301], 2, (Turn([302], 3),))
        options = OpenAI(chat=True, api_key="k", extra='{"top_k": 1}')
        records, _ = await run(url, [job], options, words=True)
        assert [record.num_output for record in records] == [2, 3]
        (first_path, first, fields), (_, second, _) = talker.asked
        assert first_path == "/v1/chat/completions"
        assert first["messages"] == [{"role": "user", "content": as_text([300, 301])}]
        assert [message["role"] for message in second["messages"]] == ["user", "assistant", "user"]
        assert second["messages"][1]["content"] == " w w"
        assert first["top_k"] == 1
        assert fields["authorization"] == "bearer k"


async def test_a_conversation_goes_on_from_the_ids_that_came():
    async with talking() as (talker, url):
        await run(url, [Job(None, [300, 301], 2, (Turn([302], 1),))])
        assert talker.asked[1][1]["prompt"] == [300, 301, 0, 1, 302]


async def test_failures_are_misses_with_a_name():
    async with talking() as (talker, url):
        talker.cut_after = 1
        assert [r.error for r in (await run(url, [Job(None, [300], 3)]))[0]] == ["SHORT"]
        talker.cut_after, talker.status = None, 503
        records, _ = await run_undescribed(url, [Job(None, [300], 3, (Turn([301], 1),))])
        assert [record.error for record in records] == ["HTTP_503", "BROKEN_OFF"]


async def run_undescribed(url: str, jobs: list[Job]):
    async with OpenAITarget(url, Sending(2), lambda *_: None, OpenAI(model="m")) as target:
        return await target.run(jobs), None


async def test_what_is_no_such_server_is_one_line():
    async with talking() as (talker, url):
        talker.models = {"nothing": 1}
        with pytest.raises(StartupError, match="not an answer of the OpenAI API"):
            await run(url, [])
    with pytest.raises(StartupError, match="does not list its models"):
        await run("http://127.0.0.1:1", [])
    with pytest.raises(StartupError, match="--extra-body"):
        OpenAITarget("http://h", Sending(1), lambda *_: None, OpenAI(extra="[1]"))


def test_which_protocol_is_spoken():
    def kind(address: str, api: str = "auto") -> tuple[str, str]:
        target = make_target(address, Bench([], Shape(), Sending(1), {}, api=api), meter=Silent())
        return type(target).__name__, target.address

    assert kind("h:1") == kind("h:1", "grpc") == ("Target", "h:1")
    assert kind("http://h:1") == kind("h:1", "openai") == kind("h:1", "openai-chat") == ("OpenAITarget", "http://h:1")
    for address, api in (("http://h:1", "grpc"), ("ftp://h", "auto")):
        with pytest.raises(StartupError, match="--targets"):
            kind(address, api)


class Silent:
    def heard(self, record, num_new):
        """Nobody watches."""


def test_names_and_rates():
    assert parse_target("vllm=http://h:1/v1?a=b") == ("vllm", "http://h:1/v1?a=b")
    assert parse_target("h:1") == ("h:1", "h:1")
    assert parse_target("http://h:1/?a=b") == ("http://h:1/?a=b", "http://h:1/?a=b")
    assert parse_rates("1,2 4.5") == [1, 2, 4.5]
    assert parse_rates("") == []
    for bad in ("x", "0", "1,-2", "inf"):
        with pytest.raises(StartupError, match="--rate"):
            parse_rates(bad)
