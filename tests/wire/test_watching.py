"""Snapshots and stories over real sockets."""

import asyncio

from scheduler_svc import snapshot
from tests.wire.cluster import SchedulerThread, collect, request
from tests.wire.peers import LIMIT_S, ExecutorThread, executor_hello
from tests.wire.test_service import Gate, opened, until


async def test_a_snapshot_is_the_truth_and_costs_nothing_unasked(tmp_path, monkeypatch):
    monkeypatch.setattr(snapshot, "MIN_INTERVAL_S", 3600.0)
    with SchedulerThread(tmp_path) as scheduler, ExecutorThread(tmp_path) as executor:
        first = executor.before_step = Gate(0)
        async with opened(tmp_path) as ours:
            await until(ours, lambda: ours.ready)
            streams = [ours.submit(request(f"r{i}", [7] * 9, 20, tenant="t")) for i in range(2)]
            await ours.load()  # the scheduler knows both before either has run
            gate = executor.before_step = Gate(6)
            first.opened.set()
            async with asyncio.timeout(LIMIT_S):
                while not gate.reached.is_set():  # noqa: ASYNC110 - set by another thread
                    await asyncio.sleep(0.01)
            assert scheduler.service._snapshots._made_at == -float("inf")
            seen = await ours.snapshot()
            assert (seen.epoch, seen.executor_ready, seen.draining) == (1, True, False)
            assert seen.device == "test"
            assert sorted(seen.running.request_ids) == ["r0", "r1"]
            assert list(seen.running.tenants) == ["t", "t"]
            assert list(seen.running.num_prompt_tokens) == [9, 9]
            assert len(seen.blocks.cells) == seen.blocks.total == 64
            assert seen.blocks.owned + seen.blocks.cached + seen.blocks.free == 64
            assert [frontend.num_sequences for frontend in seen.frontends] == [2]
            assert [one.serving for one in seen.executors] == [True]
            assert seen.totals.steps > 0
            assert seen.totals.step_s > 0
            assert sum(seen.time_to_first_token.counts) == 2
            # Asked again within the interval, the same one is told.
            again = await ours.snapshot()
            assert again == seen
            assert "submitted with 9 tokens" in (await ours.story("r0"))[0]
            assert await ours.story("nobody") == []
            gate.opened.set()
            await asyncio.gather(*(collect(stream) for stream in streams))


async def test_a_standby_is_told(tmp_path):
    with SchedulerThread(tmp_path), ExecutorThread(tmp_path), ExecutorThread(tmp_path, executor_hello()):
        async with opened(tmp_path) as ours, asyncio.timeout(LIMIT_S):
            while len(seen := (await ours.snapshot()).executors) < 2:  # noqa: ASYNC110 - nobody announces it
                await asyncio.sleep(0.05)
    assert [one.serving for one in seen] == [True, False]
