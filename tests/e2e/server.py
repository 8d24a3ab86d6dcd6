"""Runs `stepwire serve` as a user does and talks to it over gRPC. Knows nothing of the services' insides."""

import asyncio
import contextlib
import itertools
import json
import os
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import grpc
from prometheus_client.parser import text_string_to_metric_families

from protos.stepwire.inference.v1 import inference_pb2 as pb
from protos.stepwire.inference.v1 import inference_pb2_grpc

# For what a busy machine may take; nothing is measured with them.
START_LIMIT_S = 180.0
STOP_LIMIT_S = 120.0
ANSWER_LIMIT_S = 60.0


def _ephemeral() -> int:
    """The first port that the kernel gives to whoever asks for none: for outgoing connections, and for port 0."""
    with contextlib.suppress(OSError, ValueError):
        return int(Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()[0])
    return 32_768


# Below those: a port that is chosen here and bound seconds later is nobody's by chance meanwhile. No port is given
# twice, and two runs on one machine begin at different ones.
FIRST_PORT, END_PORT = 10_000, max(11_000, _ephemeral())
_next_ports = itertools.count(os.getpid() * 101 % (END_PORT - FIRST_PORT))


def free_port(count: int = 1) -> int:
    """The first of `count` consecutive ports that are free, on loopback, and that no other call is given."""
    for _ in range(5000):
        found = [FIRST_PORT + next(_next_ports) % (END_PORT - FIRST_PORT) for _ in range(count)]
        if found[-1] - found[0] == count - 1 and all(map(_is_free, found)):
            return found[0]
    raise RuntimeError(f"no {count} free ports in a row")


def _is_free(port: int) -> bool:
    with socket.socket() as probe:
        try:
            probe.bind(("127.0.0.1", port))
        except OSError:
            return False
        return True


class Answering:
    """Something that answers gRPC at `addresses` and tells its metrics at `metrics_urls`."""

    addresses: list[str]
    metrics_urls: list[str]

    def metric(self, name: str, **labels: str) -> float:
        """The sum over series of `name` that carry `labels`, from the metrics endpoints."""
        total = 0.0
        for url in self.metrics_urls:
            with urllib.request.urlopen(url, timeout=ANSWER_LIMIT_S) as reply:
                text = reply.read().decode()
            for family in text_string_to_metric_families(text):
                for sample in family.samples:
                    if sample.name == name and labels.items() <= sample.labels.items():
                        total += sample.value
        return total

    @contextlib.contextmanager
    def stub(self, frontend: int = 0) -> Iterator[inference_pb2_grpc.InferenceServiceStub]:
        """A blocking client, for single calls."""
        with grpc.insecure_channel(self.addresses[frontend]) as channel:
            yield inference_pb2_grpc.InferenceServiceStub(channel)

    def load(self, frontend: int = 0) -> pb.GetLoadResponse:
        """Waits for a scheduler that is away for a moment: it was just started again, or the machine is busy."""
        limit = time.monotonic() + ANSWER_LIMIT_S
        while True:
            try:
                with self.stub(frontend) as stub:
                    return stub.GetLoad(pb.GetLoadRequest(), timeout=ANSWER_LIMIT_S)
            except grpc.RpcError as error:
                if error.code() is not grpc.StatusCode.UNAVAILABLE or time.monotonic() > limit:
                    raise
            time.sleep(0.02)

    def wait_idle(self, limit_s: float = 60.0) -> pb.GetLoadResponse:
        """The load once nothing runs or waits and every block is free or cached."""
        limit = time.monotonic() + limit_s
        while True:
            load = self.load()
            if load.num_running == load.num_waiting == load.blocks_used == 0:
                return load
            assert time.monotonic() < limit, f"not idle after {limit_s} s: {load}"
            time.sleep(0.02)


class Serve(Answering):
    """One `stepwire serve`: started on entry, drained on exit."""

    def __init__(
        self,
        folder: Path,
        *args: str,
        frontends: int = 1,
        env: dict[str, str] | None = None,
        output: Path | None = None,
    ):
        """`output`: where it writes instead of a log file in `folder`."""
        self.ready_file = folder / "ready.json"
        self.log_path = output or folder / "serve.log"
        self.port = free_port(frontends)
        self.command = [
            *(sys.executable, "-m", "scheduler_svc.cli", "serve"),
            *("--port", str(self.port), "--frontends", str(frontends)),
            *("--metrics-port", str(free_port()), "--ready-file", str(self.ready_file)),
            *args,
        ]
        self.env = {**os.environ, **(env or {})}

    def __enter__(self) -> "Serve":
        self.log = self.log_path.open("wb")
        self.process = subprocess.Popen(self.command, stdout=self.log, stderr=subprocess.STDOUT, env=self.env)
        limit = time.monotonic() + START_LIMIT_S
        while not self.ready_file.exists():
            if self.process.poll() is not None:
                raise AssertionError(f"serve ended with {self.process.returncode}:\n{self.output()}")
            if time.monotonic() > limit:
                self.process.kill()
                raise AssertionError(f"serve was not ready after {START_LIMIT_S} s:\n{self.output()}")
            time.sleep(0.02)
        return self

    def __exit__(self, *_: object) -> None:
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGTERM)
            try:
                self.process.wait(STOP_LIMIT_S)
            except subprocess.TimeoutExpired:
                self.process.kill()
                self.process.wait()
                raise AssertionError(f"serve did not drain within {STOP_LIMIT_S} s:\n{self.output()}") from None
        self.log.close()

    def output(self) -> str:
        return self.log_path.read_text(errors="replace")

    @property
    def ready(self) -> dict:
        return json.loads(self.ready_file.read_text())

    @property
    def addresses(self) -> list[str]:  # type: ignore[override]
        return self.ready["grpc"]

    @property
    def metrics_urls(self) -> list[str]:  # type: ignore[override]
        return [self.ready["metrics"]]

    def runtime_sockets(self) -> list[str]:
        """Paths of the Unix sockets that the scheduler listens on."""
        scheduler = self.ready["pids"]["scheduler"]
        listing = Path("/proc/net/unix").read_text().splitlines()[1:]
        inodes = {os.stat(f"/proc/{scheduler}/fd/{fd}").st_ino for fd in os.listdir(f"/proc/{scheduler}/fd")}
        fields = [line.split() for line in listing]
        listening = {f[7] for f in fields if len(f) > 7 and int(f[6]) in inodes and f[3] == "00010000"}
        return sorted(path for path in listening if path.startswith("/"))


@dataclass
class Answer:
    """One finished stream, choice 0."""

    token_ids: list[int] = field(default_factory=list)
    text: str = ""
    finish_reason: int = 0
    usage: pb.Usage | None = None
    num_messages: int = 0


def generate_all(addresses: list[str], requests: list[pb.GenerateRequest]) -> list[Answer]:
    """Sends every request at once, request i to address i modulo their number; returns the answers in order."""

    async def run() -> list[Answer]:
        channels = [grpc.aio.insecure_channel(address) for address in addresses]
        stubs = [inference_pb2_grpc.InferenceServiceStub(channel) for channel in channels]
        try:
            return await asyncio.gather(*(collect(stubs[i % len(stubs)], r) for i, r in enumerate(requests)))
        finally:
            await asyncio.gather(*(channel.close() for channel in channels))

    return asyncio.run(run())


async def collect(stub: inference_pb2_grpc.InferenceServiceStub, request: pb.GenerateRequest) -> Answer:
    answer = Answer()
    async for message in stub.Generate(request):
        answer.num_messages += 1
        answer.token_ids.extend(message.token_ids)
        answer.text += message.text
        if message.finish_reason:
            answer.finish_reason = message.finish_reason
            answer.usage = message.usage
    return answer


def greedy(prompt: "str | list[int]", max_tokens: int, *, ignore_eos: bool = False) -> pb.GenerateRequest:
    request = pb.GenerateRequest(
        sampling=pb.SamplingParams(temperature=0.0),
        stopping=pb.StoppingCriteria(max_tokens=max_tokens, ignore_eos=ignore_eos),
    )
    if isinstance(prompt, str):
        request.text = prompt
    else:
        request.token_ids.ids.extend(prompt)
    return request
