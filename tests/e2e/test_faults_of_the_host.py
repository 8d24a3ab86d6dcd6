"""Services that are told to end, break, or find a disk full and a log that nobody reads: streams go on all the same."""

import asyncio
import contextlib
import fcntl
import json
import os
import shutil
import signal
import textwrap
from pathlib import Path

import pytest

from tests.e2e.known_answers import LIMIT_S, SLOW, assert_clean, pids, requests, streams, until
from tests.e2e.process import EXECUTOR, FRONTEND, SCHEDULER, Process
from tests.e2e.server import Answering, Serve, free_port

SEED = 7_400
PIPE_BYTES = 4096


@pytest.fixture(scope="module")
def serve(tmp_path_factory, default_model):
    folder = tmp_path_factory.mktemp("serve")
    options = ("--model", str(default_model), "--backend", "simulated")
    with Serve(folder, *options, frontends=2, env=SLOW) as running:
        yield running


@pytest.mark.parametrize("part", ["executor", "scheduler", "frontend"])
async def test_a_service_that_is_told_to_end_under_load_drains_and_no_stream_fails(serve, part):
    before = pids(serve, part)
    async with streams(serve, requests(24, SEED)) as running:
        os.kill(before[0], signal.SIGTERM)
    assert [i for i, stream in enumerate(running) if not stream.is_exact] == []
    await until(lambda: pids(serve, part)[0] != before[0])
    name = "frontend-0" if part == "frontend" else part
    (line,) = [line for line in serve.output().splitlines() if line.startswith(name) and " died after " in line]
    assert "(exit status 0)" in line
    assert_clean(serve)


def full_pipe() -> tuple[int, Path]:
    """(reading end, path of the writing end) of a pipe that takes nothing more."""
    reading, writing = os.pipe()
    fcntl.fcntl(writing, fcntl.F_SETPIPE_SZ, PIPE_BYTES)
    os.set_blocking(writing, False)
    with contextlib.suppress(BlockingIOError):
        while True:
            os.write(writing, b"." * PIPE_BYTES)
    os.set_blocking(writing, True)
    return reading, Path(f"/proc/{os.getpid()}/fd/{writing}")


async def lose_an_executor(serve: Serve) -> None:
    """What makes every tier log."""
    before = pids(serve, "executor")
    async with streams(serve, requests(16, SEED + 1)) as running:
        os.kill(before[0], signal.SIGKILL)
    assert [i for i, stream in enumerate(running) if not stream.is_exact] == []
    await until(lambda: serve.load().executor_ready)


@pytest.mark.parametrize("sink", ["a pipe that nobody reads", "a full disk"])
async def test_serve_goes_on_when_its_log_cannot_be_written(tmp_path, default_model, sink):
    output = Path("/dev/full") if sink == "a full disk" else full_pipe()[1]
    options = ("--model", str(default_model), "--backend", "simulated", "--verbose")
    with Serve(tmp_path, *options, env=SLOW, output=output) as serve:
        await lose_an_executor(serve)
        # The disk is full for the ready file as well: it cannot be written again.
        serve.ready_file.unlink()
        shutil.rmtree(serve.ready_file.parent, ignore_errors=True)
    assert serve.process.returncode == 0


class Alone(Answering):
    """Three services without a supervisor, all of whose output goes to `output`."""

    def __init__(self, folder: Path, model: Path, output: Path):
        self.port = free_port()
        self.addresses = [f"127.0.0.1:{self.port}"]
        run = folder / "run"
        ends = ("--connect", f"ipc://{run}/executor.sock", "--connect-beat", f"ipc://{run}/beat.sock")
        self.scheduler = Process(folder, "s", *SCHEDULER, "--runtime-dir", run, output=output)
        simulated = ("--backend", "simulated", "--model", model)
        self.executors = [
            Process(folder, f"e{i}", *EXECUTOR, *simulated, *ends, env=SLOW, output=output) for i in (0, 1)
        ]
        connect = ("--connect", f"ipc://{run}/frontend.sock", "--port", self.port, "--model", model)
        self.frontend = Process(folder, "f", *FRONTEND, *connect, "--log-level", "debug", output=output)

    def is_ready(self) -> bool:
        try:
            return self.load().executor_ready
        except Exception:
            return False


async def test_services_alone_go_on_when_nobody_reads_their_logs(tmp_path, default_model):
    reading, output = full_pipe()
    alone = Alone(tmp_path, default_model, output)
    with alone.scheduler, alone.frontend, alone.executors[0] as first:
        await until(alone.is_ready)
        with alone.executors[1]:
            async with streams(alone, requests(16, SEED + 2)) as running:
                os.kill(first.pid, signal.SIGKILL)
            assert [i for i, stream in enumerate(running) if not stream.is_exact] == []
            alone.wait_idle()
    os.close(reading)


# The scheduler on a disk that is full after so many bytes a file.
ON_A_SMALL_DISK = """
    import resource, runpy, sys
    size = int(sys.argv.pop(1))
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, size))
    runpy.run_module("scheduler_svc", run_name="__main__", alter_sys=True)
"""


async def test_a_disk_that_fills_up_ends_the_journal_and_nothing_else(tmp_path, default_model):
    alone = Alone(tmp_path, default_model, tmp_path / "log")
    options = ("--runtime-dir", tmp_path / "run", "--journal", tmp_path / "journal")
    scheduler = Process(tmp_path, "small", "-c", textwrap.dedent(ON_A_SMALL_DISK), 8192, *options)
    with scheduler, alone.frontend, alone.executors[0]:
        await until(alone.is_ready)
        async with streams(alone, requests(16, SEED + 5), begun=False) as running:
            pass
        assert [i for i, stream in enumerate(running) if not stream.is_exact] == []
        alone.wait_idle()
    assert "journal_ended" in scheduler.output()
    assert (tmp_path / "journal").stat().st_size <= 8192


# A bug in the middle of service, by replacing one function of ours with one that fails.
BROKEN = {
    "scheduler": ("scheduler_svc.core.scheduler:Scheduler.plan", "scheduler_svc.__main__", SCHEDULER[1]),
    "executor": ("executor_svc.worker:Worker.execute", "executor_svc.__main__", EXECUTOR[1]),
}
LAUNCHER = """
    import importlib, sys
    module, _, path = sys.argv[1].partition(":")
    owner, _, name = path.partition(".")
    inner = getattr(importlib.import_module(module), owner)
    calls = []
    def broken(self, *args):
        calls.append(1)
        if len(calls) > 20:
            raise RuntimeError("a bug, and the words of a user")
        return original(self, *args)
    original = getattr(inner, name)
    setattr(inner, name, broken)
    main = importlib.import_module(sys.argv[2])
    arguments = sys.argv[3:]
    if hasattr(main, "run"):
        sys.exit(main.run(arguments))
    sys.exit(main.entry.run(main.app, "stepwire scheduler", arguments))
"""


@pytest.mark.parametrize("part", BROKEN)
async def test_a_bug_ends_the_process_with_one_line_and_costs_no_stream(tmp_path, default_model, part):
    target, main, _ = BROKEN[part]
    launch = ("-c", textwrap.dedent(LAUNCHER), target, main)
    alone = Alone(tmp_path, default_model, tmp_path / "log")
    run = tmp_path / "run"
    if part == "scheduler":
        broken = Process(tmp_path, "broken", *launch, "--runtime-dir", run)
        with alone.frontend, alone.executors[0]:
            with broken:
                await until(alone.is_ready)
                async with streams(alone, requests(8, SEED + 3)) as running:
                    await until(lambda: broken.popen.poll() is not None)
                    alone.scheduler.__enter__()
            assert [i for i, stream in enumerate(running) if not stream.is_exact] == []
            alone.scheduler.__exit__()
    else:
        ends = ("--connect", f"ipc://{run}/executor.sock", "--connect-beat", f"ipc://{run}/beat.sock")
        options = (*ends, "--backend", "simulated", "--model", default_model)
        broken = Process(tmp_path, "broken", *launch, *options, env=SLOW)
        with alone.scheduler, alone.frontend, broken:
            await until(alone.is_ready)
            async with streams(alone, requests(8, SEED + 3)) as running:
                await until(lambda: broken.popen.poll() is not None)
                alone.executors[0].__enter__()
            assert [i for i, stream in enumerate(running) if not stream.is_exact] == []
            alone.executors[0].__exit__()
    assert broken.popen.returncode == 70
    assert "Traceback" not in broken.output()
    assert len([line for line in broken.output().splitlines() if "CRITICAL" in line]) == 1


async def test_another_model_is_refused_by_name_on_both_sides(serve, tmp_path, default_model):
    other = tmp_path / "other"
    shutil.copytree(default_model, other, ignore=shutil.ignore_patterns("*.safetensors"))
    config = json.loads((other / "config.json").read_text())
    (other / "config.json").write_text(json.dumps(config | {"rope_theta": 1.0}))
    sockets = {Path(path).stem: path for path in serve.runtime_sockets()}
    ends = ("--connect", f"ipc://{sockets['executor']}", "--connect-beat", f"ipc://{sockets['beat']}")
    with Process(tmp_path, "e", *EXECUTOR, "--backend", "simulated", "--model", other, *ends) as executor:
        connect = ("--connect", f"ipc://{sockets['frontend']}", "--port", free_port(), "--model", other)
        with Process(tmp_path, "f", *FRONTEND, *connect) as frontend:
            await asyncio.to_thread(executor.popen.wait, LIMIT_S)
            await asyncio.to_thread(frontend.wait_until_it_says, "session_refused")
    assert executor.popen.returncode == 1
    (line,) = [line for line in executor.output().splitlines() if "refuses this executor" in line]
    assert "model fingerprint mismatch: this scheduler serves '" in line
    assert "model mismatch" in frontend.output()
    async with streams(serve, requests(4, SEED + 4), begun=False) as running:
        pass
    assert [i for i, stream in enumerate(running) if not stream.is_exact] == []
    assert_clean(serve)
