"""Masked is another name, one to one, and back."""

import numpy as np

from protos.stepwire.wire.v1 import step_pb2
from scheduler_svc.core.contract import Delivered, Request
from scheduler_svc.journal.mask import NameMask, TokenMask

VOCAB = 1000


def request(**changes) -> Request:
    sampling = step_pb2.Sampling(
        stop_token_ids=np.array([3, 9], "<i4").tobytes(), allowed_token_ids=np.array([3], "<i4").tobytes()
    )
    values = {"prompt": np.array([3, 4, 3], "<i4"), "stop_token_ids": frozenset({9, 3}), **changes}
    return Request(session=1, request_id="r", handle=1, sampling=sampling, max_tokens=5, **values)


def test_every_id_has_another_name_and_gets_its_own_back():
    mask = TokenMask(b"key", VOCAB)
    ids = np.arange(VOCAB, dtype="<i4")
    masked = mask.ids(ids)
    assert sorted(masked.tolist()) == ids.tolist()
    assert (masked != ids).mean() > 0.9
    admit = step_pb2.Admit(token_ids=masked.tobytes())
    admit.sampling.stop_token_ids = masked[:7].tobytes()
    clear = mask.plan(step_pb2.StepPlan(admit=[admit])).admit[0]
    assert clear.token_ids == ids.tobytes()
    assert clear.sampling.stop_token_ids == ids[:7].tobytes()
    assert (TokenMask(b"other key", VOCAB).ids(ids) != masked).any()


def test_ids_outside_the_vocabulary_stay_what_they_are():
    mask = TokenMask(b"key", VOCAB)
    values = np.array([-1, 0, VOCAB - 1, VOCAB, 2**31 - 1], "<i4")
    masked = mask.ids(values)
    assert masked[[0, 3, 4]].tolist() == [-1, VOCAB, 2**31 - 1]
    assert masked[1:3].tolist() == mask.ids(np.array([0, VOCAB - 1])).tolist()


def test_all_ids_of_a_request_are_masked_alike_and_the_callers_message_is_left_alone():
    mask = TokenMask(b"key", VOCAB)
    three, nine = mask.ids(np.array([3, 9])).tolist()
    masked = request(delivered=(Delivered(np.array([9, 3], "<i4")),))
    sampling = masked.sampling
    mask.request(masked)
    assert masked.prompt[0] == masked.prompt[2] == three
    assert masked.stop_token_ids == {three, nine}
    assert np.frombuffer(masked.sampling.stop_token_ids, "<i4").tolist() == [three, nine]
    assert np.frombuffer(masked.sampling.allowed_token_ids, "<i4").tolist() == [three]
    assert masked.delivered[0].token_ids.tolist() == [nine, three]
    assert sampling.allowed_token_ids == np.array([3], "<i4").tobytes()


def test_names_are_equal_when_they_were():
    mask = NameMask(b"key")
    names = (("a", b"x"), ("a", b"x"), ("b", b""))
    one, same, other = (mask.request(request(tenant=tenant, cache_salt=salt)) for tenant, salt in names)
    assert (one.tenant, one.cache_salt) == (same.tenant, same.cache_salt)
    assert one.tenant != other.tenant
    assert one.tenant != "a"
    assert other.cache_salt == b""
