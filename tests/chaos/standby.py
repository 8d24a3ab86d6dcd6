"""Executors beside the supervisor's own: they load, connect and stand by. Whoever dies is started again."""

import subprocess
import sys
import threading
import time
from pathlib import Path

RESTART_AFTER_S = 0.2


class Standby:
    """Keeps one more executor of the same kind alive from entry to exit."""

    def __init__(self, runtime_dir: Path, log_path: Path, options: tuple[str, ...], environ: dict[str, str]):
        self._command = [
            *(sys.executable, "-m", "executor_svc"),
            *("--connect", f"ipc://{runtime_dir}/executor.sock", "--connect-beat", f"ipc://{runtime_dir}/beat.sock"),
            *options,
        ]
        self._log_path = log_path
        self._environ = environ
        self._is_over = False
        self._process: subprocess.Popen[bytes] | None = None
        self._keeper = threading.Thread(target=self._keep, name="standby", daemon=True)

    @property
    def pid(self) -> int | None:
        return self._process.pid if self._process is not None else None

    def __enter__(self) -> "Standby":
        self._keeper.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._is_over = True
        if self._process is not None and self._process.poll() is None:
            self._process.kill()
        self._keeper.join()

    def _keep(self) -> None:
        with self._log_path.open("ab") as log:
            while not self._is_over:
                self._process = subprocess.Popen(
                    self._command, stdout=log, stderr=log, env=self._environ, start_new_session=True
                )
                if self._is_over:
                    self._process.kill()
                self._process.wait()
                time.sleep(RESTART_AFTER_S)
