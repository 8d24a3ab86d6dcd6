"""What clients send stays out of errors and logs: a marker in every text field of good, bad and broken requests."""

import json
import logging

import grpc
import pytest

from protos.stepwire.inference.v1 import inference_pb2 as pb
from scheduler_svc.client.config import Access
from scheduler_svc.errors import RequestFailed
from scheduler_svc.frontend import api_keys
from tests.unit.frontend.grpc_rig import rig
from tests.unit.frontend.test_grpc_generate import until

MARK = "xyzzyMARKER"
LONG = f"{MARK} " * 40_000


def generate(**fields) -> pb.GenerateRequest:
    return pb.GenerateRequest(**{"text": MARK, "stopping": pb.StoppingCriteria(max_tokens=3), **fields})


def chat(**fields) -> pb.ChatRequest:
    messages = [pb.ChatMessage(role="user", content=MARK)]
    return pb.ChatRequest(**{"messages": messages, "stopping": pb.StoppingCriteria(max_tokens=3), **fields})


def requests() -> list:
    sampling, stopping = pb.SamplingParams, pb.StoppingCriteria
    return [
        generate(),
        generate(text=LONG),
        generate(text=f"{MARK}\x00<|im_end|>", parse_special_tokens=True),
        generate(request_id=f"{MARK}\n2026-01-01 ERROR forged"),
        generate(request_id=f"{MARK}\x1b[31m"),
        generate(request_id=MARK * 40),
        generate(model=MARK),
        generate(cache_salt=MARK),
        generate(cache_salt=MARK * 40),
        generate(stopping=stopping(stop=[MARK], max_tokens=1)),
        generate(stopping=stopping(stop=[MARK * 40])),
        generate(stopping=stopping(stop=[MARK, ""])),
        generate(stopping=stopping(stop=[MARK] * 17)),
        generate(sampling=sampling(bad_words=[MARK * 40])),
        generate(sampling=sampling(regex=f"({MARK}")),
        # Why a grammar or schema is refused may quote it, to its sender and to nobody else; so these have no mark.
        generate(sampling=sampling(grammar="root ::= (")),
        generate(sampling=sampling(json_schema=json.dumps({"type": "nonsense"}))),
        generate(sampling=sampling(json_schema=f'{{"{MARK}')),
        generate(sampling=sampling(choice=pb.ChoiceList(choices=[MARK, MARK]))),
        generate(sampling=sampling(top_p=5.0)),
        chat(),
        chat(messages=[pb.ChatMessage(role=MARK * 20, content=MARK)]),
        chat(messages=[pb.ChatMessage(role=MARK, content=LONG)]),
        chat(tools_json=f'[{{"{MARK}'),
        chat(tools_json=json.dumps({MARK: 1})),
        chat(tools_json=json.dumps([{"name": MARK}])),
        chat(template_kwargs_json=json.dumps({MARK: 1})),
        chat(template_kwargs_json=json.dumps({"add_generation_prompt": MARK})),
        chat(template_kwargs_json=f"{{{MARK}"),
        chat(model=MARK),
    ]


class Errors(list):
    """Every word that a client is told: status, message, details in the trailers."""

    def note(self, error: grpc.aio.AioRpcError) -> None:
        self.append(error.details() or "")
        self.extend(str(value) for _, value in error.trailing_metadata() or ())


async def send(r, errors: Errors, request, **options) -> None:
    try:
        await r.collect(request, timeout=60, **options)
    except grpc.aio.AioRpcError as error:
        errors.note(error)


def check(errors: Errors, logged: str, printed: str, folder) -> None:
    for words in (*errors, logged, printed):
        assert MARK not in words
        assert "Traceback" not in words
        assert str(folder) not in words
        assert "site-packages" not in words
    assert not any(".py" in words for words in errors)


async def test_no_field_shows_up_in_an_error_or_a_log(tmp_path, caplog, capfd):
    caplog.set_level(logging.DEBUG)
    logging.getLogger("asyncio").setLevel(logging.INFO)
    async with rig(tmp_path) as r:
        errors = Errors()
        for request in requests():
            await send(r, errors, request)
        for call in (
            r.stub.Cancel(pb.CancelRequest(request_id=f"{MARK}\n")),
            r.stub.Tokenize(pb.TokenizeRequest(text=LONG * 4)),
            r.stub.Detokenize(pb.DetokenizeRequest(token_ids=[512])),
        ):
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await call
            errors.note(caught.value)
        assert len(errors) > 30
    check(errors, caplog.text, "".join(capfd.readouterr()), tmp_path)


async def test_no_field_shows_up_when_something_breaks(tmp_path, caplog, capfd):
    """A bug of ours with the prompt in its message, an answer that fails, a client that goes away."""

    def broken(submit, index):
        raise ValueError(f"cannot handle {MARK}")

    caplog.set_level(logging.DEBUG)
    logging.getLogger("asyncio").setLevel(logging.INFO)
    async with rig(tmp_path) as r:
        errors = Errors()
        decode, r.service._detokenizer.stream = r.service._detokenizer.stream, lambda *a, **k: broken(*a, 0)
        await send(r, errors, generate())
        r.service._detokenizer.stream = decode
        r.session.refuse_with = RequestFailed("the request failed")
        await send(r, errors, chat())
        r.session.refuse_with = None
        r.session.gate.clear()
        call = r.stub.Generate(generate())
        await until(lambda: r.session.live)
        call.cancel()
        await until(lambda: not r.service.num_active)
        assert "internal error" in errors[0]
    check(errors, caplog.text, "".join(capfd.readouterr()), tmp_path)


async def test_no_key_shows_up_anywhere(tmp_path, caplog, capfd):
    caplog.set_level(logging.DEBUG)
    key, entry = api_keys.make_key("acme")
    api_keys.add(tmp_path / "keys", entry)
    async with rig(tmp_path, config={"api_keys": tmp_path / "keys"}) as r:
        errors = Errors()
        await send(r, errors, generate(), metadata=Access(key).metadata)
        await send(r, errors, generate(), metadata=Access(key[:-1]).metadata)
        await send(r, errors, generate(text=LONG), metadata=Access(key).metadata)
        await send(r, errors, generate(), metadata=[("authorization", key)])
        assert len(errors) >= 3
    said = "\n".join([*errors, caplog.text, *capfd.readouterr()])
    assert key[:-1] not in said
    assert entry.digest.hex() not in said
