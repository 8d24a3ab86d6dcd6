"""Starts a gateway as a user does, waits until it has its workers, and ends it. Knows nothing of what it speaks."""

import http.client
import json
import signal
import subprocess
import time
import urllib.error
import urllib.request
from collections.abc import Callable
from pathlib import Path
from typing import Any

from prometheus_client.parser import text_string_to_metric_families

# For what a busy machine may take; nothing is measured with them.
START_LIMIT_S = 180.0
ANSWER_LIMIT_S = 60.0
STOP_LIMIT_S = 10.0


class Gateway:
    """One process: started on entry, ready when `is_ready` says so, ended on exit."""

    def __init__(
        self,
        command: list[str],
        port: int,
        log_path: Path,
        is_ready: Callable[["Gateway"], bool],
        env: dict[str, str] | None = None,
        metrics_url: str = "",
    ):
        self.command = command
        self.metrics_url = metrics_url
        self.port = port
        self.log_path = log_path
        self._is_ready = is_ready
        self._env = env

    def __enter__(self) -> "Gateway":
        self._log = self.log_path.open("wb")
        self.process = subprocess.Popen(self.command, stdout=self._log, stderr=subprocess.STDOUT, env=self._env)
        limit = time.monotonic() + START_LIMIT_S
        while not self._answers():
            if self.process.poll() is not None or time.monotonic() > limit:
                self.__exit__()
                raise AssertionError(f"{self.command[0]} is not ready:\n{self.output()[-3000:]}")
            time.sleep(0.05)
        return self

    def _answers(self) -> bool:
        try:
            return self._is_ready(self)
        except (OSError, http.client.HTTPException):
            return False

    def __exit__(self, *_: object) -> None:
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGTERM)
            try:
                self.process.wait(STOP_LIMIT_S)
            except subprocess.TimeoutExpired:
                self.process.kill()
                self.process.wait()
        self._log.close()

    def output(self) -> str:
        return self.log_path.read_text(errors="replace")

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def get(self, path: str) -> Any:
        with urllib.request.urlopen(self.url + path, timeout=ANSWER_LIMIT_S) as reply:
            return json.loads(reply.read())

    def metric(self, name: str) -> list[float]:
        """Its values, of every series, in order of their size."""
        with urllib.request.urlopen(self.metrics_url, timeout=ANSWER_LIMIT_S) as reply:
            families = list(text_string_to_metric_families(reply.read().decode()))
        return sorted(sample.value for family in families for sample in family.samples if sample.name == name)

    def post(self, path: str, body: dict[str, Any], timeout_s: float = 120.0) -> tuple[int, dict[str, Any]]:
        """Status and answer, whatever the status."""
        request = urllib.request.Request(
            self.url + path, json.dumps(body).encode(), {"content-type": "application/json"}
        )
        try:
            with urllib.request.urlopen(request, timeout=timeout_s) as reply:
                return reply.status, json.loads(reply.read())
        except urllib.error.HTTPError as error:
            text = error.read().decode(errors="replace")
            return error.code, json.loads(text) if text.startswith("{") else {"error": text}

    def open_stream(self, path: str, body: dict[str, Any]) -> http.client.HTTPConnection:
        """A request whose answer has begun; closing the connection is the client going away."""
        connection = self.start(path, body)
        reply = connection.getresponse()
        assert reply.status == 200, reply.read()
        connection.reply = reply  # type: ignore[attr-defined]
        assert reply.readline()
        return connection

    def start(self, path: str, body: dict[str, Any]) -> http.client.HTTPConnection:
        """A request that was sent; nobody waits for its answer."""
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=ANSWER_LIMIT_S)
        connection.request("POST", path, json.dumps(body), {"content-type": "application/json"})
        return connection


def hang_up(connection: http.client.HTTPConnection) -> None:
    reply = getattr(connection, "reply", None)
    if reply is not None:
        reply.close()
    connection.close()


def until(condition: Callable[[], object], limit_s: float = 60.0) -> None:
    limit = time.monotonic() + limit_s
    while not condition():
        assert time.monotonic() < limit, "it did not come to pass"
        time.sleep(0.02)
