"""Services that are told to end, break, or find a disk full and a log that nobody reads: streams go on all the same."""

import contextlib
import fcntl
import os
import shutil
import signal
from pathlib import Path

import pytest

from tests.e2e.known_answers import SLOW, assert_clean, pids, requests, streams, until
from tests.e2e.server import Serve

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


class Pipe:
    """A small pipe that nobody reads; `path` opens its writing end in any process."""

    def __init__(self) -> None:
        self._reading, self._writing = os.pipe()
        fcntl.fcntl(self._writing, fcntl.F_SETPIPE_SZ, PIPE_BYTES)
        self.path = Path(f"/proc/{os.getpid()}/fd/{self._writing}")

    def fill(self) -> None:
        # Through a description of its own: the one that the services share stays as they found it.
        own = os.open(self.path, os.O_WRONLY | os.O_NONBLOCK)
        with contextlib.suppress(BlockingIOError):
            while True:
                os.write(own, b".")
        os.close(own)

    def close(self) -> None:
        os.close(self._reading)
        os.close(self._writing)


async def lose_an_executor(serve: Serve) -> None:
    """What makes every tier log."""
    before = pids(serve, "executor")
    async with streams(serve, requests(16, SEED + 1)) as running:
        os.kill(before[0], signal.SIGKILL)
    assert [i for i, stream in enumerate(running) if not stream.is_exact] == []
    await until(lambda: serve.load().executor_ready)


@pytest.mark.parametrize("sink", ["a pipe that nobody reads", pytest.param("a full disk", marks=pytest.mark.slow)])
async def test_serve_goes_on_when_its_log_cannot_be_written(tmp_path, default_model, sink):
    pipe = Pipe()
    pipe.fill()
    output = Path("/dev/full") if sink == "a full disk" else pipe.path
    options = ("--model", str(default_model), "--backend", "simulated", "--verbose")
    with Serve(tmp_path, *options, env=SLOW, output=output) as serve:
        await lose_an_executor(serve)
        # The disk is full for the ready file as well: it cannot be written again.
        serve.ready_file.unlink()
        shutil.rmtree(serve.ready_file.parent, ignore_errors=True)
    assert serve.process.returncode == 0
    pipe.close()
