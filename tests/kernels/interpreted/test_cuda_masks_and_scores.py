"""Changing masks and prompt logprobs of the CUDA backend on CPU tensors: the CPU backend's answers."""

from pathlib import Path

import numpy as np
import pytest

from executor_svc.batch import build_batch
from executor_svc.rows import RowTable
from executor_svc.sampler import score
from protos.stepwire.wire.v1 import step_pb2
from tests.kernels.interpreted.models import make_checkpoint
from tests.kernels.interpreted.test_cuda_backend import GEOMETRY, Oracle, admit, ints, make_backend, sampling

EVERYTHING = [value for token in range(97) for value in (1, token)]
SOME = [value for token in range(0, 97, 2) for value in (1, token)] + [2, 1, 3]


def plans() -> list[step_pb2.StepPlan]:
    """Scores alone, scores beside draws, a row that may draw odd ids only, one that may draw nothing."""
    barred = sampling(bad_words=ints(SOME), min_tokens=4, stop_token_ids=ints([1, 3, 5]), presence_penalty=2)
    return [
        step_pb2.StepPlan(
            admit=[admit(0, 20, range(0, 4), sampling(prompt_logprobs=4, logprobs=2))], prefill=ints([(0, 7)])
        ),
        step_pb2.StepPlan(
            admit=[
                admit(1, 9, range(4, 6), barred),
                admit(2, 4, range(6, 8), sampling(bad_words=ints(EVERYTHING))),
                admit(3, 2, range(8, 10), sampling(prompt_logprobs=0, temperature=1, seed=3)),
            ],
            prefill=ints([(0, 13), (1, 9), (2, 4), (3, 1)]),
        ),
        step_pb2.StepPlan(release=ints([2])),
        step_pb2.StepPlan(),
        step_pb2.StepPlan(),
    ]


def test_masks_and_scores(tmp_path: Path) -> None:
    make_checkpoint(tmp_path, "llama", num_hidden_layers=1)
    backend, oracle, rows = make_backend(tmp_path), Oracle(tmp_path), RowTable(GEOMETRY)
    drawn = []
    for plan in plans():
        work = rows.apply(plan)
        batch = build_batch(rows, work)
        logits, scores = oracle.decoder.forward(batch, oracle.pool).numpy(), []
        if batch.scoring is not None:
            scores, logits = score(logits[batch.scoring.index], batch.scoring), logits[batch.scoring.others]
        expected = oracle.sampler.sample(logits, batch.sampling)
        output = backend.run(batch)
        faulty = [fault.row for fault in expected.faults]
        assert output.faults == expected.faults
        for row, got, want in zip(batch.sampling.rows, output.token_ids, expected.token_ids, strict=True):
            assert got == want or row in faulty
            drawn.append((int(row), int(got)))
        assert [(m.row, m.first_position, m.num_top, m.ranks, m.top_token_ids) for m in output.prompt_logprobs] == [
            (m.row, m.first_position, m.num_top, m.ranks, m.top_token_ids) for m in scores
        ]
        for mine, other in zip(output.prompt_logprobs, scores, strict=True):
            values, wanted = (np.frombuffer(m.logprobs + m.top_logprobs, "<f4") for m in (mine, other))
            assert values == pytest.approx(wanted, abs=1e-3)
        rows.append(work, expected.token_ids)
    assert all(token % 2 for row, token in drawn if row == 1)
