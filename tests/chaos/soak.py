"""`python -m tests.chaos.soak [--streams 20000]`: short and cancelled streams without end; nothing grows.

After a warm-up, memory, descriptors and threads of every process of `stepwire serve` must stay where they are, and when
the last stream has ended the registries are empty and the gauges zero. Every answer is checked.
"""

import argparse
import asyncio
import random
import tempfile
import time
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path

import grpc
import numpy as np
import psutil

from protos.stepwire.inference.v1 import inference_pb2 as pb
from protos.stepwire.inference.v1 import inference_pb2_grpc
from scheduler_svc.models.store import resolve_model
from tests.e2e.known_answers import VOCAB, drawn
from tests.e2e.server import Serve, greedy

NUM_SAMPLES = 20
# The first samples are warm-up: allocators and caches fill, lazy imports happen.
WARM_UP_SAMPLES = 6
# Of one process, over everything after the warm-up: less than any leak of a few bytes a stream would be.
MAX_GROWTH_BYTES = 12 * 2**20
MAX_MORE_DESCRIPTORS = 8
ZERO_AT_IDLE = (
    "vllm:num_requests_running",
    "vllm:num_requests_waiting",
    "stepwire_frontend_active_streams",
)


@dataclass
class Samples:
    """Of one process: bytes, descriptors and threads at each sample, and streams served until then."""

    streams: list[int] = field(default_factory=list)
    memory: list[int] = field(default_factory=list)
    descriptors: list[int] = field(default_factory=list)
    threads: list[int] = field(default_factory=list)

    def take(self, process: psutil.Process, num_streams: int) -> None:
        self.streams.append(num_streams)
        memory = process.memory_info()
        # Without the pages of files, which the kernel takes and gives as it likes.
        self.memory.append(memory.rss - memory.shared)
        self.descriptors.append(process.num_fds())
        self.threads.append(process.num_threads())

    def slope(self) -> float:
        """Bytes a stream, least squares after the warm-up."""
        x, y = np.asarray(self.streams[WARM_UP_SAMPLES:], float), np.asarray(self.memory[WARM_UP_SAMPLES:], float)
        return float(np.polyfit(x, y, 1)[0])

    def faults(self) -> list[str]:
        warm = self.memory[WARM_UP_SAMPLES:]
        found = []
        if self.slope() * (self.streams[-1] - self.streams[WARM_UP_SAMPLES]) > MAX_GROWTH_BYTES:
            found.append(f"memory grows: {[round(size / 2**20, 1) for size in warm]} MiB")
        for name, values in (("descriptors", self.descriptors), ("threads", self.threads)):
            if values[-1] > max(values[:WARM_UP_SAMPLES]) + MAX_MORE_DESCRIPTORS:
                found.append(f"{name} grow: {values}")
        return found


@dataclass
class Outcome:
    seed: int
    ends: Counter[str] = field(default_factory=Counter)
    wrong: list[str] = field(default_factory=list)
    leaks: list[str] = field(default_factory=list)
    processes: dict[str, Samples] = field(default_factory=dict)
    seconds: float = 0.0

    @property
    def is_good(self) -> bool:
        return not (self.wrong or self.leaks)

    def report(self) -> str:
        count = sum(self.ends.values())
        rate = count / max(self.seconds, 1e-9)
        lines = [
            f"soak: seed {self.seed}, {count} streams in {self.seconds:.0f} s ({rate:.0f} a second): {dict(self.ends)}"
        ]
        for name, samples in self.processes.items():
            first, last = samples.memory[WARM_UP_SAMPLES] / 2**20, samples.memory[-1] / 2**20
            lines.append(
                f"  {name:12} {first:7.1f} to {last:7.1f} MiB after warm-up, {samples.slope():7.1f} bytes a stream, "
                f"{samples.descriptors[WARM_UP_SAMPLES]} to {samples.descriptors[-1]} descriptors, "
                f"{samples.threads[WARM_UP_SAMPLES]} to {samples.threads[-1]} threads"
            )
        lines += [f"  WRONG   {text}" for text in self.wrong[:20]] + [f"  LEAKED  {text}" for text in self.leaks]
        return "\n".join(lines)


class Soak:
    def __init__(self, serve: Serve, num_streams: int, seed: int, width: int):
        self.outcome = Outcome(seed)
        self._serve, self._num_streams, self._width = serve, num_streams, width
        self._draw = random.Random(seed)
        pids = serve.ready["pids"]
        named = {"supervisor": serve.process.pid, "scheduler": pids["scheduler"], "executor": pids["executor"][0]}
        named |= {f"frontend-{i}": pid for i, pid in enumerate(pids["frontend"])}
        self._processes = {name: psutil.Process(pid) for name, pid in named.items()}
        self.outcome.processes = {name: Samples() for name in named}

    async def run(self) -> None:
        began = time.monotonic()
        # As other clients come and go, a channel is made anew for every sample.
        for number in range(NUM_SAMPLES):
            share = self._num_streams * (number + 1) // NUM_SAMPLES - self._num_streams * number // NUM_SAMPLES
            await self._batch(share)
            await asyncio.to_thread(self._serve.wait_idle, 30.0)
            for name, process in self._processes.items():
                self.outcome.processes[name].take(process, sum(self.outcome.ends.values()))
        self.outcome.seconds = time.monotonic() - began

    async def _batch(self, count: int) -> None:
        channels = [grpc.aio.insecure_channel(address) for address in self._serve.addresses]
        stubs = [inference_pb2_grpc.InferenceServiceStub(channel) for channel in channels]
        left = iter(range(count))

        async def worker() -> None:
            for i in left:
                await self._one(stubs[i % len(stubs)])

        await asyncio.gather(*(worker() for _ in range(self._width)))
        for channel in channels:
            await channel.close()

    async def _one(self, stub: inference_pb2_grpc.InferenceServiceStub) -> None:
        draw = self._draw
        request = greedy([draw.randrange(VOCAB) for _ in range(draw.randint(1, 40))], draw.randint(1, 8))
        request.stopping.ignore_eos = True
        is_cancelled = draw.random() < 0.3
        if is_cancelled:
            request.stopping.max_tokens = 2000
        if draw.random() < 0.2:
            request.response.logprobs = 2
        cancel_after = draw.choice((0, 0, 1, 5)) if is_cancelled else None
        got: list[int] = []
        call = stub.Generate(request)
        try:
            if cancel_after == 0 and draw.random() < 0.5:
                self.outcome.ends["cancelled at once"] += 1
                return
            async for message in call:
                got.extend(message.token_ids)
                if cancel_after is not None and len(got) >= cancel_after:
                    break
        except grpc.RpcError as error:
            self.outcome.wrong.append(f"{error.code().name}: {error.details()}")
            return
        finally:
            call.cancel()
        self._judge(request, got, "cancelled" if is_cancelled else "exact")

    def _judge(self, request: pb.GenerateRequest, got: list[int], end: str) -> None:
        if end == "cancelled":
            request.stopping.max_tokens = len(got)
        if got != drawn(request):
            self.outcome.wrong.append(f"{end}, but not with its tokens: {len(got)} of {request.stopping.max_tokens}")
        self.outcome.ends[end] += 1


def run(num_streams: int, seed: int, folder: Path, model: Path, *, width: int = 64) -> Outcome:
    with Serve(folder, "--model", str(model), "--backend", "simulated", frontends=2) as serve:
        soak = Soak(serve, num_streams, seed, width)
        asyncio.run(soak.run())
        outcome = soak.outcome
        outcome.leaks += [f"{name}: {fault}" for name, s in outcome.processes.items() for fault in s.faults()]
        load = serve.load()
        if load.blocks_used or load.num_running or load.num_waiting:
            outcome.leaks.append(f"not idle: {load}")
        limit = time.monotonic() + 10.0
        while (left := {n: v for n in ZERO_AT_IDLE if (v := serve.metric(n))}) and time.monotonic() < limit:
            time.sleep(0.2)
        if left:
            outcome.leaks.append(f"gauges at idle: {left}")
        if "Traceback" in serve.output():
            outcome.leaks.append(serve.output()[-3000:])
    return outcome


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--streams", type=int, default=20_000)
    parser.add_argument("--width", type=int, default=64, help="streams at a time")
    parser.add_argument("--seed", type=int, default=1)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        outcome = run(args.streams, args.seed, Path(folder), resolve_model(""), width=args.width)
    print(outcome.report())
    return 0 if outcome.is_good else 1


if __name__ == "__main__":
    raise SystemExit(main())
