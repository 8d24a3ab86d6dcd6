"""smg in front of two frontends that are slow, full, drained or killed."""

import os
import signal
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from tests.e2e.server import Serve
from tests.gateways.conftest import smg_in_front_of
from tests.gateways.gateway import Gateway, hang_up, until

MODEL = "SmolLM2-135M-Instruct"
CHAT = "/v1/chat/completions"


def chat(max_tokens: int, **fields: object) -> dict:
    messages = [{"role": "user", "content": "Hello"}]
    return {"model": MODEL, "messages": messages, "max_tokens": max_tokens, "ignore_eos": True, **fields}


def test_slow_full_drained_and_killed(slow_service: Serve, smg_bin: Path, tmp_path: Path):
    addresses = slow_service.addresses
    with smg_in_front_of(smg_bin, addresses, tmp_path, "--policy", "round_robin") as smg:
        clients_that_hang_up_free_their_blocks(slow_service, smg)
        a_full_queue_is_too_many_requests(slow_service, smg)
        a_drained_frontend_gets_nothing_new_and_ends_what_it_has(slow_service, smg)
        a_killed_frontend_is_routed_around(slow_service, smg)


def clients_that_hang_up_free_their_blocks(serve: Serve, smg: Gateway) -> None:
    for _ in range(2):  # one on each frontend
        streaming = smg.open_stream(CHAT, chat(4000, stream=True))
        assert serve.load().num_running == 1, "the first piece came before the last"
        hang_up(streaming)
        serve.wait_idle()
        waiting = smg.start(CHAT, chat(4000))
        until(lambda: serve.load().num_running == 1)
        hang_up(waiting)
        serve.wait_idle()


def a_full_queue_is_too_many_requests(serve: Serve, smg: Gateway) -> None:
    running = [smg.start(CHAT, chat(4000)) for _ in range(4)]
    try:
        until(lambda: (serve.load().num_running, serve.load().num_waiting) == (2, 2))
        status, answer = smg.post(CHAT, chat(5))
        assert status == 429, answer
    finally:
        for connection in running:
            hang_up(connection)
    serve.wait_idle()


def a_drained_frontend_gets_nothing_new_and_ends_what_it_has(serve: Serve, smg: Gateway) -> None:
    first, second = serve.ready["pids"]["frontend"]
    streams = [smg.open_stream(CHAT, chat(60, stream=True)) for _ in range(2)]  # one on each
    os.kill(first, signal.SIGTERM)
    hang_up(streams[1])
    for _ in range(4):
        status, answer = smg.post(CHAT, chat(2))
        assert status == 200, answer
        assert answer["usage"]["completion_tokens"] == 2
    rest = streams[0].reply.read().decode()
    assert rest.rstrip().endswith("data: [DONE]")
    assert '"finish_reason":"length"' in rest
    until(lambda: serve.ready["pids"]["frontend"][0] != first)
    assert serve.ready["pids"]["frontend"][1] == second
    until(lambda: all(worker["is_healthy"] for worker in smg.get("/workers")["workers"]))


def a_killed_frontend_is_routed_around(serve: Serve, smg: Gateway) -> None:
    os.kill(serve.ready["pids"]["frontend"][1], signal.SIGKILL)
    with ThreadPoolExecutor(2) as pool:
        answers = list(pool.map(lambda _: smg.post(CHAT, chat(2)), range(6)))
    assert [status for status, _ in answers] == [200] * 6
    until(lambda: all(worker["is_healthy"] for worker in smg.get("/workers")["workers"]))
    serve.wait_idle()
