"""A frontend with a bug: whatever numbers it submits, they are refused before anything indexes with them."""

import numpy as np
import pytest

from executor_svc.sampling import SamplingTable
from protos.stepwire.wire.v1 import session_pb2, step_pb2
from scheduler_svc.errors import InvalidArgument
from scheduler_svc.links.messages import request_from_submit

VOCAB = 100


def ids(*values: int) -> bytes:
    return np.array(values, "<i8").astype("<u4").tobytes()


def submit(**changes: object) -> session_pb2.Submit:
    sampling = step_pb2.Sampling(temperature=1, top_p=1, repetition_penalty=1)
    base = session_pb2.Submit(
        request_id="r", handle=1, num_choices=1, prompt_token_ids=ids(1, 2), max_tokens=4, sampling=sampling
    )
    for path, value in changes.items():
        *parents, name = path.split("__")
        target = base
        for parent in parents:
            target = getattr(target, parent)
        if isinstance(value, list):
            getattr(target, name).extend(value)
        else:
            setattr(target, name, value)
    return base


@pytest.mark.parametrize(
    ("field", "allowed", "refused"),
    [
        ("request_id", ["a", "a" * 512], ["", "a" * 513, "é" * 257]),
        ("tenant", ["", "t" * 256], ["t" * 257]),
        ("cache_salt", [b"", b"s" * 256], [b"s" * 257]),
        ("num_choices", [1, 16], [0, 17, 2**32 - 1]),
        ("handle", [0, 2**63, 2**64 - 1], []),
        ("max_tokens", [0, 2**31 - 1], [2**31, 2**32 - 1]),
        ("min_tokens", [0, 2**31 - 1], [2**31]),
        ("prompt_token_ids", [ids(0), ids(VOCAB - 1)], [b"", b"1", ids(VOCAB), ids(-1)]),
        ("stop_token_ids", [b"", ids(VOCAB - 1)], [b"1", ids(VOCAB), ids(-1)]),
        ("sampling__temperature", [0, 2], [-0.1, 2.1, float("nan"), float("inf")]),
        ("sampling__top_p", [1e-45, 1], [0, 1.1, float("nan")]),
        ("sampling__top_k", [0, VOCAB], [VOCAB + 1, 2**32 - 1]),
        ("sampling__min_p", [0, 1], [-0.1, 1.1, float("nan")]),
        ("sampling__presence_penalty", [-2, 2], [-2.1, 2.1, float("nan")]),
        ("sampling__frequency_penalty", [-2, 2], [-2.1, 2.1, float("inf")]),
        ("sampling__repetition_penalty", [1e-45, 10], [0, 10.1, float("nan")]),
        ("sampling__logprobs", [0, 20], [21, 2**32 - 1]),
        ("sampling__min_tokens", [0, 2**31 - 1], [2**31]),
        ("sampling__stop_token_ids", [ids(VOCAB - 1)], [ids(VOCAB), b"123"]),
        ("sampling__allowed_token_ids", [ids(0, VOCAB - 1)], [ids(VOCAB)]),
        ("sampling__bias_values", [b""], [b"1234"]),
    ],
)
def test_bounds(field, allowed, refused):
    for value in allowed:
        request = request_from_submit(submit(**{field: value}), 1, 0.0, VOCAB)
        # What the scheduler lets through, an executor takes: it would end everybody's epoch otherwise.
        SamplingTable(1, VOCAB).set(0, request.sampling)
    for value in refused:
        with pytest.raises(InvalidArgument):
            request_from_submit(submit(**{field: value}), 1, 0.0, VOCAB)


def test_handles_of_all_choices_fit_64_bits():
    request_from_submit(submit(handle=2**64 - 16, num_choices=16), 1, 0.0, VOCAB)
    with pytest.raises(InvalidArgument, match="handle"):
        request_from_submit(submit(handle=2**64 - 15, num_choices=16), 1, 0.0, VOCAB)


def test_biases_are_finite_one_a_token_and_as_many_as_ids():
    one, two = np.float32(1).tobytes(), np.float32([1, 2]).tobytes()
    request_from_submit(submit(sampling__bias_token_ids=ids(3, 4), sampling__bias_values=two), 1, 0.0, VOCAB)
    for bias_ids, values in ((ids(3), two), (ids(3, 3), two), (ids(3), np.float32("nan").tobytes()), (ids(VOCAB), one)):
        with pytest.raises(InvalidArgument):
            request_from_submit(submit(sampling__bias_token_ids=bias_ids, sampling__bias_values=values), 1, 0.0, VOCAB)


def test_counts_of_a_resumed_choice_fit_what_tells_of_them():
    for name in ("num_resumes", "num_preemptions"):
        request_from_submit(submit(delivered=[session_pb2.Delivered(**{name: 2**31 - 1})]), 1, 0.0, VOCAB)
        with pytest.raises(InvalidArgument):
            request_from_submit(submit(delivered=[session_pb2.Delivered(**{name: 2**31})]), 1, 0.0, VOCAB)
