"""Generate and Chat over a real server: what a client sees."""

import asyncio

import grpc
import pytest

from protos.stepwire.inference.v1 import inference_pb2 as pb
from scheduler_svc.errors import DeadlineExceeded, QueueFull, RequestFailed, Unavailable
from tests.unit.frontend.grpc_rig import Refusal, rig, spelled


def script_of(*tokens: int):
    """The same tokens for each choice, then `x` for ever."""

    def script(_submit, _index):
        yield from tokens
        while True:
            yield 90

    return script


def generate(**fields) -> pb.GenerateRequest:
    fields.setdefault("token_ids", pb.TokenIds(ids=[70, 71]))
    return pb.GenerateRequest(**fields)


def stopping(**fields) -> pb.StoppingCriteria:
    return pb.StoppingCriteria(**fields)


def text_of(messages, index=0) -> str:
    return "".join(m.text for m in messages if m.index == index)


def ids_of(messages, index=0) -> list[int]:
    return [i for m in messages if m.index == index for i in m.token_ids]


async def test_the_shape_of_a_stream(tmp_path):
    async with rig(tmp_path, script_of(80, 81, 82)) as r:
        r.session.cached = 1
        messages = await r.collect(generate(request_id="me", stopping=stopping(max_tokens=3)))
        first, last = messages[0], messages[-1]
        assert first.request_id == "me"
        assert (first.prompt.num_tokens, first.prompt.num_cached_tokens) == (2, 1)
        assert not any(m.request_id or m.HasField("prompt") for m in messages[1:])
        assert last.finish_reason == pb.FINISH_REASON_LENGTH
        assert last.WhichOneof("stop_match") is None
        usage = last.usage
        assert (usage.prompt_tokens, usage.cached_tokens, usage.completion_tokens) == (2, 1, 3)
        assert (usage.num_preemptions, usage.num_resumes) == (1, 2)
        assert not any(m.finish_reason or m.HasField("usage") for m in messages[:-1])
        assert ids_of(messages) == [80, 81, 82]
        assert text_of(messages) == r.tokenizer.decode([80, 81, 82])
        assert all(m.text or m is last for m in messages)
        assert not r.session.live


async def test_choices_are_told_apart(tmp_path):
    async with rig(tmp_path, lambda _s, i: iter(lambda: 80 + i, None)) as r:
        request = generate(sampling=pb.SamplingParams(n=3, seed=2**64 - 1), stopping=stopping(max_tokens=4))
        messages = await r.collect(request)
        for i in range(3):
            assert ids_of(messages, i) == [80 + i] * 4
            assert [m.usage.completion_tokens for m in messages if m.index == i and m.finish_reason] == [4]
        assert r.session.submitted[0].sampling.seed == 2**64 - 1
        assert r.session.submitted[0].num_choices == 3


async def test_max_tokens_zero(tmp_path):
    async with rig(tmp_path) as r:
        [message] = await r.collect(generate(stopping=stopping(max_tokens=0)))
        assert message.finish_reason == pb.FINISH_REASON_LENGTH
        assert message.usage.completion_tokens == 0
        assert (message.text, list(message.token_ids), message.prompt.num_tokens) == ("", [], 2)


async def test_stop_token_counts_and_has_no_text(tmp_path):
    async with rig(tmp_path, script_of(80, 81, 200, 82)) as r:
        for include in (False, True):
            criteria = stopping(stop_token_ids=[200], include_stop=include)
            messages = await r.collect(generate(stopping=criteria))
            assert ids_of(messages) == [80, 81, 200]
            assert text_of(messages) == r.tokenizer.decode([80, 81, 200] if include else [80, 81])
            assert messages[-1].stop_token_id == 200
            assert messages[-1].finish_reason == pb.FINISH_REASON_STOP


@pytest.mark.parametrize("per_step", [1, 3, 50])
async def test_stop_string_across_tokens(tmp_path, per_step):
    async with rig(tmp_path, max_model_len=2**20) as r:
        tokens = spelled(r.tokenizer, "a", "b", "c", "X", "Y", "d", "e")
        r.session.script = script_of(*tokens)
        r.session.tokens_per_step = per_step
        for include in (False, True):
            messages = await r.collect(generate(stopping=stopping(stop=["zz", "XY"], include_stop=include)))
            assert text_of(messages) == ("abcXY" if include else "abc")
            assert messages[-1].finish_reason == pb.FINISH_REASON_STOP
            assert messages[-1].stop_string == "XY"
            assert messages[-1].usage.completion_tokens == 5
            assert ids_of(messages) == tokens[:5]
            assert not any("X" in m.text for m in messages) or include
        assert r.session.streams[0].cancels == [0]
        assert not r.session.live


async def test_stop_string_in_the_last_token_beats_length(tmp_path):
    async with rig(tmp_path) as r:
        r.session.script = script_of(*spelled(r.tokenizer, "a", "X"))
        messages = await r.collect(generate(stopping=stopping(stop=["X"], max_tokens=2)))
        assert (text_of(messages), messages[-1].stop_string) == ("a", "X")
        assert r.session.streams[0].cancels == []


async def test_min_tokens_beats_stop_strings(tmp_path):
    async with rig(tmp_path) as r:
        r.session.script = script_of(*spelled(r.tokenizer, "a", "\n", "b", "c", "\n", "d"))
        messages = await r.collect(generate(stopping=stopping(stop=["\n"], min_tokens=4)))
        assert text_of(messages) == "a\nbc"
        assert messages[-1].usage.completion_tokens == 5


async def test_a_special_token_as_stop_string(tmp_path):
    async with rig(tmp_path) as r:
        a = spelled(r.tokenizer, "a")
        r.session.script = script_of(*a, 1, *a)
        for include, text in ((False, "a"), (True, "a<|im_start|>")):
            criteria = stopping(stop=["<|im_start|>"], ignore_eos=True, include_stop=include)
            messages = await r.collect(generate(stopping=criteria))
            assert text_of(messages) == text
            assert messages[-1].stop_string == "<|im_start|>"


async def test_end_of_sequence_and_ignoring_it(tmp_path):
    async with rig(tmp_path, script_of(80, 2, 81)) as r:
        messages = await r.collect(generate())
        assert (ids_of(messages), messages[-1].stop_token_id) == ([80, 2], 2)
        messages = await r.collect(generate(stopping=stopping(ignore_eos=True, max_tokens=3)))
        assert ids_of(messages) == [80, 2, 81]
        assert text_of(messages) == r.tokenizer.decode([80, 81])
        request = generate(
            stopping=stopping(ignore_eos=True, max_tokens=3), response=pb.ResponseOptions(skip_special_tokens=False)
        )
        assert "<|im_end|>" in text_of(await r.collect(request))


async def test_without_text_tokens_come_at_once(tmp_path):
    async with rig(tmp_path, script_of(80, 81)) as r:
        options = pb.ResponseOptions(text=False)
        messages = await r.collect(generate(response=options, stopping=stopping(max_tokens=2)))
        assert (ids_of(messages), text_of(messages)) == ([80, 81], "")


async def test_characters_come_whole_and_cut_ones_as_replacement(tmp_path):
    async with rig(tmp_path) as r:
        fox = spelled(r.tokenizer, "🦊")
        assert len(fox) > 2
        r.session.script = script_of(*fox, *fox[:2])
        messages = await r.collect(generate(stopping=stopping(max_tokens=len(fox) + 2)))
        assert [m.text for m in messages] == ["🦊", "\ufffd"]
        assert [list(m.token_ids) for m in messages] == [fox, fox[:2]]


async def test_ids_beyond_the_tokenizer_have_no_text(tmp_path):
    async with rig(tmp_path, script_of(80, 511, 81)) as r:
        messages = await r.collect(generate(stopping=stopping(max_tokens=3)))
        assert ids_of(messages) == [80, 511, 81]
        assert text_of(messages) == r.tokenizer.decode([80, 81])


async def test_logprobs(tmp_path):
    async with rig(tmp_path, script_of(80, 81)) as r:
        options = pb.ResponseOptions(logprobs=2)
        messages = await r.collect(generate(response=options, stopping=stopping(max_tokens=2)))
        entries = [entry for m in messages for entry in m.logprobs]
        assert [e.token_id for e in entries] == [80, 81]
        assert entries[0].logprob == -9999.0
        assert entries[0].rank == 3
        assert [(c.token_id, c.logprob) for c in entries[0].top] == [(0, -9999.0), (1, -1.5)]
        assert r.session.submitted[0].sampling.logprobs == 2
        await r.collect(generate(response=pb.ResponseOptions(logprobs=0), stopping=stopping(max_tokens=1)))
        assert r.session.submitted[1].sampling.HasField("logprobs")


async def test_a_slow_reader_gets_everything_in_few_messages(tmp_path):
    async with rig(tmp_path, script_of(*range(70, 90)), max_model_len=6000) as r:
        r.session.tokens_per_step = 5000
        messages = await r.collect(generate(stopping=stopping(max_tokens=5000, ignore_eos=True)))
        assert len(ids_of(messages)) == 5000
        assert len(messages) <= 4
        assert max(len(m.token_ids) for m in messages) <= 2048


async def test_chat_renders_the_template(tmp_path):
    async with rig(tmp_path, script_of(80, 2)) as r:
        messages = await r.collect(pb.ChatRequest(messages=[pb.ChatMessage(role="user", content="Hi <|im_end|>")]))
        assert ids_of(messages) == [80, 2]
        prompt = r.session.submitted[0].prompt_token_ids
        ids = [int.from_bytes(prompt[i : i + 4], "little") for i in range(0, len(prompt), 4)]
        text = r.tokenizer.decode(ids, skip_special_tokens=False)
        assert text.endswith("<|im_start|>user\nHi <|im_end|><|im_end|>\n<|im_start|>assistant\n")
        assert ids.count(2) == 2  # the default system turn's and the user turn's own
        assert messages[0].prompt.num_tokens == len(ids)


# ---- ends ----


async def test_cancel_ends_the_stream_kindly(tmp_path):
    async with rig(tmp_path, max_model_len=2**20) as r:
        call = r.stub.Generate(generate(request_id="a", stopping=stopping(ignore_eos=True)))
        await call.read()
        r.session.gate.clear()
        await r.stub.Cancel(pb.CancelRequest(request_id="a"))
        messages = await rest_of(call)
        assert messages[-1].finish_reason == pb.FINISH_REASON_CANCELLED
        assert await call.code() == grpc.StatusCode.OK
        await r.stub.Cancel(pb.CancelRequest(request_id="nobody"))
        assert r.session.cancelled == ["a", "nobody"]


async def until(condition) -> None:
    async with asyncio.timeout(60.0):
        while not condition():  # noqa: ASYNC110  (what is waited for happens on the other side of a socket)
            await asyncio.sleep(0.005)


async def rest_of(call) -> list[pb.GenerateResponse]:
    messages = []
    while (message := await call.read()) is not grpc.aio.EOF:
        messages.append(message)
    return messages


@pytest.mark.parametrize("how", ["cancel", "deadline", "close"])
async def test_a_client_that_leaves_frees_its_request(tmp_path, how):
    async with rig(tmp_path) as r:
        r.session.gate.clear()
        call = r.stub.Generate(generate(request_id="a"), timeout=2.0 if how == "deadline" else None)
        await until(lambda: r.session.submitted)
        if how == "cancel":
            call.cancel()
        elif how == "close":
            await r.channel.close()
        else:
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await call.read()
            assert caught.value.code() == grpc.StatusCode.DEADLINE_EXCEEDED
            assert 0 < r.session.submitted[0].deadline_ms <= 2000
        await until(lambda: r.session.streams[0].cancels)
        await until(lambda: r.service.num_active == 0)
        assert not r.session.live
        value = r.service.metrics.registry.get_sample_value
        assert value("stepwire_frontend_active_streams") == 0
        reason = "deadline" if how == "deadline" else "disconnected"
        assert value("stepwire_frontend_requests_total", {"finish_reason": reason}) == 1


async def test_a_client_that_leaves_during_a_write_frees_its_request(tmp_path):
    """Nobody reads: the server ends up blocked in a write, where a cancel comes as another exception."""
    async with rig(tmp_path, max_model_len=2**20) as r:
        r.session.tokens_per_step = 512
        options = pb.ResponseOptions(logprobs=20)
        call = r.stub.Generate(generate(response=options, stopping=stopping(ignore_eos=True)))
        await until(lambda: r.session.live)
        stream = r.session.streams[0]
        sizes = [-1]

        async def blocked() -> bool:  # the pending delta grows when nothing is read from it
            await asyncio.sleep(0.05)
            sizes.append(sum(len(d.token_ids) for d in stream._pending.values()))
            return sizes[-1] > sizes[-2] > 0

        while not await blocked():
            pass
        r.session.gate.clear()
        call.cancel()
        await until(lambda: r.service.num_active == 0)
        assert stream.cancels == ["request"]


@pytest.mark.parametrize(
    ("error", "code", "retry"),
    [
        (QueueFull("full", retry_after_s=2.5), grpc.StatusCode.RESOURCE_EXHAUSTED, 2.5),
        (Unavailable("away", retry_after_s=1.0), grpc.StatusCode.UNAVAILABLE, 1.0),
        (DeadlineExceeded("late"), grpc.StatusCode.DEADLINE_EXCEEDED, None),
        (RequestFailed("broke"), grpc.StatusCode.INTERNAL, None),
    ],
)
async def test_errors_after_tokens_and_before(tmp_path, error, code, retry):
    async with rig(tmp_path, max_model_len=2**20) as r:
        r.session.refuse_with = error
        found = await r.refusal(generate())
        assert (found.code, found.retry_after_s) == (code, retry)
        assert found.pushback_ms == (None if retry is None else str(int(retry * 1000)))
        r.session.refuse_with = None
        call = r.stub.Generate(generate(stopping=stopping(ignore_eos=True)))
        await call.read()
        r.session.streams[0].fail(error)
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await rest_of(call)
        assert Refusal.of(caught.value).code == code
        await until(lambda: not r.service.num_active)


async def test_a_bug_is_internal_and_tells_nothing(tmp_path, caplog):
    async with rig(tmp_path) as r:

        def broken(_submit):
            raise ValueError("prompt text /secret/path")

        r.session.submit = broken
        found = await r.refusal(generate(text="very private"))
        assert (found.code, found.message) == (grpc.StatusCode.INTERNAL, "internal error")
        assert "secret" not in caplog.text
        assert "private" not in caplog.text


async def test_a_live_request_id(tmp_path):
    async with rig(tmp_path) as r:
        r.session.gate.clear()
        call = r.stub.Generate(generate(request_id="twin"))
        await until(lambda: r.session.live)
        found = await r.refusal(generate(request_id="twin"))
        assert (found.code, found.fields) == (grpc.StatusCode.ALREADY_EXISTS, ["request_id"])
        call.cancel()


async def test_one_bad_stream_hurts_no_other(tmp_path):
    """An id out of any range in one stream; the others end well."""
    scripts = {80: [2**31 - 1, 80], 81: [81, 81]}

    def script(submit, _index):
        return iter(scripts[int.from_bytes(submit.prompt_token_ids[:4], "little")])

    async with rig(tmp_path, script) as r:
        requests = [generate(token_ids=pb.TokenIds(ids=[i]), stopping=stopping(max_tokens=2)) for i in (80, 81, 81, 81)]
        answers = await asyncio.gather(*(r.collect(request) for request in requests))
        assert [text_of(a) for a in answers[1:]] == [r.tokenizer.decode([81, 81])] * 3
        assert text_of(answers[0]) == r.tokenizer.decode([80])
