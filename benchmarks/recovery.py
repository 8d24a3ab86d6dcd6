"""What a kill costs those who read: how long their streams pause, and that not one token differs.

    python -m benchmarks.recovery [--executor-kills 100] [--scheduler-kills 30] [--standby-kills 100] [--json FILE]
    python -m benchmarks.recovery --cost

Waves of streams on the cpu backend in float32. In each wave one process gets SIGKILL at a random moment of prefill, of
decode, or of a drain (another service has just been told to end). The answers must be those of the undisturbed wave. A
pause is the longest wait for the next message that any client of the wave saw after the kill. Processes are started
again after 0.1 s, as `stepwire serve` does after a first death. The model is a tiny random one unless one is given.
"""

import argparse
import asyncio
import contextlib
import json
import os
import random
import signal
import statistics
import tempfile
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path

import grpc
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from benchmarks.config import quiet_threads
from benchmarks.recovery_cost import report_cost
from protos.stepwire.inference.v1 import inference_pb2 as pb
from protos.stepwire.inference.v1 import inference_pb2_grpc
from scheduler_svc.models.store import resolve_model
from tests.chaos.keeper import Keeper, executor_args
from tests.chaos.tiny import make_tiny_model
from tests.e2e.server import Answering, free_port, greedy

LIMIT_S = 300.0
PHASES = ("prefill", "decode", "decode", "decode", "drain")
DRAIN_HEAD_START_S = 0.05
# Streams are promised to survive within the drain's time and the frontend's resume limit; neither shall end first here.
DRAIN_TIMEOUT_S = 600
RESUME_LIMIT_S = 600
CHANNEL = (("grpc.initial_reconnect_backoff_ms", 50), ("grpc.max_reconnect_backoff_ms", 200))


@dataclass
class Reading:
    """One stream as its client saw it. `times`: of the submission and of every message, monotonic seconds."""

    token_ids: list[int] = field(default_factory=list)
    times: list[float] = field(default_factory=list)
    num_resumes: int = 0
    error: str = ""

    def longest_gap_after(self, moment: float) -> float:
        """Seconds; 0 when it had ended before."""
        pairs = zip(self.times, self.times[1:], strict=False)
        return max((after - before for before, after in pairs if after > moment), default=0.0)


@dataclass(frozen=True)
class Kill:
    victim: str
    phase: str
    pause_s: float
    num_resumes: int
    num_wrong: int


class Cluster(Answering):
    """Scheduler, frontend and one or two executors, each kept alive."""

    def __init__(self, folder: Path, model: Path, *, with_standby: bool):
        first = free_port(2)
        run = folder / "run"
        self.addresses = [f"127.0.0.1:{first}"]
        self.metrics_urls = [f"http://127.0.0.1:{first + 1}/metrics"]
        self.with_standby = with_standby
        executor = executor_args(run, *("--backend", "cpu", "--dtype", "float32", "--model", str(model)))
        executor += ["--max-num-batched-tokens", "128"]
        drain = ("--drain-timeout", DRAIN_TIMEOUT_S)
        scheduler = ("-m", "scheduler_svc", "--runtime-dir", run, "--metrics-port", first + 1, *drain)
        socket = f"ipc://{run}/frontend.sock"
        patience = (*drain, "--resume-limit", RESUME_LIMIT_S)
        frontend = ("-m", "scheduler_svc.frontend", "--connect", socket, "--port", first, "--model", model, *patience)
        self.scheduler = Keeper(folder / "scheduler.log", *scheduler)
        self.frontend = Keeper(folder / "frontend.log", *frontend)
        self.executors = [Keeper(folder / f"executor-{i}.log", *executor) for i in range(1 + with_standby)]

    @contextlib.contextmanager
    def running(self) -> Iterator["Cluster"]:
        with contextlib.ExitStack() as stack:
            for keeper in (self.scheduler, self.frontend, *self.executors):
                stack.enter_context(keeper)
            yield self

    async def ready(self) -> None:
        """Until a request would be computed at once, and whoever shall stand by does."""
        limit = time.monotonic() + LIMIT_S
        while not await asyncio.to_thread(self._is_ready):
            if time.monotonic() > limit:
                raise TimeoutError("the services are not ready: see their logs")
            await asyncio.sleep(0.05)

    def serving_pid(self) -> int:
        """Of the executor that serves: with a standby, only its log tells."""
        said = [keeper.output().rfind("epoch_started") for keeper in self.executors]
        if len(said) == 1:
            return _pid(self.executors[0])
        began = [_last_time(keeper.output(), "epoch_started") for keeper in self.executors]
        return _pid(self.executors[began.index(max(began))])

    def _is_ready(self) -> bool:
        try:
            return self.load().executor_ready and (
                not self.with_standby or self.metric("stepwire_executors_standby") == 1
            )
        except (grpc.RpcError, OSError):
            return False


def _pid(keeper: Keeper) -> int:
    assert keeper.pid is not None
    return keeper.pid


def _last_time(log: str, event: str) -> str:
    """The timestamp at the head of the last line that tells of `event`."""
    lines = [line for line in log.splitlines() if event in line]
    return lines[-1][:23] if lines else ""


def make_wave(args: argparse.Namespace, vocab_size: int) -> list[pb.GenerateRequest]:
    """Greedy and sampled ones; some begin as others do."""
    draw = random.Random(args.seed)
    prefix = [draw.randrange(vocab_size) for _ in range(32)]
    wave = []
    for i in range(args.streams):
        own = [draw.randrange(vocab_size) for _ in range(draw.randint(args.prompt // 2, args.prompt))]
        request = greedy(prefix + own if i % 3 == 0 else own, draw.randint(args.output // 2, args.output))
        request.stopping.ignore_eos = True
        if i % 2:
            request.sampling.temperature, request.sampling.seed = 1.0, draw.getrandbits(63)
        request.response.text = False
        wave.append(request)
    return wave


class Wave:
    """All requests at once; `disturb` runs beside them."""

    def __init__(self, address: str, requests: list[pb.GenerateRequest]):
        self._address = address
        self._requests = requests
        self.readings: list[Reading] = []
        self.has_tokens = asyncio.Event()

    async def run(self) -> list[Reading]:
        self.readings = [Reading() for _ in self._requests]
        async with grpc.aio.insecure_channel(self._address, options=CHANNEL) as channel:
            await channel.channel_ready()
            stub = inference_pb2_grpc.InferenceServiceStub(channel)
            pairs = zip(self._requests, self.readings, strict=True)
            await asyncio.wait_for(asyncio.gather(*(self._read(stub, *pair) for pair in pairs)), LIMIT_S)
        return self.readings

    async def _read(
        self, stub: inference_pb2_grpc.InferenceServiceStub, request: pb.GenerateRequest, reading: Reading
    ) -> None:
        reading.times.append(time.monotonic())
        try:
            async for message in stub.Generate(request):
                reading.times.append(time.monotonic())
                reading.token_ids.extend(message.token_ids)
                self.has_tokens.set()
                if message.finish_reason:
                    reading.num_resumes = message.usage.num_resumes
        except grpc.RpcError as error:
            reading.error = f"{error.code().name}: {error.details()}"


@dataclass(frozen=True)
class Undisturbed:
    answers: list[list[int]]
    first_token_s: float
    seconds: float
    longest_gap_s: float


async def undisturbed(cluster: Cluster, requests: list[pb.GenerateRequest]) -> Undisturbed:
    """The second of two equal waves, when everything is warm."""
    both = []
    for _ in range(2):
        await cluster.ready()
        began = time.monotonic()
        readings = await Wave(cluster.addresses[0], requests).run()
        both.append([reading.token_ids for reading in readings])
        assert not any(reading.error for reading in readings), [reading.error for reading in readings]
    assert both[0] == both[1], "two undisturbed waves differ: nothing can be compared with them"
    return Undisturbed(
        both[1],
        first_token_s=min(reading.times[1] for reading in readings) - began,
        seconds=max(reading.times[-1] for reading in readings) - began,
        longest_gap_s=max(reading.longest_gap_after(began) for reading in readings),
    )


async def kill_once(
    cluster: Cluster, requests: list[pb.GenerateRequest], normal: Undisturbed, victim: str, phase: str, at: float
) -> Kill:
    """`at`: 0 to 1, the moment within the phase."""
    await cluster.ready()
    wave = Wave(cluster.addresses[0], requests)
    reading = asyncio.create_task(wave.run())
    if phase == "prefill":
        await asyncio.sleep(at * normal.first_token_s)
    else:
        await wave.has_tokens.wait()
        await asyncio.sleep(at * 0.8 * (normal.seconds - normal.first_token_s))
    if phase == "drain":
        drained = cluster.scheduler if victim == "executor" else cluster.frontend
        os.kill(_pid(drained), signal.SIGTERM)
        await asyncio.sleep(DRAIN_HEAD_START_S)
    moment = time.monotonic()
    os.kill(cluster.serving_pid() if victim == "executor" else _pid(cluster.scheduler), signal.SIGKILL)
    readings = await reading
    wrong = [r.error or "other tokens" for r, a in zip(readings, normal.answers, strict=True) if r.token_ids != a]
    for text in wrong:
        print(f"WRONG after a kill of the {victim} in {phase}: {text}")
    return Kill(
        victim,
        phase,
        pause_s=max(r.longest_gap_after(moment) for r in readings),
        num_resumes=max(r.num_resumes for r in readings),
        num_wrong=len(wrong),
    )


async def campaign(
    cluster: Cluster, requests: list[pb.GenerateRequest], victim: str, count: int, seed: int, bar: Progress
) -> tuple[Undisturbed, list[Kill]]:
    normal = await undisturbed(cluster, requests)
    draw = random.Random(seed)
    title = f"{victim}{' with a standby' if cluster.with_standby else ''}"
    task = bar.add_task(title, total=count)
    kills: list[Kill] = []
    with contextlib.suppress(asyncio.CancelledError):  # Ctrl-C: what was measured so far is worth its table
        while len(kills) < count:
            phase = PHASES[len(kills) % len(PHASES)]
            kills.append(await kill_once(cluster, requests, normal, victim, phase, draw.random()))
            bar.update(task, advance=1, description=f"{title}: last pause {kills[-1].pause_s:.2f} s")
            if not bar.console.is_terminal:
                print(kills[-1], flush=True)
    return normal, kills


def summarise(title: str, normal: Undisturbed, kills: list[Kill], num_streams: int) -> dict[str, object]:
    pauses = sorted(kill.pause_s for kill in kills if kill.num_resumes) or [0.0]
    num_tokens = len(kills) * sum(map(len, normal.answers))
    row: dict[str, object] = {
        "what": title,
        "kills": len(kills),
        "by_phase": {phase: sum(kill.phase == phase for kill in kills) for phase in dict.fromkeys(PHASES)},
        "that_hit_no_stream": sum(kill.num_resumes == 0 for kill in kills),
        "streams": len(kills) * num_streams,
        "tokens": num_tokens,
        "wrong_streams": sum(kill.num_wrong for kill in kills),
        "pause_p50_s": round(statistics.median(pauses), 3),
        "pause_p99_s": round(pauses[min(len(pauses) - 1, int(0.99 * len(pauses)))], 3),
        "pause_max_s": round(pauses[-1], 3),
        "undisturbed_longest_gap_s": round(normal.longest_gap_s, 3),
    }
    print(
        f"{title:28} {row['kills']:4} kills  {row['wrong_streams']} of {row['streams']} streams wrong  "
        f"pause p50 {row['pause_p50_s']:6.2f}  p99 {row['pause_p99_s']:6.2f}  max {row['pause_max_s']:6.2f} s  "
        f"(undisturbed {row['undisturbed_longest_gap_s']:.2f} s)",
        flush=True,
    )
    return row


def run(args: argparse.Namespace, folder: Path) -> dict[str, object]:
    model = args.model or make_tiny_model(folder)
    vocab_size = json.loads((model / "config.json").read_text())["vocab_size"]
    requests = make_wave(args, vocab_size)
    plans = [
        ("executor", args.executor_kills, False),
        ("executor", args.standby_kills, True),
        ("scheduler", args.scheduler_kills, False),
    ]
    rows, every = [], []
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, transient=True) as bar:
        for i, (victim, count, with_standby) in enumerate(plans):
            if not count:
                continue
            part = folder / f"part-{i}"
            part.mkdir()
            with Cluster(part, model, with_standby=with_standby).running() as cluster:
                normal, kills = asyncio.run(campaign(cluster, requests, victim, count, args.seed + i, bar))
            title = f"{victim} killed{', one stands by' if with_standby else ''}"
            rows.append(summarise(title, normal, kills, len(requests)))
            every += [{"standby": with_standby, **asdict(kill)} for kill in kills]
    return {"model": model.name, "streams": len(requests), "rows": rows, "kills": every}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--executor-kills", type=int, default=100)
    parser.add_argument("--scheduler-kills", type=int, default=30)
    parser.add_argument("--standby-kills", type=int, default=0, help="of the executor, while a second one stands by")
    parser.add_argument("--model", type=lambda name: resolve_model("") if name == "default" else Path(name))
    parser.add_argument("--streams", type=int, default=16)
    parser.add_argument("--prompt", type=int, default=200, help="tokens of the longest prompt")
    parser.add_argument("--output", type=int, default=100, help="tokens of the longest answer")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--cost", action="store_true", help="only: what recovery costs when nobody dies")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    quiet_threads()
    if args.cost:
        report = report_cost()
    else:
        with tempfile.TemporaryDirectory() as folder:
            report = run(args, Path(folder))
    if args.json:
        args.json.write_text(json.dumps(report, indent=1) + "\n")
    rows = report.get("rows", [])
    assert isinstance(rows, list)
    return int(any(row.get("wrong_streams") for row in rows))


if __name__ == "__main__":
    raise SystemExit(main())
