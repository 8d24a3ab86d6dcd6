"""What the journal's mask does to constraints, bad words and scores: unreadable in the file, whole on the wire."""

import numpy as np

from protos.stepwire.wire.v1 import journal_pb2, step_pb2
from scheduler_svc.core.contract import Request
from scheduler_svc.journal.mask import TokenMask
from scheduler_svc.journal.recorder import _encoded

VOCAB = 50
WORDS = [2, 7, 8, 1, 9]


def asked() -> step_pb2.Sampling:
    constraint = step_pb2.Constraint(grammar='start: "geheim"', end_token_ids=np.array([0, 2], "<i4").tobytes())
    return step_pb2.Sampling(bad_words=np.array(WORDS, "<i4").tobytes(), constraint=constraint, prompt_logprobs=3)


def test_masked_and_back() -> None:
    mask = TokenMask(b"key", VOCAB)
    request = Request(0, "r", 1, np.array([1, 2], np.int32), asked(), 4)
    mask.request(request)
    masked = request.sampling
    assert "geheim" not in str(masked)
    assert bytes.fromhex(masked.constraint.grammar)
    values = np.frombuffer(masked.bad_words, "<i4").tolist()
    assert (values[0], values[3]) == (2, 1)
    assert values != WORDS
    plan = mask.plan(step_pb2.StepPlan(admit=[step_pb2.Admit(sampling=masked)]))
    assert plan.admit[0].sampling == asked()
    again = Request(0, "s", 1, np.array([1, 2], np.int32), asked(), 4)
    mask.request(again)
    assert again.sampling == masked, "equal stays equal"


def test_results_keep_no_more_than_how_many() -> None:
    result = step_pb2.StepResult(faults=[step_pb2.RowFault(row=1, message="geheim")])
    floats = np.array([-1, -2], "<f4").tobytes()
    result.prompt_logprobs.add(row=2, first_position=3, logprobs=floats, ranks=floats, num_top=1, top_token_ids=floats,
                               top_logprobs=floats)  # fmt: skip
    entry = journal_pb2.JournalEntry.FromString(_encoded(0.0, "result", result))
    assert entry.result.faults == [step_pb2.RowFault(row=1)]
    zeros = bytes(8)
    want = step_pb2.PromptLogprobs(row=2, first_position=3, logprobs=zeros, ranks=zeros)
    assert entry.result.prompt_logprobs == [want]


def test_a_masked_result_is_the_result_but_for_its_tokens() -> None:
    result = step_pb2.StepResult(
        boot_id=1,
        epoch=2,
        step_id=3,
        token_ids=np.array([4, 5], "<i4").tobytes(),
        logprobs=[step_pb2.RowLogprobs(row=0, logprob=-1, rank=1)],
        forward_us=6,
        num_rows=7,
        num_stored_tokens=8,
        prompt_logprobs=[step_pb2.PromptLogprobs(row=1, first_position=1)],
        faults=[step_pb2.RowFault(row=1, message="nothing left")],
    )
    assert len(result.ListFields()) == len(result.DESCRIPTOR.fields), "every field is set"
    mask = TokenMask(b"key", VOCAB)
    masked = mask.result(result)
    tokens = np.frombuffer(masked.token_ids, "<i4")
    assert tokens.tolist() == mask.ids(np.array([4, 5])).tolist() != [4, 5]
    masked.token_ids = result.token_ids
    assert masked == result
