"""What ends a request, a child or the whole service: poison, silence, the restart budget. Real processes."""

import asyncio
import contextlib
import os
import re
import signal
import subprocess
import sys
from collections.abc import AsyncIterator

import grpc
import numpy as np
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from tests.e2e.known_answers import ENDLESS, LIMIT_S, SLOW, assert_clean, drawn, pids, requests, streams, until
from tests.e2e.server import Serve

SEED = 7_777
# No innocent request of this seed holds or draws it.
POISON = 49_151


def options(model, *more: str) -> tuple[str, ...]:
    return ("--model", str(model), "--backend", "simulated", *more)


def health(serve: Serve, service: str = "") -> int:
    with grpc.insecure_channel(serve.addresses[0]) as channel:
        request = health_pb2.HealthCheckRequest(service=service)
        return health_pb2_grpc.HealthStub(channel).Check(request, timeout=LIMIT_S).status


@contextlib.asynccontextmanager
async def watched(serve: Serve) -> AsyncIterator[list[int]]:
    """Every state of health that a client is told, in order, as long as the body runs."""
    states: list[int] = []
    async with grpc.aio.insecure_channel(serve.addresses[0]) as channel:
        call = health_pb2_grpc.HealthStub(channel).Watch(health_pb2.HealthCheckRequest())

        async def note() -> None:
            async for told in call:
                states.append(told.status)  # noqa: PERF401 - it is read while more come

        noting = asyncio.create_task(note())
        try:
            yield states
        finally:
            call.cancel()
            await asyncio.gather(noting, return_exceptions=True)


def with_poison(count: int):
    made = requests(count, SEED, low=40, high=60)
    for request in made:
        assert POISON not in [*request.token_ids.ids, *drawn(request)]
    made[count // 2].token_ids.ids.insert(3, POISON)
    return made


@pytest.mark.parametrize("kind", ["kill", "nan"])
async def test_a_request_that_kills_every_executor_ends_and_the_others_live(tmp_path, default_model, kind):
    env = {"STEPWIRE_SIM_FAULT": f"{kind}:{POISON}"}
    with Serve(tmp_path, *options(default_model), frontends=2, env=env) as serve:
        async with streams(serve, with_poison(9), begun=False) as running:
            pass
        guilty = running.pop(4)
        assert guilty.error is not None
        assert guilty.error.code() == grpc.StatusCode.INTERNAL
        assert "executors died" in guilty.error.details()
        assert guilty.token_ids == []
        assert [i for i, stream in enumerate(running) if not stream.is_exact] == []
        assert 4 <= serve.load().epoch - 1 <= 5
        if kind == "nan":
            await until(lambda: serve.metric("stepwire_epochs_ended_total", reason="not_finite") >= 4)
            assert serve.metric("stepwire_deaths_total") == 0
        assert_clean(serve)


async def test_a_second_executor_takes_over_and_the_first_comes_back_to_stand_by(tmp_path, default_model):
    with Serve(tmp_path, *options(default_model, "--executors", "2"), env=SLOW) as serve:
        before = pids(serve, "executor")
        assert len(before) == 2
        await until(lambda: serve.metric("stepwire_executors_standby") == 1)
        epoch = serve.load().epoch
        async with streams(serve, requests(24, SEED + 1)) as running:
            for pid in before:  # one of the two computes
                os.kill(pid, signal.SIGKILL)
                await until(lambda: serve.load().executor_ready)
            await until(lambda: serve.load().epoch > epoch)
        assert [i for i, stream in enumerate(running) if not stream.is_exact] == []
        assert running.num_resumes >= 1
        await until(lambda: serve.metric("stepwire_executors_standby") == 1)
        await until(lambda: not set(before) & set(pids(serve, "executor")))
        assert_clean(serve)


async def test_beyond_the_restart_limit_everybody_is_told_and_the_service_ends(tmp_path, default_model):
    with Serve(tmp_path, *options(default_model, "--restart-limit", "1"), env=SLOW) as serve:
        async with streams(serve, requests(6, SEED + 1, low=ENDLESS, high=ENDLESS)) as running:
            first = pids(serve, "executor")
            os.kill(first[0], signal.SIGKILL)
            await until(lambda: pids(serve, "executor") != first)
            os.kill(pids(serve, "executor")[0], signal.SIGKILL)
        assert {stream.error.code() for stream in running if stream.error} == {grpc.StatusCode.UNAVAILABLE}
        assert all(stream.error for stream in running)
        assert await asyncio.to_thread(serve.process.wait, LIMIT_S) == 1
        assert (
            "executor keeps dying (SIGKILL; 1 restarts in 10 minutes did not help)" in serve.output().splitlines()[-1]
        )
        assert "Traceback" not in serve.output()


@pytest.mark.parametrize("part", ["executor", "scheduler"])
async def test_what_stands_still_for_good_is_replaced_and_health_says_so_meanwhile(tmp_path, default_model, part):
    with Serve(tmp_path, *options(default_model, "--silence-limit", "6"), env=SLOW) as serve:
        before = pids(serve, part)
        serving, not_serving = health_pb2.HealthCheckResponse.SERVING, health_pb2.HealthCheckResponse.NOT_SERVING
        async with watched(serve) as states, streams(serve, requests(8, SEED + 2, low=400, high=400)) as running:
            await until(lambda: states[-1:] == [serving])
            os.kill(before[0], signal.SIGSTOP)
            await until(lambda: not_serving in states)
            assert health(serve, "liveness") == health_pb2.HealthCheckResponse.SERVING
            live = await asyncio.to_thread(stepwire, "health", "--live", "--address", serve.addresses[0])
            assert (live.returncode, live.stdout) == (0, "SERVING\n")
            await until(lambda: pids(serve, part) != before)
            await until(lambda: states[-1] == serving)
        assert [i for i, stream in enumerate(running) if not stream.is_exact] == []
        assert "no sign of life for 6 s: killed" in serve.output()
        assert_clean(serve)


async def test_a_served_life_with_a_death_in_it_is_replayed(tmp_path, default_model):
    journal = tmp_path / "journal"
    made = requests(8, SEED + 3)
    made[0].request_id = "mine"
    with Serve(tmp_path, *options(default_model, "--journal", str(journal)), env=SLOW) as serve:
        before = pids(serve, "executor")
        # It stands still before they come: it has a plan with the first of them when it dies.
        os.kill(before[0], signal.SIGSTOP)
        async with streams(serve, made, begun=False) as running:
            await until(lambda: (load := serve.load()).num_running + load.num_waiting == len(made))
            os.kill(before[0], signal.SIGKILL)
        assert [i for i, stream in enumerate(running) if not stream.is_exact] == []
        await until(lambda: pids(serve, "executor") != before)
        assert_clean(serve)
    told = stepwire("replay", str(journal), "--story", "mine")
    assert told.returncode == 0, told.stderr
    assert re.search(r"^\d+ plans in 2 epochs are the same; ids are masked$", told.stdout, re.MULTILINE)
    assert "choice 0 lost its executor in row" in told.stdout
    assert "choice 0 finished LENGTH" in told.stdout
    assert "after plan 5 of epoch 2" in stepwire("replay", str(journal), "--until", "2:5").stdout
    data = journal.read_bytes()
    longest = max(made, key=lambda request: len(request.token_ids.ids))
    assert np.array(longest.token_ids.ids, "<i4").tobytes() not in data
    journal.write_bytes(data.replace(b"mine", b"ours"))  # breaks the frame's sum, and whole ones follow
    damaged = stepwire("replay", str(journal))
    assert damaged.returncode == 1
    assert "is damaged in the entry that begins at byte" in damaged.stderr
    journal.write_bytes(b"no journal")
    refused = stepwire("replay", str(journal))
    assert (refused.returncode, refused.stdout) == (1, "")
    assert refused.stderr == f"stepwire: {journal} is not a journal of this version\n"


def stepwire(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "scheduler_svc.cli", *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=LIMIT_S, check=False)
