"""The least that a frontend in Python can be, a process of its own: grpc.aio and uvloop alone.

    python -m benchmarks.frontend_ruler < job.json

Job: {"palette", "step_s", "port"}. At every beat each open Generate gets one message, serialised once for all of them;
no scheduler, no text, no metrics. Machines differ, and so does one from hour to hour: quote ratios to this.
"""

import asyncio
import json
import signal
import sys
from collections.abc import AsyncIterator
from typing import Any

import grpc
import uvloop

from benchmarks.stamps import ticks
from protos.stepwire.inference.v1 import inference_pb2 as pb
from scheduler_svc.frontend.server import OPTIONS

NAME = pb.DESCRIPTOR.services_by_name["InferenceService"].full_name


class Beat:
    """Wakes every stream at once; a stream that is late for a beat has its tokens in one message."""

    def __init__(self, job: dict[str, Any]):
        self._palette, self._step_s = job["palette"], job["step_s"]
        self.token = 0
        self.number = 0
        self.news: set[asyncio.Event] = set()
        self.made: dict[int, bytes] = {}

    async def run(self) -> None:
        loop = asyncio.get_running_loop()
        due = loop.time()
        while True:
            due = max(due + self._step_s, loop.time())
            await asyncio.sleep(due - loop.time())
            self.number += 1
            self.token = self._palette[ticks() % len(self._palette)]
            self.made.clear()
            for event in self.news:
                event.set()

    def message(self, num_tokens: int) -> bytes:
        made = self.made.get(num_tokens)
        if made is None:
            ids = [self.token] * num_tokens
            made = self.made[num_tokens] = pb.GenerateResponse(
                token_ids=ids, text=" token" * num_tokens
            ).SerializeToString()
        return made

    async def generate(self, request: bytes, context: Any) -> AsyncIterator[bytes]:
        event = asyncio.Event()
        self.news.add(event)
        seen = self.number
        try:
            while True:
                await event.wait()
                event.clear()
                count, seen = self.number - seen, self.number
                yield self.message(count)
        finally:
            self.news.discard(event)


async def serve(job: dict[str, Any]) -> None:
    beat = Beat(job)
    server = grpc.aio.server(options=OPTIONS)
    method = grpc.unary_stream_rpc_method_handler(beat.generate)
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(NAME, {"Generate": method}),))
    if server.add_insecure_port(f"127.0.0.1:{job['port']}") == 0:
        raise SystemExit(f"port {job['port']} is in use")
    await server.start()
    ended = asyncio.Event()
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, ended.set)
    runs = asyncio.create_task(beat.run())
    await ended.wait()
    runs.cancel()
    await server.stop(0)


if __name__ == "__main__":
    uvloop.run(serve(json.load(sys.stdin)))
