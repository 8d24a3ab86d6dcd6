"""One chaos run: `stepwire serve` under streams with known answers while processes are killed and stopped at random.

Every process but the clients' and the supervisor is a victim. Afterwards every stream has ended as it may, the service
is idle and holds nothing, and no process is left.
"""

import asyncio
import os
import random
import signal
import time
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path

import psutil

from scheduler_svc.supervisor.options import OPTIONS
from tests.chaos.keeper import Keeper, executor_args
from tests.chaos.streams import Clients, Verdict
from tests.e2e.server import Serve

STEP_US = "3000"
# Not longer than a lease: what happens after it is tested alone.
LONGEST_STOP_S = 4.0
CALM_WITHIN_S = 15.0
IDLE_WITHIN_S = 30.0
# The run kills more often than any service should have to bear.
PATIENCE = tuple(
    word
    for name, value in (("restart-limit", "1000"), ("max-executor-deaths", "100"))
    if name in {option.name for option in OPTIONS}
    for word in (f"--{name}", value)
)
ZERO_AT_IDLE = (
    "vllm:num_requests_running",
    "vllm:num_requests_waiting",
    "stepwire_frontend_active_streams",
)


@dataclass(frozen=True)
class Plan:
    seconds: float
    seed: int
    num_streams: int = 64
    num_frontends: int = 2
    with_standby: bool = False
    # The run goes on until there were so many.
    min_kills: int = 0
    fault_every_s: float = 0.5
    kill_share: float = 0.75
    # Of the faults, those that wait until somebody is served again; the others fall into the recovery from the last.
    calm_share: float = 0.6


@dataclass
class Outcome:
    plan: Plan
    verdict: Verdict = field(default_factory=Verdict)
    faults: Counter[str] = field(default_factory=Counter)
    story: list[str] = field(default_factory=list)
    leaks: list[str] = field(default_factory=list)

    @property
    def num_kills(self) -> int:
        return sum(count for name, count in self.faults.items() if name.startswith("kill"))

    @property
    def is_good(self) -> bool:
        return not (self.verdict.wrong or self.leaks) and self.verdict.ends["exact"] > 0

    def report(self) -> str:
        verdict = self.verdict
        lines = [
            f"chaos: seed {self.plan.seed}, {self.plan.seconds:g} s, {self.plan.num_streams} streams at a time, "
            f"{self.plan.num_frontends} frontends{', a standby' if self.plan.with_standby else ''}",
            f"  faults   {self.num_kills} kills: {_counts(self.faults)}",
            f"  streams  {sum(verdict.ends.values())}: {_counts(verdict.ends)}",
            f"  tokens   {verdict.num_tokens}, every one as it should be; {verdict.num_resumes} resumptions",
        ]
        if not self.is_good:
            lines[-1] = f"  tokens   {verdict.num_tokens} right"
            lines += [f"  WRONG    {text}" for text in verdict.wrong[:20]]
            lines += [f"  LEAKED   {text}" for text in self.leaks]
            lines += ["  story", *(f"    {text}" for text in self.story)]
        return "\n".join(lines)


def run(plan: Plan, folder: Path, model: Path) -> Outcome:
    outcome = Outcome(plan)
    options = ("--model", str(model), "--backend", "simulated")
    environ = {"STEPWIRE_SIM_STEP_US": STEP_US}
    serve = Serve(folder, *options, *PATIENCE, "--verbose", frontends=plan.num_frontends, env=environ)
    with serve:
        supervisor = psutil.Process(serve.process.pid)
        if plan.with_standby:
            runtime_dir = Path(serve.runtime_sockets()[0]).parent
            args = executor_args(runtime_dir, *options)
            with Keeper(folder / "standby.log", *args, environ=os.environ | environ) as standby:
                asyncio.run(_disturb(plan, serve, standby, outcome))
        else:
            asyncio.run(_disturb(plan, serve, None, outcome))
        _look_for_leaks(serve, outcome)
        children = supervisor.children(recursive=True)
        serve.process.send_signal(signal.SIGTERM)
        status = serve.process.wait(60)
        if status != 0:
            outcome.leaks.append(f"serve ended with status {status}")
        _, alive = psutil.wait_procs(children, timeout=5)
        outcome.leaks += [f"process {process.pid} outlived serve" for process in alive]
    text = serve.output()
    if "Traceback" in text:
        outcome.leaks.append("a traceback:\n" + text[text.index("Traceback") - 500 :][:3000])
    return outcome


async def _disturb(plan: Plan, serve: Serve, standby: Keeper | None, outcome: Outcome) -> None:
    clients = Clients(serve.addresses, plan.num_streams, plan.seed)
    outcome.verdict = clients.verdict
    reading = asyncio.create_task(clients.run())
    faults = Faults(plan, serve, standby, clients, outcome)
    try:
        await faults.run()
    finally:
        faults.resume_all()
        clients.stop()
    await reading


class Faults:
    """Kills and stops at random moments; a stopped process goes on after a while, if nobody killed it meanwhile."""

    def __init__(self, plan: Plan, serve: Serve, standby: Keeper | None, clients: Clients, outcome: Outcome):
        self._plan, self._serve, self._standby = plan, serve, standby
        self._clients, self._outcome = clients, outcome
        self._draw = random.Random(plan.seed + 1)
        self._began_at = time.monotonic()
        self._stopped: dict[int, float] = {}

    async def run(self) -> None:
        plan = self._plan
        while self._age() < plan.seconds or (
            self._outcome.num_kills < plan.min_kills and self._age() < 9 * plan.seconds
        ):
            if self._draw.random() < plan.calm_share:
                await self._served()
            await self._pause(self._draw.expovariate(1 / plan.fault_every_s))
            if self._serve.process.poll() is not None:
                self._outcome.leaks.append("serve ended by itself:\n" + self._serve.output()[-2000:])
                return
            self._strike()

    async def _served(self) -> None:
        """Until somebody reads something; not for ever, because a fault may be what it takes."""
        before, limit = self._clients.num_messages, time.monotonic() + CALM_WITHIN_S
        while self._clients.num_messages == before and time.monotonic() < limit:
            await self._pause(0.05)

    async def _pause(self, seconds: float) -> None:
        """Whoever has stood still for long enough goes on meanwhile."""
        limit = time.monotonic() + seconds
        while (now := time.monotonic()) < limit:
            for pid in [pid for pid, until in self._stopped.items() if until <= now]:
                self._resume(pid)
            await asyncio.sleep(min(0.05, limit - now))

    def _age(self) -> float:
        return time.monotonic() - self._began_at

    def resume_all(self) -> None:
        for pid in list(self._stopped):
            self._resume(pid)

    def _strike(self) -> None:
        victims = self._victims()
        name = self._draw.choice(sorted(victims))
        pid = victims[name]
        kills = self._draw.random() < self._plan.kill_share
        stop_s = self._draw.uniform(0.1, LONGEST_STOP_S)
        try:
            if psutil.Process(pid).status() == psutil.STATUS_ZOMBIE:
                return
            os.kill(pid, signal.SIGKILL if kills else signal.SIGSTOP)
        except (psutil.NoSuchProcess, ProcessLookupError):
            return  # it is being started again
        if kills:
            self._stopped.pop(pid, None)
        else:
            self._stopped[pid] = time.monotonic() + stop_s
        what = "kill" if kills else "stop"
        self._outcome.faults[f"{what} {name.partition('-')[0]}"] += 1
        self._tell(f"{what} {name} (pid {pid}){'' if kills else f' for {stop_s:.1f} s'}")

    def _victims(self) -> dict[str, int]:
        pids = self._serve.ready["pids"]
        named = {"scheduler": pids["scheduler"], "executor": pids["executor"][0]}
        named |= {f"frontend-{i}": pid for i, pid in enumerate(pids["frontend"])}
        if self._standby is not None and self._standby.pid is not None:
            named["standby"] = self._standby.pid
        return named

    def _resume(self, pid: int) -> None:
        del self._stopped[pid]
        try:
            os.kill(pid, signal.SIGCONT)
        except ProcessLookupError:
            return
        self._tell(f"go on (pid {pid})")

    def _tell(self, text: str) -> None:
        self._outcome.story.append(f"{self._age():6.2f} s  {text}")


def _look_for_leaks(serve: Serve, outcome: Outcome) -> None:
    limit = time.monotonic() + IDLE_WITHIN_S
    try:
        serve.wait_idle(IDLE_WITHIN_S)
    except AssertionError as error:
        outcome.leaks.append(str(error))
        return
    while left := {name: serve.metric(name) for name in ZERO_AT_IDLE if serve.metric(name)}:
        if time.monotonic() > limit:
            outcome.leaks.append(f"gauges at idle: {left}")
            return
        time.sleep(0.2)


def _counts(counter: Counter[str]) -> str:
    return ", ".join(f"{count} {name}" for name, count in counter.most_common())
