"""Clients that die, vanish or do not read: their requests end, their memory is bounded, and nobody else notices."""

import asyncio
import sys
import textwrap
import time

import grpc
import psutil
import pytest

from protos.stepwire.inference.v1 import inference_pb2_grpc
from tests.e2e.known_answers import ENDLESS, SLOW, assert_clean, requests, streams, until
from tests.e2e.process import Process
from tests.e2e.proxy import TcpProxy
from tests.e2e.server import Serve, free_port, greedy

SEED = 7_300
MAX_UNREAD_BYTES = 64 * 2**20

CLIENT = """
    import sys, grpc
    from protos.stepwire.inference.v1 import inference_pb2_grpc
    from tests.e2e.server import greedy
    with grpc.insecure_channel(sys.argv[1]) as channel:
        stub = inference_pb2_grpc.InferenceServiceStub(channel)
        for _ in stub.Generate(greedy([5, 6, 7], int(sys.argv[2]), ignore_eos=True)):
            print("reading", flush=True)
"""

# The frontend with its keepalive times, 30 and 10 s, cut to one second and three.
IMPATIENT_FRONTEND = """
    import sys
    from scheduler_svc import entry
    from scheduler_svc.frontend import __main__, server
    names = ("grpc.keepalive_time_ms", "grpc.keepalive_timeout_ms", "grpc.http2.ping_timeout_ms")
    short = dict(zip(names, (1000, 3000, 3000)))
    assert short.keys() <= dict(server.OPTIONS).keys()
    server.OPTIONS = tuple((name, short.get(name, value)) for name, value in server.OPTIONS)
    sys.exit(entry.run(__main__.app, "stepwire frontend"))
"""


@pytest.fixture(scope="module")
def serve(tmp_path_factory, default_model):
    folder = tmp_path_factory.mktemp("serve")
    with Serve(folder, "--model", str(default_model), "--backend", "simulated", env=SLOW) as running:
        yield running


def anonymous_bytes(process: psutil.Process) -> int:
    """Without the pages of files, which the kernel takes and gives as it likes."""
    memory = process.memory_info()
    return memory.rss - memory.shared


async def running(serve: Serve, count: int) -> None:
    await until(lambda: serve.load().num_running == count)


async def cut_short(serve: Serve, before: float, count: int) -> None:
    """So many more have ended as cancelled: they did not run to their end, however late this looks."""
    await until(lambda: num_cancelled(serve) == before + count)
    await asyncio.to_thread(serve.wait_idle)


def num_cancelled(serve: Serve) -> float:
    return serve.metric("stepwire_requests_total", finish_reason="cancelled")


async def half_open(serve: Serve, port: int) -> None:
    """A client behind a network that swallows everything, and then is gone: its requests must not stay for ever."""
    before = num_cancelled(serve)
    with TcpProxy(port) as proxy:
        async with grpc.aio.insecure_channel(f"127.0.0.1:{proxy.port}") as channel:
            stub = inference_pb2_grpc.InferenceServiceStub(channel)
            calls = [stub.Generate(greedy([i, 1], ENDLESS, ignore_eos=True)) for i in range(4)]
            await asyncio.gather(*(call.read() for call in calls))
            proxy.hold()
            await running(serve, 4)
            began = time.monotonic()
            await cut_short(serve, before, 4)
            print(f"a half-open connection was found out after {time.monotonic() - began:.1f} s")
            for call in calls:
                call.cancel()


async def test_a_killed_client_takes_its_request_with_it(serve):
    before = num_cancelled(serve)
    command = [sys.executable, "-c", textwrap.dedent(CLIENT), serve.addresses[0], str(ENDLESS)]
    async with streams(serve, requests(8, SEED)) as others:
        client = await asyncio.create_subprocess_exec(*command, stdout=asyncio.subprocess.PIPE)
        assert await client.stdout.readline() == b"reading\n"
        client.kill()
        await client.wait()
        await until(lambda: num_cancelled(serve) == before + 1)
    assert [i for i, stream in enumerate(others) if not stream.is_exact] == []
    assert_clean(serve)


async def test_a_cut_connection_ends_every_stream_on_it(serve):
    before = num_cancelled(serve)
    async with streams(serve, requests(8, SEED + 1)) as others:
        with TcpProxy(serve.port) as proxy:
            async with grpc.aio.insecure_channel(f"127.0.0.1:{proxy.port}") as channel:
                stub = inference_pb2_grpc.InferenceServiceStub(channel)
                calls = [stub.Generate(greedy([i, 2], ENDLESS, ignore_eos=True)) for i in range(8)]
                await asyncio.gather(*(call.read() for call in calls))
                proxy.cut()
                codes = await asyncio.gather(*(call.code() for call in calls))
                await until(lambda: num_cancelled(serve) == before + 8)
    assert set(codes) == {grpc.StatusCode.UNAVAILABLE}
    assert [i for i, stream in enumerate(others) if not stream.is_exact] == []
    assert_clean(serve)


async def test_a_half_open_connection_is_found_out_by_keepalive(serve, tmp_path, default_model):
    port, connect = free_port(), next(p for p in serve.runtime_sockets() if p.endswith("frontend.sock"))
    options = ("--connect", f"ipc://{connect}", "--port", port, "--model", default_model)
    with Process(tmp_path, "frontend", "-c", textwrap.dedent(IMPATIENT_FRONTEND), *options) as frontend:
        await asyncio.to_thread(frontend.wait_until_it_says, "health serving=True")
        await half_open(serve, port)
    assert_clean(serve)


@pytest.mark.slow
async def test_a_half_open_connection_is_found_out_within_a_minute_as_shipped(serve):
    await half_open(serve, serve.port)
    assert_clean(serve)


async def test_clients_that_do_not_read_cost_bounded_memory_and_nobody_else_notices(serve):
    frontend = psutil.Process(serve.ready["pids"]["frontend"][0])
    async with grpc.aio.insecure_channel(serve.addresses[0]) as channel:
        stub = inference_pb2_grpc.InferenceServiceStub(channel)
        before = anonymous_bytes(frontend)
        silent = []
        for i in range(48):
            request = greedy([i, 3], 700, ignore_eos=True)
            request.response.logprobs = 20
            silent.append(stub.Generate(request))
        await until(lambda: serve.metric("stepwire_frontend_active_streams") == 48)
        async with streams(serve, requests(8, SEED + 2)) as others:
            pass
        assert [i for i, stream in enumerate(others) if not stream.is_exact] == []
        await asyncio.to_thread(serve.wait_idle)  # the scheduler is done with them
        grown = anonymous_bytes(frontend) - before
        print(f"48 unread streams of 700 tokens with 20 candidates each: {grown / 2**20:.1f} MiB")
        assert grown < MAX_UNREAD_BYTES
        for call in silent:
            call.cancel()
    await until(lambda: serve.metric("stepwire_frontend_active_streams") == 0)
    assert_clean(serve)
