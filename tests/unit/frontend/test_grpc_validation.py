"""Each bound of the public API at n-1, n and n+1, over a real server; the refusal names the field."""

import math

import grpc
import pytest

from protos.stepwire.inference.v1 import inference_pb2 as pb
from tests.unit.frontend.grpc_rig import rig

VOCAB, CONTEXT = 512, 256
BAD = grpc.StatusCode.INVALID_ARGUMENT


@pytest.fixture
async def r(tmp_path):
    async with rig(tmp_path, vocab_size=VOCAB, max_model_len=CONTEXT) as made:
        yield made


def generate(sampling=None, stopping=None, response=None, **fields) -> pb.GenerateRequest:
    if "text" not in fields:
        fields.setdefault("token_ids", pb.TokenIds(ids=[70, 71]))
    return pb.GenerateRequest(
        sampling=pb.SamplingParams(**(sampling or {})),
        stopping=pb.StoppingCriteria(**{"max_tokens": 2, **(stopping or {})}),
        response=pb.ResponseOptions(**(response or {})),
        **fields,
    )


def ulps(value: float, up: bool) -> float:
    """The next float32."""
    import numpy as np

    return float(np.nextafter(np.float32(value), np.float32(math.inf if up else -math.inf)))


REALS = [
    ("temperature", 0.0, 2.0, False),
    ("top_p", 0.0, 1.0, True),
    ("min_p", 0.0, 1.0, False),
    ("presence_penalty", -2.0, 2.0, False),
    ("frequency_penalty", -2.0, 2.0, False),
    ("repetition_penalty", 0.0, 10.0, True),
]


@pytest.mark.parametrize(("name", "low", "high", "open_low"), REALS)
async def test_reals(r, name, low, high, open_low):
    inside = [high, ulps(high, False), ulps(low, True)] + ([] if open_low else [low])
    outside = [ulps(high, True), ulps(low, False), math.nan, math.inf, -math.inf] + ([low] if open_low else [])
    for value in inside:
        await r.collect(generate({name: value}))
    for value in outside:
        found = await r.refusal(generate({name: value}))
        assert (found.code, found.fields) == (BAD, [f"sampling.{name}"]), value
        assert f"{high:g}" in found.message


COUNTS = [
    ("sampling.n", lambda v: generate({"n": v}), [1, 15, 16], [0, 17, 2**32 - 1]),
    ("sampling.top_k", lambda v: generate({"top_k": v}), [0, 1, VOCAB - 1, VOCAB], [VOCAB + 1, 2**32 - 1]),
    ("priority", lambda v: generate(priority=v), [-100, 0, 100], [-101, 101, 2**31 - 1, -(2**31)]),
    ("response.logprobs", lambda v: generate(response={"logprobs": v}), [0, 19, 20], [21, 2**32 - 1]),
    ("response.prompt_logprobs", lambda v: generate(response={"prompt_logprobs": v}), [], [21, 259, 2**32 - 1]),
    ("stopping.min_tokens", lambda v: generate(stopping={"min_tokens": v}), [0, 1, 2], [3, 2**32 - 1]),
    (
        "stopping.min_tokens",
        lambda v: pb.GenerateRequest(
            token_ids=pb.TokenIds(ids=[70]),
            stopping=pb.StoppingCriteria(min_tokens=v, stop_token_ids=[100]),
        ),
        [0, 100, CONTEXT],
        [CONTEXT + 1],
    ),
    ("stopping.stop", lambda v: generate(stopping={"stop": ["s"] * v}), [0, 15, 16], [17, 1000]),
    ("stopping.stop[0]", lambda v: generate(stopping={"stop": ["s" * v]}), [1, 255, 256], [0, 257]),
    ("stopping.stop[0]", lambda v: generate(stopping={"stop": ["é" * v]}), [127, 128], [129]),
    ("stopping.stop_token_ids", lambda v: generate(stopping={"stop_token_ids": [9] * v}), [0, 63, 64], [65]),
    (
        "stopping.stop_token_ids[1]",
        lambda v: generate(stopping={"stop_token_ids": [5, v]}),
        [0, VOCAB - 1],
        [VOCAB, VOCAB + 1, 2**31, 2**32 - 1],
    ),
    ("sampling.logit_bias", lambda v: generate({"logit_bias": dict.fromkeys(range(v), 1.0)}), [0, 300], [1025]),
    (
        "sampling.allowed_token_ids[0]",
        lambda v: generate({"allowed_token_ids": [v]}),
        [0, VOCAB - 1],
        [VOCAB, 2**32 - 1],
    ),
    ("sampling.allowed_token_ids", lambda v: generate({"allowed_token_ids": [1] * v}), [VOCAB], [VOCAB + 1]),
    (
        "token_ids.ids[1]",
        lambda v: generate(token_ids=pb.TokenIds(ids=[1, v])),
        [0, VOCAB - 1],
        [VOCAB, VOCAB + 1, 2**31, 2**32 - 1],
    ),
    ("token_ids.ids", lambda v: generate(token_ids=pb.TokenIds(ids=[1] * v)), [1, CONTEXT - 1], [0, CONTEXT, 5000]),
    ("request_id", lambda v: generate(request_id="i" * v), [0, 255, 256], [257]),
    ("cache_salt", lambda v: generate(cache_salt="i" * v), [0, 256], [257]),
    ("sampling.bad_words", lambda v: generate({"bad_words": ["w"] * v}), [0, 128], [129]),
    (
        "sampling.choice.choices",
        lambda v: generate({"choice": pb.ChoiceList(choices=["w"] * v)}),
        [1, 1024],
        [0, 1025],
    ),
    ("sampling.regex", lambda v: generate({"regex": "a" * v}), [1], [0, 2**20 + 1]),
    ("response.prompt_logprobs", lambda v: generate(response={"prompt_logprobs": v}), [0, 20], [21]),
]


@pytest.mark.parametrize(("field", "make", "inside", "outside"), COUNTS, ids=lambda v: v if isinstance(v, str) else "")
async def test_counts(r, field, make, inside, outside):
    for value in inside:
        await r.collect(make(value))
    for value in outside:
        found = await r.refusal(make(value))
        assert (found.code, found.fields) == (BAD, [field]), value


async def test_logit_bias_values_and_ids(r):
    for value in (-100.0, 100.0):
        await r.collect(generate({"logit_bias": {VOCAB - 1: value}}))
    for value in (ulps(100, True), ulps(-100, False), math.nan, math.inf):
        found = await r.refusal(generate({"logit_bias": {7: value}}))
        assert (found.code, found.fields) == (BAD, ["sampling.logit_bias[7]"])
    found = await r.refusal(generate({"logit_bias": {VOCAB: 1.0}}))
    assert (found.code, found.fields[0].split("[")[0]) == (BAD, "sampling.logit_bias")


async def test_logit_bias_of_1024_entries(tmp_path):
    async with rig(tmp_path, vocab_size=2048) as r:
        for count in (1023, 1024):
            await r.collect(generate({"logit_bias": dict.fromkeys(range(count), 0.5)}))
        found = await r.refusal(generate({"logit_bias": dict.fromkeys(range(1025), 0.5)}))
        assert (found.code, found.fields) == (BAD, ["sampling.logit_bias"])


async def test_greedy_has_one_choice(r):
    await r.collect(generate({"temperature": 0.0, "n": 1}))
    found = await r.refusal(generate({"temperature": 0.0, "n": 2}))
    assert (found.code, found.fields) == (BAD, ["sampling.n"])


async def test_prompts(r):
    for request, field in (
        (pb.GenerateRequest(), "prompt"),
        (generate(text=""), "text"),
        (generate(text="word " * CONTEXT), "text"),
        (generate(text="x" * (CONTEXT * r.tokenizer.max_token_bytes + 1)), "text"),
        (generate(parse_special_tokens=True), "parse_special_tokens"),
        (pb.ChatRequest(), "messages"),
        (pb.ChatRequest(messages=[pb.ChatMessage(content="x")]), "messages[0].role"),
        (pb.ChatRequest(messages=[pb.ChatMessage(role="user", content="word " * CONTEXT)]), "messages"),
        (generate(request_id="a\nb"), "request_id"),
        (generate(request_id="a\x7f"), "request_id"),
    ):
        found = await r.refusal(request)
        assert (found.code, found.fields) == (BAD, [field]), request


async def test_an_over_long_text_is_refused_before_it_is_tokenised(r, monkeypatch):
    monkeypatch.setattr(r.tokenizer, "encode", None)
    found = await r.refusal(generate(text="x" * (CONTEXT * r.tokenizer.max_token_bytes + 1)))
    assert found.code == BAD


async def test_max_tokens_is_capped_by_the_context(r):
    for prompt, asked, given in ((200, 100, 56), (200, 56, 56), (200, 55, 55), (255, 9, 1), (1, 2**32 - 1, 255)):
        request = generate(
            token_ids=pb.TokenIds(ids=[70] * prompt), stopping={"max_tokens": asked, "min_tokens": asked}
        )
        messages = await r.collect(request)
        assert messages[-1].usage.completion_tokens == given
        assert messages[-1].finish_reason == pb.FINISH_REASON_LENGTH
    messages = await r.collect(pb.GenerateRequest(token_ids=pb.TokenIds(ids=[70] * 250)))
    assert messages[-1].usage.completion_tokens == 6


async def test_what_can_never_fit_the_pool(r):
    """4 blocks of 16 hold 64 tokens; the last token of a sequence is never stored."""
    r.session.welcome.geometry.num_blocks = 4
    prompt = pb.TokenIds(ids=[70] * 40)
    await r.collect(generate(token_ids=prompt, stopping={"max_tokens": 25}))
    found = await r.refusal(generate(token_ids=prompt, stopping={"max_tokens": 26}))
    assert (found.code, found.fields) == (BAD, ["token_ids"])
    assert "token_ids and its output may come to 65 tokens, but the server has memory for 64: " in found.message
    messages = await r.collect(pb.GenerateRequest(token_ids=prompt))
    assert messages[-1].usage.completion_tokens == 25
    found = await r.refusal(pb.GenerateRequest(token_ids=pb.TokenIds(ids=[70] * 66)))
    assert found.code == BAD


@pytest.mark.parametrize(
    ("fields", "field"),
    [
        ({"tools_json": "{"}, "tools_json"),
        ({"tools_json": "{}"}, "tools_json"),
        ({"tools_json": "[1]"}, "tools_json"),
        ({"tools_json": '[{"a": NaN}]'}, "tools_json"),
        ({"tools_json": '[{"a": 1e999}]'}, "tools_json"),
        ({"tools_json": '[{"a": "\\ud800"}]'}, "tools_json"),
        ({"tools_json": "[" * 10_000}, "tools_json"),
        ({"template_kwargs_json": "[]"}, "template_kwargs_json"),
        ({"template_kwargs_json": '{"messages": "x"}'}, "template_kwargs_json"),
        ({"template_kwargs_json": '{"add_generation_prompt": false}'}, "template_kwargs_json"),
        ({"template_kwargs_json": '{"bos_token": "x"}'}, "template_kwargs_json"),
        ({"template_kwargs_json": '{"self": "x"}'}, "template_kwargs_json"),
    ],
)
async def test_chat_extras(tmp_path, fields, field):
    async with rig(tmp_path, max_model_len=4096) as r:
        r.session.welcome.geometry.num_blocks = 1000
        request = pb.ChatRequest(messages=[pb.ChatMessage(role="user", content="hi")], **fields)
        found = await r.refusal(request)
        assert (found.code, found.fields) == (BAD, [field])


async def test_model_names(r):
    await r.collect(generate(model="tiny"))
    found = await r.refusal(generate(model="gpt-9"))
    assert (found.code, found.fields) == (grpc.StatusCode.NOT_FOUND, ["model"])
    found = await r.refusal(pb.ChatRequest(model="gpt-9", messages=[pb.ChatMessage(role="user")]))
    assert found.code == grpc.StatusCode.NOT_FOUND


async def test_everything_is_resolved(r):
    r.service.model.sampling_defaults.update(temperature=0.6, top_k=2**31 - 1)
    await r.collect(generate())
    await r.collect(generate({"temperature": 1e-6, "top_k": 0, "logit_bias": {9: 1.0, 3: -2.0}}))
    first, second = r.session.submitted
    assert first.sampling.temperature == pytest.approx(0.6)
    assert (first.sampling.top_k, first.sampling.top_p, first.sampling.repetition_penalty) == (VOCAB, 1.0, 1.0)
    assert len(first.request_id) == 32
    assert first.request_id != second.request_id
    assert first.sampling.seed != second.sampling.seed
    assert (second.sampling.temperature, second.sampling.top_k) == (0.0, 0)
    assert second.sampling.bias_token_ids == b"\3\0\0\0\x09\0\0\0"
    assert first.stop_token_ids == first.sampling.stop_token_ids == b"\0\0\0\0\2\0\0\0"
    assert not first.sampling.HasField("logprobs")


async def test_parse_special_tokens_is_the_clients_choice(r):
    counts = []
    for parse in (False, True):
        await r.collect(generate(text="<|im_start|>hi", parse_special_tokens=parse))
        prompt = r.session.submitted[-1].prompt_token_ids
        counts.append([int.from_bytes(prompt[i : i + 4], "little") for i in range(0, len(prompt), 4)].count(1))
    assert counts == [0, 1]


async def test_refusals_tell_no_secrets(r):
    for request in (generate(text="my secret " * 2000), generate(text="secret", request_id="secret\n")):
        found = await r.refusal(request)
        assert "secret" not in found.message
        assert "/" not in found.message


async def test_no_geometry_yet(r):
    r.session.welcome.ClearField("geometry")
    found = await r.refusal(generate())
    assert (found.code, found.retry_after_s) == (grpc.StatusCode.UNAVAILABLE, 1.0)
    r.session.welcome = None
    assert (await r.refusal(generate())).code == grpc.StatusCode.UNAVAILABLE
