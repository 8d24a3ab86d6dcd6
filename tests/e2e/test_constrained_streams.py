"""Constrained streams through the whole service: 64 languages at once, each answer a word of its own.

The executor is killed in the middle of them: the simulated one, and one that computes the model. The oracles are re and
json, and the answers of those whom nobody disturbed.
"""

import asyncio
import json
import os
import re
import signal

import grpc
import pytest

from protos.stepwire.inference.v1 import inference_pb2 as pb
from protos.stepwire.inference.v1 import inference_pb2_grpc
from tests.e2e.known_answers import ENDLESS, LIMIT_S, SLOW, assert_clean, pids, until
from tests.e2e.server import Answer, Serve, collect

pytest.importorskip("llguidance")

NUM_STREAMS = 64
# Beside them runs one that is not over by itself, so that the fault always meets a language under way.
ENDLESS_PATTERN = "[a-h]+"
EXPLODING = "start: " + " | ".join(f'"x{i}" "y"' for i in range(60_000))


def pattern(i: int) -> str:
    return f"([a-{'cdefgh'[i % 6]}]{{2,4}}-|{i}){{12,20}}end{i}"


def schema(i: int) -> dict:
    fields = {"kind": {"enum": [f"k{i}", "other"]}, "n": {"type": "integer", "minimum": i, "maximum": 9 * i + 9}}
    # With whitespace where JSON allows it, this model goes on with newlines until its limit.
    compact = {"x-guidance": {"whitespace_flexible": False}, "additionalProperties": False}
    return {"type": "object", "properties": fields, "required": list(fields), **compact}


def choices(i: int) -> list[str]:
    return [f"yes {i}", f"no {i}", f"perhaps {i}"]


def ask(i: int, **language: object) -> pb.GenerateRequest:
    sampling = pb.SamplingParams(temperature=float(i % 2), seed=i, **language)
    return pb.GenerateRequest(
        token_ids=pb.TokenIds(ids=[100 + i, 7, 9]), sampling=sampling, stopping=pb.StoppingCriteria(max_tokens=200)
    )


class Endless:
    """A constrained stream that ends when it is cancelled."""

    def __init__(self, stub: inference_pb2_grpc.InferenceServiceStub):
        request = ask(NUM_STREAMS, regex=ENDLESS_PATTERN)
        request.request_id = "endless"
        request.stopping.max_tokens = request.stopping.min_tokens = ENDLESS
        self.text, self.usage, self.begun = "", pb.Usage(), asyncio.Event()
        self._stub, self._reading = stub, asyncio.create_task(self._read(stub.Generate(request)))

    async def _read(self, call) -> None:
        async for message in call:
            self.text += message.text
            self.begun.set()
            self.usage = message.usage

    async def cancel(self) -> None:
        await self._stub.Cancel(pb.CancelRequest(request_id="endless"), timeout=LIMIT_S)
        await asyncio.wait_for(self._reading, LIMIT_S)


async def stream(stub: inference_pb2_grpc.InferenceServiceStub, i: int, begun: set[int]) -> tuple[str, list[int]]:
    text, ids = "", []
    async for message in stub.Generate(ask(i, regex=pattern(i)), timeout=LIMIT_S):
        text += message.text
        ids += message.token_ids
        begun.add(i)
    return text, ids


async def test_many_languages_survive_the_executor_and_a_grammar_that_explodes(tmp_path, default_model):
    with Serve(tmp_path, "--model", str(default_model), "--backend", "simulated", env=SLOW) as serve:
        async with grpc.aio.insecure_channel(serve.addresses[0]) as channel:
            stub = inference_pb2_grpc.InferenceServiceStub(channel)
            undisturbed = await asyncio.gather(*(stream(stub, i, set()) for i in range(NUM_STREAMS)))
            for i, (text, _) in enumerate(undisturbed):
                assert re.fullmatch(pattern(i), text), (i, text)
            assert serve.load().epoch == 1
            begun: set[int] = set()
            endless = Endless(stub)
            await asyncio.wait_for(endless.begun.wait(), LIMIT_S)
            again = asyncio.gather(*(stream(stub, i, begun) for i in range(NUM_STREAMS)))
            await until(lambda: len(begun) >= NUM_STREAMS // 2)
            os.kill(pids(serve, "executor")[0], signal.SIGKILL)
            with pytest.raises(grpc.aio.AioRpcError) as refused:
                await stub.Generate(ask(1, grammar=EXPLODING), timeout=LIMIT_S).read()
            assert refused.value.code() == grpc.StatusCode.INVALID_ARGUMENT
            # By its size or by its time, whichever this machine meets first.
            assert refused.value.details().startswith("sampling.grammar ")
            assert await again == undisturbed
            await until(lambda: serve.load().epoch == 2)
            await endless.cancel()
            assert re.fullmatch(ENDLESS_PATTERN, endless.text)
            assert endless.usage.num_resumes == 1
        assert_clean(serve)


async def test_a_computed_model_keeps_to_schemas_expressions_and_choices_whatever_dies(tmp_path, default_model):
    """Twelve short answers and two long ones, of which one is drawn; the executor is killed in the middle of these."""
    languages = [
        {"json_schema": json.dumps(schema(i))} if i % 3 == 0 else {"regex": f"([ab]{{2}}-){{3}}end{i}"} if i % 3 == 1
        else {"choice": pb.ChoiceList(choices=choices(i))}
        for i in range(12)
    ]  # fmt: skip
    languages += [{"regex": f"([a-f]{{2,4}}-){{30}}end{i}"} for i in (12, 13)]
    made = [ask(i, **language) for i, language in enumerate(languages)]
    for request in made[12:]:
        request.stopping.max_tokens = 300
    with Serve(tmp_path, "--model", str(default_model), "--backend", "cpu", "--num-blocks", "512") as serve:
        async with grpc.aio.insecure_channel(serve.addresses[0]) as channel:
            stub = inference_pb2_grpc.InferenceServiceStub(channel)
            answers = await asyncio.gather(*(collect(stub, request) for request in made))
            for i, answer in enumerate(answers):
                assert answer.finish_reason == pb.FINISH_REASON_STOP, answer
                if i >= 12:
                    assert re.fullmatch(f"([a-f]{{2,4}}-){{30}}end{i}", answer.text)
                elif i % 3 == 0:
                    value = json.loads(answer.text)
                    assert set(value) == {"kind", "n"}
                    assert value["kind"] in (f"k{i}", "other")
                    assert i <= value["n"] <= 9 * i + 9
                elif i % 3 == 1:
                    assert re.fullmatch(f"([ab]{{2}}-){{3}}end{i}", answer.text)
                else:
                    assert answer.text in choices(i)
            assert serve.load().epoch == 1
            ends = await disturbed(serve, stub, made)
            assert [(end.text, end.token_ids) for end in ends] == [(one.text, one.token_ids) for one in answers]
        assert_clean(serve)


async def disturbed(
    serve: Serve, stub: inference_pb2_grpc.InferenceServiceStub, made: list[pb.GenerateRequest]
) -> list[Answer]:
    """The answers when the executor is killed after some tokens; one more stream is under way whenever that is."""
    endless = Endless(stub)
    await asyncio.wait_for(endless.begun.wait(), LIMIT_S)
    begun = serve.load().generation_tokens_total
    running = asyncio.gather(*(collect(stub, request) for request in made))
    await until(lambda: serve.load().generation_tokens_total > begun + 60)
    os.kill(pids(serve, "executor")[0], signal.SIGKILL)
    await until(lambda: serve.load().epoch > 1)
    ends = await asyncio.wait_for(running, LIMIT_S)
    await endless.cancel()
    assert endless.usage.num_resumes == 1
    return ends
