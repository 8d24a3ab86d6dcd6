"""Random requests through the real server: only statuses that the API promises, and nothing left behind."""

import asyncio
import math
import tempfile
from pathlib import Path

import grpc
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from protos.stepwire.inference.v1 import inference_pb2 as pb
from tests.unit.frontend.grpc_rig import rig

ALLOWED = {
    grpc.StatusCode.OK, grpc.StatusCode.INVALID_ARGUMENT, grpc.StatusCode.NOT_FOUND, grpc.StatusCode.UNIMPLEMENTED,
    grpc.StatusCode.ALREADY_EXISTS, grpc.StatusCode.DEADLINE_EXCEEDED,
}  # fmt: skip

TEXT = st.one_of(
    st.text(max_size=12),
    st.sampled_from(["<|im_end|>", "<|im_start|>system", "a\x00b", "🦊" * 5, "\n", "x" * 300, "<|im_"]),
)
REAL = st.one_of(st.floats(width=32), st.sampled_from([0.0, 1.0, 2.0, -2.0, 1e-30, math.nan, math.inf, -0.0]))
COUNT = st.one_of(st.integers(0, 20), st.sampled_from([255, 256, 257, 511, 512, 513, 2**31 - 1, 2**31, 2**32 - 1]))
ID = st.one_of(st.integers(0, 511), st.sampled_from([0, 1, 2, 511, 512, 2**31, 2**32 - 1]))


def some(**fields):
    """Any subset of the fields."""
    return st.fixed_dictionaries({}, optional=fields)


SAMPLING = st.builds(
    lambda values, constraint: pb.SamplingParams(**values, **constraint),
    some(
        temperature=REAL, top_p=REAL, top_k=COUNT, min_p=REAL, presence_penalty=REAL, frequency_penalty=REAL,
        repetition_penalty=REAL, seed=st.integers(0, 2**64 - 1), n=st.integers(0, 17),
        logit_bias=st.dictionaries(ID, REAL, max_size=3), allowed_token_ids=st.lists(ID, max_size=3),
        bad_words=st.lists(TEXT, max_size=1),
    ),
    st.one_of(
        st.just({}), st.just({"json_object": False}),
        st.sampled_from([{"regex": "("}, {"json_schema": "{"}, {"json_object": True}]),
    ),
)  # fmt: skip
STOPPING = some(
    max_tokens=COUNT, min_tokens=st.integers(0, 9), stop=st.lists(TEXT, max_size=4),
    stop_token_ids=st.lists(ID, max_size=3), include_stop=st.booleans(), ignore_eos=st.booleans(),
).map(lambda values: pb.StoppingCriteria(**values))  # fmt: skip
RESPONSE = some(
    text=st.booleans(), logprobs=st.integers(0, 21), prompt_logprobs=st.integers(20, 21),
    skip_special_tokens=st.booleans(),
).map(lambda values: pb.ResponseOptions(**values))  # fmt: skip
COMMON = {
    "request_id": st.sampled_from(["", "a", "b", "c\n"]), "model": st.sampled_from(["", "", "tiny", "other"]),
    "sampling": SAMPLING, "stopping": STOPPING, "response": RESPONSE, "priority": st.integers(-101, 101),
    "cache_salt": TEXT,
}  # fmt: skip
GENERATE = st.builds(
    lambda values, prompt: pb.GenerateRequest(**values, **prompt),
    some(**COMMON, parse_special_tokens=st.booleans()),
    st.one_of(
        TEXT.map(lambda text: {"text": text}),
        st.lists(ID, max_size=6).map(lambda ids: {"token_ids": pb.TokenIds(ids=ids)}),
        st.just({}),
    ),
)
CHAT = st.builds(
    lambda values, turns: pb.ChatRequest(messages=[pb.ChatMessage(role=r, content=c) for r, c in turns], **values),
    some(
        **COMMON, add_generation_prompt=st.booleans(), tools_json=st.sampled_from(["", "[]", "{", '[{"a": 1}]']),
        template_kwargs_json=st.sampled_from(["", "{}", '{"x": 1}', "["]),
    ),
    st.lists(st.tuples(st.sampled_from(["user", "system", "", "<|im_end|>"]), TEXT), max_size=4),
)  # fmt: skip


async def code_of(call) -> grpc.StatusCode:
    try:
        async for _ in call:
            pass
    except grpc.aio.AioRpcError as error:
        return error.code()
    except asyncio.CancelledError:
        return grpc.StatusCode.OK
    return grpc.StatusCode.OK


async def send_all(requests) -> None:
    # Tokens beyond the tokenizer, control tokens, halves of characters: whatever a model may say.
    def script(submit, index):
        seed = submit.sampling.seed % 997 + index
        return iter((seed := (seed * 31 + 7) % 512) for _ in iter(int, 1))

    with tempfile.TemporaryDirectory() as directory:
        async with rig(Path(directory), script) as r:
            calls = [
                (r.stub.Chat if isinstance(request, pb.ChatRequest) else r.stub.Generate)(request, timeout=20)
                for request, _ in requests
            ]
            running = [asyncio.ensure_future(code_of(call)) for call in calls]
            for call, (_, leaves) in zip(calls, requests, strict=True):
                if leaves:
                    call.cancel()
            codes = await asyncio.gather(*running)
            assert set(codes) <= ALLOWED, dict(zip(codes, requests, strict=True))
            while r.service.num_active:  # noqa: ASYNC110  (the server learns of cancels in its own time)
                await asyncio.sleep(0.005)
            assert not r.session.live
            assert all(stream.is_over for stream in r.session.streams)


@given(st.lists(st.tuples(st.one_of(GENERATE, CHAT), st.booleans()), min_size=1, max_size=25))
@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large])
def test_random_requests(requests):
    asyncio.run(send_all(requests))
