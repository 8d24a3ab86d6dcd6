"""What other inference servers got wrong in public, as expectations of this one: text, stops, bounds, ends of streams.

Each test is one idea from a list of real reports. What lies behind the frontend is in tests/wire and tests/unit.
"""

import asyncio
import gc
import itertools
import json
import math
import socket
import struct
import threading
from collections import Counter

import grpc
import numpy as np
import pytest
from google.protobuf.json_format import MessageToJson
from grpc_health.v1 import health_pb2, health_pb2_grpc

from protos.stepwire.inference.v1 import inference_pb2 as pb
from protos.stepwire.wire.v1 import step_pb2
from scheduler_svc.client.config import Access
from scheduler_svc.frontend import api_keys, service
from scheduler_svc.frontend.detokenizer import Detokenizer
from scheduler_svc.frontend.generation import Generation
from scheduler_svc.frontend.tokenizer import ModelTokenizer
from tests.unit.frontend import tiny_models
from tests.unit.frontend.grpc_rig import rig, spelled
from tests.unit.frontend.test_detokenizer import DETOKENIZERS, deltas, expected
from tests.unit.frontend.test_grpc_generate import generate, ids_of, script_of, stopping, text_of, until

INVALID = grpc.StatusCode.INVALID_ARGUMENT
SEED = 20_241_129
STOP, LENGTH = pb.FINISH_REASON_STOP, pb.FINISH_REASON_LENGTH


def byte_ids(data: bytes) -> list[int]:
    """One token a byte, of the byte-level tokenizer: printable bytes are spelled as themselves, others from 256 on."""
    printable = {*range(33, 127), *range(161, 173), *range(174, 256)}
    others = (chr(256 + i) for i in range(256 - len(printable)))
    names = [chr(byte) if byte in printable else next(others) for byte in range(256)]
    return [DETOKENIZERS["digits"].tokenizer.token_id(names[byte]) for byte in data]


def decoded(data: bytes) -> str:
    return "".join(deltas(DETOKENIZERS["digits"], byte_ids(b"p"), byte_ids(data)))


# ---- text ----


async def test_emoji_byte_by_byte_in_many_streams_at_once(tmp_path):
    emoji = "🦊🐙🚀🌍🎉🍕🐝🔥"
    prompts = {80 + i: byte_ids(char.encode()) for i, char in enumerate(emoji)}

    def script(submit, _index):
        return iter(prompts[np.frombuffer(submit.prompt_token_ids, "<i4")[0]])

    async with rig(tmp_path, script) as r:
        requests = [
            generate(token_ids=pb.TokenIds(ids=[80 + i]), stopping=stopping(max_tokens=4)) for i in range(len(emoji))
        ]
        for char, messages in zip(emoji, await asyncio.gather(*map(r.collect, requests)), strict=True):
            assert [m.text for m in messages] == [char]


@pytest.mark.parametrize(
    ("data", "text"),
    [
        (b"\xe3\x81 \x82", "\ufffd \ufffd"),  # a space comes between: it really is invalid
        (b"\xe3\x81\x82 ", "あ "),
        (b"\xa1 \xc2\xbb", "\ufffd »"),  # a stray continuation byte, then a good character
        (b"\xf0", "\ufffd"),
        (b"\xf0\x9f\xa6", "\ufffd"),
        ("👩‍👩‍👧‍👦".encode(), "👩‍👩‍👧‍👦"),
    ],
)
def test_bytes_become_the_text_that_decoding_them_at_once_gives(data, text):
    assert decoded(data) == text


@pytest.mark.parametrize("name", ["digits", "byte_fallback", "gemma", "unigram"])
def test_any_ids_stream_to_their_full_decode(name):
    """Long ones, dwelling on bytes that begin or go on with a character; none raises."""
    rng = np.random.default_rng(SEED)
    detokenizer = DETOKENIZERS[name]
    size = max(detokenizer.tokenizer.vocab().values()) + 40
    for _ in range(250):
        length = int(rng.integers(1, 400))
        low, high = (3, 259) if name in ("byte_fallback", "gemma") and rng.random() < 0.5 else (0, size)
        ids = rng.integers(low, high, length).tolist()
        prompt = rng.integers(0, size, 3).tolist()
        assert "".join(deltas(detokenizer, prompt, ids)) == expected(detokenizer.tokenizer, prompt, ids, True)


async def test_half_a_character_at_the_end_hurts_no_neighbour(tmp_path):
    def script(submit, _index):
        half = submit.request_id == "half"
        return iter([*byte_ids(b"\xf0"), 2] if half else itertools.repeat(80))

    async with rig(tmp_path, script) as r:
        names = ["a", "b", "c", "half"]
        requests = [generate(request_id=name, stopping=stopping(max_tokens=20)) for name in names]
        *others, half = await asyncio.gather(*map(r.collect, requests))
        assert (text_of(half), half[-1].finish_reason) == ("\ufffd", STOP)
        assert all(len(ids_of(messages)) == 20 for messages in others)


@pytest.mark.parametrize("bad", [-1, 2**31 - 1, 2**32 - 1, 2**32])
async def test_an_id_that_cannot_be_ends_its_own_stream_only(tmp_path, bad):
    """One that fits the message has no text; one that does not is INTERNAL."""

    def script(submit, _index):
        return iter([80, bad] + [81] * 20 if submit.request_id == "bad" else itertools.repeat(80))

    async with rig(tmp_path, script) as r:
        good = [asyncio.ensure_future(r.collect(generate(stopping=stopping(max_tokens=9)))) for _ in range(3)]
        request = generate(request_id="bad", stopping=stopping(max_tokens=4))
        if 0 <= bad < 2**32:
            assert len(ids_of(await r.collect(request))) == 4
        else:
            assert (await r.refusal(request)).code == grpc.StatusCode.INTERNAL
        assert [len(ids_of(messages)) for messages in await asyncio.gather(*good)] == [9, 9, 9]


# ---- stops ----


async def stopped(tmp_path, stop: list[str], *pieces: str, **options):
    """The messages of a model that says `pieces`, token by token, then end of sequence."""
    tokenizer = DETOKENIZERS["digits"].tokenizer
    tokens = spelled(tokenizer, *pieces)
    per_step = options.pop("per_step", 1)
    async with rig(tmp_path, script_of(*tokens, 2)) as r:
        r.session.tokens_per_step = per_step
        messages = await r.collect(generate(stopping=stopping(stop=stop, max_tokens=100, **options)))
        return messages, r.session.streams[0], tokenizer


@pytest.mark.parametrize(
    ("stop", "pieces", "text"),
    [
        (["XY"], ["ab", "cX", "Yd", "e"], "abc"),
        (["ZZZZZZZZZZ"], ["a", "ZZ"], "aZZ"),
        (["five"], ["one, five", " six"], "one, "),
        (["<|im_end|>"], ["A", "<|im_end|>", "B"], "A"),
        (["bc", "abcd"], ["abcd"], "a"),
        (["aab"], ["aaab"], "a"),
        (["あ"], ["いあう"], "い"),
    ],
)
@pytest.mark.parametrize("per_step", [1, 3, 50])
async def test_nothing_of_a_stop_or_after_it_is_shown(tmp_path, stop, pieces, text, per_step):
    messages, _, tokenizer = await stopped(tmp_path, stop, *pieces, per_step=per_step)
    assert text_of(messages) == text
    last = messages[-1]
    matched = text != "".join(pieces)
    assert last.finish_reason == STOP
    assert last.stop_string == (next(s for s in stop if s in "".join(pieces)) if matched else "")
    # Tokens up to and with the one that completed the match, however many came along with it.
    counted = next(i for i in range(1, 99) if matches(tokenizer, pieces, stop, i)) if matched else last.usage
    assert not matched or last.usage.completion_tokens == counted == len(ids_of(messages))


def matches(tokenizer, pieces, stop, num_tokens: int) -> bool:
    text = tokenizer.decode(spelled(tokenizer, *pieces)[:num_tokens], skip_special_tokens=False)
    return any(one in text for one in stop)


def splits(text: str, longest: int):
    if not text:
        yield []
    for size in range(1, min(longest, len(text)) + 1):
        for rest in splits(text[size:], longest):
            yield [text[:size], *rest]


def test_a_stop_string_is_found_wherever_tokens_end():
    """Every way to cut the text into tokens of up to five characters."""
    from scheduler_svc.frontend.stop import StopMatcher, StopSet

    stops = StopSet(("O P Q",))
    num = 0
    for pieces in splits("M N O P Q", 5):
        matcher = StopMatcher(stops, include_stop=False)
        shown = "".join(matcher.feed(piece) for piece in [*pieces, " R"] if matcher.matched is None)
        assert (shown, matcher.matched) == ("M N ", "O P Q")
        num += 1
    assert num > 200


async def test_a_stop_found_in_the_text_ends_the_request_in_the_scheduler(tmp_path):
    said = spelled(DETOKENIZERS["digits"].tokenizer, "one, five")

    def script(_submit, _index):
        return itertools.chain(said, itertools.repeat(said[0]))  # it does not end by itself

    async with rig(tmp_path, script, max_model_len=1 << 20) as r:
        messages = await r.collect(generate(stopping=stopping(stop=["five"], max_tokens=1_000_000)))
        [stream] = r.session.streams
        assert messages[-1].finish_reason == STOP
        assert stream.cancels == [0]


async def test_what_cannot_be_a_stop_is_not_held_back(tmp_path):
    messages, _, tokenizer = await stopped(tmp_path, ["ZZZZZZZZZZ"], "q", "w", "e", "ZZ", "r")
    for i in range(len(messages)):
        text, whole = text_of(messages[:i]), tokenizer.decode(ids_of(messages[:i]))
        assert whole.startswith(text)
        assert whole[len(text) :] in ("", "Z", "ZZ")
    assert text_of(messages) == "qweZZr"


async def test_min_tokens_beats_a_stop_string_that_comes_too_early(tmp_path):
    messages, _, _ = await stopped(tmp_path, ["\n"], "q", "\n", "w", "e", "\n", "r", min_tokens=4)
    assert text_of(messages) == "q\nwe"
    assert messages[-1].usage.completion_tokens == 5


@pytest.mark.parametrize("stop", [[], ["zz"], ["e ", "the"]])
async def test_text_never_runs_ahead_of_the_ids(tmp_path, stop):
    """Nor does it fall behind, but for a cut character and what may become a stop."""
    messages, _, tokenizer = await stopped(tmp_path, stop, "naïve café 🦊 and th", "e end")
    longest = max(map(len, stop), default=0)
    for i in range(1, len(messages)):
        text, whole = text_of(messages[:i]), tokenizer.decode(ids_of(messages[:i])).rstrip("\ufffd")
        assert whole.startswith(text)
        assert len(whole) - len(text) <= max(longest - 1, 0)


async def test_every_end_token_is_barred_before_min_tokens(tmp_path):
    async with rig(tmp_path, script_of(2)) as r:
        request = generate(stopping=stopping(min_tokens=3, max_tokens=9, stop_token_ids=[65]))
        await r.collect(request)
        [submit] = r.session.submitted
        assert submit.sampling.min_tokens == 3
        assert np.frombuffer(submit.sampling.stop_token_ids, "<i4").tolist() == [0, 2, 65]


@pytest.mark.parametrize("fields", [{}, {"temperature": 0.3}, {"top_k": 7, "seed": 1}, {"temperature": 0.0}])
async def test_a_default_that_is_overridden_takes_no_end_token_with_it(tmp_path, fields):
    async with rig(tmp_path, script_of(65)) as r:
        await r.collect(generate(sampling=pb.SamplingParams(**fields), stopping=stopping(max_tokens=2)))
        [submit] = r.session.submitted
        assert np.frombuffer(submit.stop_token_ids, "<i4").tolist() == [0, 2]


# ---- bounds ----


def sampled(**fields) -> pb.GenerateRequest:
    return generate(sampling=pb.SamplingParams(**fields), stopping=stopping(max_tokens=2))


@pytest.mark.parametrize(
    ("request_", "field"),
    [
        (generate(stopping=stopping(stop_token_ids=[512])), "stopping.stop_token_ids[0]"),
        (generate(stopping=stopping(stop_token_ids=[1, 2**31])), "stopping.stop_token_ids[1]"),
        (sampled(logit_bias={512: 5.0}), "sampling.logit_bias[0]"),
        (sampled(logit_bias={2**32 - 1: 5.0}), "sampling.logit_bias[0]"),
        (sampled(logit_bias={1: math.nan}), "sampling.logit_bias[1]"),
        (sampled(logit_bias={1: 101.0}), "sampling.logit_bias[1]"),
        (sampled(allowed_token_ids=[512]), "sampling.allowed_token_ids[0]"),
        (generate(token_ids=pb.TokenIds(ids=[1, 512])), "token_ids.ids[1]"),
        (generate(token_ids=pb.TokenIds(ids=[4294967295])), "token_ids.ids[0]"),
        (generate(token_ids=pb.TokenIds(ids=[2147483648])), "token_ids.ids[0]"),
        (generate(token_ids=pb.TokenIds()), "token_ids.ids"),
        (pb.GenerateRequest(text=""), "text"),
        (sampled(top_p=0.0), "sampling.top_p"),
        (generate(response=pb.ResponseOptions(prompt_logprobs=21)), "response.prompt_logprobs"),
        (generate(response=pb.ResponseOptions(prompt_logprobs=512)), "response.prompt_logprobs"),
        (generate(response=pb.ResponseOptions(logprobs=2**32 - 1)), "response.logprobs"),
    ],
)
async def test_numbers_that_would_be_an_index_or_a_size(tmp_path, request_, field):
    async with rig(tmp_path) as r:
        found = await r.refusal(request_)
        assert (found.code, found.fields) == (INVALID, [field])
        assert await r.collect(sampled(logit_bias={511: 100.0}, top_p=1e-9))


REALS = ("temperature", "top_p", "min_p", "presence_penalty", "frequency_penalty", "repetition_penalty")


async def test_extreme_reals_are_refused_or_computed(tmp_path):
    async with rig(tmp_path) as r:
        for name in REALS:
            for value in (math.nan, math.inf, -math.inf, -1.0, 0.0, 1e30, 1e-30, -1e-30):
                request = sampled(**{name: value})
                try:
                    await r.collect(request)
                except grpc.aio.AioRpcError as error:
                    if error.code() != INVALID:
                        raise
        for submit in r.session.submitted:
            assert all(math.isfinite(getattr(submit.sampling, name)) for name in REALS)


@pytest.mark.parametrize("temperature", [1e-38, 1e-6, 0.0])
async def test_a_temperature_that_would_overflow_is_greedy(tmp_path, temperature):
    async with rig(tmp_path) as r:
        await r.collect(sampled(temperature=temperature))
        assert r.session.submitted[0].sampling.temperature == 0.0


async def test_impossible_tokens_have_logprobs_that_json_can_say(tmp_path):
    async with rig(tmp_path) as r:
        messages = await r.collect(generate(response=pb.ResponseOptions(logprobs=5), stopping=stopping(max_tokens=3)))
        values = [v for m in messages for p in m.logprobs for v in (p.logprob, *(c.logprob for c in p.top))]
        assert len(values) == 18
        assert min(values) == -9999.0
        for message in messages:
            json.dumps(json.loads(MessageToJson(message)), allow_nan=False)


@pytest.mark.parametrize(
    ("num_prompt", "max_tokens", "asked"),
    [(8, None, 24), (20, 20, 12), (20, 12, 12), (20, 11, 11), (31, 5, 1), (8, 0, 0)],
)
async def test_lengths_are_bounded_by_the_context(tmp_path, num_prompt, max_tokens, asked):
    async with rig(tmp_path, max_model_len=32) as r:
        limit = {} if max_tokens is None else {"max_tokens": max_tokens}
        prompt = pb.TokenIds(ids=[70] * num_prompt)
        messages = await r.collect(generate(token_ids=prompt, stopping=stopping(**limit)))
        assert (len(ids_of(messages)), messages[-1].finish_reason) == (asked, LENGTH)


async def test_a_prompt_too_long_blocks_nobody(tmp_path):
    async with rig(tmp_path, max_model_len=32) as r:
        for length in (32, 40):
            assert (await r.refusal(generate(token_ids=pb.TokenIds(ids=[70] * length)))).code == INVALID
        assert not r.session.submitted
        await r.collect(generate(token_ids=pb.TokenIds(ids=[70] * 4), stopping=stopping(max_tokens=2)))


async def test_the_limits_are_those_that_the_scheduler_tells(tmp_path):
    """The executor found memory for less than the configuration says."""
    async with rig(tmp_path) as r:
        geometry = step_pb2.Geometry(num_blocks=6, block_size=4, max_num_seqs=8, max_model_len=24,
                                     max_num_batched_tokens=64, vocab_size=512)  # fmt: skip
        r.session.welcome.geometry.CopyFrom(geometry)
        assert (await r.refusal(generate(token_ids=pb.TokenIds(ids=[70] * 30)))).code == INVALID
        assert (await r.stub.GetModel(pb.GetModelRequest())).max_model_len == 24


def test_an_empty_text_is_a_prompt_only_where_there_is_a_first_token():
    assert ModelTokenizer(tiny_models.byte_fallback()).encode("") == [1]
    assert ModelTokenizer(tiny_models.byte_level()).encode("") == []


# ---- many choices ----


async def test_choices_end_each_with_its_own_reason_and_once(tmp_path):
    def script(_submit, index):
        return iter([80, 2] if index == 0 else [81] * 5)

    async with rig(tmp_path, script) as r:
        request = generate(sampling=pb.SamplingParams(n=2, temperature=1.0), stopping=stopping(max_tokens=5))
        messages = await r.collect(request)
        assert [(m.index, m.finish_reason) for m in messages if m.finish_reason] == [(0, STOP), (1, LENGTH)]
        assert (ids_of(messages, 0), ids_of(messages, 1)) == ([80, 2], [81] * 5)


def num_generations() -> int:
    gc.collect()
    return sum(type(thing) is Generation for thing in gc.get_objects())


async def test_cancelled_choices_leave_no_object_behind(tmp_path):
    before = num_generations()
    async with rig(tmp_path) as r:
        for _ in range(50):
            call = r.stub.Generate(
                generate(sampling=pb.SamplingParams(n=2, temperature=1.0), stopping=stopping(max_tokens=100))
            )
            await call.read()
            call.cancel()
        await until(lambda: not r.service.num_active)
        r.session.streams.clear()
        await until(lambda: num_generations() <= before + 1)


# ---- ends ----


async def test_a_refused_double_of_a_live_id_leaves_every_gauge_right(tmp_path):
    async with rig(tmp_path) as r:
        r.session.gate.clear()
        first = asyncio.ensure_future(r.collect(generate(request_id="x", stopping=stopping(max_tokens=3))))
        await until(lambda: r.session.live)
        for _ in range(3):
            found = await r.refusal(generate(request_id="x"))
            assert found.code == grpc.StatusCode.ALREADY_EXISTS
        gauge = "stepwire_frontend_active_streams"
        assert r.service.metrics.registry.get_sample_value(gauge) == 1
        r.session.gate.set()
        assert len(ids_of(await first)) == 3
        await until(lambda: r.service.metrics.registry.get_sample_value(gauge) == 0)


async def test_a_client_that_goes_is_noticed_behind_every_interceptor(tmp_path):
    key, entry = api_keys.make_key("acme")
    api_keys.add(tmp_path / "keys", entry)
    async with rig(tmp_path, config={"api_keys": tmp_path / "keys"}) as r:
        r.session.gate.clear()
        call = r.stub.Generate(generate(stopping=stopping(max_tokens=200)), metadata=Access(key).metadata)
        await until(lambda: r.session.live)
        call.cancel()
        await until(lambda: r.session.streams[0].cancels)
        assert r.session.streams[0].cancels == ["request"]


async def test_a_cut_connection_frees_the_request(tmp_path):
    """No RST_STREAM, no goodbye: the TCP connection ends in the middle of a stream."""
    async with rig(tmp_path) as r:
        r.session.gate.clear()
        host, _, port = r.server.address.rpartition(":")
        _, writer = await asyncio.open_connection(host, int(port))
        fields = {":method": "POST", ":scheme": "http", ":path": "/stepwire.inference.v1.InferenceService/Generate",
                  ":authority": "x", "content-type": "application/grpc", "te": "trailers"}  # fmt: skip
        block = b"".join(
            b"\x10" + bytes([len(name)]) + name.encode() + bytes([len(value)]) + value.encode()
            for name, value in fields.items()
        )
        message = generate(stopping=stopping(max_tokens=200)).SerializeToString()
        writer.write(b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + http2(4, 0, 0, b"") + http2(1, 4, 1, block))
        writer.write(http2(0, 1, 1, b"\0" + struct.pack(">I", len(message)) + message))
        await writer.drain()
        await until(lambda: r.session.live)
        writer.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        writer.transport.abort()
        await until(lambda: not r.session.live)


def http2(kind: int, flags: int, stream: int, payload: bytes) -> bytes:
    return len(payload).to_bytes(3) + bytes([kind, flags]) + stream.to_bytes(4) + payload


async def test_much_text_at_once_is_refused_and_health_answers_meanwhile(tmp_path, monkeypatch):
    monkeypatch.setattr(service, "MAX_WAITING_BYTES", 1 << 20)
    async with rig(tmp_path) as r:
        text, opened, encode = "word " * 100_000, threading.Event(), r.service.model.tokenizer.encode

        def slowly(*arguments, **options) -> list[int]:
            assert opened.wait(60)
            return encode(*arguments, **options)

        monkeypatch.setattr(r.service.model.tokenizer, "encode", slowly)
        calls = [r.stub.Tokenize(pb.TokenizeRequest(text=text)) for _ in range(20)]
        running = [asyncio.ensure_future(code_of(call)) for call in calls]
        await until(lambda: sum(task.done() for task in running) == 18)  # two of half a megabyte fit
        await health_pb2_grpc.HealthStub(r.channel).Check(health_pb2.HealthCheckRequest(), timeout=60)
        opened.set()
        codes = Counter(await asyncio.gather(*running))
        assert codes == {grpc.StatusCode.OK: 2, grpc.StatusCode.RESOURCE_EXHAUSTED: 18}
        assert r.service._waiting_bytes == 0


async def code_of(call) -> grpc.StatusCode:
    try:
        await call
    except grpc.aio.AioRpcError as error:
        return error.code()
    return grpc.StatusCode.OK


def test_one_decoder_serves_many_streams_in_turn():
    """State of one stream never shows up in another."""
    detokenizer = Detokenizer(DETOKENIZERS["digits"].tokenizer)
    data = ["🦊".encode(), "é".encode() * 2, b"abcd"]
    streams = [detokenizer.stream([1]) for _ in data]
    texts = ["", "", ""]
    for step in range(4):
        for i, stream in enumerate(streams):
            texts[i] += stream.push(byte_ids(data[i])[step])
    assert texts == ["🦊", "éé", "abcd"]
