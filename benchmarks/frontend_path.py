"""A frontend's own work on a token, in this process and in CPU time: no gRPC, no sockets, no other process.

From the scheduler's frame to the bytes of the clients' messages, through the real session, service and text. What
gRPC adds comes on top; what a change of the code gains shows here on the busiest machine.
"""

import asyncio
import time
from typing import Any

import numpy as np
import uvloop

from protos.stepwire.inference.v1 import inference_pb2 as pb
from protos.stepwire.wire.v1 import session_pb2, step_pb2
from scheduler_svc.frontend.metrics import FrontendMetrics
from scheduler_svc.frontend.model_files import ModelFiles
from scheduler_svc.frontend.service import InferenceService
from scheduler_svc.links.session import SchedulerSession
from scheduler_svc.models.store import resolve_model

MAX_MODEL_LEN = 1 << 15
# Different tokens that come: those of a stream that has run for a while.
WORDS = 1000
# Turns of the event loop after which every reader has read.
LOOPS = 4


class Context:
    """As much of a gRPC call as the service asks for."""

    def time_remaining(self) -> float | None:
        return None


class Clients:
    """Streams whose messages go nowhere, once they are bytes."""

    def __init__(self, streams: int, *, text: bool, stop: list[str]):
        files = ModelFiles.load(resolve_model(""))
        self.session = SchedulerSession("inproc://nowhere", fingerprint="")
        self.session.welcome = session_pb2.Welcome(
            geometry=step_pb2.Geometry(
                num_blocks=1 << 16,
                block_size=16,
                max_num_seqs=streams,
                max_model_len=MAX_MODEL_LEN,
                max_num_batched_tokens=2048,
                vocab_size=len(files.tokenizer.vocab()),
            )
        )
        self.service = InferenceService(self.session, files, "model", FrontendMetrics())
        self.num_messages = 0
        self.handles = np.arange(1, streams + 1, dtype="<u8").tobytes()
        self.request = pb.GenerateRequest(
            token_ids=pb.TokenIds(ids=[100, 200, 300]),
            sampling=pb.SamplingParams(temperature=0.0),
            stopping=pb.StoppingCriteria(max_tokens=MAX_MODEL_LEN - 3, ignore_eos=True, stop=stop),
            response=pb.ResponseOptions(text=text),
        )

    async def write(self, message: pb.GenerateResponse) -> None:
        message.SerializeToString()
        self.num_messages += 1

    def generate(self) -> "asyncio.Task[None]":
        context: Any = Context()
        return asyncio.create_task(self.service.generate(self.request, context, self.write))


def frame(handles: bytes, ids: np.ndarray, position: int) -> bytes:
    tokens = session_pb2.TokenFrame(
        handles=handles,
        token_ids=ids.astype("<i4").tobytes(),
        positions=np.full(len(ids), position, "<i4").tobytes(),
    )
    return session_pb2.ToFrontend(tokens=tokens).SerializeToString()


async def _measure(streams: int, per_message: int, steps: int, palette: list[int], **kind: Any) -> dict[str, float]:
    clients = Clients(streams, **kind)
    tasks = [clients.generate() for _ in range(streams)]
    await asyncio.sleep(0)
    drawn = np.random.default_rng(1).choice(np.array(palette[:WORDS]), (steps, streams))
    frames = [frame(clients.handles, ids, step) for step, ids in enumerate(drawn)]
    spent = 0
    for first in range(0, steps, per_message):
        began = time.thread_time_ns()
        for data in frames[first : first + per_message]:
            clients.session._on_message(session_pb2.ToFrontend.FromString(data))
        for _ in range(LOOPS):
            await asyncio.sleep(0)
        if first:  # the first message of a stream says more than the others
            spent += time.thread_time_ns() - began
    for task in tasks:
        task.cancel()
    await asyncio.wait(tasks)
    clients.service.close()
    tokens = (steps - per_message) * streams
    return {"tokens": tokens, "us_per_token": spent / 1e3 / tokens, "tok_per_cpu_s": tokens * 1e9 / spent}


def measure(
    streams: int, per_message: int, palette: list[int], *, text: bool = True, stop: bool = False
) -> dict[str, float]:
    """CPU microseconds a token; `per_message`: tokens that have come for a stream before it is read."""
    steps = per_message * max(20, 12_800 // streams // per_message)
    stops = ["never written", "nor this"] if stop else []
    return uvloop.run(_measure(streams, per_message, steps, palette, text=text, stop=stops))
