"""The whole of `stepwire serve` in a process of its own, over children that are small scripts."""

import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

LIMIT_S = 120.0


class FakeServe:
    def __init__(self, folder: Path, kinds: str, options: tuple[str, ...], environ: dict[str, str]):
        self.folder = folder
        self.ready_file = folder / "ready.json"
        self.log = folder / "log"
        # Socket addresses must fit 108 bytes, which pytest's own folders leave little of.
        self.runtime = tempfile.TemporaryDirectory(prefix="sw-")
        values = {"port": "0", "metrics_port": "0", "ready_file": str(self.ready_file)}
        values |= dict(option.split("=") for option in options)
        command = [sys.executable, "-m", "tests.unit.supervisor.fake_serve", kinds]
        self.process = subprocess.Popen(
            [*command, *(f"{key}={value}" for key, value in values.items())],
            stdout=self.log.open("wb"),
            stderr=subprocess.STDOUT,
            env={**os.environ, "XDG_RUNTIME_DIR": self.runtime.name, **environ},
        )

    def until(self, condition: Callable[[], object]) -> object:
        """The condition's value once it is true."""
        deadline = time.monotonic() + LIMIT_S
        while time.monotonic() < deadline:
            with contextlib.suppress(FileNotFoundError):
                if value := condition():
                    return value
            if self.process.poll() is not None:
                break
            time.sleep(0.01)
        raise AssertionError(f"not within {LIMIT_S} s, or serve ended; the log:\n{self.text}")

    def ready(self) -> dict:
        return self.until(lambda: json.loads(self.ready_file.read_text()))

    @property
    def text(self) -> str:
        return self.log.read_text()

    def pids(self) -> list[int]:
        pids = self.ready()["pids"]
        return [pids["scheduler"], *pids["executor"], *pids["frontend"]]

    def end(self, number: signal.Signals = signal.SIGTERM) -> int:
        self.process.send_signal(number)
        return self.process.wait(LIMIT_S)


@pytest.fixture
def start(tmp_path) -> Iterator[Callable[..., FakeServe]]:
    started: list[FakeServe] = []

    def make(kinds: str = "", *options: str, **environ: str) -> FakeServe:
        started.append(FakeServe(tmp_path, kinds, options, environ))
        return started[-1]

    yield make
    for serve in started:
        serve.process.kill()
        serve.process.wait()
        serve.runtime.cleanup()


def is_alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_it_gets_ready_and_drains(start, number):
    serve = start("", "frontends=2")
    report = serve.ready()
    assert set(report) == {"grpc", "metrics", "pids"}
    assert len(report["grpc"]) == 2
    assert all(is_alive(pid) for pid in serve.pids())
    pids = serve.pids()
    assert serve.end(number) == 0
    assert not any(is_alive(pid) for pid in pids)
    assert not serve.ready_file.exists()
    assert os.listdir(serve.runtime.name) == []
    assert "ready in" in serve.text
    assert "drained" in serve.text


def test_frontends_end_first_then_the_scheduler_then_the_executor(start):
    serve = start("frontend=slow,scheduler=slow")
    serve.ready()
    assert serve.end() == 0
    byes = re.findall(r"^(\w+) +│ bye$", serve.text, re.MULTILINE)
    assert byes == ["frontend", "scheduler", "executor"]


def test_children_get_their_options_and_no_variables_of_ours(start):
    serve = start("", "dtype=int8", STEPWIRE_MAX_WAITING="9", STEPWIRE_CACHE="/c")
    serve.ready()
    serve.until(lambda: len(re.findall("variables", serve.text)) == 3)
    lines = dict(re.findall(r"^(\w+) +│ arguments (.*)$", serve.text, re.MULTILINE))
    assert "--model /models/fake" in lines["executor"]
    assert "--dtype int8" in lines["executor"]
    assert re.search(r"--connect ipc://\S+/executor.sock --connect-beat ipc://\S+/beat.sock", lines["executor"])
    assert "--max-waiting 9" in lines["scheduler"]
    assert re.search(r"--connect ipc://\S+/frontend.sock --host 127.0.0.1 --port 0", lines["frontend"])
    assert set(re.findall(r"│ variables (.*)", serve.text)) == {"PROMETHEUS_MULTIPROC_DIR"}


@pytest.mark.parametrize("part", ["scheduler", "executor", "frontend"])
def test_a_killed_child_comes_back_with_a_new_pid_in_the_ready_file(start, part):
    serve = start()
    before = serve.ready()
    victim = before["pids"][part] if part == "scheduler" else before["pids"][part][0]
    os.kill(victim, signal.SIGKILL)
    after = serve.until(lambda: (r := serve.ready())["pids"] != before["pids"] and r)
    assert after["grpc"] == before["grpc"]
    assert [p for p in after["pids"] if after["pids"][p] != before["pids"][p]] == [part]
    assert "SIGKILL" in serve.text
    with urllib.request.urlopen(after["metrics"], timeout=LIMIT_S) as reply:
        assert f'stepwire_deaths_total{{process="{part}"}} 1.0' in reply.read().decode()
    assert serve.end() == 0


def test_a_child_that_cannot_start_ends_serve_with_its_line(start):
    serve = start("executor=refuse")
    assert serve.process.wait(LIMIT_S) == 1
    assert serve.text.splitlines()[-1] == "stepwire: the weights are made of cheese: bring others"
    assert serve.text.count("cheese") == 1
    assert "Traceback" not in serve.text
    assert not serve.ready_file.exists()


def test_a_child_that_crashes_in_its_first_start_ends_serve(start):
    serve = start("scheduler=crash")
    assert serve.process.wait(LIMIT_S) == 1
    assert serve.text.splitlines()[-1] == "stepwire: scheduler did not start (exit status 1): RuntimeError: a bug"


def test_a_child_killed_in_its_first_start_is_tried_again(start):
    serve = start("executor=flaky")
    serve.ready()
    assert "executor   │ died after" in serve.text
    assert serve.end() == 0


@pytest.mark.parametrize("limit", [0, 2])
def test_one_death_more_than_the_restart_limit_ends_serve_and_nobody_waits(start, limit):
    serve = start("frontend=streaming", f"restart_limit={limit}", "restart_window=3600")
    pid = 0
    for _ in range(limit + 1):
        before = pid
        pid = serve.until(lambda old=before: (new := serve.ready()["pids"]["executor"][0]) != old and new)
        os.kill(pid, signal.SIGKILL)
    assert serve.process.wait(LIMIT_S) == 1
    lines = serve.text.splitlines()
    assert f"executor keeps dying (SIGKILL; {limit} restarts in 60 minutes did not help)" in lines[-1]
    assert "frontend   │ asked twice" in serve.text
    assert not serve.ready_file.exists()


def test_a_child_that_stands_still_is_killed_and_replaced(start):
    serve = start("executor=pulsing,scheduler=pulsing", "silence_limit=5")
    pids = serve.ready()["pids"]
    os.kill(pids["executor"][0], signal.SIGSTOP)
    serve.until(lambda: "executor   │ ready again after" in serve.text)
    assert "executor   │ no sign of life for 5 s: killed" in serve.text
    serve.until(lambda: serve.ready()["pids"]["executor"] != pids["executor"])  # the file follows the line
    after = serve.ready()["pids"]
    assert after["scheduler"] == pids["scheduler"], "it gave signs of life"
    assert after["frontend"] == pids["frontend"], "it never gave any"
    assert serve.end() == 0


def test_a_child_that_keeps_dying_ends_serve(start):
    serve = start("frontend=once", "restart_limit=5")
    os.kill(serve.ready()["pids"]["frontend"][0], signal.SIGKILL)
    assert serve.process.wait(LIMIT_S) == 1
    assert "frontend keeps dying" in serve.text.splitlines()[-1]
    delays = re.findall(r"restart \d of 5 in (\S+) s", serve.text)
    assert delays == ["0.1", "0.2", "0.4", "0.8", "1.6"]


def test_a_second_signal_ends_at_once(start):
    serve = start("frontend=deaf")
    pids = serve.pids()
    serve.process.send_signal(signal.SIGINT)
    serve.until(lambda: "draining" in serve.text)
    assert serve.end(signal.SIGINT) == 130
    assert not any(is_alive(pid) for pid in pids)


def test_a_deaf_child_is_killed_after_its_time_and_the_status_tells(start):
    serve = start("executor=deaf")
    serve.ready()
    assert serve.end() == 1
    assert "executor   │ did not end within 10 s: killed" in serve.text


def test_no_child_outlives_a_killed_supervisor(start):
    serve = start("frontend=deaf")
    pids = serve.pids()
    serve.process.kill()
    serve.process.wait(LIMIT_S)
    deadline = time.monotonic() + LIMIT_S
    while any(is_alive(pid) for pid in pids):
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_a_taken_port_is_refused_before_anything_starts(start):
    import socket

    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        serve = start("", f"port={port}")
        assert serve.process.wait(LIMIT_S) == 1
    (line,) = serve.text.splitlines()
    assert line == f"stepwire: cannot listen on 127.0.0.1:{port} (address already in use): choose another --port"


def test_a_ready_file_that_cannot_be_written_is_refused_before_anything_starts(start):
    serve = start("", "ready_file=/nonexistent/ready")
    assert serve.process.wait(LIMIT_S) == 1
    (line,) = serve.text.splitlines()
    assert line.startswith("stepwire: --ready-file /nonexistent/ready cannot be written (No such file or directory)")


def test_an_old_ready_file_is_gone_before_the_service_is_ready(start, tmp_path):
    (tmp_path / "ready.json").write_text("{}")
    serve = start("executor=refuse")
    assert serve.process.wait(LIMIT_S) == 1
    assert not serve.ready_file.exists()


def test_an_unknown_variable_is_refused_by_name(start):
    serve = start(STEPWIRE_COLOUR="blue")
    assert serve.process.wait(LIMIT_S) == 1
    (line,) = serve.text.splitlines()
    assert line.startswith("stepwire: unknown environment variable STEPWIRE_COLOUR")


def test_routine_lines_wait_for_trouble(start):
    serve = start()
    pids = serve.ready()["pids"]
    serve.until(lambda: serve.text.count("said it all") == 3 and serve.text.count("fake trouble") == 3)
    assert "fake routine" not in serve.text
    os.kill(pids["executor"][0], signal.SIGKILL)
    serve.until(lambda: "executor   │ ready again after" in serve.text)
    lines = serve.text.splitlines()
    routine = [number for number, line in enumerate(lines) if "fake routine" in line]
    assert len(routine) == 1
    assert "executor   │ died after" in lines[routine[0] + 1]


def test_verbose_shows_routine_lines(start):
    serve = start("", "verbose=1")
    serve.ready()
    serve.until(lambda: serve.text.count("fake routine") == 3)
    assert serve.end() == 0


def test_at_the_end_only_those_who_end_first_may_warn(start):
    serve = start()
    serve.ready()
    assert serve.end() == 0
    assert re.findall(r"^(\w+) +│ WARNING parting$", serve.text, re.MULTILINE) == ["frontend"]


def test_the_ready_line_says_how_to_go_on(start):
    serve = start()
    (address,) = serve.ready()["grpc"]
    serve.until(lambda: f"try: stepwire chat --address {address}    (Ctrl-C here ends the service)" in serve.text)
    assert f"s: fake on {address}, metrics on http://127.0.0.1:" in serve.text


def test_there_is_nothing_to_drain_before_it_is_ready(start):
    serve = start("executor=silent")
    serve.until(lambda: "executor   │ still loading" in serve.text)
    assert serve.end(signal.SIGINT) == 0
    assert "ending before it was ready" in serve.text
    assert "drain" not in serve.text
