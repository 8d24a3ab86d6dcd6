"""Constraints, bad words and prompt logprobs at the door: what is refused, with which words, and what is passed on."""

import json
import os
import re
import signal
import threading

import grpc
import numpy as np
import pytest

from executor_svc.constraints import LIMITS as EXECUTOR_LIMITS
from protos.stepwire.inference.v1 import inference_pb2 as pb
from protos.stepwire.wire.v1 import step_pb2
from scheduler_svc.errors import InvalidArgument
from scheduler_svc.frontend import generation
from scheduler_svc.frontend.grammar import COMPILE_LIMIT_S, LIMITS, GrammarChecker
from scheduler_svc.frontend.submission import bad_word_ids
from tests.unit.frontend.grpc_rig import rig
from tests.unit.frontend.test_grpc_generate import generate, stopping

BAD = grpc.StatusCode.INVALID_ARGUMENT


def constraint(**fields) -> pb.SamplingParams:
    return pb.SamplingParams(**fields)


@pytest.fixture(scope="module")
def checker():
    made = GrammarChecker(compile_limit_s=120)
    yield made
    made.close()


def test_both_ends_compile_with_the_same_limits():
    assert LIMITS == EXECUTOR_LIMITS


GOOD = [
    {"json_schema": "{}"},
    {"json_schema": "true"},
    {"json_schema": json.dumps({"type": "object", "properties": {"a": {"type": "array", "items": {"$ref": "#"}}}})},
    {"regex": r"[a-z]{1,100000}\d+"},
    {"grammar": 'start: "a" start "b" | "c"'},
    {"grammar": 'root ::= "a" root "b" | "c"'},
    {"choice": pb.ChoiceList(choices=['a"b', "x\\y", "/re/", "🦊\n", "né"])},
    {"json_object": True},
]


@pytest.mark.parametrize("fields", GOOD, ids=str)
def test_good_constraints(checker, fields):
    asked = constraint(**fields)
    assert checker.check(asked)
    assert checker.known(asked) == checker.check(asked)


BROKEN = [
    ({"json_schema": "{"}, "not a JSON text"),
    ({"json_schema": "[]"}, "a JSON object or a boolean"),
    ({"json_schema": '{"type": "strng"}'}, "strng"),
    ({"json_schema": '{"uniqueItems": true, "type": "array"}'}, "uniqueItems"),
    ({"json_schema": '{"$ref": "http://elsewhere/schema"}'}, "cannot be compiled"),
    ({"json_schema": "[" * 20_000 + "]" * 20_000}, ""),
    ({"json_schema": '{"items":' * 5000 + "{}" + "}" * 5000}, ""),
    ({"json_schema": '{}}], "max_tokens": 1, "x": [{"a":{}'}, "not a JSON text"),
    ({"regex": "(a"}, "unclosed group"),
    ({"regex": "(?=a)b"}, "look-ahead"),
    ({"regex": "(" * 50_000 + ")" * 50_000}, ""),
    ({"grammar": "start: foo"}, 'unknown name: "foo"'),
    ({"grammar": "  "}, "empty"),
    ({"grammar": "root ::= (("}, "GBNF"),
    ({"grammar": "start: " + "(" * 100_000 + '"a"' + ")" * 100_000}, ""),
]


@pytest.mark.parametrize(("fields", "why"), BROKEN, ids=lambda v: str(v)[:40])
def test_broken_constraints_say_why(checker, fields, why):
    asked = constraint(**fields)
    with pytest.raises(InvalidArgument) as raised:
        checker.check(asked)
    assert raised.value.field == f"sampling.{next(iter(fields))}"
    assert why in raised.value.message
    assert len(raised.value.message) < 400
    assert not re.search(r"Traceback|/tmp|site-packages", raised.value.message)
    assert checker.known(asked) is None


EXPLODING = {"grammar": "start: " + " | ".join(f'"x{i}" "y"' for i in range(50_000))}


def test_what_takes_too_long_is_given_up_and_the_next_one_compiles():
    checker = GrammarChecker(compile_limit_s=0.001)
    try:
        with pytest.raises(InvalidArgument, match=r"too large: it cannot be compiled within 0\.001 s"):
            checker.check(constraint(**EXPLODING))
        checker._limit_s = 120
        assert checker.check(constraint(regex="a"))
    finally:
        checker.close()


def test_time_in_which_the_compiler_does_not_run_is_not_its_own():
    checker = GrammarChecker()
    try:
        assert checker.check(constraint(regex="a"))
        pid = checker._child._process.pid
        os.kill(pid, signal.SIGSTOP)
        threading.Timer(COMPILE_LIMIT_S + 0.3, os.kill, (pid, signal.SIGCONT)).start()
        assert checker.check(constraint(regex="b"))
        assert checker._child._process.pid == pid
    finally:
        checker.close()


def test_accepted_grammars_are_remembered_within_bounds(checker, monkeypatch):
    monkeypatch.setattr("scheduler_svc.frontend.grammar.MAX_KEPT", 2)
    asks = [constraint(regex=f"a{i}") for i in range(3)]
    for asked in asks:
        checker.check(asked)
    assert [checker.known(asked) is not None for asked in asks] == [False, True, True]


async def test_through_the_server(tmp_path):
    async with rig(tmp_path) as r:
        r.service._grammars._limit_s = 120
        good = generate(sampling={"regex": "[ab]+"}, stopping=stopping(max_tokens=2))
        await r.collect(good)
        [submit] = r.session.submitted
        assert "[ab]+" in submit.sampling.constraint.grammar
        assert np.frombuffer(submit.sampling.constraint.end_token_ids, "<i4").tolist() == [0, 2]
        found = await r.refusal(generate(sampling={"regex": "(a"}))
        assert (found.code, found.fields) == (BAD, ["sampling.regex"])
        await r.collect(generate(sampling={"regex": "[ab]+"}, stopping=stopping(max_tokens=0)))
        assert not r.session.submitted[-1].sampling.HasField("constraint")
        r.service.model.__dict__["eos_token_ids"] = ()
        found = await r.refusal(good)
        assert (found.code, found.fields) == (BAD, ["sampling.regex"])
        assert "end-of-sequence" in found.message


# ---- bad words ----------------------------------------------------------------------------------------------


def naive(word: str, encode) -> list[list[int]]:
    word = word.lstrip()
    first, second = encode(word), encode(" " + word)
    return [first, second] if second[0] != first[0] and len(second) == len(first) else [first]


async def test_bad_words_are_tokenised_in_two_ways(tmp_path):
    async with rig(tmp_path) as r:

        def encode(text: str) -> list[int]:
            return r.tokenizer.encode(text, add_special_tokens=False, parse_special_tokens=True)

        words = ["fox", " fox", "the lazy", "quick brown", "<|im_end|>", "🦊", "END,"]
        want = [ids for word in words for ids in naive(word, encode)]
        assert bad_word_ids(words, encode, 512) == want
        assert len(want) > len(words)
        assert bad_word_ids(["  "], encode, 512), "nothing but space is a word too"
        assert bad_word_ids(words, encode, min(max(ids) for ids in want)) == []
        await r.collect(generate(sampling={"bad_words": words}, stopping=stopping(max_tokens=1)))
        values = np.frombuffer(r.session.submitted[0].sampling.bad_words, "<i4").tolist()
        assert values == [value for ids in want for value in (len(ids), *ids)]


# ---- prompt logprobs ----------------------------------------------------------------------------------------


def part(first: int, count: int, num_top: int = 2) -> step_pb2.PromptLogprobs:
    return step_pb2.PromptLogprobs(
        first_position=first,
        logprobs=np.array([-np.inf, *-np.arange(1.0, count)], "<f4").tobytes(),
        ranks=np.arange(1, count + 1, dtype="<i4").tobytes(),
        num_top=num_top,
        top_token_ids=np.arange(count * num_top, dtype="<i4").tobytes(),
        top_logprobs=np.zeros(count * num_top, "<f4").tobytes(),
    )


@pytest.mark.parametrize(("limit", "sizes"), [(2048, [5]), (5, [5]), (2, [2, 2, 1]), (4, [4, 1])])
@pytest.mark.parametrize("max_tokens", [0, 1])
async def test_prompt_logprobs_come_first_and_in_order(tmp_path, monkeypatch, limit, sizes, max_tokens):
    monkeypatch.setattr(generation, "MAX_TOKENS_PER_MESSAGE", limit)
    async with rig(tmp_path) as r:
        r.session.prompt_logprobs = [part(1, 2), part(3, 3)]
        asked = generate(token_ids=pb.TokenIds(ids=[70, 71, 72, 73, 74, 75]), response={"prompt_logprobs": 2},
                         stopping=stopping(max_tokens=max_tokens))  # fmt: skip
        messages = await r.collect(asked)
        assert r.session.submitted[0].sampling.prompt_logprobs == 2
        told = [m for m in messages if m.prompt.logprobs]
        assert [len(m.prompt.logprobs) for m in told] == sizes
        assert told == messages[: len(told)]
        assert not any(m.token_ids for m in told[:-1])
        assert (messages[0].prompt.num_tokens, bool(messages[0].request_id)) == (6, True)
        entries = [entry for m in told for entry in m.prompt.logprobs]
        assert [entry.token_id for entry in entries] == [71, 72, 73, 74, 75]
        assert [entry.logprob for entry in entries] == [-9999, -1, -9999, -1, -2]
        assert [entry.rank for entry in entries] == [1, 2, 1, 2, 3]
        assert [[c.token_id for c in entry.top] for entry in entries] == [[0, 1], [2, 3], [0, 1], [2, 3], [4, 5]]
        assert messages[-1].finish_reason == pb.FINISH_REASON_LENGTH
