"""Executors that lie, hang, stand still or cannot be reached: an epoch ends, and every stream ends as it would have."""

import asyncio
import contextlib
import os
import signal
import time

import pytest
from grpc import insecure_channel
from grpc_health.v1 import health_pb2, health_pb2_grpc

from protos.stepwire.wire.v1 import step_pb2
from tests.e2e.known_answers import SLOW, VOCAB, Stream, assert_clean, requests, streams, until
from tests.e2e.proxy import TcpProxy
from tests.e2e.stage import STEP_TIMEOUT_S, Stage

SEED = 7_200
# A step may take two seconds here, and heartbeats be away for three: a short partition passes neither.
SHORT_S = 1.0
# Longer than the scheduler waits for a heartbeat (3 s) and than an executor waits for its scheduler (5 s).
BEYOND_THE_FENCE_S = 6.0


@pytest.fixture(scope="module")
def only_stage(tmp_path_factory, default_model):
    with Stage(tmp_path_factory.mktemp("stage"), default_model) as made:
        yield made


@pytest.fixture
async def stage(only_stage):
    """Nobody is left of the test before."""
    await until(lambda: not only_stage.load().executor_ready)
    return only_stage


def is_serving(stage: Stage) -> bool:
    with insecure_channel(stage.addresses[0]) as channel:
        reply = health_pb2_grpc.HealthStub(channel).Check(health_pb2.HealthCheckRequest())
    return reply.status == health_pb2.HealthCheckResponse.SERVING


def not_exact(running: list[Stream]) -> list[int]:
    return [i for i, stream in enumerate(running) if not stream.is_exact]


def with_tokens(result: step_pb2.StepResult, token_ids: bytes) -> step_pb2.StepResult:
    result.token_ids = token_ids
    return result


def with_field(result: step_pb2.StepResult, name: str, value: int) -> step_pb2.StepResult:
    setattr(result, name, value)
    return result


LIES = {
    "a token outside the vocabulary": lambda r: with_tokens(r, VOCAB.to_bytes(4, "little") + r.token_ids[4:]),
    "a token below zero": lambda r: with_tokens(r, b"\xff\xff\xff\xff" + r.token_ids[4:]),
    "a token too few": lambda r: with_tokens(r, r.token_ids[4:]),
    "a token too many": lambda r: with_tokens(r, r.token_ids + r.token_ids[:4]),
    "half a token": lambda r: with_tokens(r, r.token_ids[:-1]),
    "fewer rows": lambda r: with_field(r, "num_rows", r.num_rows - 1),
    "more stored tokens": lambda r: with_field(r, "num_stored_tokens", r.num_stored_tokens + 1),
    "a step that was not asked for": lambda r: with_field(r, "step_id", r.step_id + 1),
    "no message at all": lambda r: b"\xff" * 100,
}


@pytest.mark.parametrize("lie", LIES)
async def test_a_lie_ends_the_epoch_and_commits_nothing_of_that_step(stage, lie):
    with contextlib.ExitStack() as stack:
        liar = stack.enter_context(stage.thread(LIES[lie], after=12))
        await until(lambda: is_serving(stage))
        epoch = stage.load().epoch
        # Nobody ends before the lie, which comes in the thirteenth step, and who came after it waits for the next one.
        async with streams(stage, requests(8, SEED, prompt=60, low=30, high=50), begun=False) as running:
            await until(liar.has_lied.is_set)
            stack.enter_context(stage.thread())
        assert not_exact(running) == []
        assert stage.load().epoch == epoch + 1
        assert_clean(stage)


async def test_health_tells_of_a_kill_and_of_the_next_executor(stage):
    with stage.executor("first", env=SLOW) as first:
        await until(lambda: is_serving(stage))
        async with streams(stage, requests(8, SEED + 1)) as running:
            os.kill(first.pid, signal.SIGKILL)
            await until(lambda: not is_serving(stage))
            with stage.thread():
                await until(lambda: is_serving(stage))
                await asyncio.gather(*(stream.reading for stream in running))
        assert not_exact(running) == []
        assert_clean(stage)


async def test_a_step_that_never_ends_is_seen_by_its_age_while_heartbeats_go_on(stage):
    with stage.thread(lambda result: None, after=40):
        await until(lambda: is_serving(stage))
        with stage.thread():
            await until(lambda: stage.metric("stepwire_executors_standby") == 1)
            epoch = stage.load().epoch
            async with streams(stage, requests(8, SEED + 2)) as running:
                pass
            assert not_exact(running) == []
            assert stage.load().epoch == epoch + 1
            # On a machine that stands still its heartbeats, which come from this process, may be missed first.
            said = stage.scheduler.output()
            assert f"takes longer than {STEP_TIMEOUT_S:.1f} s" in said or "no heartbeat for" in said
            assert_clean(stage)


async def test_an_executor_that_stood_still_is_not_believed_afterwards(stage):
    with stage.executor("first", env=SLOW) as first:
        await until(lambda: is_serving(stage))
        with stage.thread():
            await until(lambda: stage.metric("stepwire_executors_standby") == 1)
            epoch = stage.load().epoch
            async with streams(stage, requests(8, SEED + 3)) as running:
                os.kill(first.pid, signal.SIGSTOP)
                await until(lambda: stage.load().epoch == epoch + 1)
                os.kill(first.pid, signal.SIGCONT)
            assert not_exact(running) == []
            # What it says after the pause is of another epoch; it stands by like any other.
            await until(lambda: stage.metric("stepwire_executors_standby") == 1)
            assert stage.load().epoch == epoch + 1
            assert_clean(stage)


@contextlib.contextmanager
def network(stage: Stage):
    """Two relays, of the step socket and of heartbeats, and an executor behind them."""
    with (
        TcpProxy(stage.executor_port) as steps,
        TcpProxy(stage.beat_port) as beats,
        stage.executor("remote", ports=(steps.port, beats.port), env=SLOW),
    ):
        yield steps, beats


async def test_a_partition_of_two_seconds_is_nothing_and_a_long_one_is_a_new_epoch(stage):
    with network(stage) as relays:
        await until(lambda: is_serving(stage))
        epoch = stage.load().epoch
        async with streams(stage, requests(8, SEED + 4)) as running:
            held_s = await partition(relays, SHORT_S)
        assert not_exact(running) == []
        # A machine that stood still meanwhile has made a long one of it.
        assert stage.load().epoch == epoch or held_s > 1.5 * SHORT_S
        epoch = stage.load().epoch
        assert_clean(stage)
        async with streams(stage, requests(8, SEED + 4)) as running:
            await partition(relays, BEYOND_THE_FENCE_S)
            await until(lambda: stage.load().epoch > epoch)
        assert not_exact(running) == []
        assert stage.load().epoch == epoch + 1
        assert_clean(stage)


async def partition(relays, seconds: float) -> float:
    """How long nothing passed, really."""
    began = time.monotonic()
    for relay in relays:
        relay.hold()
    await asyncio.sleep(seconds)
    for relay in relays:
        relay.release()
    return time.monotonic() - began


async def test_a_connection_that_is_cut_costs_an_epoch_and_no_token(stage):
    with network(stage) as relays:
        await until(lambda: is_serving(stage))
        epoch = stage.load().epoch
        async with streams(stage, requests(8, SEED + 5)) as running:
            for relay in relays:
                relay.cut()
            await until(lambda: stage.load().epoch > epoch)
        assert not_exact(running) == []
        assert stage.load().epoch == epoch + 1
        assert_clean(stage)
