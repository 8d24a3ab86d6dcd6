"""The Python examples, in this process: what they say to wrong input, wrong addresses and refusals."""

import asyncio
import importlib.util
import json
from collections.abc import Iterator
from types import ModuleType

import grpc
import pytest

from protos.stepwire.inference.v1 import inference_pb2 as pb
from protos.stepwire.inference.v1 import inference_pb2_grpc
from tests.architecture.source import ROOT
from tests.unit.client.served import served

NOBODY = "127.0.0.1:1"


class Echo(inference_pb2_grpc.InferenceServiceServicer):
    def Generate(self, request, context):
        if request.text == "refuse":
            context.abort(grpc.StatusCode.INVALID_ARGUMENT, "text is too long")
        yield pb.GenerateResponse(text=request.text.upper(), finish_reason=pb.FINISH_REASON_LENGTH)

    def Tokenize(self, request, context):
        context.abort(grpc.StatusCode.INVALID_ARGUMENT, "text is too long")


@pytest.fixture(scope="module")
def address() -> Iterator[str]:
    with served(Echo(), inference_pb2_grpc.add_InferenceServiceServicer_to_server) as running:
        yield running


def example(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(f"example_{name}", ROOT / "examples" / "python" / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def run(name: str, *arguments: object) -> int:
    return asyncio.run(example(name).main([str(argument) for argument in arguments]))


WRONG = {  # a line of the file, and what its answer says
    b'{"id": "broken", "prompt": ': "line 1 is not JSON",
    b"[1, 2]": "line 2 is not a JSON object",
    b'{"prompt": "x", "max_tokens": 99999999999}': "max_tokens is 99999999999, but must be a whole number within 0..",
    b'{"prompt": "x", "max_tokens": -1}': "max_tokens is -1",
    b'{"prompt": "x", "max_tokens": "5"}': "max_tokens is '5'",
    b'{"prompt": ["x"]}': "not as it should be",
    b'{"prompt": "\\ud800"}': "not as it should be",
    b'{"messages": [1]}': "not as it should be",
    b'{"messages": [{"who": "me"}]}': "not as it should be",
    b"{}": "neither prompt nor messages",
    b'{"id": [], "prompt": "x"}': "line 11 has an id that is neither",
    b"\xff": "line 12 is not JSON",
    b"[" * 100_000: "line 13 is not JSON",
    b'{"prompt": "refuse"}': "INVALID_ARGUMENT: text is too long",
}


def test_a_wrong_row_is_answered_and_the_others_go_on(address, tmp_path, capsys):
    source, target = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    source.write_bytes(b"\n".join([*WRONG, b'{"id": "good", "prompt": "hi"}', b'{"id": "\\ud800", "prompt": "hi"}']))
    assert run("batch", source, target, "--address", address) == 1
    answers = {row["id"]: row for row in map(json.loads, target.read_text().splitlines())}
    assert set(answers) == {*range(1, len(WRONG) + 1), "good", "\ud800"}
    for number, says in enumerate(WRONG.values(), start=1):
        assert says in answers[number]["error"]
    assert answers["good"]["text"] == answers["\ud800"]["text"] == "HI"
    assert capsys.readouterr().out.startswith(f"{len(WRONG) + 2} rows: 0 were there, {len(WRONG)} errors, ")


def test_an_id_that_is_there_twice_is_named_in_every_run(address, tmp_path, capsys):
    source, target = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    rows = [
        {"id": "a", "prompt": "one"},
        {"id": "a", "prompt": "two"},
        {"id": 4, "prompt": "three"},
        {"prompt": "four"},
    ]
    source.write_text("".join(json.dumps(row) + "\n" for row in rows))
    for num_there in (0, 2):
        assert run("batch", source, target, "--address", address) == 1
        assert capsys.readouterr().out.startswith(f"4 rows: {num_there} were there, 2 errors, ")
    found = [json.loads(line) for line in target.read_text().splitlines()]
    assert {(row["id"], row["text"]) for row in found if "text" in row} == {("a", "ONE"), (4, "THREE")}
    errors = [row["error"] for row in found if "error" in row]
    assert len(errors) == 4
    assert {error.partition(":")[0] for error in errors} == {
        "line 2 has the id of line 1",
        "line 4 has the id of line 3",
    }


def test_files_that_are_none_are_one_line(address, tmp_path, capsys):
    assert run("batch", tmp_path / "no.jsonl", tmp_path / "out.jsonl") == 1
    assert capsys.readouterr().err == f"batch.py: {tmp_path / 'no.jsonl'}: No such file or directory\n"
    assert not (tmp_path / "out.jsonl").exists()
    foreign = tmp_path / "foreign"
    foreign.write_text("dear diary\n")
    with pytest.raises(SystemExit, match="foreign is there, but holds no answers of this program"):
        run("batch", foreign, foreign)


def test_who_reaches_nobody_says_so_in_one_line(capsys):
    assert run("resume", "x", "--address", NOBODY, "--wait", 0.1) == 1
    assert capsys.readouterr().err == f"resume.py: nothing answered on {NOBODY} in 0.1 s\n"
    assert run("many_streams", "x", "y", "--address", NOBODY) == 1
    [line] = capsys.readouterr().err.splitlines()
    assert line.startswith(f"many_streams.py: {NOBODY}: UNAVAILABLE: ")


def test_who_waits_says_so(monkeypatch, capsys):
    module = example("resume")
    monkeypatch.setattr(module, "SILENT_S", 0.01)
    assert asyncio.run(module.main(["x", "--address", NOBODY, "--wait", "0.1"])) == 1
    assert capsys.readouterr().err.startswith(f"[nothing answers on {NOBODY} yet: waiting up to 0.1 s]\n")


def test_a_refusal_is_one_line(address, capsys):
    assert run("resume", "x", "--address", address) == 1
    assert capsys.readouterr().err.strip() == f"resume.py: {address}: INVALID_ARGUMENT: text is too long"
    assert run("many_streams", "refuse", "--address", address) == 1
    assert capsys.readouterr().err.strip() == f"many_streams.py: {address}: INVALID_ARGUMENT: text is too long"


@pytest.mark.parametrize("words", [("batch", "in", "out"), ("resume", "x"), ("many_streams", "x")])
def test_more_tokens_than_a_field_holds_are_refused_by_name(words, capsys):
    with pytest.raises(SystemExit) as caught:
        run(*words, "--max-tokens", 2**32)
    assert caught.value.code == 2
    assert "--max-tokens is 4294967296, but must be within 0..4294967295" in capsys.readouterr().err
