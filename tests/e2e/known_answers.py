"""Streams whose every token is known beforehand, and what a test may do while they run.

The oracle is the simulated backend's rule in plain arithmetic: it knows nothing of blocks, steps, epochs or processes.
"""

import asyncio
import contextlib
import random
import time
from collections.abc import AsyncIterator, Callable

import grpc

from executor_svc.backends.simulated import FACTOR
from executor_svc.noise import draw_key, mix64
from protos.stepwire.inference.v1 import inference_pb2 as pb
from protos.stepwire.inference.v1 import inference_pb2_grpc
from tests.e2e.server import Serve, greedy

# For what a busy machine may take; nothing is measured with it.
LIMIT_S = 90.0
# A step takes long enough that a fault lands in the middle of every stream.
SLOW = {"STEPWIRE_SIM_STEP_US": "5000"}
VOCAB = 49_152


def drawn(request: pb.GenerateRequest, choice: int = 0) -> list[int]:
    """The tokens of one choice of an undisturbed run."""
    context, power, tokens = 0, 1, []
    known = list(request.token_ids.ids)
    sampling = request.sampling
    for position in range(request.stopping.max_tokens):
        for token in known:
            power = power * FACTOR % 2**64
            context = (context + (token + 1) * power) % 2**64
        key = draw_key(sampling.seed, choice, position) if sampling.temperature > 0 else 0
        known = [mix64(context ^ key) % VOCAB]
        tokens += known
    return tokens


def requests(count: int, seed: int, *, prompt: int = 150, low: int = 100, high: int = 160) -> list[pb.GenerateRequest]:
    """Greedy and sampled ones; every third begins as another one does."""
    print(f"seed {seed}")
    draw = random.Random(seed)
    prefix = [draw.randrange(VOCAB) for _ in range(40)]
    made = []
    for i in range(count):
        own = [draw.randrange(VOCAB) for _ in range(draw.randint(1, prompt))]
        request = greedy(prefix + own if i % 3 == 0 else own, draw.randint(low, high), ignore_eos=True)
        if i % 2:
            request.sampling.temperature, request.sampling.seed = 1.0, draw.getrandbits(64)
        made.append(request)
    return made


class Stream:
    def __init__(self, stub: inference_pb2_grpc.InferenceServiceStub, request: pb.GenerateRequest):
        self.request = request
        self.token_ids: list[int] = []
        self.usage = pb.Usage()
        self.error: grpc.RpcError | None = None
        self.begun = asyncio.Event()
        self.reading = asyncio.create_task(self._read(stub))

    async def _read(self, stub: inference_pb2_grpc.InferenceServiceStub) -> None:
        try:
            async for message in stub.Generate(self.request):
                self.token_ids.extend(message.token_ids)
                self.begun.set()
                if message.finish_reason:
                    self.usage = message.usage
        except grpc.RpcError as error:
            self.error = error
        finally:
            self.begun.set()

    @property
    def is_exact(self) -> bool:
        return self.error is None and self.token_ids == drawn(self.request)


@contextlib.asynccontextmanager
async def streams(serve: Serve, made: list[pb.GenerateRequest], *, begun: bool = True) -> AsyncIterator[list[Stream]]:
    """All of them at once over all frontends, each with its first tokens before the body runs; ended after it."""
    async with contextlib.AsyncExitStack() as stack:
        channels = [await stack.enter_async_context(grpc.aio.insecure_channel(a)) for a in serve.addresses]
        stubs = [inference_pb2_grpc.InferenceServiceStub(channel) for channel in channels]
        running = [Stream(stubs[i % len(stubs)], request) for i, request in enumerate(made)]
        if begun:
            await asyncio.wait_for(asyncio.gather(*(stream.begun.wait() for stream in running)), LIMIT_S)
            assert any(len(s.token_ids) < s.request.stopping.max_tokens for s in running), "nothing left to disturb"
        yield running
        await asyncio.wait_for(asyncio.gather(*(stream.reading for stream in running)), LIMIT_S)


async def until(condition: Callable[[], bool]) -> None:
    limit = time.monotonic() + LIMIT_S
    while not condition():
        assert time.monotonic() < limit, "not in time"
        await asyncio.sleep(0.02)


def pids(serve: Serve, part: str) -> list[int]:
    found = serve.ready["pids"][part]
    return found if isinstance(found, list) else [found]


def assert_clean(serve: Serve) -> None:
    """Nothing runs, waits or holds a block, and nobody had to show a traceback."""
    serve.wait_idle()
    assert "Traceback" not in serve.output(), serve.output()
    assert "tokens_lost" not in serve.output(), serve.output()
