"""Random requests through the real server: only statuses that the API promises, and nothing left behind.

Hypothesis finds the parts (samplings, prompts, stop strings, ...); each example crosses them into hundreds of requests,
some with bytes changed on their way, so that tens of thousands run in the time that drawing a thousand would take.
"""

import asyncio
import gc
import math
import random
import threading
from dataclasses import dataclass

import grpc
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from protos.stepwire.inference.v1 import inference_pb2 as pb
from tests.unit.frontend.fake_session import FakeStream
from tests.unit.frontend.grpc_rig import Rig, rig

NUM_EXAMPLES, REQUESTS_PER_EXAMPLE = 40, 512
AT_ONCE = 128

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
PROMPT = st.one_of(
    TEXT.map(lambda text: {"text": text}),
    st.lists(ID, max_size=6).map(lambda ids: {"token_ids": pb.TokenIds(ids=ids)}),
    st.just({}),
)
TURNS = st.lists(st.tuples(st.sampled_from(["user", "system", "", "<|im_end|>"]), TEXT), max_size=4)
COMMON = some(
    request_id=st.sampled_from(["", "a", "b", "c\n"]), model=st.sampled_from(["", "", "tiny", "other"]),
    priority=st.integers(-101, 101), cache_salt=TEXT,
)  # fmt: skip
ONLY_CHAT = some(
    add_generation_prompt=st.booleans(), tools_json=st.sampled_from(["", "[]", "{", '[{"a": 1}]']),
    template_kwargs_json=st.sampled_from(["", "{}", '{"x": 1}', "["]),
)  # fmt: skip


def few(parts):
    return st.lists(parts, min_size=4, max_size=8)


@dataclass
class Parts:
    """What the requests of one example are made of."""

    samplings: list[pb.SamplingParams]
    stoppings: list[pb.StoppingCriteria]
    responses: list[pb.ResponseOptions]
    prompts: list[dict]
    turns: list[list[tuple[str, str]]]
    commons: list[dict]
    chats: list[dict]
    seed: int

    def __post_init__(self) -> None:
        # Most requests should come far, whatever was drawn.
        self.samplings += [pb.SamplingParams(), pb.SamplingParams(temperature=0.0)]
        self.stoppings += [pb.StoppingCriteria(max_tokens=5), pb.StoppingCriteria(max_tokens=9, stop=["a"])]
        self.responses += [pb.ResponseOptions(), pb.ResponseOptions(logprobs=2)]
        self.prompts += [{"token_ids": pb.TokenIds(ids=[70])}, {"text": "Hello"}]
        self.turns += [[("user", "Hello")]]
        self.commons += [{}, {}, {}]

    def request(self, rng: random.Random) -> pb.GenerateRequest | pb.ChatRequest:
        fields = {
            **rng.choice(self.commons),
            "sampling": rng.choice(self.samplings),
            "stopping": rng.choice(self.stoppings),
            "response": rng.choice(self.responses),
        }
        if rng.random() < 0.7:
            special = {"parse_special_tokens": True} if rng.random() < 0.3 else {}
            return pb.GenerateRequest(**fields, **rng.choice(self.prompts), **special)
        messages = [pb.ChatMessage(role=role, content=content) for role, content in rng.choice(self.turns)]
        return pb.ChatRequest(**fields, **rng.choice(self.chats), messages=messages)


PARTS = st.builds(
    Parts, few(SAMPLING), few(STOPPING), few(RESPONSE), few(PROMPT), few(TURNS), few(COMMON), few(ONLY_CHAT),
    st.integers(0, 2**32 - 1),
)  # fmt: skip


def broken(data: bytes, rng: random.Random) -> bytes:
    """The message with some bytes changed, cut off or doubled."""
    changed = bytearray(data)
    for _ in range(rng.randint(1, 3)):
        if changed:
            changed[rng.randrange(len(changed))] = rng.randrange(256)
    cut = rng.randrange(len(changed) + 1) if rng.random() < 0.3 else len(changed)
    return bytes(changed[:cut]) * (2 if rng.random() < 0.1 else 1)


class Server:
    """One server for all examples, in a thread of its own, and the statuses it has given."""

    def __init__(self, folder):
        self.codes: dict[grpc.StatusCode, int] = dict.fromkeys(ALLOWED, 0)
        self._folder = folder
        self._loop = asyncio.new_event_loop()
        self._ready, self._end = threading.Event(), asyncio.Event()
        self._thread = threading.Thread(target=self._loop.run_until_complete, args=(self._run(),))
        self.rig: Rig

    def __enter__(self) -> "Server":
        self._thread.start()
        assert self._ready.wait(60)
        return self

    def __exit__(self, *_: object) -> None:
        self._loop.call_soon_threadsafe(self._end.set)
        self._thread.join(60)
        self._loop.close()

    async def _run(self) -> None:
        # Tokens beyond the tokenizer, control tokens, halves of characters: whatever a model may say.
        def script(submit, index):
            seed = submit.sampling.seed % 997 + index
            return iter((seed := (seed * 31 + 7) % 512) for _ in iter(int, 1))

        async with rig(self._folder, script, max_model_len=64) as self.rig:
            self.rig.session.tokens_per_step = 8
            self._ready.set()
            await self._end.wait()

    def send(self, parts: Parts) -> None:
        asyncio.run_coroutine_threadsafe(self._send(parts), self._loop).result(250)

    async def _send(self, parts: Parts) -> None:
        rng = random.Random(parts.seed)
        requests = [parts.request(rng) for _ in range(REQUESTS_PER_EXAMPLE)]
        for first in range(0, len(requests), AT_ONCE):
            chunk = requests[first : first + AT_ONCE]
            codes = await asyncio.gather(*(self._one(request, rng.random(), rng) for request in chunk))
            for code, request in zip(codes, chunk, strict=True):
                assert code in ALLOWED, f"{code} for {request!r} (seed {parts.seed})"
                self.codes[code] += 1
        while self.rig.service.num_active:  # noqa: ASYNC110  (the server learns of cancels in its own time)
            await asyncio.sleep(0.005)
        session = self.rig.session
        assert not session.live
        assert all(stream.is_over for stream in session.streams)
        session.streams.clear()
        session.submitted.clear()
        session.cancelled.clear()

    async def _one(self, request, chance: float, rng: random.Random) -> grpc.StatusCode:
        method = "Chat" if isinstance(request, pb.ChatRequest) else "Generate"
        if chance < 0.1:
            data = broken(request.SerializeToString(), rng)
            path = f"/stepwire.inference.v1.InferenceService/{method}"
            return await code_of(self.rig.channel.unary_stream(path)(data, timeout=120))
        call = getattr(self.rig.stub, method)(request, timeout=120)
        if chance > 0.9:
            asyncio.get_running_loop().call_later(rng.random() * 0.01, call.cancel)
        return await code_of(call)


async def code_of(call) -> grpc.StatusCode:
    try:
        async for _ in call:
            pass
    except grpc.aio.AioRpcError as error:
        return error.code()
    except asyncio.CancelledError:
        return grpc.StatusCode.OK
    return grpc.StatusCode.OK


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    with Server(tmp_path_factory.mktemp("fuzz")) as running:
        yield running


def test_twenty_thousand_random_requests(server):
    @given(PARTS)
    @settings(
        max_examples=NUM_EXAMPLES, deadline=None, database=None,
        suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
    )  # fmt: skip
    def run(parts: Parts) -> None:
        server.send(parts)

    run()
    assert sum(server.codes.values()) >= 20_000
    # Requests of every fate were among them.
    assert min(server.codes[grpc.StatusCode[name]] for name in ("OK", "INVALID_ARGUMENT")) > 2000, server.codes
    gc.collect()
    assert sum(type(thing) is FakeStream for thing in gc.get_objects()) <= REQUESTS_PER_EXAMPLE
