"""One child process: started, listened to, seen ready, stopped. It knows nothing of restarts or of the other children.

Invariants: a child is in a session of its own, so that Ctrl-C reaches only the supervisor; the kernel kills it when the
supervisor dies, however that happens; its ready file belongs to its present life.
"""

import asyncio
import ctypes
import logging
import os
import re
import signal
import time
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from scheduler_svc.supervisor import log_lines, ready

READY_POLL_S = 0.02
# What a child said before it died, when that was not shown as it came.
NUM_KEPT_LINES = 10
PR_SET_PDEATHSIG = 1
# How a service says why it cannot start: "stepwire executor: port 1 is taken", "error: ...".
LAST_WORDS = re.compile(r"(?:stepwire[\w -]*|error): (.+)", re.IGNORECASE)
_libc = ctypes.CDLL(None, use_errno=True)

Report = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class ChildSpec:
    """`command` makes the command line from the last ready report (empty at first): a frontend keeps its port so."""

    name: str
    part: str  # scheduler, executor or frontend
    command: Callable[[Report], list[str]]
    environ: Mapping[str, str]
    ready_file: Path
    stop_grace_s: float = 5.0


class Child:
    """`on_line` hears everything with `verbose`, else all but the routine, of which the last lines are kept."""

    def __init__(self, spec: ChildSpec, on_line: Callable[[str, str], None], *, verbose: bool = False):
        self.spec = spec
        self.routine_below = logging.NOTSET if verbose else logging.WARNING
        self.report: Report = {}
        self.was_ready = False  # in any of its lives
        self.is_ready = False
        self.last_line = ""
        self._on_line = on_line
        self._process: asyncio.subprocess.Process | None = None
        self._readers: list[asyncio.Task[None]] = []
        self._last_words = ""
        self._kept: deque[str] = deque(maxlen=NUM_KEPT_LINES)
        self._started = 0.0

    @property
    def pid(self) -> int | None:
        return self._process.pid if self._process else None

    @property
    def is_alive(self) -> bool:
        return self._process is not None and self._process.returncode is None

    @property
    def lived_s(self) -> float:
        return time.monotonic() - self._started

    async def spawn(self) -> None:
        self.spec.ready_file.unlink(missing_ok=True)
        self.is_ready = False
        self._last_words = self.last_line = ""
        self._kept.clear()
        self._started = time.monotonic()
        supervisor = os.getpid()
        self._process = await asyncio.create_subprocess_exec(
            *self.spec.command(self.report),
            stdin=asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
            env=dict(self.spec.environ),
            start_new_session=True,
            preexec_fn=lambda: _die_with(supervisor),
        )
        assert self._process.stdout is not None
        assert self._process.stderr is not None
        streams = (self._process.stdout, self._process.stderr)
        self._readers = [asyncio.create_task(self._listen(stream)) for stream in streams]

    async def wait_ready(self) -> bool:
        """True once it answers, False when it ended before."""
        while self.is_alive:
            report = ready.read(self.spec.ready_file)
            if report is not None and report.get("pid") == self.pid:
                self.report = report
                self.is_ready = self.was_ready = True
                self._say_last_words()
                return True
            await asyncio.sleep(READY_POLL_S)
        return False

    def sign_of_life(self) -> int | None:
        """Changes every second or so while it is well; None: this service gives none."""
        if not self.report.get("pulse"):
            return None
        try:
            return self.spec.ready_file.stat().st_mtime_ns
        except OSError:
            return None

    async def wait(self) -> int:
        """Its exit status, once everything that it said was heard; minus the signal when one ended it."""
        assert self._process is not None
        status = await self._process.wait()
        # A grandchild may hold the pipes open; what was written before the end is there at once.
        _, unfinished = await asyncio.wait(self._readers, timeout=1.0)
        for reader in unfinished:
            reader.cancel()
        self.is_ready = False
        return status

    def signal(self, number: signal.Signals) -> None:
        if self.is_alive:
            assert self._process is not None
            self._process.send_signal(number)

    def why(self, status: int) -> str:
        """One line about an end before it was ready."""
        if self._last_words:
            return self._last_words
        how = describe_status(status)
        return f"{self.spec.name} did not start ({how}){': ' + self.last_line if self.last_line else ''}"

    async def _listen(self, stream: asyncio.StreamReader) -> None:
        """Lines of any length; a line without an end counts when the stream ends."""
        rest = b""
        while chunk := await stream.read(1 << 16):
            *lines, rest = (rest + chunk).replace(b"\r\n", b"\n").split(b"\n")
            for line in lines:
                self._heard(line.decode(errors="replace").rstrip())
        if rest:
            self._heard(rest.decode(errors="replace").rstrip())

    def _heard(self, line: str) -> None:
        if not line:
            return
        if log_lines.is_routine(line, self.routine_below):
            self._kept.append(line)
            return
        # Without the frame that some tools draw around an error.
        if text := line.strip(" │╭╮╰╯─"):
            self.last_line = text
        # Held back while it may be the reason why serve ends: the operator then reads it once, as serve's last line.
        if not self.was_ready and (match := LAST_WORDS.fullmatch(line)):
            self._say_last_words()
            self._last_words = match[1]
            return
        self._on_line(self.spec.name, line)

    def say_kept_lines(self) -> None:
        """Something is wrong: now the routine may tell how it came about."""
        while self._kept:
            self._on_line(self.spec.name, self._kept.popleft())

    def _say_last_words(self) -> None:
        if self._last_words:
            self._on_line(self.spec.name, self._last_words)
            self._last_words = ""


def describe_status(status: int) -> str:
    if status >= 0:
        return f"exit status {status}"
    try:
        return signal.Signals(-status).name
    except ValueError:
        return f"signal {-status}"


def _die_with(supervisor: int) -> None:
    """Runs in the child before its program: the kernel kills it when the supervisor's main thread ends."""
    _libc.prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != supervisor:  # it died in between: nobody would send the signal
        os._exit(1)
