"""Readers of many streams, a process of its own: what arrived in a window of time, and how old it was.

    python -m benchmarks.frontend_client < job.json > found.json

Job: {"addresses", "api", "streams", "prompt", "text", "max_tokens", "window_s", "palette", "pids"}; "api" is
"stepwire" or "vllm", which is vllm.grpc.engine.VllmEngine and has no text. The window begins
once every stream has had a token; the CPU time of `pids` is read as it begins and as it ends.
"""

import asyncio
import json
import sys
import time
import uuid
from collections.abc import Callable, Sequence
from typing import Any

import grpc
import psutil
import uvloop
from smg_grpc_proto.generated import vllm_engine_pb2 as engine
from smg_grpc_proto.generated import vllm_engine_pb2_grpc

from benchmarks.stamps import Ages, ticks
from protos.stepwire.inference.v1 import inference_pb2 as pb
from protos.stepwire.inference.v1 import inference_pb2_grpc

CONNECT_LIMIT_S = 60.0


class Reader:
    """Counts while `is_open`."""

    def __init__(self, job: dict[str, Any]):
        self.is_open = False
        self.messages = self.tokens = 0
        self.ages_ms: list[float] = []
        self.waiting = job["streams"]
        self.all_begun = asyncio.Event()
        self._ages = Ages(job["palette"])

    async def read(self, stub: Any, job: dict[str, Any]) -> None:
        """For ever: a stream that ends begins again."""
        begun = False
        ids_of = IDS_OF[job["api"]]
        while True:
            async for message in stub.Generate(REQUESTS[job["api"]](job)):
                ids = ids_of(message)
                if self.is_open and ids:
                    self.messages += 1
                    self.tokens += len(ids)
                    self.ages_ms.append(self._ages.ms(ids[0], ticks()))
                elif not begun:
                    begun = True
                    self.waiting -= 1
                    if not self.waiting:
                        self.all_begun.set()


def cpu_seconds(pid: int) -> float:
    """Of all threads of a process, in the kernel and out of it."""
    times = psutil.Process(pid).cpu_times()
    return times.user + times.system


async def streams(job: dict[str, Any], stubs: list[Any]) -> dict[str, Any]:
    reader = Reader(job)
    tasks = [asyncio.create_task(reader.read(stubs[i % len(stubs)], job)) for i in range(job["streams"])]
    begun = asyncio.create_task(reader.all_begun.wait())
    await asyncio.wait([begun, *tasks], timeout=CONNECT_LIMIT_S, return_when=asyncio.FIRST_COMPLETED)
    if not begun.done():
        raise SystemExit(f"{reader.waiting} streams have not begun: {[t.exception() for t in tasks if t.done()][:1]}")
    await asyncio.sleep(job["window_s"] / 4)
    own, before, began = time.process_time(), [cpu_seconds(pid) for pid in job["pids"]], time.perf_counter()
    reader.is_open = True
    await asyncio.sleep(job["window_s"])
    reader.is_open = False
    seconds = time.perf_counter() - began
    used = [cpu_seconds(pid) - cpu for pid, cpu in zip(job["pids"], before, strict=True)]
    own = time.process_time() - own
    for task in tasks:
        task.cancel()
    await asyncio.wait(tasks)
    return {
        "seconds": seconds,
        "messages": reader.messages,
        "tokens": reader.tokens,
        "cpu_s": used,
        "client_cpu_s": own,
        "ages_ms": sorted(reader.ages_ms),
    }


def request_of(job: dict[str, Any]) -> pb.GenerateRequest:
    return pb.GenerateRequest(
        token_ids=pb.TokenIds(ids=job["prompt"]),
        sampling=pb.SamplingParams(temperature=0.0),
        stopping=pb.StoppingCriteria(max_tokens=job["max_tokens"], ignore_eos=True),
        response=pb.ResponseOptions(text=job["text"]),
    )


def engine_request_of(job: dict[str, Any]) -> Any:
    return engine.GenerateRequest(
        request_id=uuid.uuid4().hex,
        tokenized=engine.TokenizedInput(input_ids=job["prompt"]),
        sampling_params=engine.SamplingParams(temperature=0.0, max_tokens=job["max_tokens"], ignore_eos=True),
        stream=True,
    )


STUBS: dict[str, Callable[[grpc.aio.Channel], Any]] = {
    "stepwire": inference_pb2_grpc.InferenceServiceStub,
    "vllm": vllm_engine_pb2_grpc.VllmEngineStub,
}
REQUESTS: dict[str, Callable[[dict[str, Any]], Any]] = {"stepwire": request_of, "vllm": engine_request_of}
IDS_OF: dict[str, Callable[[Any], Sequence[int]]] = {
    "stepwire": lambda message: message.token_ids,
    "vllm": lambda message: message.chunk.token_ids,
}


async def run(job: dict[str, Any]) -> dict[str, Any]:
    channels = [grpc.aio.insecure_channel(address) for address in job["addresses"]]
    try:
        await asyncio.wait_for(asyncio.gather(*(c.channel_ready() for c in channels)), CONNECT_LIMIT_S)
        stubs = [STUBS[job["api"]](channel) for channel in channels]
        return await streams(job, stubs)
    finally:
        await asyncio.gather(*(channel.close() for channel in channels))


if __name__ == "__main__":
    json.dump(uvloop.run(run(json.load(sys.stdin))), sys.stdout)
