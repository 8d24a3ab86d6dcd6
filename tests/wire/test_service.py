"""The whole path over real sockets: sessions, the poll loop with the real core, executors that come and go."""

import asyncio
import contextlib
import random
import threading
import time
from collections.abc import AsyncIterator, Callable
from functools import partial

import numpy as np
import pytest

from protos.stepwire.wire.v1 import session_pb2, step_pb2
from scheduler_svc.errors import (
    AlreadyExists,
    DeadlineExceeded,
    InvalidArgument,
    QueueFull,
    RequestError,
    Unavailable,
)
from scheduler_svc.links.session import RETRY_SPREAD, SchedulerSession
from tests.wire.cluster import SchedulerThread, collect, request, session
from tests.wire.peers import (
    LIMIT_S,
    ExecutorThread,
    RawDealer,
    executor_hello,
    expected_output,
    next_token,
    raw_context,
)

SEED = 7


@contextlib.asynccontextmanager
async def opened(folder, **options) -> AsyncIterator[SchedulerSession]:
    """A session that has had its Welcome."""
    made = session(folder, **options)
    await made.start()
    try:
        await until(made, lambda: made.welcome is not None)
        yield made
    finally:
        await made.close()


async def until(made: SchedulerSession, condition: Callable[[], object]) -> None:
    """Waits for a change that makes `condition` true."""
    changed = asyncio.Event()
    made.on_change(changed.set)
    async with asyncio.timeout(LIMIT_S):
        while not condition():
            changed.clear()
            await changed.wait()


async def eventually(condition: Callable[[], object]) -> None:
    """Gives another thread time to make `condition` true."""
    async with asyncio.timeout(LIMIT_S):
        while not condition():  # noqa: ASYNC110 - nobody announces it
            await asyncio.sleep(0.01)


def counted(scheduler: SchedulerThread, link: str, count: int) -> bool:
    return scheduler.metric("stepwire_bad_frames_total", link=link) == count


async def idle(made: SchedulerSession) -> session_pb2.Load:
    async with asyncio.timeout(LIMIT_S):
        while True:
            load = await made.load()
            if load.num_running == load.num_waiting == load.blocks_owned == 0:
                return load
            await asyncio.sleep(0.01)


class Gate:
    """Lets an executor run a given number of steps, then holds it."""

    def __init__(self, steps: int) -> None:
        self.left = steps
        self.reached = threading.Event()
        self.opened = threading.Event()

    def __call__(self, plan: step_pb2.StepPlan) -> None:
        if self.left == 0:
            self.reached.set()
            assert self.opened.wait(LIMIT_S)
        else:
            self.left -= 1


def mixed(count: int) -> list[tuple[str, list[int], int]]:
    print(f"seed {SEED}")
    draw = random.Random(SEED)
    shared = [draw.randrange(1000) for _ in range(12)]
    requests = []
    for i in range(count):
        prompt = [draw.randrange(1000) for _ in range(draw.randint(1, 40))]
        requests.append((f"r{i}", shared + prompt if i % 3 == 0 else prompt, draw.randint(1, 40)))
    return requests


async def check_streams(sessions: list[SchedulerSession], requests: list[tuple[str, list[int], int]]) -> None:
    """Submits all at once, in turn on each session; every stream must equal the oracle."""
    streams = [sessions[i % len(sessions)].submit(request(*r)) for i, r in enumerate(requests)]
    answers = await asyncio.gather(*(collect(stream) for stream in streams))
    for (_, prompt, max_tokens), (tokens, ends) in zip(requests, answers, strict=True):
        assert tokens[0] == expected_output(prompt, max_tokens)
        assert ends[0].cause == session_pb2.FINISH_CAUSE_LENGTH
        assert ends[0].num_output_tokens == max_tokens


@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize("num_blocks", [24, 64])
async def test_many_streams_of_two_frontends_equal_the_oracle(tmp_path, depth, num_blocks):
    hello = executor_hello(num_blocks=num_blocks)
    with SchedulerThread(tmp_path, pipeline_depth=depth) as scheduler, ExecutorThread(tmp_path, hello):
        async with opened(tmp_path) as one, opened(tmp_path) as two:
            await check_streams([one, two], mixed(40))
            load = await idle(two)
            assert (load.num_frontends, load.executor_ready, load.blocks_total) == (2, True, num_blocks)
            assert one.num_live == two.num_live == 0
    assert scheduler.metric("stepwire_requests_total", finish_reason="length") == 40


async def test_requests_wait_for_the_first_executor(tmp_path):
    with SchedulerThread(tmp_path):
        async with opened(tmp_path) as made:
            assert not made.ready
            stream = made.submit(request("a", [1, 2, 3], 5))
            with ExecutorThread(tmp_path):
                tokens, _ = await collect(stream)
                assert tokens[0] == expected_output([1, 2, 3], 5)
                assert stream.started is not None
                assert made.ready
                assert made.welcome.geometry.vocab_size == 1000


async def test_choices_share_a_prompt_and_end_one_by_one(tmp_path):
    with SchedulerThread(tmp_path) as scheduler, ExecutorThread(tmp_path) as executor:
        async with opened(tmp_path) as made:
            gate = executor.before_step = Gate(8)
            stream = made.submit(request("a", [1, 2, 3], 30, num_choices=3))
            deltas = await stream.read()
            assert {delta.index for delta in deltas} <= {0, 1, 2}
            stream.cancel_choice(1)
            await made.load()  # the scheduler knows: one session's messages are in order
            gate.opened.set()
            tokens: dict[int, list[int]] = {0: [], 1: [], 2: []}
            while deltas:
                for delta in deltas:
                    tokens[delta.index] += delta.token_ids
                deltas = await stream.read()
            assert tokens[0] == tokens[2] == expected_output([1, 2, 3], 30)
            assert tokens[1] == tokens[0][: len(tokens[1])]
            assert len(tokens[1]) < 30
            await idle(made)
    assert scheduler.metric("stepwire_requests_total", finish_reason="stop") == 1


async def test_a_stop_token_ends_the_stream_and_is_named(tmp_path):
    prompt = [4, 5, 6]
    output = expected_output(prompt, 10)
    with SchedulerThread(tmp_path), ExecutorThread(tmp_path):
        async with opened(tmp_path) as made:
            stop = output[5].to_bytes(4, "little")
            tokens, ends = await collect(made.submit(request("a", prompt, 10, stop_token_ids=stop)))
            assert tokens[0] == output[: output.index(output[5]) + 1]
            assert (ends[0].cause, ends[0].stop_token_id) == (session_pb2.FINISH_CAUSE_STOP, output[5])


async def test_cancel_by_stream_by_id_and_by_another_frontend(tmp_path):
    with SchedulerThread(tmp_path), ExecutorThread(tmp_path) as executor:
        async with opened(tmp_path) as one, opened(tmp_path) as two:
            gate = executor.before_step = Gate(20)
            streams = [one.submit(request(f"r{i}", [i + 1], 60)) for i in range(3)]
            await streams[2].read()
            streams[0].cancel()
            streams[0].cancel()
            one.cancel_request("r1")
            two.cancel_request("r2")
            two.cancel_request("nobody")
            await asyncio.gather(one.load(), two.load())  # the scheduler knows of all of them
            gate.opened.set()
            for stream in streams:
                _, ends = await collect(stream)
                assert ends[0].cause == session_pb2.FINISH_CAUSE_CANCELLED
                stream.cancel()
            await idle(one)


async def test_refusals_reach_their_stream(tmp_path):
    with SchedulerThread(tmp_path, max_waiting=2), ExecutorThread(tmp_path) as executor:
        async with opened(tmp_path) as one, opened(tmp_path) as two:
            await until(one, lambda: one.ready)
            gate = executor.before_step = Gate(0)
            live = one.submit(request("live", [1], 3))
            bad: list[tuple[type[RequestError], session_pb2.Submit]] = [
                (AlreadyExists, request("live", [2], 3)),
                (InvalidArgument, request("a", [], 3)),
                (InvalidArgument, request("b", [1000], 3)),
                (InvalidArgument, request("c", [-1], 3)),
                (InvalidArgument, request("d", [1], 3, num_choices=17)),
                (InvalidArgument, request("e", [1] * 500, 3)),
                (InvalidArgument, request("", [1], 3)),
            ]
            await two.load()  # "live" is known: one session's messages are in order, and this one came later
            for kind, submit in bad:
                with pytest.raises(kind):
                    await two.submit(submit).read()
            gate.opened.set()
            assert (await collect(live))[0][0] == expected_output([1], 3)
            await idle(one)


async def test_a_deadline_passes_even_while_no_executor_is_there(tmp_path):
    with SchedulerThread(tmp_path):
        async with opened(tmp_path) as made:
            with pytest.raises(DeadlineExceeded):
                await collect(made.submit(request("late", [1, 2], 3, deadline_ms=1)))
            await idle(made)


async def test_a_full_queue_refuses_with_advice(tmp_path):
    with SchedulerThread(tmp_path, max_waiting=2):
        async with opened(tmp_path) as made:
            waiting = [made.submit(request(f"r{i}", [1], 3)) for i in range(2)]
            with pytest.raises(QueueFull) as raised:
                await made.submit(request("r3", [1], 3)).read()
            assert raised.value.retry_after_s > 0
            with ExecutorThread(tmp_path):
                await asyncio.gather(*(collect(stream) for stream in waiting))


async def test_those_refused_together_are_told_different_times(tmp_path):
    with SchedulerThread(tmp_path, max_waiting=1):
        async with opened(tmp_path) as made:
            waiting = made.submit(request("first", [1], 3))
            told = []
            for i in range(20):
                with pytest.raises(QueueFull) as raised:
                    await made.submit(request(f"r{i}", [1], 3)).read()
                told.append(raised.value.retry_after_s)
            assert len(set(told)) > 10
            assert max(told) <= min(told) * (1 + RETRY_SPREAD)
            waiting.cancel()


async def test_requests_whose_deadline_passes_in_the_queue_cost_no_prefill(tmp_path):
    """Behind a step that takes longer than all of them can wait."""
    blocked, release = threading.Event(), threading.Event()
    admitted: list[list[int]] = []

    def before_step(plan: step_pb2.StepPlan) -> None:
        admitted.extend(np.frombuffer(admit.token_ids, "<i4").tolist() for admit in plan.admit)
        blocked.set()
        assert release.wait(LIMIT_S)

    executor = ExecutorThread(tmp_path, executor_hello(max_num_seqs=1))
    executor.before_step = before_step
    with SchedulerThread(tmp_path), executor:
        async with opened(tmp_path) as made:
            first = made.submit(request("first", [1], 3))
            await eventually(blocked.is_set)
            late = [made.submit(request(f"late{i}", [2, i], 3, deadline_ms=1)) for i in range(100)]
            for stream in late:
                with pytest.raises(DeadlineExceeded):
                    await stream.read()
            release.set()
            tokens, _ = await collect(first)
            assert tokens[0] == expected_output([1], 3)
            assert admitted == [[1]]


# ---- executors come and go ---------------------------------------------------------------------------------------


async def test_every_stream_survives_the_loss_of_executors(tmp_path):
    with SchedulerThread(tmp_path) as scheduler:
        async with opened(tmp_path) as made:
            answers = asyncio.create_task(check_streams([made], mixed(20)))
            for steps in (0, 1, 7, 20):
                with ExecutorThread(tmp_path) as executor:
                    gate = executor.before_step = Gate(steps)
                    assert await asyncio.to_thread(gate.reached.wait, LIMIT_S)
                    executor.link.stop()
                    gate.opened.set()
            with ExecutorThread(tmp_path):
                await answers
            await idle(made)
    assert scheduler.metric("stepwire_epochs_ended_total", reason="connection") >= 4


@pytest.mark.parametrize(
    ("spoil", "reason"),
    [
        (lambda r: r.__setattr__("num_rows", r.num_rows + 1), "digest"),
        (lambda r: r.__setattr__("num_stored_tokens", 0), "digest"),
        (lambda r: r.__setattr__("token_ids", r.token_ids + b"\0\0\0\0"), "bad_result"),
        (lambda r: r.__setattr__("token_ids", r.token_ids[:-1]), "bad_result"),
        (lambda r: r.__setattr__("token_ids", b"\xff" * len(r.token_ids)), "bad_result"),
        (lambda r: r.__setattr__("step_id", r.step_id + 1), "bad_result"),
    ],
)
async def test_an_answer_that_does_not_fit_its_plan_ends_the_epoch_and_nothing_else(tmp_path, spoil, reason):
    with SchedulerThread(tmp_path) as scheduler, ExecutorThread(tmp_path) as executor:
        async with opened(tmp_path) as made:

            def change(result: step_pb2.StepResult) -> step_pb2.StepResult:
                if len(executor.epochs) == 1 and result.step_id == 5:
                    spoil(result)
                return result

            executor.change_result = change
            await check_streams([made], mixed(10))
            assert [begun.epoch for begun in executor.epochs] == [1, 2]
            assert scheduler.metric("stepwire_epochs_ended_total", reason=reason) == 1


async def test_a_fault_ends_the_epoch_and_the_same_executor_serves_the_next(tmp_path):
    with SchedulerThread(tmp_path) as scheduler, ExecutorThread(tmp_path) as executor:
        async with opened(tmp_path) as made:

            def change(result: step_pb2.StepResult) -> step_pb2.StepResult:
                if len(executor.epochs) == 1 and result.step_id == 4:
                    executor.link.fault("not a number", step_pb2.FAULT_KIND_NOT_FINITE)
                return result

            executor.change_result = change
            await check_streams([made], mixed(10))
            assert len(executor.epochs) == 2
            assert scheduler.metric("stepwire_epochs_ended_total", reason="not_finite") == 1


async def test_a_standby_takes_over(tmp_path):
    with SchedulerThread(tmp_path), ExecutorThread(tmp_path) as first:
        async with opened(tmp_path) as made:
            await until(made, lambda: made.ready)
            gate = first.before_step = Gate(5)
            answers = asyncio.create_task(check_streams([made], mixed(10)))
            assert await asyncio.to_thread(gate.reached.wait, LIMIT_S)
            with ExecutorThread(tmp_path) as second:
                first.link.stop()
                gate.opened.set()
                await answers
                assert len(second.epochs) == 1


async def test_a_scheduler_that_stood_still_blames_nobody_for_its_silence(tmp_path):
    """Its clock goes on by a minute between two turns: no heartbeat, no lease and no result came in it."""
    with SchedulerThread(tmp_path) as scheduler, ExecutorThread(tmp_path) as executor:
        async with opened(tmp_path) as made:
            gate = executor.before_step = Gate(5)
            stream = made.submit(request("a", [1, 2], 30))
            first = await stream.read()
            scheduler.service._clock = lambda: time.monotonic() + 60.0
            await made.load()
            gate.opened.set()
            tokens, ends = await collect(stream)
            assert first[0].token_ids + tokens[0] == expected_output([1, 2], 30)
            assert ends[0].num_resumes == 0
            assert len(executor.epochs) == 1
            assert scheduler.service._frontends.num_sessions == 1


async def test_the_wrong_model_ends_the_executor_with_one_line(tmp_path):
    with SchedulerThread(tmp_path), ExecutorThread(tmp_path):
        async with opened(tmp_path) as made:
            await until(made, lambda: made.ready)
            with ExecutorThread(tmp_path, executor_hello(fingerprint="f2")) as wrong:
                await asyncio.to_thread(wrong._thread.join, LIMIT_S)
            assert "'f1'" in str(wrong.error)
            assert "'f2'" in str(wrong.error)


# ---- schedulers come and go --------------------------------------------------------------------------------------


async def test_every_stream_survives_the_loss_of_schedulers(tmp_path):
    with ExecutorThread(tmp_path) as executor:
        async with contextlib.AsyncExitStack() as stack:
            scheduler = stack.enter_context(SchedulerThread(tmp_path))
            made = await stack.enter_async_context(opened(tmp_path))
            two = await stack.enter_async_context(opened(tmp_path))
            gate = executor.before_step = Gate(10)
            answers = asyncio.create_task(check_streams([made, two], mixed(20)))
            for _ in range(3):
                assert await asyncio.to_thread(gate.reached.wait, LIMIT_S)
                await asyncio.to_thread(scheduler.kill)
                held, gate = gate, Gate(10)
                executor.before_step = gate
                scheduler = stack.enter_context(SchedulerThread(tmp_path))
                held.opened.set()
            gate.left = -1
            gate.opened.set()
            await answers
            await idle(made)
            assert len({begun.boot_id for begun in executor.epochs}) == 4


async def test_a_cancel_that_no_scheduler_lived_to_hear_is_obeyed(tmp_path):
    async with contextlib.AsyncExitStack() as stack:
        scheduler = stack.enter_context(SchedulerThread(tmp_path))
        executor = stack.enter_context(ExecutorThread(tmp_path))
        made = await stack.enter_async_context(opened(tmp_path))
        gate = executor.before_step = Gate(4)
        stream = made.submit(request("a", [1, 2], 60))
        await stream.read()
        scheduler.kill()  # in this loop's own time: the session has not heard of it
        assert made._is_open
        made.cancel_request("a")
        stack.enter_context(SchedulerThread(tmp_path))
        gate.opened.set()
        _, ends = await collect(stream)
        assert ends[0].cause == session_pb2.FINISH_CAUSE_CANCELLED
        assert made.num_live == 0
        await until(made, lambda: made.ready)
        await idle(made)


async def test_a_request_waits_for_the_next_scheduler_and_no_longer_than_the_limit(tmp_path):
    async with contextlib.AsyncExitStack() as stack:
        scheduler = stack.enter_context(SchedulerThread(tmp_path))
        patient = await stack.enter_async_context(opened(tmp_path))
        hasty = await stack.enter_async_context(opened(tmp_path, resume_limit_s=0.5))
        await asyncio.to_thread(scheduler.kill)
        await until(patient, lambda: not patient._is_open)
        held = patient.submit(request("a", [1, 2], 4))
        await until(hasty, lambda: not hasty._is_open)
        with pytest.raises(Unavailable) as raised:
            await hasty.submit(request("b", [1, 2], 4)).read()
        assert raised.value.retry_after_s
        stack.enter_context(SchedulerThread(tmp_path))
        stack.enter_context(ExecutorThread(tmp_path))
        assert (await collect(held))[0][0] == expected_output([1, 2], 4)


async def test_submit_before_any_scheduler_is_unavailable(tmp_path):
    made = session(tmp_path)
    await made.start()
    with pytest.raises(Unavailable):
        made.submit(request("a", [1], 1))
    with pytest.raises(Unavailable):
        await made.load()
    await made.close()


async def test_a_frontend_that_leaves_takes_its_requests_with_it(tmp_path):
    with SchedulerThread(tmp_path), ExecutorThread(tmp_path) as executor:
        async with opened(tmp_path) as stays:
            gate = executor.before_step = Gate(20)
            async with opened(tmp_path) as leaves:
                mine = stays.submit(request("mine", [1], 40))
                theirs = leaves.submit(request("theirs", [2], 60))
                await theirs.read()
            with pytest.raises(Unavailable):
                await collect(theirs)
            gate.opened.set()
            assert (await collect(mine))[0][0] == expected_output([1], 40)
            assert (await idle(stays)).num_frontends == 1


# ---- drain and garbage -------------------------------------------------------------------------------------------


async def test_a_drain_finishes_what_runs_and_refuses_the_rest(tmp_path):
    with SchedulerThread(tmp_path) as scheduler, ExecutorThread(tmp_path) as executor:
        async with opened(tmp_path) as made:
            gate = executor.before_step = Gate(3)
            stream = made.submit(request("a", [1, 2], 30))
            first = await stream.read()
            scheduler.drain()
            await eventually(lambda: scheduler.service.is_draining)
            with pytest.raises(Unavailable) as raised:
                await made.submit(request("b", [3], 1)).read()
            assert raised.value.retry_after_s
            gate.opened.set()
            tokens, _ = await collect(stream)
            assert first[0].token_ids + tokens[0] == expected_output([1, 2], 30)
            await asyncio.to_thread(scheduler.join)


async def test_a_drain_ends_at_its_limit(tmp_path):
    with SchedulerThread(tmp_path, drain_timeout_s=0.2) as scheduler:
        async with opened(tmp_path) as made:
            made.submit(request("a", [1], 1))
            await made.load()
            scheduler.drain()
            await asyncio.to_thread(scheduler.join)


async def test_garbage_on_every_socket_is_counted_and_the_service_lives(tmp_path):
    garbage = [b"", b"\0" * 7, b"\xff" * 1000, b"cos\nsystem\n(S'true'\ntR.", random.Random(SEED).randbytes(4096)]
    with SchedulerThread(tmp_path) as scheduler, ExecutorThread(tmp_path):
        async with opened(tmp_path) as made:
            with raw_context() as context:
                for name in ("frontend", "executor", "beat"):
                    peer = RawDealer(context, f"ipc://{tmp_path}/{name}.sock", session_pb2.ToFrontend)
                    for frame in garbage:
                        peer.send(frame)
                    peer.socket.send_multipart([b"one", b"two", b"three"])
                await check_streams([made], mixed(5))
                for name in ("frontend", "executor", "beat"):
                    await eventually(partial(counted, scheduler, name, len(garbage) + 1))


async def test_metrics_tell_what_happened(tmp_path):
    prompt = list(range(20))
    with SchedulerThread(tmp_path) as scheduler, ExecutorThread(tmp_path):
        async with opened(tmp_path) as made:
            for name in ("a", "b"):
                await collect(made.submit(request(name, prompt, 10)))
            await idle(made)
            await eventually(lambda: scheduler.metric("stepwire_generation_tokens_total") == 20)
            metric = scheduler.metric
            assert metric("stepwire_generation_tokens_total") == 20
            assert metric("stepwire_prompt_tokens_total", source="cached") == 16
            assert metric("stepwire_prompt_tokens_total", source="computed") == 24
            load = await made.load()
            assert (load.prompt_tokens_cached_total, load.prompt_tokens_total) == (16, 40)
            assert metric("stepwire_time_to_first_token_seconds_count") == 2
            assert metric("stepwire_inter_token_seconds_count") == 18
            assert metric("stepwire_epoch") == metric("stepwire_executor_ready") == 1
            assert metric("stepwire_blocks", state="owned") == 0
            assert metric("stepwire_blocks", state="free") + metric("stepwire_blocks", state="cached") == 64
            assert metric("vllm:cache_config_info", block_size="4", num_gpu_blocks="64") == 1
            assert metric("stepwire_plan_bytes_count") == metric("stepwire_executor_step_seconds_count") > 0


def test_the_oracle_depends_on_every_token():
    assert next_token([1, 2, 3]) != next_token([2, 1, 3])
