"""What the operator sets at the door and for the length of steps has its effect in the running service."""

import asyncio

import numpy as np
import pytest

from protos.stepwire.wire.v1 import step_pb2
from scheduler_svc.errors import DeadlineExceeded, QueueFull
from tests.wire.cluster import SchedulerThread, collect, request
from tests.wire.peers import LIMIT_S, ExecutorThread, executor_hello, expected_output
from tests.wire.test_service import Gate, idle, opened, until


async def refusal(made, *what, **changes) -> QueueFull:
    with pytest.raises(QueueFull) as raised:
        await made.submit(request(*what, **changes)).read()
    assert raised.value.retry_after_s > 0
    return raised.value


async def test_a_tenant_fills_its_own_share_of_the_queue_and_no_more(tmp_path):
    with SchedulerThread(tmp_path, max_waiting_per_tenant=1, max_waiting_tokens_per_tenant=50):
        async with opened(tmp_path) as made:
            waiting = [made.submit(request(f"{tenant}1", [1], 3, tenant=tenant)) for tenant in "ab"]
            told = await refusal(made, "a2", [1], 3, tenant="a")
            assert told.message == "the tenant's queue is full: max_waiting_per_tenant is 1 requests"
            with ExecutorThread(tmp_path):
                for stream in waiting:
                    assert (await collect(stream))[0][0] == expected_output([1], 3)


async def test_who_would_wait_too_long_is_refused_at_once(tmp_path):
    hello = executor_hello(max_num_seqs=1)
    with SchedulerThread(tmp_path, max_wait_s=0.05), ExecutorThread(tmp_path, hello) as executor:
        async with opened(tmp_path) as made:
            await until(made, lambda: made.ready)
            gate = executor.before_step = Gate(0)
            early = [made.submit(request(f"r{i}", [1], 1)) for i in range(20)]
            await made.load()  # all of them are in the queue
            held = executor.before_step = Gate(12)
            gate.opened.set()
            async with asyncio.timeout(LIMIT_S):
                told = None
                while told is None:  # the longer nobody has a turn, the longer the next one is expected to wait
                    late = made.submit(request("late", [1], 1))
                    await made.load()
                    late.cancel()
                    try:
                        await late.read()
                    except QueueFull as refused:
                        told = refused
            assert "its turn would come in" in told.message
            assert told.message.endswith("max_wait is 0.05 s")
            assert told.retry_after_s > 0
            held.opened.set()
            for stream in early:
                assert (await collect(stream))[0][0] == expected_output([1], 1)
            await idle(made)


async def test_deadlines_pass_while_a_step_takes_for_ever(tmp_path):
    with SchedulerThread(tmp_path), ExecutorThread(tmp_path) as executor:
        async with opened(tmp_path) as made:
            await until(made, lambda: made.ready)
            gate = executor.before_step = Gate(0)
            live = made.submit(request("live", [1], 9))
            with pytest.raises(DeadlineExceeded):
                await collect(made.submit(request("late", [1, 2], 3, deadline_ms=50)))
            gate.opened.set()
            assert (await collect(live))[0][0] == expected_output([1], 9)


@pytest.mark.parametrize(("target_s", "longest"), [(None, 100), (0.02, 22)])
async def test_steps_are_kept_short_while_streams_run(tmp_path, target_s, longest):
    """A token takes a millisecond: twenty fit."""
    chunks: list[tuple[int, int]] = []  # with the rows of their step
    plans: list[step_pb2.StepPlan] = []
    hello = executor_hello(max_num_batched_tokens=200)
    with SchedulerThread(tmp_path, inter_token_target_s=target_s), ExecutorThread(tmp_path, hello) as executor:

        def timed(result: step_pb2.StepResult) -> step_pb2.StepResult:
            mine = np.frombuffer(plans[-1].prefill, "<i4")[1::2].tolist()
            chunks.extend((count, result.num_rows) for count in mine)
            result.forward_us = 1000 * (sum(mine) + result.num_rows - len(mine))
            return result

        def hold_at(gate: Gate) -> Gate:
            executor.before_step = lambda plan: (plans.append(plan), gate(plan))
            return gate

        executor.change_result = timed
        hold_at(Gate(-1))  # at none
        async with opened(tmp_path) as made:
            await until(made, lambda: made.ready)
            streams = [made.submit(request(f"r{i}", list(range(i + 1)), 60)) for i in range(0, 30, 10)]
            await asyncio.gather(*map(collect, streams))
            gate = hold_at(Gate(3))
            running = made.submit(request("running", [5], 100))
            assert await asyncio.to_thread(gate.reached.wait, LIMIT_S)
            chunks.clear()
            long = made.submit(request("long", list(range(500, 600)), 2))
            await made.load()  # the scheduler knows of it
            gate.opened.set()
            await collect(long)
            assert sum(count for count, _ in chunks) == 100
            assert {num_rows for _, num_rows in chunks} == {2}, "a stream runs beside it all the time"
            found = max(count for count, _ in chunks)
            assert found <= longest
            assert (found == 100) == (target_s is None)
            running.cancel()
            await idle(made)
