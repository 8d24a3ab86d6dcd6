"""Step budgets, and submits that no honest frontend sends."""

import numpy as np
import pytest

from protos.stepwire.wire.v1 import session_pb2, step_pb2
from scheduler_svc.errors import InvalidArgument
from scheduler_svc.links.budget import StepBudget
from scheduler_svc.links.messages import num_planned_tokens, request_from_submit
from tests.wire.cluster import request


def int32(*values: int) -> bytes:
    return np.asarray(values, "<i4").tobytes()


def sampling(**changes: object) -> step_pb2.Sampling:
    return step_pb2.Sampling(**{"top_p": 1.0, "repetition_penalty": 1.0, **changes})


@pytest.mark.parametrize(
    ("changes", "field"),
    [
        ({"request_id": ""}, "request_id"),
        ({"request_id": "x" * 513}, "request_id"),
        ({"num_choices": 0}, "sampling.n"),
        ({"num_choices": 17}, "sampling.n"),
        ({"handle": 2**64 - 1, "num_choices": 2}, "handle"),
        ({"prompt_token_ids": b""}, "prompt"),
        ({"prompt_token_ids": b"\0\0\0"}, "prompt.token_ids"),
        ({"prompt_token_ids": int32(-1)}, "prompt.token_ids"),
        ({"prompt_token_ids": int32(1000)}, "prompt.token_ids"),
        ({"stop_token_ids": int32(1000)}, "stopping.stop_token_ids"),
        ({"sampling": sampling(allowed_token_ids=int32(1000))}, "sampling.allowed_token_ids"),
        ({"sampling": sampling(bias_token_ids=int32(-5), bias_values=b"\0" * 4)}, "sampling.logit_bias"),
        ({"sampling": sampling(bias_token_ids=int32(5), bias_values=b"\0" * 8)}, "sampling.logit_bias"),
        ({"sampling": sampling(temperature=float("nan"))}, "sampling.temperature"),
        ({"sampling": sampling(bias_token_ids=int32(5), bias_values=b"\0\0\x80\x7f")}, "sampling.logit_bias"),
        ({"sampling": sampling(prompt_logprobs=21)}, "sampling.prompt_logprobs"),
        ({"sampling": sampling(bad_words=b"\0")}, "sampling.bad_words"),
        ({"sampling": sampling(bad_words=int32(0))}, "sampling.bad_words"),
        ({"sampling": sampling(bad_words=int32(2, 1))}, "sampling.bad_words"),
        ({"sampling": sampling(bad_words=int32(-1, 1))}, "sampling.bad_words"),
        ({"sampling": sampling(bad_words=int32(1, 1000))}, "sampling.bad_words"),
        ({"sampling": sampling(bad_words=int32(1, -1))}, "sampling.bad_words"),
        ({"sampling": sampling(bad_words=int32(*[1, 1] * 257))}, "sampling.bad_words"),
        ({"sampling": sampling(constraint=step_pb2.Constraint(grammar="g"))}, "sampling.constraint"),
        ({"sampling": sampling(constraint=step_pb2.Constraint(end_token_ids=int32(1)))}, "sampling.constraint"),
        (
            {"sampling": sampling(constraint=step_pb2.Constraint(grammar="g", end_token_ids=int32(1000)))},
            "sampling.constraint",
        ),
        ({"delivered": [session_pb2.Delivered(token_ids=int32(1000))]}, "delivered.token_ids"),
    ],
)
def test_numbers_that_could_become_an_index_are_checked(changes, field):
    submit = request("a", [1, 2], 3)
    replaced = session_pb2.Submit(**{name: value for name, value in changes.items() if name != "delivered"})
    for name in changes:
        submit.ClearField(name)
    submit.MergeFrom(replaced)
    submit.delivered.extend(changes.get("delivered", []))
    with pytest.raises(InvalidArgument) as raised:
        request_from_submit(submit, 1, 0.0, 1000)
    assert raised.value.field == field


def test_delivered_must_speak_of_every_choice():
    submit = request("a", [1, 2], 3, num_choices=2)
    submit.delivered.add()
    with pytest.raises(InvalidArgument, match="1 entries for 2 choices"):
        request_from_submit(submit, 1, 0.0, 1000)


def test_the_edge_of_the_vocabulary_and_of_sizes_is_allowed():
    made = request_from_submit(request("x" * 512, [0, 999], 3, num_choices=16, deadline_ms=1500), 4, 10.0, 1000)
    assert (made.session, made.prompt.tolist(), made.num_choices, made.deadline) == (4, [0, 999], 16, 11.5)
    assert made.delivered is None


def test_planned_tokens_are_those_catching_up_and_one_for_each_other_row():
    assert num_planned_tokens(step_pb2.StepPlan(prefill=int32(1, 100, 4, 0)), 10) == 108
    assert num_planned_tokens(step_pb2.StepPlan(), 10) == 10


def test_step_budget_follows_what_steps_take():
    budget = StepBudget(5.0)
    assert budget.limit_s(1) == 300.0
    for _ in range(100):
        budget.observe(1.0, 10)
    assert budget.limit_s(1) == 20.0
    assert budget.limit_s(100) == 200.0
    assert budget.limit_s(10_000) == 300.0
    budget.restart()
    assert budget.limit_s(1) == 300.0
    budget.observe(0.01, 10)
    assert budget.limit_s(10) == 5.0
    assert budget.stall_s(10) == 5.0
