"""Measures the step-time model of a running server, from outside: what its clients see is what counts.

Some prompts alone, for the time to the first token by length; then one, four, sixteen ... streams at once, short and
long ones, for the gap between tokens by rows and by tokens stored. Medians, so that a neighbour's noise costs little.
"""

import asyncio
import itertools
import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import grpc

from protos.stepwire.admin.v1.admin_pb2 import WatchRequest
from protos.stepwire.admin.v1.admin_pb2_grpc import AdminServiceStub
from scheduler_svc.client.config import Access
from scheduler_svc.client.connection import OPEN, explain
from scheduler_svc.client.load import Sending, Served, Target
from scheduler_svc.client.measure import Record
from scheduler_svc.client.workload import Job, Shape, make_jobs
from scheduler_svc.core.contract import Geometry
from scheduler_svc.core.sequence import blocks_for
from scheduler_svc.errors import StartupError
from scheduler_svc.planning.step_model import DecodeSample, PrefillSample, StepModel, fit

PROMPT_LENGTHS = (32, 128, 256, 512)
# Streams at once, and tokens of their prompts. The first ones tell all coefficients and are always measured: prompts
# are what costs a slow server most.
CROWDS = ((1, 16), (16, 16), (4, 384), (4, 16), (32, 16), (8, 256))
NUM_NEEDED = 3
NUM_OUTPUT = 24
ANSWER_TIMEOUT_S = 10.0
# After what is needed, nothing more is begun when this has passed.
DURATION_S = 15.0

Say = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class Measured:
    served: Served
    geometry: Geometry
    step: StepModel


async def calibrate(address: str, say: Say, duration_s: float = DURATION_S, *, access: Access = OPEN) -> Measured:
    """Raises StartupError when the server refuses what is asked."""
    sending = Sending(max(streams for streams, _ in CROWDS))
    async with Target(address, sending, lambda *_: None, access) as target:
        served = await target.describe()
        geometry = await _geometry(target, served)
        crowds = [crowd for crowd in CROWDS if _fits(crowd, geometry)]
        began = time.monotonic()
        ttfts: dict[int, list[float]] = {}
        gaps: dict[tuple[int, int], list[float]] = {}
        for number, length, streams in _pieces(crowds, lambda: time.monotonic() - began >= duration_s):
            spent = f"measuring, {time.monotonic() - began:.0f} s: round {number}"
            if streams:
                say(f"{spent}, {streams} streams of {length} tokens")
                records = await _run(target, served, streams, length, NUM_OUTPUT, seed=number)
                gaps.setdefault((streams, length), []).extend(steady_gaps(records))
            else:
                say(f"{spent}, a prompt of {length} tokens alone")
                for record in await _run(target, served, 1, length, 1, seed=number):
                    ttfts.setdefault(length, []).append(record.ttft_s)
    if any(not values for values in gaps.values()):
        raise StartupError(f"{address} ran too few streams at once to be measured: is it busy?")
    decodes = [
        DecodeSample(streams, streams * (length + NUM_OUTPUT // 2), 1e6 * statistics.median(values))
        for (streams, length), values in gaps.items()
    ]
    prefills = [PrefillSample(length, 1e6 * statistics.median(values)) for length, values in ttfts.items()]
    return Measured(served, geometry, fit(decodes, prefills))


def _pieces(crowds: list[tuple[int, int]], is_over: Callable[[], bool]) -> Iterator[tuple[int, int, int]]:
    """Round, tokens of a prompt and streams at once; 0 streams: a prompt alone. What is needed comes first."""
    needed = len(PROMPT_LENGTHS) + NUM_NEEDED
    for number in itertools.count(1):
        for place, (streams, length) in enumerate([*((0, length) for length in PROMPT_LENGTHS), *crowds]):
            if (number > 1 or place >= needed) and is_over():
                return
            yield number, length, streams


def _fits(crowd: tuple[int, int], geometry: Geometry) -> bool:
    streams, length = crowd
    return streams <= geometry.max_num_seqs and streams * blocks_for(length + NUM_OUTPUT, geometry.block_size) <= (
        geometry.num_blocks
    )


async def _geometry(target: Target, served: Served) -> Geometry:
    """As the server is set up. The budget of a step is the admin service's word."""
    async for response in AdminServiceStub(target.channel).Watch(
        WatchRequest(), timeout=ANSWER_TIMEOUT_S, metadata=target.access.metadata
    ):
        budget = response.snapshot.max_num_batched_tokens
        break
    return Geometry(
        num_blocks=served.num_blocks,
        block_size=served.block_size,
        max_num_seqs=served.max_num_seqs,
        max_model_len=served.room.max_model_len,
        max_num_batched_tokens=budget or served.room.max_model_len,
        vocab_size=served.room.vocab_size,
    )


async def _run(target: Target, served: Served, streams: int, length: int, output: int, seed: int) -> list[Record]:
    length = min(length, served.room.max_model_len - output)
    shape = Shape(streams, max(1, length), output, spread="fixed", seed=1000 * seed + length)
    jobs: list[Job] = make_jobs(shape, served.room)
    records = await target.run(jobs)
    failed = [record.error for record in records if record.error]
    if failed:
        raise StartupError(f"{target.address} refused a request of the calibration: {failed[0]}")
    return records


def steady_gaps(records: list[Record]) -> list[float]:
    """Gaps while every stream decodes: after the last first token, before the first end."""
    begins = max(record.message_s[0] for record in records)
    ends = min(record.message_s[-1] for record in records)
    return [
        later - earlier
        for record in records
        for earlier, later in zip(record.message_s, record.message_s[1:], strict=False)
        if earlier >= begins and later <= ends
    ]


def run(address: str, say: Say, duration_s: float = DURATION_S, *, access: Access = OPEN) -> Measured:
    try:
        return asyncio.run(calibrate(address, say, duration_s, access=access))
    except grpc.RpcError as error:
        raise StartupError(explain(error, address, access)) from None
