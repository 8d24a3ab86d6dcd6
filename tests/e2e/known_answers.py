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
# A step takes long enough that a fault lands in the middle of most streams. In which is left to chance.
SLOW = {"STEPWIRE_SIM_STEP_US": "5000"}
# Tokens that take more than half a minute then, however fast the machine is: what asks for them is not over by itself.
ENDLESS = 7_900
VOCAB = 49_152


def drawn(request: pb.GenerateRequest, choice: int = 0, num_tokens: int | None = None) -> list[int]:
    """The tokens of one choice of an undisturbed run, or the first of them."""
    context, power, tokens = 0, 1, []
    known = list(request.token_ids.ids)
    sampling = request.sampling
    for position in range(request.stopping.max_tokens if num_tokens is None else num_tokens):
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
        self._stub = stub
        self.reading = asyncio.create_task(self._read(stub))

    async def cancel(self) -> None:
        """By its id, so that its end tells what it went through. Whoever is gone needs no cancel."""
        with contextlib.suppress(grpc.RpcError):
            await self._stub.Cancel(pb.CancelRequest(request_id=self.request.request_id), timeout=LIMIT_S)
        await asyncio.wait_for(self.reading, LIMIT_S)

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

    @property
    def is_exact_so_far(self) -> bool:
        return self.token_ids == drawn(self.request, num_tokens=len(self.token_ids))


class Running(list[Stream]):
    """The streams of a test. `anchors` run beside them, one on each frontend, as long as any of them does and as the
    body of the test takes: whatever a test does to the service, and however late it comes, it does to these."""

    anchors: list[Stream]

    @property
    def num_resumes(self) -> int:
        """Of the stream that went through most."""
        return max(stream.usage.num_resumes for stream in [*self, *self.anchors])


def anchor(i: int) -> pb.GenerateRequest:
    request = greedy([11 + i, 12, 13], ENDLESS, ignore_eos=True)
    request.request_id = f"anchor-{i}"
    return request


@contextlib.asynccontextmanager
async def streams(serve: Serve, made: list[pb.GenerateRequest], *, begun: bool = True) -> AsyncIterator[Running]:
    """All of them at once over all frontends; ended after the body. `begun`: each has its first tokens before the body
    runs, and there are anchors."""
    async with contextlib.AsyncExitStack() as stack:
        channels = [await stack.enter_async_context(grpc.aio.insecure_channel(a)) for a in serve.addresses]
        stubs = [inference_pb2_grpc.InferenceServiceStub(channel) for channel in channels]
        running = Running()
        running.anchors = [Stream(stub, anchor(i)) for i, stub in enumerate(stubs)] if begun else []
        running += [Stream(stubs[i % len(stubs)], request) for i, request in enumerate(made)]
        if begun:
            everybody = [*running, *running.anchors]
            await asyncio.wait_for(asyncio.gather(*(stream.begun.wait() for stream in everybody)), LIMIT_S)
            assert not any(stream.reading.done() for stream in running.anchors), [s.error for s in running.anchors]
        yield running
        await asyncio.wait_for(asyncio.gather(*(stream.reading for stream in running)), LIMIT_S)
        await asyncio.gather(*(stream.cancel() for stream in running.anchors))
        assert all(stream.is_exact_so_far for stream in running.anchors)


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
