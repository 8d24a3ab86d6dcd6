"""The clients of a chaos run: streams with known answers that never stop coming, and a verdict on every one of them.

A stream is right when it ends with exactly its tokens, or is cancelled by its own client, or is refused with an allowed
status; in each case what came of it is a prefix of its tokens. Knows nothing of processes or faults.
"""

import asyncio
import random
from collections import Counter
from dataclasses import dataclass, field

import grpc

from protos.stepwire.inference.v1 import inference_pb2 as pb
from protos.stepwire.inference.v1 import inference_pb2_grpc
from tests.e2e.known_answers import VOCAB, drawn
from tests.e2e.server import greedy

# What a client may be told instead of the rest of its answer: its frontend died, or nobody can serve it right now.
ALLOWED = frozenset({grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.RESOURCE_EXHAUSTED})
# Longer than every recovery together: a stream that takes so long hangs.
HANGS_AFTER_S = 90.0
OPTIONS = (("grpc.initial_reconnect_backoff_ms", 100), ("grpc.max_reconnect_backoff_ms", 500))
WAIT_AFTER_REFUSAL_S = 0.2


@dataclass
class Verdict:
    """Streams by how they ended; `wrong` says what no stream may do."""

    ends: Counter[str] = field(default_factory=Counter)
    wrong: list[str] = field(default_factory=list)
    num_tokens: int = 0
    num_resumes: int = 0


class Clients:
    """`count` streams at any time over all addresses, until told to stop."""

    def __init__(self, addresses: list[str], count: int, seed: int, *, cancel_share: float = 0.2):
        self.verdict = Verdict()
        # Messages read so far: it rises while anybody is served.
        self.num_messages = 0
        self._addresses = addresses
        self._count = count
        self._draw = random.Random(seed)
        self._cancel_share = cancel_share
        self._is_over = False
        self._prefix = [self._draw.randrange(VOCAB) for _ in range(40)]

    def stop(self) -> None:
        """No new streams; those that run are read to their end."""
        self._is_over = True

    async def run(self) -> None:
        channels = [grpc.aio.insecure_channel(address, options=OPTIONS) for address in self._addresses]
        stubs = [inference_pb2_grpc.InferenceServiceStub(channel) for channel in channels]
        try:
            await asyncio.gather(*(self._one_after_another(stubs[i % len(stubs)]) for i in range(self._count)))
        finally:
            for channel in channels:
                await channel.close()

    async def _one_after_another(self, stub: inference_pb2_grpc.InferenceServiceStub) -> None:
        while not self._is_over:
            request = self._request()
            is_cancelled = self._draw.random() < self._cancel_share
            cancel_after = self._draw.randrange(request.stopping.max_tokens) if is_cancelled else None
            try:
                refused = await asyncio.wait_for(self._read(stub, request, cancel_after), HANGS_AFTER_S)
            except TimeoutError:
                self._wrong("hangs", request, [])
                continue
            if refused:
                await asyncio.sleep(WAIT_AFTER_REFUSAL_S)

    def _request(self) -> pb.GenerateRequest:
        draw = self._draw
        own = [draw.randrange(VOCAB) for _ in range(draw.randint(1, 200))]
        prompt = self._prefix + own if draw.random() < 0.3 else own
        request = greedy(prompt, draw.randint(1, 150), ignore_eos=True)
        if draw.random() < 0.5:
            request.sampling.temperature, request.sampling.seed = 1.0, draw.getrandbits(64)
        request.response.text = draw.random() < 0.2
        return request

    async def _read(
        self, stub: inference_pb2_grpc.InferenceServiceStub, request: pb.GenerateRequest, cancel_after: int | None
    ) -> bool:
        """True: it was refused."""
        got: list[int] = []
        is_finished = False
        call = stub.Generate(request)
        try:
            async for message in call:
                self.num_messages += 1
                got.extend(message.token_ids)
                if message.finish_reason:
                    is_finished = True
                    self.verdict.num_resumes += message.usage.num_resumes
                elif cancel_after is not None and len(got) > cancel_after:
                    self._judge("cancelled", request, got, whole=False)
                    return False
        except grpc.RpcError as error:
            code = error.code()
            if code in ALLOWED:
                self._judge(f"refused {code.name}", request, got, whole=False)
            else:
                self._wrong(f"{code.name}: {error.details()}", request, got)
            return True
        finally:
            call.cancel()
        if is_finished:
            self._judge("exact", request, got, whole=True)
        else:
            self._wrong("ended without a reason", request, got)
        return False

    def _judge(self, end: str, request: pb.GenerateRequest, got: list[int], *, whole: bool) -> None:
        expected = drawn(request)
        if got != (expected if whole else expected[: len(got)]):
            self._wrong(f"{end}, but not with its tokens", request, got)
            return
        self.verdict.ends[end] += 1
        self.verdict.num_tokens += len(got)

    def _wrong(self, what: str, request: pb.GenerateRequest, got: list[int]) -> None:
        expected = drawn(request)
        equal = next((i for i, (a, b) in enumerate(zip(got, expected, strict=False)) if a != b), len(got))
        self.verdict.wrong.append(
            f"{what} (prompt {len(request.token_ids.ids)}, asked for {len(expected)}, got {len(got)}, {equal} right)"
        )
