"""The other methods, health, reflection, drain, start-up faults and the size of the import."""

import asyncio
import json
import os
import signal
import subprocess
import sys

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha.proto_reflection_descriptor_database import ProtoReflectionDescriptorDatabase

from protos.stepwire.inference.v1 import inference_pb2 as pb
from scheduler_svc.client.health import ask
from scheduler_svc.errors import StartupError
from scheduler_svc.frontend.config import FrontendConfig, join
from scheduler_svc.frontend.metrics import FrontendMetrics
from scheduler_svc.frontend.model_files import ModelFiles
from scheduler_svc.frontend.server import LIVENESS, FrontendServer, check_ready_file, serve, write_ready_file
from scheduler_svc.frontend.service import InferenceService
from tests.unit.frontend import tiny_models
from tests.unit.frontend.fake_session import FakeSession
from tests.unit.frontend.grpc_rig import Refusal, rig
from tests.unit.frontend.test_grpc_generate import rest_of, until

SERVING = health_pb2.HealthCheckResponse.SERVING
NOT_SERVING = health_pb2.HealthCheckResponse.NOT_SERVING
ENDLESS = pb.GenerateRequest(token_ids=pb.TokenIds(ids=[70]), stopping=pb.StoppingCriteria(max_tokens=200))


async def test_tokenize_and_back(tmp_path):
    async with rig(tmp_path) as r:
        text = "Hello <|im_end|> 12345 🦊"
        plain = (await r.stub.Tokenize(pb.TokenizeRequest(text=text))).token_ids
        parsed = (await r.stub.Tokenize(pb.TokenizeRequest(text=text, parse_special_tokens=True))).token_ids
        assert 2 not in plain
        assert 2 in parsed
        assert (await r.stub.Detokenize(pb.DetokenizeRequest(token_ids=plain))).text == text
        assert (await r.stub.Detokenize(pb.DetokenizeRequest(token_ids=parsed))).text == text.replace("<|im_end|>", "")
        request = pb.DetokenizeRequest(token_ids=parsed, skip_special_tokens=False)
        assert (await r.stub.Detokenize(request)).text == text
        assert (await r.stub.Detokenize(pb.DetokenizeRequest(token_ids=[511]))).text == ""
        long = "word " * 5000  # in a thread
        ids = (await r.stub.Tokenize(pb.TokenizeRequest(text=long))).token_ids
        assert (await r.stub.Detokenize(pb.DetokenizeRequest(token_ids=ids))).text == long
        assert (await r.stub.Tokenize(pb.TokenizeRequest())).token_ids == []


async def test_bad_input_of_the_other_methods(tmp_path):
    async with rig(tmp_path) as r:
        for call, field in (
            (r.stub.Detokenize(pb.DetokenizeRequest(token_ids=[1, 512])), "token_ids[1]"),
            (r.stub.Tokenize(pb.TokenizeRequest(text="x" * ((1 << 20) + 1))), "text"),
            (r.stub.Cancel(pb.CancelRequest()), "request_id"),
            (r.stub.Cancel(pb.CancelRequest(request_id="x" * 257)), "request_id"),
        ):
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await call
            found = Refusal.of(caught.value)
            assert (found.code, found.fields) == (grpc.StatusCode.INVALID_ARGUMENT, [field])


async def test_get_model_and_load(tmp_path):
    async with rig(tmp_path) as r:
        model = await r.stub.GetModel(pb.GetModelRequest())
        assert model == pb.GetModelResponse(
            model="tiny", architecture="TinyForCausalLM", max_model_len=256, vocab_size=512, eos_token_ids=[0, 2],
            block_size=16, num_blocks=20, dtype="float32", device="cpu", max_num_seqs=8, has_chat_template=True,
        )  # fmt: skip
        load = await r.stub.GetLoad(pb.GetLoadRequest())
        assert load == pb.GetLoadResponse(
            num_running=1, num_waiting=2, blocks_total=20, blocks_used=3, blocks_cached=4,
            generation_tokens_total=5, prompt_tokens_total=6, epoch=7, executor_ready=True, num_frontends=8,
        )  # fmt: skip


async def test_health_follows_the_path(tmp_path):
    async with rig(tmp_path) as r:
        stub = health_pb2_grpc.HealthStub(r.channel)
        for name in ("", *r.server.names):
            watch = stub.Watch(health_pb2.HealthCheckRequest(service=name))
            states = [(await watch.read()).status]
            if states[0] == NOT_SERVING:  # the first word of a server that has just begun
                states = [(await watch.read()).status]
            r.session.set_ready(False)
            states.append((await watch.read()).status)
            r.session.set_ready(True)
            states.append((await watch.read()).status)
            watch.cancel()
            assert states == [SERVING, NOT_SERVING, SERVING]
        r.session.set_ready(False)
        watch = stub.Watch(health_pb2.HealthCheckRequest())
        while (await watch.read()).status != NOT_SERVING:
            pass
        watch.cancel()
        answer, words = await asyncio.to_thread(ask, r.server.address, "", 60.0)
        assert (answer, "has no executor" in words) == ("NOT_SERVING", True)
        live = await stub.Check(health_pb2.HealthCheckRequest(service=LIVENESS))
        assert live.status == SERVING


async def test_reflection_knows_the_services(tmp_path):
    async with rig(tmp_path) as r:

        def ask() -> list[str]:
            with grpc.insecure_channel(r.server.address) as channel:
                return list(ProtoReflectionDescriptorDatabase(channel).get_services())

        assert set(r.server.names) <= set(await asyncio.to_thread(ask))


async def test_drain_finishes_streams_and_refuses_new_ones(tmp_path):
    async with rig(tmp_path, drain_s=300.0) as r:
        r.session.gate.clear()
        call = r.stub.Generate(ENDLESS)
        await until(lambda: r.session.live)
        draining = asyncio.create_task(r.server.drain())
        await until(lambda: r.service._is_draining)
        live = await health_pb2_grpc.HealthStub(r.channel).Check(health_pb2.HealthCheckRequest(service=LIVENESS))
        assert live.status == SERVING
        status = await health_pb2_grpc.HealthStub(r.channel).Check(health_pb2.HealthCheckRequest())
        assert status.status == NOT_SERVING
        answer, words = await asyncio.to_thread(ask, r.server.address, "", 60.0)
        assert (answer, "but drains" in words) == ("NOT_SERVING", True)
        found = await r.refusal(ENDLESS)
        assert (found.code, found.retry_after_s) == (grpc.StatusCode.UNAVAILABLE, 1.0)
        assert not draining.done()
        r.session.set_ready(True)  # no return from a drain
        r.session.gate.set()
        messages = await rest_of(call)
        assert messages[-1].usage.completion_tokens == 200
        await draining
        status = await health_pb2_grpc.HealthStub(r.channel).Check(health_pb2.HealthCheckRequest())
        assert status.status == NOT_SERVING


async def test_streams_beyond_the_drain_time_end_unavailable(tmp_path):
    async with rig(tmp_path, drain_s=0.05) as r:
        r.session.gate.clear()
        call = r.stub.Generate(ENDLESS)
        await until(lambda: r.session.live)
        await r.server.drain()
        await r.server.stop()
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await rest_of(call)
        found = Refusal.of(caught.value)
        assert (found.code, found.retry_after_s) == (grpc.StatusCode.UNAVAILABLE, 1.0)
        await until(lambda: not r.session.live)


@pytest.mark.parametrize("method", ["Generate", "Chat", "GetLoad", "Tokenize"])
async def test_bytes_that_are_no_message_are_invalid_and_not_logged(tmp_path, caplog, method):
    async with rig(tmp_path) as r:
        path = f"/{r.server.names[0]}/{method}"
        streams = method in ("Generate", "Chat")
        call = r.channel.unary_stream(path)(b"\xff\xff") if streams else r.channel.unary_unary(path)(b"\xff\xff")
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await (call.read() if streams else call)
        assert caught.value.code() == grpc.StatusCode.INVALID_ARGUMENT
        assert not [record for record in caplog.records if record.levelname == "ERROR"]
        assert (await r.stub.Tokenize(pb.TokenizeRequest(text="a"))).token_ids


async def test_a_port_in_use_is_one_clear_line(tmp_path):
    async with rig(tmp_path) as r:
        port = int(r.server.address.rpartition(":")[2])
        second = FrontendServer(FrontendConfig(connect="", port=port), r.service, r.session)
        with pytest.raises(StartupError, match=rf"cannot listen on 127\.0\.0\.1:{port}"):
            await second.start()


async def test_serve_writes_its_ready_file_once_ready_and_ends_on_sigterm(tmp_path):
    ready_file = tmp_path / "ready.json"
    model = ModelFiles.load(tiny_models.chat_model(tmp_path / "model"))
    session = FakeSession(lambda _s, _i: iter(lambda: 80, None))
    session.ready = False
    service = InferenceService(session, model, "tiny", FrontendMetrics())
    config = FrontendConfig(connect="", port=0, ready_file=ready_file, drain_timeout_s=1)
    serving = asyncio.create_task(serve(config, service, session))
    await until(lambda: session._callbacks)
    assert not ready_file.exists()
    session.set_ready(True)
    await until(ready_file.exists)
    report = json.loads(ready_file.read_text())
    assert report["pid"] == os.getpid()
    async with grpc.aio.insecure_channel(report["grpc"]) as channel:
        await health_pb2_grpc.HealthStub(channel).Check(health_pb2.HealthCheckRequest())
    os.kill(os.getpid(), signal.SIGTERM)
    await serving
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().remove_signal_handler(number)


def test_ready_files_appear_whole(tmp_path):
    path = tmp_path / "ready.json"
    write_ready_file(path, "127.0.0.1:1")
    write_ready_file(path, "127.0.0.1:2")
    assert json.loads(path.read_text())["grpc"] == "127.0.0.1:2"
    assert [p.name for p in tmp_path.iterdir()] == ["ready.json"]


def test_a_ready_file_that_cannot_be_written_is_one_clear_line(tmp_path):
    with pytest.raises(StartupError, match="--ready-file"):
        check_ready_file(tmp_path / "nowhere" / "ready.json")
    old = tmp_path / "ready.json"
    old.write_text("{}")
    check_ready_file(old)
    assert not list(tmp_path.iterdir())


def test_addresses():
    assert join("::1", 5) == "[::1]:5"
    assert join("localhost", 5) == "localhost:5"


def test_the_frontend_imports_no_model_library():
    code = (
        "import sys, scheduler_svc.frontend.server, scheduler_svc.frontend.service\n"
        "print([m for m in ('torch', 'transformers', 'executor_svc', 'zmq') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_metrics_in_multiprocess_mode(tmp_path):
    code = (
        "from prometheus_client import CollectorRegistry, generate_latest\n"
        "from prometheus_client.multiprocess import MultiProcessCollector\n"
        "from scheduler_svc.frontend.metrics import FrontendMetrics\n"
        "m = FrontendMetrics(); m.opened(); m.first_token(0.5); m.tokens(0.004, 4, 1.0); m.closed('stop'); m.opened()\n"
        "m.refused('Chat', 'INTERNAL')\n"
        "r = CollectorRegistry(); MultiProcessCollector(r); print(generate_latest(r).decode())"
    )
    environment = {**os.environ, "PROMETHEUS_MULTIPROC_DIR": str(tmp_path)}
    text = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, env=environment
    ).stdout
    assert 'stepwire_frontend_requests_total{finish_reason="stop"} 1.0' in text
    assert "stepwire_frontend_active_streams 1.0" in text
    assert 'stepwire_frontend_inter_token_seconds_bucket{le="0.001"} 4.0' in text


async def test_a_burst_of_calls_is_taken_whole(tmp_path):
    """grpc's own default cancels calls at random when more than a thousand wait to be taken."""
    async with rig(tmp_path) as r:
        loads = await asyncio.gather(*(r.stub.GetLoad(pb.GetLoadRequest()) for _ in range(4000)))
        assert {load.num_frontends for load in loads} == {8}
