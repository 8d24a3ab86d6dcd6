"""A frontend's session when the scheduler goes, and when another one comes that thinks otherwise of it."""

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import pytest

from scheduler_svc.errors import Unavailable
from scheduler_svc.links.frontends import FrontendLink
from scheduler_svc.links.session import SchedulerSession
from scheduler_svc.links.transport import BadFrames, Wire

LIMIT_S = 60.0


async def until(condition: Callable[[], bool]) -> None:
    limit = time.monotonic() + LIMIT_S
    while not condition():
        assert time.monotonic() < limit, "not in time"
        await asyncio.sleep(0.01)


@contextlib.asynccontextmanager
async def scheduler(folder: Path, boot_id: int, fingerprint: str) -> AsyncIterator[list[object]]:
    """Answers hellos and leases, and nothing else; what it was asked is in the list."""
    wire, asked = Wire(), []
    link = FrontendLink(wire, f"ipc://{folder}/frontend.sock", boot_id, BadFrames())
    link.welcome.model.fingerprint = fingerprint
    link.welcome.executor_ready = True

    async def answer() -> None:
        while True:
            asked.extend(link.receive(time.monotonic()))
            await asyncio.sleep(0.01)

    answering = asyncio.create_task(answer())
    try:
        yield asked
    finally:
        answering.cancel()
        await asyncio.gather(answering, return_exceptions=True)
        wire.close()


@contextlib.asynccontextmanager
async def session(folder: Path) -> AsyncIterator[SchedulerSession]:
    made = SchedulerSession(f"ipc://{folder}/frontend.sock", fingerprint="ours")
    await made.start()
    try:
        yield made
    finally:
        await made.close()


@pytest.fixture
def folder(tmp_path):
    tmp_path.chmod(0o700)
    return tmp_path


async def test_a_refusal_ends_with_the_scheduler_that_said_it(folder):
    async with session(folder) as ours:
        async with scheduler(folder, 1, "theirs"):
            await until(lambda: bool(ours.refused))
            assert "theirs" in ours.refused
            assert not ours.ready
        async with scheduler(folder, 2, "ours"):
            await until(lambda: ours.ready)
            assert ours.refused == ""


async def test_a_question_about_load_ends_with_the_session(folder):
    async with session(folder) as ours:
        async with scheduler(folder, 1, "ours") as asked:
            await until(lambda: ours.ready)
            question = asyncio.create_task(ours.load(timeout_s=600))
            await until(lambda: bool(asked))
        with pytest.raises(Unavailable, match="the scheduler is away"):
            await asyncio.wait_for(question, LIMIT_S)


async def test_a_scheduler_that_does_not_answer_is_named(folder):
    async with session(folder) as ours, scheduler(folder, 1, "ours"):
        await until(lambda: ours.ready)
        with pytest.raises(Unavailable, match=r"has not answered for 0\.1 s"):
            await ours.load(timeout_s=0.1)
