"""vllm.Inference and vllm.Control, over a real server with a fake session."""

import grpc
import pytest
from google.protobuf import struct_pb2

from protos.vllm import control_pb2, control_pb2_grpc, inference_pb2_grpc
from protos.vllm import inference_pb2 as vllm
from tests.unit.frontend.adapters.test_engine import counting, pausing, refusal
from tests.unit.frontend.grpc_rig import Rig, rig, spelled

IDS = vllm.TokenIds(ids=[5, 6, 7])


def stub(r: Rig) -> inference_pb2_grpc.InferenceStub:
    return inference_pb2_grpc.InferenceStub(r.channel)


def request(**fields) -> vllm.GenerateRequest:
    fields.setdefault("stopping", vllm.StoppingCriteria(max_new_tokens=3))
    if "text" not in fields:
        fields.setdefault("token_ids", IDS)
    return vllm.GenerateRequest(temperature=fields.pop("temperature", 1.0), **fields)


async def collect(r: Rig, asked: vllm.GenerateRequest) -> list[vllm.GenerateResponse]:
    return [message async for message in stub(r).GenerateStream(asked)]


async def test_ids_alone_when_text_is_not_wanted(tmp_path):
    async with rig(tmp_path, counting) as r:
        r.session.cached = 2
        asked = request(response=vllm.ResponseOptions(output_text=False, output_token_ids=True))
        messages = await collect(r, asked)
    assert [i for message in messages for i in message.outputs.token_ids] == [100, 101, 102]
    assert sum(message.outputs.num_tokens for message in messages) == 3
    assert all(not message.outputs.text for message in messages)
    assert messages[0].prompt_info.num_prompt_tokens == 3
    assert not any(message.HasField("prompt_info") for message in messages[1:])
    info = messages[-1].outputs.finish_info
    assert (info.finish_reason, info.num_output_tokens) == (vllm.FinishInfo.LENGTH, 3)
    assert info.WhichOneof("stop_reason") is None
    assert not any(message.outputs.HasField("finish_info") for message in messages[:-1])


async def test_text_by_default_and_no_ids(tmp_path):
    async with rig(tmp_path) as r:
        ids = spelled(r.tokenizer, "The quick", " brown fox")
        r.session.script = lambda submit, index: iter([*ids, *ids])
        messages = await collect(r, request(stopping=vllm.StoppingCriteria(max_new_tokens=len(ids))))
        assert "".join(message.outputs.text for message in messages) == "The quick brown fox"
        assert not any(message.outputs.token_ids for message in messages)
        whole = await stub(r).Generate(request(stopping=vllm.StoppingCriteria(max_new_tokens=len(ids))))
        assert whole.outputs.text == "The quick brown fox"
        assert (whole.outputs.num_tokens, whole.prompt_info.num_prompt_tokens) == (len(ids), 3)
        assert whole.outputs.finish_info.finish_reason == vllm.FinishInfo.LENGTH


async def test_zero_is_not_set(tmp_path):
    async with rig(tmp_path, counting) as r:
        await collect(r, vllm.GenerateRequest(token_ids=IDS, sampling=vllm.RandomSampling(num_sequences=0)))
        submit = r.session.submitted[0]
    own = r.service.model.sampling_defaults
    assert submit.max_tokens == 20  # this interface's default
    assert submit.sampling.top_p == pytest.approx(own.get("top_p", 1.0))
    assert submit.sampling.repetition_penalty == pytest.approx(own.get("repetition_penalty", 1.0))
    assert (submit.num_choices, submit.priority) == (1, 0)


async def test_every_parameter_arrives(tmp_path):
    async with rig(tmp_path, counting) as r:
        asked = request(
            request_id="mine",
            model="tiny",
            priority=-3,
            sampling=vllm.RandomSampling(num_sequences=2, top_k=7, top_p=0.5, min_p=0.25, seed=-1),
            decoding=vllm.DecodingParameters(
                presence_penalty=0.5, frequency_penalty=-0.5, repetition_penalty=1.5, logit_bias={3: 2.0},
                allowed_token_ids=[100, 101],
            ),
            stopping=vllm.StoppingCriteria(max_new_tokens=4, min_new_tokens=2, stop_token_ids=[9], ignore_eos=True),
            kv=vllm.KVCacheParameters(cache_salt="salt"),
        )  # fmt: skip
        await collect(r, asked)
        submit = r.session.submitted[0]
    sampling = submit.sampling
    assert (submit.request_id, submit.priority, submit.cache_salt) == ("mine", -3, b"salt")
    assert (submit.num_choices, submit.max_tokens, submit.min_tokens) == (2, 4, 2)
    assert (sampling.top_k, sampling.top_p, sampling.min_p, sampling.seed) == (7, 0.5, 0.25, 2**64 - 1)
    assert (sampling.presence_penalty, sampling.frequency_penalty, sampling.repetition_penalty) == (0.5, -0.5, 1.5)
    assert list(memoryview(submit.stop_token_ids).cast("i")) == [9]
    assert list(memoryview(sampling.allowed_token_ids).cast("i")) == [100, 101]


async def test_candidates_leave_out_the_token_itself(tmp_path):
    async with rig(tmp_path) as r:
        r.session.script = lambda submit, index: iter([1, 100, 101])
        asked = request(
            response=vllm.ResponseOptions(output_logprobs=True, output_candidates=vllm.CandidateTokens(top_n=2))
        )
        outputs = [message.outputs for message in await collect(r, asked)]
    candidates = [info for output in outputs for info in output.candidate_tokens]
    assert [[(t.id, t.rank) for t in info.tokens] for info in candidates] == [
        [(0, 1)],
        [(0, 1), (1, 2)],
        [(0, 1), (1, 2)],
    ]
    assert [value for output in outputs for value in output.logprobs] == [-9999.0] * 3
    assert [rank for output in outputs for rank in output.ranks] == [3] * 3


async def test_what_stopped_it(tmp_path):
    async with rig(tmp_path) as r:
        eos = r.service.model.eos_token_ids[-1]

        async def end(script, **stopping) -> vllm.FinishInfo:
            r.session.script = lambda submit, index: iter(script)
            asked = request(stopping=vllm.StoppingCriteria(max_new_tokens=20, **stopping))
            return (await collect(r, asked))[-1].outputs.finish_info

        info = await end([100, eos])
        assert (info.finish_reason, info.WhichOneof("stop_reason")) == (vllm.FinishInfo.STOP, "eos_token_id")
        assert (await end([100, eos], stop_token_ids=[eos])).WhichOneof("stop_reason") == "stop_token_id"
        fox = spelled(r.tokenizer, "fox")
        assert (await end([*fox, *range(300, 400)], stop_strings=["ox"])).stop_string == "ox"


REFUSALS = [
    ({"temperature": 3.0}, "INVALID_ARGUMENT", "temperature"),
    ({"sampling": vllm.RandomSampling(num_sequences=17)}, "INVALID_ARGUMENT", "sampling.num_sequences"),
    ({"sampling": vllm.RandomSampling(top_k=513)}, "INVALID_ARGUMENT", "sampling.top_k"),
    (
        {"decoding": vllm.DecodingParameters(presence_penalty=3)},
        "INVALID_ARGUMENT",
        "decoding.presence_penalty",
    ),
    ({"stopping": vllm.StoppingCriteria(stop_strings=[""])}, "INVALID_ARGUMENT", "stopping.stop_strings[0]"),
    ({"token_ids": vllm.TokenIds(ids=[512])}, "INVALID_ARGUMENT", "token_ids.ids[0]"),
    (
        {"response": vllm.ResponseOptions(output_candidates=vllm.CandidateTokens(top_n=21))},
        "INVALID_ARGUMENT",
        "response.output_candidates",
    ),
    (
        {"response": vllm.ResponseOptions(output_candidates=vllm.CandidateTokens(all=True))},
        "UNIMPLEMENTED",
        "response.output_candidates.all",
    ),
    ({"model": "other"}, "NOT_FOUND", "model"),
    ({"lora_name": "x"}, "UNIMPLEMENTED", "lora_name"),
    ({"media": [vllm.MediaItem()]}, "UNIMPLEMENTED", "media"),
    ({"truncate_prompt_tokens": 1}, "UNIMPLEMENTED", "truncate_prompt_tokens"),
    ({"kv": vllm.KVCacheParameters(bypass_prefix_cache=True)}, "UNIMPLEMENTED", "kv.bypass_prefix_cache"),
    (
        {"kv": vllm.KVCacheParameters(kv_transfer_params=struct_pb2.Struct())},
        "UNIMPLEMENTED",
        "kv.kv_transfer_params",
    ),
    ({"decoding": vllm.DecodingParameters(structural_tag="")}, "UNIMPLEMENTED", "decoding.structural_tag"),
]


async def test_refusals_name_the_field_in_this_interfaces_words(tmp_path):
    async with rig(tmp_path, counting) as r:
        for fields, code, field in REFUSALS:
            found = await refusal(stub(r).GenerateStream(request(**fields)))
            assert (found.code.name, found.fields) == (code, [field])
            assert field.partition("[")[0] in found.message
        assert not r.session.submitted


async def test_one_message_cannot_hold_several_choices(tmp_path):
    async with rig(tmp_path, counting) as r:
        found = await refusal(stub(r).Generate(request(sampling=vllm.RandomSampling(num_sequences=2))))
        assert (found.code.name, found.fields) == ("INVALID_ARGUMENT", ["sampling.num_sequences"])


async def test_control(tmp_path):
    async with rig(tmp_path, counting) as r:
        control = control_pb2_grpc.ControlStub(r.channel)
        server = await control.GetServerInfo(control_pb2.GetServerInfoRequest())
        assert (server.max_model_len, server.kv_block_size, server.total_kv_blocks) == (256, 16, 20)
        assert (server.max_running_requests, server.max_batched_tokens, server.max_loras) == (8, 64, 0)
        model = await control.GetModelInfo(control_pb2.GetModelInfoRequest())
        assert (model.model_id, model.served_model_name) == ("tiny", "tiny")
        assert (model.supports_text_input, model.supports_token_ids_input, model.supports_lora) == (True, True, False)
        assert not (await control.GetKvEventSources(control_pb2.GetKvEventSourcesRequest())).sources
        r.session.script = pausing(r)
        endless = vllm.StoppingCriteria(max_new_tokens=200)
        call = aiter(stub(r).GenerateStream(request(request_id="mine", stopping=endless)))
        await anext(call)
        await control.Abort(control_pb2.AbortRequest(request_ids=["mine"]))
        rest = [message async for message in call]
        assert rest[-1].outputs.finish_info.finish_reason == vllm.FinishInfo.ABORTED
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await control.Abort(control_pb2.AbortRequest(request_ids=["x"] * 1025))
        assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
