"""One service of ours as a process of its own, without a supervisor: what containers run."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

LIMIT_S = 90.0

SCHEDULER = ("-m", "scheduler_svc")
EXECUTOR = ("-m", "executor_svc")
FRONTEND = ("-m", "scheduler_svc.frontend")


# PR_SET_PDEATHSIG in a program of its own: with a preexec_fn, Python would fork, which gRPC's threads do not bear.
DIES_WITH_ITS_PARENT = "import ctypes, os, sys; ctypes.CDLL(None).prctl(1, 9); os.execv(sys.executable, sys.argv[1:])"


def mortal(*args: object) -> list[str]:
    """`python ARGS`, killed by the kernel when the thread that started it ends: no test leaves a process behind."""
    return [sys.executable, "-I", "-S", "-c", DIES_WITH_ITS_PARENT, sys.executable, *map(str, args)]


class Process:
    """Runs `python ARGS` from entry to exit, where it gets SIGTERM and time to end; its output goes to a file."""

    def __init__(
        self, folder: Path, name: str, *args: object, env: dict[str, str] | None = None, output: Path | None = None
    ):
        self.log_path = output or folder / f"{name}.log"
        self._command = mortal(*args)
        self._env = {**os.environ, **(env or {})}

    def __enter__(self) -> "Process":
        with self.log_path.open("ab") as log:
            self.popen = subprocess.Popen(self._command, stdout=log, stderr=log, env=self._env, start_new_session=True)
        return self

    def __exit__(self, *_: object) -> None:
        if self.popen.poll() is None:
            self.popen.send_signal(signal.SIGCONT)
            self.popen.terminate()
            try:
                self.popen.wait(LIMIT_S)
            except subprocess.TimeoutExpired:
                self.popen.kill()
                self.popen.wait()
                raise AssertionError(f"it did not end on SIGTERM:\n{self.output()}") from None

    @property
    def pid(self) -> int:
        return self.popen.pid

    def output(self) -> str:
        return self.log_path.read_text(errors="replace")

    def wait_until_it_says(self, text: str) -> None:
        limit = time.monotonic() + LIMIT_S
        while text not in self.output():
            assert self.popen.poll() is None, self.output()
            assert time.monotonic() < limit, self.output()
            time.sleep(0.02)
