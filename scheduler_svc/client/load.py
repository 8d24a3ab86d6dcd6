"""Sends jobs to one frontend over gRPC and writes down when each message came."""

import asyncio
import secrets
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import grpc

from protos.stepwire.inference.v1 import inference_pb2 as pb
from protos.stepwire.inference.v1.inference_pb2_grpc import InferenceServiceStub
from scheduler_svc.client.config import Access
from scheduler_svc.client.connection import OPEN, aio_channel, explain
from scheduler_svc.client.measure import Record
from scheduler_svc.client.workload import Job, Room
from scheduler_svc.errors import StartupError

# A stream of small messages must not be refused for its length; connections are not shared between targets.
CHANNEL_OPTIONS = (("grpc.max_receive_message_length", 64 << 20), ("grpc.use_local_subchannel_pool", 1))
Heard = Callable[[Record, int], None]


@dataclass(frozen=True, slots=True)
class Sending:
    """How jobs are sent: `num_streams` bounds a closed loop only; an open loop sends when a job is due."""

    num_streams: int
    temperature: float = 0.0
    timeout_s: float = 600.0


class Target:
    """One address. `heard(record, num_new_tokens)` is called for each message and, with 0, at the end of a stream."""

    def __init__(self, address: str, sending: Sending, heard: Heard, access: Access = OPEN):
        self.address = address
        self._access = access
        self._sending = sending
        self._heard = heard
        self._start = 0.0
        # Of this run alone: prefixes cached by an earlier run with the same seed must not flatter this one.
        self._salt = secrets.token_hex(8)

    async def __aenter__(self) -> "Target":
        self._channel = aio_channel(self.address, self._access, CHANNEL_OPTIONS)
        self._stub = InferenceServiceStub(self._channel)
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._channel.close()

    async def describe(self) -> tuple[pb.GetModelResponse, Room]:
        try:
            model = await self._stub.GetModel(pb.GetModelRequest(), timeout=10.0, metadata=self._access.metadata)
        except grpc.RpcError as error:
            raise StartupError(explain(error, self.address, self._access)) from None
        return model, Room(model.vocab_size, model.max_model_len)

    async def run(self, jobs: list[Job]) -> list[Record]:
        """One record a job, in the order of the jobs."""
        self._start = time.perf_counter()
        if jobs and jobs[0].at_s is None:
            return await self._closed(jobs)
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(self._when_due(job)) for job in jobs]
        return [task.result() for task in tasks]

    async def _closed(self, jobs: list[Job]) -> list[Record]:
        records: dict[int, Record] = {}
        queue: Iterator[tuple[int, Job]] = iter(enumerate(jobs))

        async def stream() -> None:
            for number, job in queue:
                records[number] = await self._send(job, self._now())

        async with asyncio.TaskGroup() as group:
            for _ in range(min(self._sending.num_streams, len(jobs))):
                group.create_task(stream())
        return [records[number] for number in range(len(jobs))]

    async def _when_due(self, job: Job) -> Record:
        due_s = job.at_s or 0.0
        await asyncio.sleep(max(0.0, due_s - self._now()))
        return await self._send(job, due_s)

    def _now(self) -> float:
        return time.perf_counter() - self._start

    async def _send(self, job: Job, due_s: float) -> Record:
        record = Record(due_s, len(job.prompt), job.num_output)
        request = pb.GenerateRequest(
            token_ids=pb.TokenIds(ids=job.prompt),
            sampling=pb.SamplingParams(temperature=self._sending.temperature),
            stopping=pb.StoppingCriteria(max_tokens=job.num_output, ignore_eos=True),
            cache_salt=self._salt,
        )
        try:
            call = self._stub.Generate(request, timeout=self._sending.timeout_s, metadata=self._access.metadata)
            async for message in call:
                self._note(record, message)
            if record.num_output != job.num_output:
                record.error = "SHORT"
        except grpc.RpcError as error:
            record.error = error.code().name
        record.end_s = self._now()
        self._heard(record, 0)
        return record

    def _note(self, record: Record, message: pb.GenerateResponse) -> None:
        if message.HasField("prompt"):
            record.num_cached = message.prompt.num_cached_tokens
        num_new = len(message.token_ids)
        if num_new:
            record.message_s.append(self._now())
            record.num_output += num_new
            self._heard(record, num_new)
