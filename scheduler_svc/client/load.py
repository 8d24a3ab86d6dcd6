"""Sends jobs to one server and writes down when each message came. Over gRPC; load_openai.py speaks HTTP instead."""

import asyncio
import secrets
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

import grpc

from protos.stepwire.inference.v1 import inference_pb2 as pb
from protos.stepwire.inference.v1.inference_pb2_grpc import InferenceServiceStub
from scheduler_svc.client.config import Access
from scheduler_svc.client.connection import OPEN, aio_channel, explain
from scheduler_svc.client.measure import Record
from scheduler_svc.client.workload import Job, Room, as_text
from scheduler_svc.errors import StartupError

# A stream of small messages must not be refused for its length; connections are not shared between targets.
CHANNEL_OPTIONS = (("grpc.max_receive_message_length", 64 << 20), ("grpc.use_local_subchannel_pool", 1))
Heard = Callable[[Record, int], None]


@dataclass(frozen=True, slots=True)
class Sending:
    """How jobs are sent: `num_streams` bounds a closed loop only; an open loop sends when a job is due.

    `as_text`: prompts go as words, for servers that take no token ids; the same words to every server.
    """

    num_streams: int
    temperature: float = 0.0
    timeout_s: float = 600.0
    as_text: bool = False


@dataclass(frozen=True, slots=True)
class Served:
    """What a server says of itself."""

    model: str
    dtype: str
    device: str
    block_size: int
    room: Room
    num_blocks: int = 0
    max_num_seqs: int = 0


@dataclass(frozen=True, slots=True)
class LoadPoint:
    """What a server is doing, as it says."""

    at_s: float
    num_running: int
    num_waiting: int
    blocks_used: float  # share of the pool
    blocks_cached: float


@dataclass(slots=True)
class Said:
    """The conversation up to a turn: token ids, and the same as who said what."""

    ids: list[int]
    parts: list[str]  # user, assistant, user ...


@dataclass(slots=True)
class Answer:
    ids: list[int] = field(default_factory=list)
    text: list[str] = field(default_factory=list)


class Failed(Exception):
    """A request that got no whole answer: the name of a gRPC status, or HTTP_ and a status."""


class Target:
    """One address. `heard(record, num_new_tokens)` is called for each message and, with 0, at the end of a stream."""

    def __init__(self, address: str, sending: Sending, heard: Heard, access: Access = OPEN):
        self.address = address
        self.access = access
        self._sending = sending
        self._heard = heard
        self._start = 0.0
        # Of this run alone: prefixes cached by an earlier run with the same seed must not flatter this one.
        self._salt = secrets.token_hex(8)

    # ---- over gRPC ---------------------------------------------------------------------------------------------

    async def __aenter__(self) -> "Target":
        self.channel = aio_channel(self.address, self.access, CHANNEL_OPTIONS)
        self._stub = InferenceServiceStub(self.channel)
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.channel.close()

    async def describe(self) -> Served:
        try:
            model = await self._stub.GetModel(pb.GetModelRequest(), timeout=10.0, metadata=self.access.metadata)
        except grpc.RpcError as error:
            raise StartupError(explain(error, self.address, self.access)) from None
        room = Room(model.vocab_size, model.max_model_len)
        return Served(
            model.model,
            model.dtype,
            model.device,
            model.block_size,
            room,
            num_blocks=model.num_blocks,
            max_num_seqs=model.max_num_seqs,
        )

    async def load(self) -> LoadPoint | None:
        """None: it cannot say."""
        try:
            load = await self._stub.GetLoad(pb.GetLoadRequest(), timeout=2.0, metadata=self.access.metadata)
        except grpc.RpcError:
            return None
        whole = load.blocks_total or 1
        used, cached = load.blocks_used / whole, load.blocks_cached / whole
        return LoadPoint(self.now(), load.num_running, load.num_waiting, used, cached)

    async def stream(self, said: Said, record: Record) -> Answer:
        """Sends one request and notes each message of the answer. Raises Failed."""
        request = pb.GenerateRequest(
            sampling=pb.SamplingParams(temperature=self._sending.temperature),
            stopping=pb.StoppingCriteria(max_tokens=record.num_asked, ignore_eos=True),
            cache_salt=self._salt,
        )
        if self._sending.as_text:
            request.text = " ".join(said.parts)
        else:
            request.token_ids.ids.extend(said.ids)
        answer = Answer()
        try:
            call = self._stub.Generate(request, timeout=self._sending.timeout_s, metadata=self.access.metadata)
            async for message in call:
                if message.HasField("prompt"):
                    record.num_cached, record.num_prompt = message.prompt.num_cached_tokens, message.prompt.num_tokens
                self.note(record, len(message.token_ids))
                answer.ids.extend(message.token_ids)
                answer.text.append(message.text)
        except grpc.RpcError as error:
            raise Failed(error.code().name) from None
        return answer

    # ---- when what is sent -------------------------------------------------------------------------------------

    async def run(self, jobs: list[Job]) -> list[Record]:
        """One record a request, in the order of the jobs and their turns."""
        self._start = time.perf_counter()
        if jobs and jobs[0].at_s is None:
            return await self._closed(jobs)
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(self._when_due(job)) for job in jobs]
        return [record for task in tasks for record in task.result()]

    async def _closed(self, jobs: list[Job]) -> list[Record]:
        records: dict[int, list[Record]] = {}
        queue: Iterator[tuple[int, Job]] = iter(enumerate(jobs))

        async def stream() -> None:
            for number, job in queue:
                records[number] = await self._converse(job, self.now())

        async with asyncio.TaskGroup() as group:
            for _ in range(min(self._sending.num_streams, len(jobs))):
                group.create_task(stream())
        return [record for number in range(len(jobs)) for record in records[number]]

    async def _when_due(self, job: Job) -> list[Record]:
        due_s = job.at_s or 0.0
        await asyncio.sleep(max(0.0, due_s - self.now()))
        return await self._converse(job, due_s)

    async def _converse(self, job: Job, due_s: float) -> list[Record]:
        """All turns of a job; the rest of a conversation that broke is not sent, and counts as failed."""
        said = Said(list(job.prompt), [as_text(job.prompt)])
        records = [Record(due_s, len(said.ids), job.num_output)]
        answer = await self._send(said, records[-1])
        for turn in job.later:
            records.append(Record(self.now(), len(said.ids), turn.num_output))
            if records[-2].error:
                records[-1].error, records[-1].end_s = "BROKEN_OFF", self.now()
                self._heard(records[-1], 0)
                continue
            said.ids += [*answer.ids, *turn.said]
            said.parts += ["".join(answer.text), as_text(turn.said)]
            records[-1].num_prompt = len(said.ids)
            answer = await self._send(said, records[-1])
        return records

    async def _send(self, said: Said, record: Record) -> Answer:
        answer = Answer()
        try:
            answer = await self.stream(said, record)
            if record.num_output != record.num_asked:
                record.error = "SHORT"
        except Failed as failure:
            record.error = str(failure)
        record.end_s = self.now()
        self._heard(record, 0)
        return answer

    def now(self) -> float:
        return time.perf_counter() - self._start

    def note(self, record: Record, num_new: int) -> None:
        """A message with that many tokens came."""
        if num_new:
            record.message_s.append(self.now())
            record.num_output += num_new
            self._heard(record, num_new)
