"""The core as data: what it holds comes back, what it must not hold is refused."""

import json
import zlib
from collections import Counter, OrderedDict, deque

import numpy as np
import pytest

from protos.stepwire.wire.v1 import step_pb2
from scheduler_svc.core.contract import Geometry, Policy
from scheduler_svc.core.epoch import Step
from scheduler_svc.core.rows import Rows
from scheduler_svc.journal.snapshot import SnapshotError, restore, take


def test_plain_things_and_containers_come_back():
    value = {
        "plain": [None, True, 1, -(2**70), "ä\n", 0.1, float("inf"), b"\0\xff", bytearray(b"ab")],
        "containers": [(1, (2, 3)), {1, 2}, frozenset({"a"}), deque([1, 2], maxlen=5), slice(0, 3)],
        "dicts": [OrderedDict([(2, 1), (1, 2)]), Counter({"a": 3}), {(1, "x"): None, b"k": 5}],
        "core": [Policy.FAIR, Geometry(1, 2, 3, 4, 5, 6), Step(1, None, (), 2, 3, 4)],
        "numpy": [np.uint64(2**64 - 1), np.arange(6, dtype="<i4").reshape(2, 3)],
        "message": step_pb2.Sampling(seed=7),
    }
    again = restore(take(value))
    assert [type(item) for item in again["plain"]] == [type(item) for item in value["plain"]]
    for name in ("plain", "containers", "dicts", "core", "message"):
        assert again[name] == value[name], name
    assert again["containers"][3].maxlen == 5
    assert again["numpy"][0] == value["numpy"][0]
    assert again["numpy"][0].dtype == np.uint64
    assert (again["numpy"][1] == value["numpy"][1]).all()


def test_one_object_stays_one_and_circles_close():
    shared: list = []
    shared.append(shared)
    again = restore(take([shared, shared]))
    assert again[0] is again[1] is again[0][0]


def test_views_stay_views():
    rows = Rows(4, 2, 8)
    again = restore(take(rows))
    for _ in range(2):
        again.table[2, 3] = 77
        assert again._flat_table[2 * 8 + 3] == 77
        again = restore(take(again))


@pytest.mark.parametrize("value", [object(), pytest, open, lambda: None, np.array([object()]), Exception()])
def test_what_is_not_of_the_core_is_not_taken(value):
    with pytest.raises(SnapshotError):
        take([value])


@pytest.mark.parametrize(
    "nodes",
    [
        [["object", "os", "system", {}]],
        [["function", "os", "system"]],
        [["object", "scheduler_svc.core.scheduler", "step_pb2", {}]],
        [["object", "scheduler_svc.corex", "A", {}]],
        [["named", "subprocess", "Popen", []]],
        [["array", "|O", [1], ""]],
        [["view", [1], "<i4", 400, [4], [4]], ["array", "<i4", [1], "AAAAAA=="]],
        [["enum", "scheduler_svc.errors", "EndReason", "CRASH"]],
        [["what", 1]],
        [["list", [[7]]]],
        [],
        {"a": 1},
    ],
)
def test_a_forged_snapshot_is_refused(nodes):
    with pytest.raises(SnapshotError):
        restore(zlib.compress(json.dumps(nodes).encode()))


def test_garbage_is_refused():
    for data in (b"", b"garbage", zlib.compress(b"garbage")):
        with pytest.raises(SnapshotError):
            restore(data)
