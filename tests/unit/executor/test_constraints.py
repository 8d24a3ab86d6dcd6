"""Constraints over a small vocabulary: masks against all words of a language, written out; faults; resumption."""

import itertools
import json
import random
import re
from pathlib import Path

import numpy as np
import pytest

from executor_svc.backends.simulated import SimulatedBackend
from executor_svc.constraints import Grammars
from executor_svc.errors import PlanViolation, RowFault
from executor_svc.sampling import SamplingTable
from executor_svc.worker import Worker
from protos.stepwire.wire.v1 import step_pb2
from tests.unit.executor.plans import ToyScheduler, ToySequence, admit, geometry, greedy, ints, plan

llguidance = pytest.importorskip("llguidance")

# One byte each, then some of several: words can be spelled in more than one way.
TOKENS = ["<end>", *'abcdenosxyz0123456789-{}[]":, ', "ab", "bc", "abc", "xyz", "12", '":', "- ", "yes", "no", '{"']
END = 0
V = len(TOKENS)


@pytest.fixture(scope="module")
def grammars(tmp_path_factory) -> Grammars:
    return Grammars(small_model(tmp_path_factory.mktemp("model")), V)


def small_model(directory: Path) -> Path:
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

    alphabet = {byte: char for char, byte in zip("Ġ", " ", strict=True)}
    vocab = {"".join(alphabet.get(c, c) for c in token): i for i, token in enumerate(TOKENS)}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken("<end>")])
    tokenizer.save(str(directory / "tokenizer.json"))
    return directory


def asked(grammar: str, **fields: object) -> step_pb2.Sampling:
    return greedy(constraint=step_pb2.Constraint(grammar=grammar, end_token_ids=ints(END)), **fields)


def regex(pattern: str) -> str:
    return llguidance.LLMatcher.grammar_from_regex(pattern)


def text(tokens: list[int]) -> str:
    return "".join(TOKENS[token] for token in tokens if token != END)


def after(grammars: Grammars, constraint, output: list[int]) -> set[int]:
    [mask] = grammars.masks([(constraint, np.array(output, np.int32))])
    return set(np.flatnonzero(mask.wait()).tolist())


# Each with all of its words.
LANGUAGES = [
    ("a[bc]?x{0,2}", ["a" + b + x for b in ("", "b", "c") for x in ("", "x", "xx")]),
    ("(ab|abc|b)-?[12]", [h + m + t for h in ("ab", "abc", "b") for m in ("", "-") for t in "12"]),
    ("yes|no|no-", ["yes", "no", "no-"]),
    ("[0-2]{1,3}", ["".join(p) for n in (1, 2, 3) for p in itertools.product("012", repeat=n)]),
]


@pytest.mark.parametrize(("pattern", "words"), LANGUAGES, ids=[pattern for pattern, _ in LANGUAGES])
def test_masks_against_every_word(grammars, pattern, words):
    rng = random.Random(pattern)
    assert all(re.fullmatch(pattern, word) for word in words)
    for _ in range(12):
        constraint = grammars.begin(regex(pattern), np.array([END], np.int32))
        output: list[int] = []
        while not output or output[-1] != END:
            so_far = text(output)
            want = {i for i, t in enumerate(TOKENS) if i != END and any(w.startswith(so_far + t) for w in words)}
            want |= {END} if so_far in words else set()
            assert after(grammars, constraint, output) == want
            output.append(rng.choice(sorted(want)))
        assert after(grammars, constraint, output) == {END}, "after the end, only the end"
        again = grammars.begin(regex(pattern), np.array([END], np.int32))
        cut = rng.randrange(len(output))
        assert after(grammars, again, output[:cut]) == after(grammars, grammars.begin(
            regex(pattern), np.array([END], np.int32)), output[:cut])  # fmt: skip
        assert after(grammars, again, output) == {END}


def run(worker: Worker, scheduler: ToyScheduler) -> None:
    for _ in range(3000):
        if not scheduler.waiting and not scheduler.running:
            return
        message, sampled = scheduler.plan()
        result = worker.execute(message)
        assert not result.faults, result.faults
        scheduler.commit(sampled, np.frombuffer(result.token_ids, "<i4").tolist())
    raise AssertionError("no end")


@pytest.mark.parametrize("seed", range(2))
def test_preemption_chunks_and_batches_do_not_change_a_constrained_stream(grammars, seed):
    """Every sequence alone, and all of them with rows, chunks and preemptions drawn at random."""
    rng = random.Random(seed)
    patterns = ["[a-d]{3,9}", "[0-9]{2}-[0-9]{2}(-[0-9]{4})?", "(yes|no)( (yes|no)){0,5}", '\\{"[xyz]{1,4}":[0-9]+\\}']
    asks = [
        asked(regex(rng.choice(patterns)), temperature=rng.choice([0.0, 1.0]), seed=i, min_tokens=rng.choice([0, 3]),
              stop_token_ids=ints(END))
        for i in range(10)
    ]  # fmt: skip
    prompts = [[rng.randrange(V) for _ in range(rng.randint(1, 12))] for _ in asks]

    def sequences() -> list[ToySequence]:
        return [ToySequence(list(p), len(p), 12, ask) for p, ask in zip(prompts, asks, strict=True)]

    shape = geometry(vocab_size=V, num_blocks=400, max_num_batched_tokens=40, max_num_seqs=10)
    together = sequences()
    run(Worker(SimulatedBackend(shape, step_pb2.ModelIdentity()), grammars), ToyScheduler(rng, shape, list(together)))
    for one, got in zip(sequences(), together, strict=True):
        worker = Worker(SimulatedBackend(shape, step_pb2.ModelIdentity()), grammars)
        run(worker, ToyScheduler(random.Random(0), shape, [one]))
        assert one.tokens == got.tokens, f"seed {seed}"
        output = one.tokens[one.num_prompt :]
        if END in output:
            assert any(re.fullmatch(pattern, text(output)) for pattern in patterns)
            assert set(output[output.index(END) :]) == {END}


def test_schemas_make_what_their_validator_accepts(grammars):
    jsonschema = pytest.importorskip("jsonschema")
    schemas = [
        {"type": "object", "properties": {"x": {"type": "integer"}}, "required": ["x"], "additionalProperties": False},
        {"type": "array", "items": {"enum": ["yes", "no"]}, "minItems": 1, "maxItems": 4},
        {"anyOf": [{"type": "integer", "minimum": 3, "maximum": 120}, {"type": "string", "pattern": "^[ab]{2,5}$"}]},
    ]
    shape = geometry(vocab_size=V, num_blocks=400)
    options = json.dumps({"whitespace_flexible": False})
    ended = 0
    for seed, schema in itertools.product(range(3), schemas):
        grammar = llguidance.LLMatcher.grammar_from_json_schema(json.dumps(schema), json.loads(options))
        sequence = ToySequence([1], 1, 40, asked(grammar, temperature=1.0, seed=seed))
        run(Worker(SimulatedBackend(shape, step_pb2.ModelIdentity()), grammars),
            ToyScheduler(random.Random(seed), shape, [sequence]))  # fmt: skip
        output = sequence.tokens[1:]
        if END in output:
            ended += 1
            jsonschema.validate(json.loads(text(output)), schema)
    assert ended > 4


# ---- faults -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("ask", "why"),
    [
        (asked(regex("(a")), "cannot be compiled"),
        (asked("start: foo"), "cannot be compiled"),
        (asked(regex("[ab]+"), allowed_token_ids=ints(TOKENS.index("1"))), "leave no token"),
    ],
)
def test_a_fault_ends_one_row_and_no_other(grammars, ask, why):
    worker = Worker(SimulatedBackend(geometry(vocab_size=V), step_pb2.ModelIdentity()), grammars)
    free = worker.execute(plan(1, admit=[admit(0, [1, 2], [0]), admit(1, [1, 2], [1], sampling=ask)],
                               prefill=ints(0, 2, 1, 2)))  # fmt: skip
    assert [fault.row for fault in free.faults] == [1]
    assert why in free.faults[0].message
    assert len(free.token_ids) == 8
    again = worker.execute(plan(2))
    assert [fault.row for fault in again.faults] == [1]
    assert not worker.execute(plan(3, release=ints(1))).faults


def test_without_a_tokenizer_a_constraint_is_a_fault(tmp_path):
    for grammars in (None, Grammars(tmp_path, V)):
        worker = Worker(SimulatedBackend(geometry(vocab_size=V), step_pb2.ModelIdentity()), grammars)
        result = worker.execute(plan(1, admit=[admit(0, [1], [0], sampling=asked(regex("a")))], prefill=ints(0, 1)))
        assert "tokenizer.json" in result.faults[0].message


def test_a_fault_stays(grammars):
    constraint = grammars.begin(regex("ab"), np.array([END], np.int32))
    for _ in range(2):
        with pytest.raises(RowFault, match="cannot be followed"):
            after(grammars, constraint, [TOKENS.index("x")])


def test_a_constraint_needs_an_end():
    table = SamplingTable(1, V)
    for ids in (b"", ints(V), ints(-1), b"\0"):
        ask = greedy(constraint=step_pb2.Constraint(grammar="start: /a/", end_token_ids=ids))
        with pytest.raises(PlanViolation):
            table.set(0, ask)
