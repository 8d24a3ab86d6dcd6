"""vllm.grpc.engine.VllmEngine, over a real server with a fake session: what a gateway asks and must be told."""

import asyncio
import hashlib
import io
import json
import subprocess
import sys
import zipfile

import grpc
import pytest
from smg_grpc_proto.generated import common_pb2 as common
from smg_grpc_proto.generated import vllm_engine_pb2 as engine
from smg_grpc_proto.generated import vllm_engine_pb2_grpc

from scheduler_svc.errors import QueueFull
from scheduler_svc.frontend.adapters.engine import Throughput
from tests.unit.frontend.grpc_rig import Refusal, Rig, rig


def counting(submit, index):
    """100, 101, ... for choice 0; 200, 201, ... for choice 1."""
    return iter(range(100 * (index + 1), 420))


def pausing(r: Rig):
    """Tokens until the first was drawn; then the gate is shut."""

    def script(submit, index):
        yield 100
        r.session.gate.clear()
        while True:
            yield 101

    return script


def request(stream: bool = False, **fields) -> engine.GenerateRequest:
    params = fields.pop("params", {})
    fields.setdefault("tokenized", engine.TokenizedInput(input_ids=[5, 6, 7]))
    return engine.GenerateRequest(
        request_id=fields.pop("request_id", ""),
        stream=stream,
        sampling_params=engine.SamplingParams(**{"max_tokens": 3, "temperature": 1.0, **params}),
        **fields,
    )


def stub(r: Rig) -> vllm_engine_pb2_grpc.VllmEngineStub:
    return vllm_engine_pb2_grpc.VllmEngineStub(r.channel)


async def collect(r: Rig, asked: engine.GenerateRequest) -> list[engine.GenerateResponse]:
    return [message async for message in stub(r).Generate(asked)]


async def refusal(call) -> Refusal:
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await (call.read() if hasattr(call, "read") else call)
    return Refusal.of(caught.value)


async def test_without_streaming_each_choice_is_one_complete_with_all_ids(tmp_path):
    async with rig(tmp_path, counting) as r:
        r.session.cached = 2
        messages = await collect(r, request(params={"n": 2}))
    assert [message.WhichOneof("response") for message in messages] == ["complete", "complete"]
    by_index = {message.complete.index: message.complete for message in messages}
    assert list(by_index[0].output_ids) == [100, 101, 102]
    assert list(by_index[1].output_ids) == [200, 201, 202]
    for complete in by_index.values():
        assert complete.finish_reason == "length"
        assert (complete.prompt_tokens, complete.completion_tokens, complete.cached_tokens) == (3, 3, 2)
        assert complete.WhichOneof("matched_stop") is None
        assert not complete.HasField("output_logprobs")


async def test_streaming_gives_new_ids_and_then_an_end_without_ids(tmp_path):
    async with rig(tmp_path, counting) as r:
        messages = await collect(r, request(stream=True))
    chunks = [message.chunk for message in messages if message.HasField("chunk")]
    assert [token for chunk in chunks for token in chunk.token_ids] == [100, 101, 102]
    counts = [chunk.completion_tokens for chunk in chunks]
    assert counts == sorted(counts)
    assert counts[-1] == 3
    assert all(chunk.prompt_tokens == 3 for chunk in chunks)
    assert [message.WhichOneof("response") for message in messages].count("complete") == 1
    end = messages[-1].complete
    assert (list(end.output_ids), end.finish_reason, end.completion_tokens) == ([], "length", 3)


async def test_sampling_parameters_mean_what_they_mean_there(tmp_path):
    async with rig(tmp_path, counting) as r:
        r.session.script = counting
        given = {
            "top_p": 0.5, "top_k": 7, "min_p": 0.25, "frequency_penalty": 0.5, "presence_penalty": -0.5,
            "repetition_penalty": 1.5, "min_tokens": 2, "seed": -1, "stop_token_ids": [9], "logit_bias": {3: 2.0},
            "logprobs": 2,
        }  # fmt: skip
        await collect(r, request(params=given))
        unset = engine.GenerateRequest(tokenized=engine.TokenizedInput(input_ids=[1]))
        call = stub(r).Generate(unset)
        await call.read()
        call.cancel()
        submit, bare = r.session.submitted
    sampling = submit.sampling
    assert (sampling.top_p, sampling.top_k, sampling.min_p) == (0.5, 7, 0.25)
    assert (sampling.frequency_penalty, sampling.presence_penalty, sampling.repetition_penalty) == (0.5, -0.5, 1.5)
    assert (sampling.seed, submit.min_tokens, submit.max_tokens, sampling.logprobs) == (2**64 - 1, 2, 3, 2)
    assert sampling.temperature == 1.0
    assert 9 in memoryview(submit.stop_token_ids).cast("i")
    assert (list(memoryview(sampling.bias_token_ids).cast("i")), len(sampling.bias_values)) == ([3], 4)
    # Zero is "not set": the model's defaults, and an output up to the context length.
    own = r.service.model.sampling_defaults
    assert bare.sampling.top_p == pytest.approx(own.get("top_p", 1.0))
    assert bare.sampling.repetition_penalty == pytest.approx(own.get("repetition_penalty", 1.0))
    assert (bare.num_choices, bare.max_tokens) == (1, 255)
    assert not bare.sampling.HasField("logprobs")


async def test_what_stopped_it_is_told(tmp_path):
    def ends(submit, index):
        return iter([100, 9, *range(101, 400)])

    async with rig(tmp_path, ends) as r:
        complete = (await collect(r, request(params={"stop_token_ids": [9]})))[-1].complete
        assert (complete.finish_reason, complete.matched_token_id, list(complete.output_ids)) == ("stop", 9, [100, 9])
        eos = r.service.model.eos_token_ids[-1]
        r.session.script = lambda submit, index: iter([100, eos])
        complete = (await collect(r, request()))[-1].complete
        assert (complete.finish_reason, complete.WhichOneof("matched_stop")) == ("stop", None)
        assert list(complete.output_ids) == [100, eos]
        token = r.tokenizer.encode("fox", add_special_tokens=False)
        r.session.script = lambda submit, index: iter([*token, *range(300, 400)])
        complete = (await collect(r, request(params={"stop": ["ox"], "max_tokens": 50})))[-1].complete
        assert (complete.finish_reason, complete.matched_stop_str) == ("stop", "ox")
        assert list(complete.output_ids) == token
        assert r.session.streams[-1].cancels == [0]  # the scheduler heard of it


async def test_logprobs_are_parallel_arrays(tmp_path):
    async with rig(tmp_path, counting) as r:
        whole = (await collect(r, request(params={"logprobs": 2})))[0].complete.output_logprobs
        assert list(whole.token_ids) == [100, 101, 102]
        assert list(whole.token_logprobs) == [-9999.0] * 3
        assert [list(top.token_ids) for top in whole.top_logprobs] == [[0, 1]] * 3
        assert [list(top.values) for top in whole.top_logprobs] == [[-9999.0, -1.5]] * 3
        messages = await collect(r, request(stream=True, params={"logprobs": 0}))
        streamed = [message.chunk.output_logprobs for message in messages if message.HasField("chunk")]
        assert [token for part in streamed for token in part.token_ids] == [100, 101, 102]


async def test_abort_ends_the_stream_and_unknown_ids_are_no_error(tmp_path):
    async with rig(tmp_path, counting) as r:
        r.session.script = pausing(r)
        call = aiter(stub(r).Generate(request(stream=True, request_id="mine", params={"max_tokens": 200})))
        await anext(call)
        await stub(r).Abort(engine.AbortRequest(request_ids=["mine", "never seen"]))
        rest = [message async for message in call]
        assert rest[-1].complete.finish_reason == "abort"
        assert r.session.cancelled == ["mine", "never seen"]
        assert "mine" not in r.session.live
        found = await refusal(stub(r).Abort(engine.AbortRequest(request_ids=["x"] * 1025)))
        assert (found.code, found.fields) == (grpc.StatusCode.INVALID_ARGUMENT, ["request_ids"])


REFUSALS = [
    ({"params": {"temperature": 3.0}}, "INVALID_ARGUMENT", "sampling_params.temperature"),
    ({"params": {"stop": [""]}}, "INVALID_ARGUMENT", "sampling_params.stop[0]"),
    ({"params": {"logprobs": -1}}, "INVALID_ARGUMENT", "sampling_params.logprobs"),
    ({"params": {"logprobs": 21}}, "INVALID_ARGUMENT", "sampling_params.logprobs"),
    ({"params": {"logit_bias": {-1: 1.0}}}, "INVALID_ARGUMENT", "sampling_params.logit_bias"),
    ({"params": {"n": 17}}, "INVALID_ARGUMENT", "sampling_params.n"),
    ({"tokenized": engine.TokenizedInput()}, "INVALID_ARGUMENT", "tokenized.input_ids"),
    ({"tokenized": engine.TokenizedInput(input_ids=[512])}, "INVALID_ARGUMENT", "tokenized.input_ids[0]"),
    ({"data_parallel_rank": 1}, "INVALID_ARGUMENT", "data_parallel_rank"),
    ({"mm_inputs": engine.MultimodalInputs()}, "UNIMPLEMENTED", "mm_inputs"),
    ({"kv_transfer_params_json": "{}"}, "UNIMPLEMENTED", "kv_transfer_params_json"),
    ({"params": {"structural_tag": "{}"}}, "UNIMPLEMENTED", "sampling_params.structural_tag"),
    ({"params": {"truncate_prompt_tokens": 1}}, "UNIMPLEMENTED", "sampling_params.truncate_prompt_tokens"),
]


async def test_refusals_name_the_field_in_this_interfaces_words(tmp_path):
    async with rig(tmp_path, counting) as r:
        for fields, code, field in REFUSALS:
            found = await refusal(stub(r).Generate(request(**fields)))
            assert (found.code.name, found.fields) == (code, [field])
            assert field.partition("[")[0] in found.message
        assert not r.session.submitted


async def test_a_missing_input_and_a_full_queue(tmp_path):
    async with rig(tmp_path, counting) as r:
        found = await refusal(stub(r).Generate(engine.GenerateRequest()))
        assert (found.code, found.fields) == (grpc.StatusCode.INVALID_ARGUMENT, ["tokenized"])
        r.session.refuse_with = QueueFull("the queue is full", retry_after_s=2.5)
        found = await refusal(stub(r).Generate(request()))
        assert (found.code, found.retry_after_s) == (grpc.StatusCode.RESOURCE_EXHAUSTED, 2.5)


async def test_a_text_prompt_is_plain_text(tmp_path):
    async with rig(tmp_path, counting) as r:
        text = "Hello <|im_end|>"
        await collect(r, request(tokenized=None, text=text))
        assert 2 not in list(memoryview(r.session.submitted[0].prompt_token_ids).cast("i"))


async def test_health_follows_the_path_and_the_drain(tmp_path):
    async with rig(tmp_path, counting, drain_s=0.0) as r:
        ask = engine.HealthCheckRequest()
        assert (await stub(r).HealthCheck(ask)).healthy
        r.session.set_ready(False)
        assert not (await stub(r).HealthCheck(ask)).healthy
        r.session.set_ready(True)
        assert (await stub(r).HealthCheck(ask)).healthy
        await r.server.drain()
        assert not (await stub(r).HealthCheck(ask)).healthy


async def test_who_this_is(tmp_path):
    async with rig(tmp_path, counting) as r:
        model = await stub(r).GetModelInfo(engine.GetModelInfoRequest())
        assert (model.served_model_name, model.vocab_size, model.max_context_length) == ("tiny", 512, 256)
        assert (list(model.eos_token_ids), model.is_generation, model.max_req_input_len) == ([0, 2], True, 255)
        assert str(tmp_path) not in str(model)
        server = await stub(r).GetServerInfo(engine.GetServerInfoRequest())
        assert (server.server_type, server.block_size, server.max_num_seqs) == ("vllm-grpc", 16, 8)
        loads = await stub(r).GetLoads(engine.GetLoadsRequest(include=["core"]))
        row = loads.loads[0]
        assert (row.num_running_reqs, row.num_waiting_reqs, row.num_total_reqs) == (1, 2, 3)
        assert (row.num_used_tokens, row.max_total_num_tokens, row.token_usage) == (48, 320, 3 / 20)
        assert row.cache_hit_rate == 3 / 6
        found = await refusal(stub(r).GetLoads(engine.GetLoadsRequest(dp_rank=1)))
        assert found.code is grpc.StatusCode.INVALID_ARGUMENT


def test_throughput_is_what_was_made_between_two_looks():
    throughput = Throughput()
    assert throughput.per_second(500, 10.0) == 0
    assert throughput.per_second(700, 12.0) == 100
    assert throughput.per_second(900, 12.5) == 100
    assert throughput.per_second(0, 14.0) == 0  # another scheduler


async def test_the_tokenizer_comes_as_a_zip_with_its_digest_on_the_last_chunk(tmp_path):
    async with rig(tmp_path, counting) as r:
        (tmp_path / "model.safetensors").write_bytes(b"weights")
        chunks = [chunk async for chunk in stub(r).GetTokenizer(common.GetTokenizerRequest())]
        again = [chunk async for chunk in stub(r).GetTokenizer(common.GetTokenizerRequest())]
    data = b"".join(chunk.data for chunk in chunks)
    assert [bool(chunk.sha256) for chunk in chunks] == [False] * (len(chunks) - 1) + [True]
    assert chunks[-1].sha256 == hashlib.sha256(data).hexdigest()
    assert again == chunks
    with zipfile.ZipFile(io.BytesIO(data)) as archive:
        names = archive.namelist()
        assert json.loads(archive.read("tokenizer.json")) == json.loads((tmp_path / "tokenizer.json").read_text())
    assert set(names) <= {path.name for path in tmp_path.iterdir()}
    assert "model.safetensors" not in names


async def test_what_this_server_does_not_do(tmp_path):
    async with rig(tmp_path, counting) as r:
        for call in (
            stub(r).Embed(engine.EmbedRequest()),
            stub(r).FlushCache(common.FlushCacheRequest()),
            stub(r).StartProfile(common.StartProfileRequest()),
            stub(r).StopProfile(common.StopProfileRequest()),
        ):
            assert (await refusal(call)).code is grpc.StatusCode.UNIMPLEMENTED


async def test_a_client_that_goes_away_frees_its_request(tmp_path):
    async with rig(tmp_path) as r:
        r.session.script = pausing(r)
        call = stub(r).Generate(request(stream=True, request_id="gone", params={"max_tokens": 200}))
        await call.read()
        call.cancel()
        ended = r.session.streams[0]
        await asyncio.wait_for(r.service._idle.wait(), 60)
        assert ended.cancels == ["request"]
        assert ended.submit.request_id == "gone"


def test_a_frontend_without_the_messages_package_serves_everything_else(tmp_path):
    code = (
        "import sys, logging; sys.modules['smg_grpc_proto'] = None\n"
        "import importlib.util as u; find = u.find_spec\n"
        "u.find_spec = lambda name, *a: None if name == 'smg_grpc_proto' else find(name, *a)\n"
        "from pathlib import Path\n"
        "from scheduler_svc.frontend.services import offered_services\n"
        "from scheduler_svc.frontend.service import InferenceService\n"
        "from scheduler_svc.frontend.metrics import FrontendMetrics\n"
        "from scheduler_svc.frontend.model_files import ModelFiles\n"
        "from tests.unit.frontend import tiny_models\n"
        "model = ModelFiles.load(tiny_models.chat_model(Path(sys.argv[1])))\n"
        "print(*(o.name for o in offered_services(InferenceService(None, model, 'tiny', FrontendMetrics()))))\n"
    )
    done = subprocess.run([sys.executable, "-c", code, str(tmp_path)], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    names = "stepwire.inference.v1.InferenceService stepwire.admin.v1.AdminService vllm.Inference vllm.Control"
    assert done.stdout.split() == names.split()
    assert "smg-grpc-proto" in done.stderr
