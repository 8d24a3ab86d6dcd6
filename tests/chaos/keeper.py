"""Keeps one process alive that `stepwire serve` does not start: whoever dies is started again, without back-off."""

import subprocess
import threading
import time
from collections.abc import Mapping
from pathlib import Path

from tests.e2e.process import mortal

# As long as serve waits after a first death.
RESTART_AFTER_S = 0.1
END_LIMIT_S = 30.0


class Keeper:
    """Runs `python ARGS` from entry to exit, again and again; `pid` is of its present life."""

    def __init__(self, log_path: Path, *args: object, environ: Mapping[str, str] | None = None):
        self._command = mortal(*args)
        self._log_path = log_path
        self._environ = environ
        self._is_over = False
        self._process: subprocess.Popen[bytes] | None = None
        self._thread = threading.Thread(target=self._keep, name="keeper", daemon=True)

    @property
    def pid(self) -> int | None:
        return self._process.pid if self._process is not None else None

    def output(self) -> str:
        return self._log_path.read_text(errors="replace")

    def __enter__(self) -> "Keeper":
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._is_over = True
        if self._process is not None and self._process.poll() is None:
            self._process.kill()
        self._thread.join(END_LIMIT_S)

    def _keep(self) -> None:
        with self._log_path.open("ab") as log:
            while not self._is_over:
                self._process = subprocess.Popen(
                    self._command,
                    stdout=log,
                    stderr=log,
                    env=self._environ,
                    start_new_session=True,
                )
                if self._is_over:
                    self._process.kill()
                self._process.wait()
                time.sleep(RESTART_AFTER_S)


def executor_args(runtime_dir: Path, *options: str) -> list[str]:
    """Of one more executor for the scheduler whose sockets are in `runtime_dir`."""
    ends = ("--connect", f"ipc://{runtime_dir}/executor.sock", "--connect-beat", f"ipc://{runtime_dir}/beat.sock")
    return ["-m", "executor_svc", *ends, *options]
