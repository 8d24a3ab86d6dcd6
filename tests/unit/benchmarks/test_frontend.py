"""What the frontend's benchmark computes: ages of tokens, who runs on which core, and the path without gRPC."""

import numpy as np
import pytest

from benchmarks import frontend, frontend_path
from benchmarks.frontend_rig import share
from benchmarks.stamps import TICK_US, Ages
from protos.stepwire.wire.v1 import session_pb2


def test_an_age_is_read_across_the_turn_of_the_palette():
    ages = Ages([7, 3, 9, 4])
    assert ages.ms(3, now=1) == 0.0
    assert ages.ms(3, now=4) == 3 * TICK_US / 1000
    assert ages.ms(4, now=5) == pytest.approx(2 * TICK_US / 1000)  # made at tick 3, read at 5


@pytest.mark.parametrize(
    ("cores", "frontends", "client", "apart"),
    [(4, 2, {3}, True), (8, 2, {3, 4, 5, 6, 7}, True), (3, 2, {2}, False), (2, 1, {1}, False), (1, 4, {0}, False)],
)
def test_the_client_never_shares_a_core_that_could_be_its_own(cores, frontends, client, apart):
    found = share(list(range(cores)), frontends)
    assert (found.client, found.apart) == (client, apart)
    assert len(found.frontends) == frontends
    services = found.engine.union(*found.frontends)
    assert services.isdisjoint(client) or cores == 1
    if apart:
        assert len(services) == frontends + 1


def test_medians_are_of_each_number_by_itself():
    rows = [{"a": 1.0, "b": 9.0, "n": 2}, {"a": 3.0, "b": 1.0, "n": 2}, {"a": 2.0, "b": 5.0, "n": 2}]
    assert frontend.medians(rows) == {"a": 2.0, "b": 5.0, "n": 2}


def test_verdicts_compare_with_the_aim_and_with_the_ruler():
    steady = {"case": "steady", "who": "stepwire", "streams": 64, "tok_per_cpu_s": 30_000.0}
    ruler = steady | {"who": "ruler", "tok_per_cpu_s": 40_000.0}
    scale = [
        {"case": "scale", "who": "stepwire", "frontends": n, "msg_per_cpu_s": rate, "cores_apart": n == 1}
        for n, rate in ((1, 100.0), (2, 95.0))
    ]
    assert list(frontend.verdicts([steady, ruler, *scale])) == [
        "steady 64: 0.75 of the aim of 40000, 0.75 of the ruler",
        "2 frontends (sharing cores): 1.90 x one, by CPU time per message",
    ]


def test_a_frame_names_one_token_a_handle():
    handles = np.array([5, 6], "<u8").tobytes()
    message = session_pb2.ToFrontend.FromString(frontend_path.frame(handles, np.array([9, 8]), 3))
    assert (message.tokens.handles, message.tokens.token_ids) == (handles, np.array([9, 8], "<i4").tobytes())
    assert np.frombuffer(message.tokens.positions, "<i4").tolist() == [3, 3]
