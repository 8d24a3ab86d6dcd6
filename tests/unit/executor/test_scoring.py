"""Prompt logprobs: the passes of a step by hand, and the cpu backend against transformers in float32."""

import random

import numpy as np
import pytest

from executor_svc import scoring
from executor_svc.backends.simulated import SimulatedBackend
from executor_svc.batch import build_batch
from executor_svc.rows import RowTable
from executor_svc.sampler import score
from executor_svc.worker import Worker
from protos.stepwire.wire.v1 import step_pb2
from tests.unit.executor.plans import ToyScheduler, ToySequence, admit, geometry, greedy, ints, plan
from tests.unit.executor.test_cpu_backend import VOCAB, make, reference  # noqa: F401

ASK = {"prompt_logprobs": 3}


def table(monkeypatch, most: int, *rows: tuple[int, int, bool]) -> tuple[RowTable, list]:
    """rows: (known tokens, tokens of this step, asked). Returns the passes as (row, tokens, samples) lists."""
    monkeypatch.setattr(scoring, "MAX_SCORED", most)
    made = RowTable(geometry(max_num_batched_tokens=500))
    step = plan(1, prefill=ints(*(n for i, row in enumerate(rows) for n in (i, row[1]))))
    for i, (known, _, asked) in enumerate(rows):
        seat = admit(i, list(range(1, known + 1)), list(range(10 * i, 10 * i + 10)))
        seat.sampling.CopyFrom(greedy(**ASK) if asked else greedy())
        step.admit.append(seat)
    work = made.apply(step)
    passes = []
    for part in scoring.passes(made, work):
        batch = build_batch(made, part)
        count = 0 if batch.scoring is None else len(batch.scoring.index)
        assert count <= most
        passes.append((part.rows.tolist(), part.num_tokens.tolist(), part.samples.tolist(), count))
        made.append(part, np.zeros(int(part.samples.sum()), np.int32))
    return made, passes


def test_a_step_without_questions_is_one_pass(monkeypatch):
    _, passes = table(monkeypatch, 2, (9, 9, False), (4, 2, False))
    assert passes == [([0, 1], [9, 2], [True, False], 0)]


def test_scored_tokens_come_a_few_at_a_time(monkeypatch):
    """Nine tokens score eight successors; the ninth draws, so it is never alone in a pass of scores."""
    _, passes = table(monkeypatch, 3, (9, 9, True), (4, 4, False))
    assert passes == [([0], [3], [False], 3), ([0], [3], [False], 3), ([0, 1], [3, 4], [True, True], 2)]
    _, passes = table(monkeypatch, 4, (9, 9, True), (9, 5, True))
    assert passes == [
        ([0], [4], [False], 4),
        ([0], [4], [False], 4),
        ([1], [4], [False], 4),
        ([0, 1], [1, 1], [True, False], 1),
    ]


def test_logits_are_in_order_and_each_is_known(monkeypatch):
    made, _ = table(monkeypatch, 100, (1, 1, True))
    step = plan(2, admit=[admit(1, [5, 6, 7, 8], [40], sampling=greedy(**ASK)), admit(2, [5, 6], [50])],
                prefill=ints(1, 3, 2, 2))  # fmt: skip
    batch = build_batch(made, made.apply(step))
    found = batch.scoring
    assert batch.logits_index.tolist() == [0, 1, 2, 3, 5]
    assert (found.index.tolist(), found.others.tolist()) == ([1, 2, 3], [0, 4])
    assert (found.targets.tolist(), found.positions.tolist(), found.rows.tolist()) == ([6, 7, 8], [1, 2, 3], [1, 1, 1])


@pytest.mark.parametrize("seed", range(4))
def test_scores_against_float64(seed):
    rng = np.random.default_rng(seed)
    logits = (rng.standard_normal((6, 50)) * 4).astype(np.float32)
    logits[0, [3, 9, 20]] = 8  # equals
    targets = rng.integers(0, 50, 6).astype(np.int32)
    rows, counts = np.array([1, 1, 1, 4, 4, 6], np.int32), np.array([5, 5, 5, 0, 0, 20], np.int32)
    asked = scoring.Scoring(np.arange(6), np.arange(0), rows, np.array([1, 2, 3, 7, 8, 1], np.int32), targets, counts)
    exact = logits.astype(np.float64)
    exact -= np.log(np.exp(exact).sum(axis=1, keepdims=True))
    got = score(logits, asked)
    assert [(m.row, m.first_position, m.num_top) for m in got] == [(1, 1, 5), (4, 7, 0), (6, 1, 20)]
    at = 0
    for message in got:
        size = len(message.ranks) // 4
        for i, value in enumerate(np.frombuffer(message.logprobs, "<f4")):
            ranked = sorted(range(50), key=lambda t: (-logits[at][t], t))
            assert value == pytest.approx(exact[at, targets[at]], abs=1e-5)
            rank = np.frombuffer(message.ranks, "<i4")[i]
            assert rank == 1 + sum(logits[at] > logits[at, targets[at]])
            top = np.frombuffer(message.top_token_ids, "<i4").reshape(size, message.num_top)[i].tolist()
            assert top == ranked[: message.num_top]
            values = np.frombuffer(message.top_logprobs, "<f4").reshape(size, message.num_top)[i]
            assert values == pytest.approx(exact[at, top], abs=1e-5)
            at += 1


def collect(worker: Worker, scheduler: ToyScheduler) -> dict[int, dict[int, tuple[float, int]]]:
    """By name of the sequence (its first token): position -> (logprob, rank), the same whenever it comes again."""
    found: dict[int, dict[int, tuple[float, int]]] = {}
    while scheduler.waiting or scheduler.running:
        message, sampled = scheduler.plan()
        seated = {s.row: s for s in scheduler.running}
        result = worker.execute(message)
        for part in result.prompt_logprobs:
            values = zip(np.frombuffer(part.logprobs, "<f4"), np.frombuffer(part.ranks, "<i4"), strict=True)
            mine = found.setdefault(seated[part.row].tokens[0], {})
            for i, (value, rank) in enumerate(values):
                mine[part.first_position + i] = (float(value), int(rank))
        scheduler.commit(sampled, np.frombuffer(result.token_ids, "<i4").tolist())
    return found


@pytest.mark.parametrize("most", [2, 64])
def test_prompts_are_scored_as_transformers_does(reference, monkeypatch, most):  # noqa: F811
    torch = pytest.importorskip("torch")
    monkeypatch.setattr(scoring, "MAX_SCORED", most)
    directory, model = reference
    backend, rng = make(directory), random.Random(most)
    prompts = [[name, *(rng.randrange(VOCAB) for _ in range(rng.randint(0, 30)))] for name in range(8)]
    sequences = [ToySequence(list(p), len(p), 3, greedy(**ASK) if p[0] % 4 else greedy()) for p in prompts]
    worker = Worker(backend)
    worker.reset()
    found = collect(worker, ToyScheduler(rng, backend.geometry, sequences))
    for prompt in prompts:
        if not prompt[0] % 4:
            assert prompt[0] not in found
            continue
        with torch.inference_mode():
            exact = model(torch.tensor([prompt])).logits[0].double().log_softmax(-1)
        mine = found.get(prompt[0], {})
        assert sorted(mine) == list(range(1, len(prompt)))
        for position, (value, rank) in mine.items():
            want = exact[position - 1]
            assert value == pytest.approx(float(want[prompt[position]]), rel=1e-4, abs=1e-4)
            assert abs(rank - 1 - int((want > want[prompt[position]]).sum())) <= 1


def test_the_simulated_backend_scores_as_it_says():
    worker = Worker(SimulatedBackend(geometry(), step_pb2.ModelIdentity()))
    result = worker.execute(plan(1, admit=[admit(0, [7, 8, 999], [0], sampling=greedy(prompt_logprobs=2))],
                                 prefill=ints(0, 3)))  # fmt: skip
    [part] = result.prompt_logprobs
    assert (part.row, part.first_position, part.num_top) == (0, 1, 2)
    assert np.frombuffer(part.top_token_ids, "<i4").tolist() == [8, 9, 999, 0]
    assert np.frombuffer(part.logprobs, "<f4").tolist() == [0, 0]
    assert np.frombuffer(part.top_logprobs, "<f4").tolist() == [0, -1, 0, -1]
