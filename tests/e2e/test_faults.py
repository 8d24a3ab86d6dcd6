"""Every process can be killed: streams pause, go on, and end with exactly the tokens they would have had."""

import asyncio
import contextlib
import os
import random
import signal

import grpc
import pytest

from protos.stepwire.inference.v1 import inference_pb2_grpc
from tests.e2e.known_answers import LIMIT_S, SLOW, VOCAB, anchor, assert_clean, drawn, pids, requests, streams, until
from tests.e2e.server import Serve, greedy

SEED = 7_071


@pytest.fixture(scope="module")
def serve(tmp_path_factory, default_model):
    """One service for all faults that it must survive; no child dies more often than its restart budget allows."""
    folder = tmp_path_factory.mktemp("serve")
    with Serve(folder, "--model", str(default_model), "--backend", "simulated", frontends=2, env=SLOW) as running:
        yield running


@pytest.fixture
def ending_serve(tmp_path, default_model):
    options = ("--model", str(default_model), "--backend", "simulated", "--verbose", "--drain-timeout", "120")
    with Serve(tmp_path, *options, frontends=2, env=SLOW) as running:
        yield running


@pytest.mark.parametrize(("part", "count"), [("executor", 64), ("scheduler", 32)])
async def test_a_kill_under_many_streams_changes_no_token(serve, part, count):
    before, epoch = pids(serve, part), serve.load().epoch
    async with streams(serve, requests(count, SEED)) as running:
        os.kill(before[0], signal.SIGKILL)
        await until(lambda: pids(serve, part) != before)
        # A new scheduler has taken everything over once it answers; of an executor's death the old one has heard then.
        await until(lambda: all(serve.load(i).executor_ready for i in range(2)))
        await until(lambda: part == "scheduler" or serve.load().epoch > epoch)
    assert [i for i, stream in enumerate(running) if not stream.is_exact] == []
    assert running.num_resumes >= 1
    assert_clean(serve)


async def test_three_kills_of_the_executor_in_a_row_change_no_token(serve):
    async with streams(serve, requests(24, SEED + 1, prompt=800), begun=False) as running:
        for _ in range(3):
            before = pids(serve, "executor")
            await until(lambda: serve.metric("stepwire_executor_ready") == 1)
            os.kill(before[0], signal.SIGKILL)
            await until(lambda old=before: pids(serve, "executor") != old)
    assert [i for i, stream in enumerate(running) if not stream.is_exact] == []
    assert_clean(serve)


async def test_an_executor_that_stands_still_is_replaced_and_its_late_results_are_dropped(serve):
    executor, epoch = pids(serve, "executor")[0], serve.load().epoch
    async with streams(serve, requests(16, SEED + 2)) as running:
        os.kill(executor, signal.SIGSTOP)
        try:
            await until(lambda: not serve.load().executor_ready)
        finally:
            os.kill(executor, signal.SIGCONT)
        await until(lambda: serve.load().epoch > epoch)
    assert [i for i, stream in enumerate(running) if not stream.is_exact] == []
    assert pids(serve, "executor") == [executor]
    assert serve.load().epoch == epoch + 1
    assert_clean(serve)


async def test_a_killed_frontend_takes_only_its_own_streams_with_it(serve):
    before = pids(serve, "frontend")
    async with streams(serve, requests(32, SEED + 3)) as running:
        os.kill(before[1], signal.SIGKILL)
        await asyncio.wait_for(running.anchors[1].reading, LIMIT_S)
    assert [i for i, stream in enumerate(running[0::2]) if not stream.is_exact] == []
    for stream in running[1::2]:
        assert stream.is_exact or stream.error.code() == grpc.StatusCode.UNAVAILABLE
        assert stream.token_ids == drawn(stream.request)[: len(stream.token_ids)]
    spared, hit = running.anchors
    assert spared.error is None
    assert hit.error.code() == grpc.StatusCode.UNAVAILABLE
    assert_clean(serve)
    await until(lambda: pids(serve, "frontend")[1] != before[1])
    assert pids(serve, "frontend")[0] == before[0]


@pytest.mark.parametrize("victim", [pytest.param("nobody", marks=pytest.mark.slow), "executor", "scheduler"])
async def test_a_drain_under_load_fails_no_stream_even_when_a_child_dies_in_it(ending_serve, victim):
    serve = ending_serve
    children = serve.ready["pids"]
    async with streams(serve, requests(32, SEED + 4)) as running:
        serve.process.send_signal(signal.SIGTERM)
        await until(lambda: "draining active" in serve.output())
        if victim != "nobody":
            os.kill(children[victim] if victim == "scheduler" else children[victim][0], signal.SIGKILL)
    assert [i for i, stream in enumerate(running) if not stream.is_exact] == []
    assert await asyncio.to_thread(serve.process.wait, LIMIT_S) == 0, serve.output()
    assert "Traceback" not in serve.output()


async def test_a_tiny_pool_under_overload_serves_everybody(tmp_path, default_model):
    args = ("--num-blocks", "24", "--max-model-len", "256", "--max-waiting", "200")
    with Serve(tmp_path, "--model", str(default_model), "--backend", "simulated", *args) as serve:
        async with streams(serve, requests(100, SEED + 5, prompt=100, low=1, high=60), begun=False) as running:
            pass
        assert [i for i, stream in enumerate(running) if not stream.is_exact] == []
        assert_clean(serve)


async def test_a_full_queue_refuses_with_a_time_to_try_again(tmp_path, default_model):
    """Two run and do not end, four wait: whoever comes then is refused, and the four are served all the same."""
    args = ("--max-num-seqs", "2", "--max-waiting", "4")
    with Serve(tmp_path, "--model", str(default_model), "--backend", "simulated", *args, env=SLOW) as serve:

        def load() -> tuple[int, int]:
            found = serve.load()
            return found.num_running, found.num_waiting

        made = requests(38, SEED + 6, low=20, high=30)
        async with streams(serve, [anchor(8), anchor(9)], begun=False) as endless:
            await until(lambda: load() == (2, 0))
            async with streams(serve, made[:4], begun=False) as waiting:
                await until(lambda: load() == (2, 4))
                async with streams(serve, made[4:], begun=False) as refused:
                    pass
                for stream in endless:
                    await stream.cancel()
        assert {stream.error and stream.error.code() for stream in refused} == {grpc.StatusCode.RESOURCE_EXHAUSTED}
        assert all("grpc-status-details-bin" in dict(s.error.trailing_metadata()) for s in refused)
        assert [s for s in waiting if not s.is_exact] == []
        assert [s for s in endless if s.error or not s.is_exact_so_far] == []
        assert_clean(serve)


async def test_a_storm_of_cancels_leaves_nothing_behind(serve):
    draw = random.Random(SEED + 7)

    async def one(stub: inference_pb2_grpc.InferenceServiceStub, i: int) -> None:
        request = greedy([draw.randrange(VOCAB) for _ in range(draw.randint(1, 60))], 4000, ignore_eos=True)
        if i % 5 == 0:
            request.sampling.temperature, request.sampling.n = 1.0, 4
        call = stub.Generate(request, timeout=0.05 if i % 7 == 0 else None)
        with contextlib.suppress(grpc.RpcError):
            for _ in range(draw.randint(0, 2)):
                await call.read()
        call.cancel()

    for address in serve.addresses:
        async with grpc.aio.insecure_channel(address) as channel:
            stub = inference_pb2_grpc.InferenceServiceStub(channel)
            for _ in range(5):
                await asyncio.gather(*(one(stub, i) for i in range(100)))
    assert_clean(serve)
    async with streams(serve, requests(8, SEED + 8), begun=False) as running:
        pass
    assert [i for i, stream in enumerate(running) if not stream.is_exact] == []
