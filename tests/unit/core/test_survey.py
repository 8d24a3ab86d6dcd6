"""What a survey shows is what the core holds, by an oracle that counts one by one; and it changes nothing."""

from collections import Counter

import numpy as np
import pytest

from protos.stepwire.wire.v1 import step_pb2
from scheduler_svc.core import survey as module
from scheduler_svc.core.contract import Geometry, Limits, Policy, Request
from scheduler_svc.core.scheduler import Scheduler
from scheduler_svc.core.survey import CACHED, FREE, OWNED, grouped
from tests.wire.peers import Arithmetic

SIZE = 4


class Rig:
    """A scheduler, and an executor that answers at once."""

    def __init__(self, num_blocks: int = 40, max_num_seqs: int = 4):
        self.core = Scheduler(Limits(policy=Policy.FAIR))
        self.core.reset(Geometry(num_blocks, SIZE, max_num_seqs, 200, 64, 1000), 1, 1)
        self.executor = Arithmetic()
        self.handle = 0

    def submit(self, request_id: str, prompt: list[int], max_tokens: int = 8, tenant: str = "a") -> None:
        self.handle += 1
        self.core.submit(
            Request(
                session=1 + self.handle % 2,
                request_id=request_id,
                handle=self.handle,
                prompt=np.array(prompt, np.int32),
                sampling=step_pb2.Sampling(),
                max_tokens=max_tokens,
                tenant=tenant,
                cache_salt=b"",
            ),
            now=float(self.handle),
        )

    def steps(self, count: int) -> None:
        for _ in range(count):
            plan = self.core.plan(50.0)
            if plan is None:
                return
            self.core.commit(self.executor.execute(plan), 50.0)

    def owners(self) -> dict[int, int]:
        """By block, counted from the tables one by one."""
        epoch = self.core._epoch
        tables = [epoch.rows.blocks(s.row) for s in epoch.rows.sequence if s is not None]
        tables += [s.blocks for s in epoch.finishing.values()]
        return Counter(block for table in tables for block in table)


def test_before_any_executor_there_are_only_those_that_wait():
    core = Scheduler(Limits())
    rig = Rig()
    rig.core = core
    rig.submit("r", [1, 2, 3])
    seen = core.survey(5.0)
    assert len(seen.cells) == seen.num_shared_blocks == 0
    assert [(view.request_id, view.num_prompt, view.age_s) for view in seen.waiting] == [("r", 3, 4.0)]
    assert seen.running == []


def test_every_block_is_shown_as_what_it_is():
    rig = Rig(num_blocks=80, max_num_seqs=8)
    prefix = list(range(1, 2 * SIZE + 1))
    rig.submit("gone", [9] * 13, 1)
    rig.steps(4)
    for i in range(3):
        rig.submit(f"r{i}", [*prefix, 100 + i, 200 + i], 40)
    rig.submit("alone", [500 + i for i in range(SIZE)], 40, tenant="b")
    rig.submit("late", [700], 1, tenant="c")
    rig.steps(5)
    seen, pool = rig.core.survey(50.0), rig.core._epoch.memory.pool
    owners = rig.owners()
    for block, cell in enumerate(seen.cells.tolist()):
        if owners[block]:
            assert cell == owners[block] + 1
        else:
            assert cell == (CACHED if pool.is_named[block] else FREE)
    stats = rig.core.stats()
    assert int((seen.cells == FREE).sum()) == stats.blocks_free
    assert int((seen.cells == CACHED).sum()) == stats.blocks_cached > 0
    assert seen.num_shared_blocks == sum(count > 1 for count in owners.values()) == 2
    assert [(one.num_sequences, one.num_blocks) for one in seen.shared] == [(3, 2)]
    assert seen.block_size == SIZE
    rig.core.check()


def test_rows_tenants_and_sessions():
    rig = Rig(max_num_seqs=2)
    rig.submit("one", list(range(10)), 30)
    rig.submit("two", list(range(20, 50)), 30, tenant="b")
    rig.submit("three", [5] * 7, 30)
    rig.steps(6)
    seen = rig.core.survey(60.0)
    by_id = {view.request_id: view for view in seen.running}
    rows = rig.core._epoch.rows
    for view in seen.running:
        assert view.num_output == rows.num_output(view.row) > 0
        assert view.num_computed == rows.num_computed(view.row)
        assert view.max_tokens == 30
    assert by_id["one"].age_s == 59.0
    assert [view.request_id for view in seen.waiting] == ["three"]
    tenants = {tenant.name: tenant for tenant in seen.tenants}
    assert (tenants["a"].num_running, tenants["a"].num_waiting) == (1, 1)
    assert (tenants["b"].num_running, tenants["b"].num_waiting) == (1, 0)
    assert tenants["b"].num_blocks == len(rows.blocks(by_id["two"].row))
    assert seen.tenants[0].name == "b"
    assert seen.num_of_session == {1: 1, 2: 2}


def test_finishing_sequences_still_own_their_blocks():
    rig = Rig()
    rig.submit("short", [1] * 9, 2)
    rig.steps(1)
    plan = rig.core.plan(50.0)  # draws its last token
    result = rig.executor.execute(plan)
    released = rig.core.plan(50.0)  # releases its row
    assert released is not None
    assert rig.core._epoch.finishing
    assert int((rig.core.survey(50.0).cells >= OWNED).sum()) == len(rig.owners()) == 3
    rig.core.commit(result, 50.0)


def test_what_is_shown_is_bounded(monkeypatch):
    monkeypatch.setattr(module, "MAX_RUNNING", 1)
    monkeypatch.setattr(module, "MAX_WAITING", 1)
    rig = Rig(max_num_seqs=2)
    for i in range(5):
        rig.submit(f"r{i}", [i] * 5, 20)
    rig.steps(3)
    seen = rig.core.survey(50.0)
    assert (len(seen.running), len(seen.waiting)) == (1, 1)
    assert seen.tenants[0].num_running == 2
    assert seen.tenants[0].num_waiting == 3


@pytest.mark.parametrize(("length", "most"), [(5, 5), (6, 5), (1000, 64), (1, 10), (17, 4)])
def test_groups_show_what_most_of_them_are(length, most):
    print(f"seed {length}")
    states = np.random.default_rng(length).integers(0, 6, length).astype(np.uint8)
    found = grouped(states, most).tolist()
    assert len(found) <= most
    size = -(-length // most)
    expected = []
    for start in range(0, length, size):
        group = states[start : start + size].tolist()
        if size == 1:
            expected += group
            continue
        kinds = Counter(min(state, 3) for state in group)
        kind = max(kinds, key=lambda k: (kinds[k], k))
        expected.append(max(group) if kind == 3 else kind)
    assert found == expected


@pytest.mark.parametrize("num_groups", [1, 3])
def test_each_prefix_that_is_shared_is_shown_the_most_shared_first(num_groups, monkeypatch):
    monkeypatch.setattr(module, "MAX_SHARED", 2)
    rig = Rig(num_blocks=200, max_num_seqs=12)
    for group in range(num_groups):
        for i in range(2 + group):
            rig.submit(f"{group}.{i}", [*range(50 * group, 50 * group + (2 + group) * SIZE), 900 + i], 40)
    rig.steps(6)
    shown = [(one.num_sequences, one.num_blocks, one.of.request.request_id[0]) for one in rig.core.survey(50.0).shared]
    assert shown == [(2 + group, 2 + group, str(group)) for group in reversed(range(num_groups))][:2]
