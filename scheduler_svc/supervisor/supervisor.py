"""Keeps a set of children alive, and ends them in order. It knows what to run from specs; who serves what it does not.

Each child has a keeper, a task that starts it, waits for its end and starts it again. A child that fails in its very
first start (a positive exit status) is not tried again: the fault is in what the operator asked. One that was killed,
or says that the fault was in its surroundings, is.
"""

import asyncio
import logging
import signal
import time
from collections.abc import Callable, Sequence

from scheduler_svc.errors import StartupError
from scheduler_svc.supervisor.child import Child, ChildSpec, describe_status
from scheduler_svc.supervisor.restart import RestartPolicy
from scheduler_svc.supervisor.silence import LOOK_EVERY_S, Silence

# sysexits' EX_TEMPFAIL: what the child needed was not there, it may be next time.
EXIT_TRY_AGAIN = 75
# Asked twice, a service does not wait for anybody; so far apart that the two are told apart.
HURRY_AFTER_S = 0.3


class KeepsDying(StartupError):
    """A child has used up its restarts. `part` is what it was."""

    def __init__(self, message: str, part: str):
        super().__init__(message)
        self.part = part


class Supervisor:
    """`on_change` is called when a child becomes ready, `on_death` with the name and pid of each that ended."""

    def __init__(
        self,
        specs: Sequence[ChildSpec],
        say: Callable[[str, str], None],
        *,
        on_change: Callable[[], None],
        on_death: Callable[[str, int], None] = lambda name, pid: None,
        policy: Callable[[], RestartPolicy] = RestartPolicy,
        silence_limit_s: float = 10.0,
        verbose: bool = False,
    ):
        self._silence_limit_s = silence_limit_s
        self._say = say
        self._on_change = on_change
        self._on_death = on_death
        self.children = [Child(spec, say, verbose=verbose) for spec in specs]
        self._policies = {child.spec.name: policy() for child in self.children}
        self._stopping = {child.spec.name: asyncio.Event() for child in self.children}
        self._keepers: dict[str, asyncio.Task[None]] = {}

    @property
    def all_ready(self) -> bool:
        return all(child.is_ready for child in self.children)

    def start(self) -> None:
        for child in self.children:
            self._keepers[child.spec.name] = asyncio.create_task(self._keep(child))

    async def run(self) -> None:
        """Until every child was asked to end; raises the StartupError of the first that cannot be kept alive."""
        await asyncio.gather(*self._keepers.values())

    async def stop(self, parts: Sequence[str], *, hurry: bool = False) -> bool:
        """Ends the children of `parts` one part after the other; False when one had to be killed. `hurry`: nothing can
        be finished any more, so nobody waits for it."""
        clean = True
        for child in self.children:
            # That the others go away is no news to those whose turn comes later.
            if child.spec.part in parts[1:] and child.routine_below:
                child.routine_below = logging.ERROR
        for part in parts:
            those = [child for child in self.children if child.spec.part == part]
            clean &= all(await asyncio.gather(*(self._stop(child, hurry) for child in those)))
        return clean

    def kill(self) -> None:
        for child in self.children:
            self._stopping[child.spec.name].set()
            child.signal(signal.SIGKILL)

    async def _keep(self, child: Child) -> None:
        name, stopping = child.spec.name, self._stopping[child.spec.name]
        while not stopping.is_set():
            was_ready = child.was_ready
            await child.spawn()
            if stopping.is_set():  # asked while it was being started: there was nobody to signal yet
                child.signal(signal.SIGKILL)
            if await child.wait_ready():
                if was_ready:
                    self._say(name, f"ready again after {child.lived_s:.1f} s")
                self._on_change()
            watch = asyncio.create_task(self._watch(child))
            status = await child.wait()
            watch.cancel()
            lived_s = child.lived_s
            assert child.pid is not None
            self._on_death(name, child.pid)
            if stopping.is_set():
                return
            delay_s = self._after_death(child, status, lived_s)
            try:
                await asyncio.wait_for(stopping.wait(), delay_s)
            except TimeoutError:
                continue

    def _after_death(self, child: Child, status: int, lived_s: float) -> float:
        """How long to wait before it is started again; raises when it should not be."""
        if not child.was_ready and status >= 0 and status != EXIT_TRY_AGAIN:
            raise StartupError(child.why(status))
        child.say_kept_lines()
        policy = self._policies[child.spec.name]
        delay_s = policy.died(time.monotonic(), lived_s)
        how = describe_status(status)
        if delay_s is None:
            times = f"{policy.max_restarts} restarts in {policy.window_s / 60:g} minutes"
            why = f"{child.spec.name} keeps dying ({how}; {times} did not help): see its last lines above"
            raise KeepsDying(why, child.spec.part)
        count = f"restart {policy.num_recent} of {policy.max_restarts}"
        self._say(child.spec.name, f"died after {lived_s:.1f} s ({how}); {count} in {delay_s:g} s")
        return delay_s

    async def _watch(self, child: Child) -> None:
        """Kills it when it is alive and shows no sign of it: stopped, or stuck beyond help."""
        silence = Silence(self._silence_limit_s)
        while not silence.look(time.monotonic(), child.sign_of_life()):  # noqa: ASYNC110 - silence is no event
            await asyncio.sleep(LOOK_EVERY_S)
        self._say(child.spec.name, f"no sign of life for {self._silence_limit_s:g} s: killed")
        child.signal(signal.SIGKILL)

    async def _stop(self, child: Child, hurry: bool) -> bool:
        name = child.spec.name
        self._stopping[name].set()
        child.signal(signal.SIGTERM)
        keeper = self._keepers.get(name)
        if keeper is None:
            return True
        if hurry:
            done, _ = await asyncio.wait([keeper], timeout=HURRY_AFTER_S)
            if not done:
                child.signal(signal.SIGTERM)
        done, _ = await asyncio.wait([keeper], timeout=child.spec.stop_grace_s)
        if not done:
            self._say(name, f"did not end within {child.spec.stop_grace_s:g} s: killed")
            child.signal(signal.SIGKILL)
            await asyncio.wait([keeper])
        return bool(done)
