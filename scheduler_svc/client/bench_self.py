"""How fast the load generator itself is: tokens a second that one core of it receives, from servers that only talk.

Each server is a process of its own that sends messages of one token as fast as they are taken; nothing else is
measured. A figure near this one means that the client was the bottleneck, not the server.
"""

import asyncio
import json
import subprocess
import sys
import time
from dataclasses import dataclass

import grpc

from protos.stepwire.inference.v1 import inference_pb2 as pb
from protos.stepwire.inference.v1 import inference_pb2_grpc
from scheduler_svc.client.load import Sending, Target
from scheduler_svc.client.load_openai import OpenAI, OpenAITarget
from scheduler_svc.client.measure import Record
from scheduler_svc.client.workload import Job
from scheduler_svc.errors import StartupError

NUM_STREAMS = 32
TOKENS_PER_STREAM = 1000


@dataclass(frozen=True, slots=True)
class SelfTest:
    api: str
    num_tokens: int
    cpu_s: float
    wall_s: float

    @property
    def tokens_per_core_s(self) -> float:
        return self.num_tokens / self.cpu_s


def self_test() -> list[SelfTest]:
    return [_against(api) for api in ("grpc", "openai")]


def _against(api: str) -> SelfTest:
    command = [sys.executable, "-m", "scheduler_svc.client.bench_self", api]
    server = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    try:
        assert server.stdout is not None
        line = server.stdout.readline()
        if not line:
            raise StartupError("the self-test's server did not start")
        return asyncio.run(_receive(api, int(line)))
    finally:
        server.kill()
        server.wait()


async def _receive(api: str, port: int) -> SelfTest:
    def ignored(record: Record, num_new: int) -> None:
        """No progress bar: it is no part of what receiving costs."""

    sending = Sending(NUM_STREAMS)
    jobs = [Job(None, [300 + i] * 16, TOKENS_PER_STREAM) for i in range(NUM_STREAMS)]
    if api == "grpc":
        target: Target = Target(f"127.0.0.1:{port}", sending, ignored)
    else:
        target = OpenAITarget(f"http://127.0.0.1:{port}", sending, ignored, OpenAI(model="m"))
    async with target:
        await target.run(jobs[:2])
        cpu, wall = time.process_time(), time.perf_counter()
        records = await target.run(jobs)
        cpu, wall = time.process_time() - cpu, time.perf_counter() - wall
    failed = [record.error for record in records if record.error]
    if failed:
        raise StartupError(f"the self-test over {api} failed: {failed[0]}")
    return SelfTest(api, sum(record.num_output for record in records), cpu, wall)


# ---- the servers -----------------------------------------------------------------------------------------------


class Talker(inference_pb2_grpc.InferenceServiceServicer):
    async def Generate(self, request: pb.GenerateRequest, context: grpc.aio.ServicerContext) -> None:
        message = pb.GenerateResponse(token_ids=[7], text=" word")
        for _ in range(request.stopping.max_tokens):
            await context.write(message)


async def _talk_grpc() -> None:
    server = grpc.aio.server()
    inference_pb2_grpc.add_InferenceServiceServicer_to_server(Talker(), server)
    print(server.add_insecure_port("127.0.0.1:0"), flush=True)
    await server.start()
    await server.wait_for_termination()


async def _head(reader: asyncio.StreamReader) -> bytes:
    """Of the next request; empty when there is none."""
    try:
        return await reader.readuntil(b"\r\n\r\n")
    except asyncio.IncompleteReadError:
        return b""


async def _talk_http() -> None:
    chunk = json.dumps({"choices": [{"index": 0, "text": " word", "token_ids": [7]}]})
    event = f"data: {chunk}\n\n".encode()
    framed = b"%x\r\n%s\r\n" % (len(event), event)

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while head := await _head(reader):
            length = next(int(line[15:]) for line in head.lower().split(b"\r\n") if line.startswith(b"content-length:"))
            asked = json.loads(await reader.readexactly(length))
            writer.write(b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n")
            for _ in range(asked["max_tokens"]):
                writer.write(framed)
                await writer.drain()
            end = b"data: [DONE]\n\n"
            writer.write(b"%x\r\n%s\r\n0\r\n\r\n" % (len(end), end))
            await writer.drain()

    server = await asyncio.start_server(answer, "127.0.0.1", 0)
    print(server.sockets[0].getsockname()[1], flush=True)
    await server.serve_forever()


if __name__ == "__main__":
    asyncio.run(_talk_http() if sys.argv[1] == "openai" else _talk_grpc())
