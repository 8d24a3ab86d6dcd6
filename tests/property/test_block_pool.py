"""The block pool against a twin that is too simple to be wrong."""

import numpy as np
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from scheduler_svc.core.block_pool import BlockPool

NUM_BLOCKS = 7


class PoolMachine(RuleBasedStateMachine):
    """The twin: tables as lists, free and cached blocks as lists in the order in which they would be handed out."""

    def __init__(self) -> None:
        super().__init__()
        self.forgotten: list[int] = []
        self.pool = BlockPool(NUM_BLOCKS, self.forgotten.extend)
        self.tables: list[list[int]] = []
        self.free = list(range(NUM_BLOCKS))
        self.cached: list[int] = []
        self.named: set[int] = set()

    @rule(count=st.integers(0, NUM_BLOCKS + 1))
    def take(self, count: int) -> None:
        self.forgotten.clear()
        blocks = self.pool.take(count)
        order = self.free + self.cached
        if count > len(order):
            assert blocks is None
            assert not self.forgotten
            return
        assert blocks == order[:count]
        evicted = [block for block in blocks if block in self.cached]
        assert self.forgotten == evicted
        self.named -= set(evicted)
        self.free = [block for block in self.free if block not in blocks]
        self.cached = [block for block in self.cached if block not in blocks]
        self.tables.append(blocks)

    @precondition(lambda self: any(self.tables))
    @rule(data=st.data())
    def name(self, data: st.DataObject) -> None:
        table = data.draw(st.sampled_from([table for table in self.tables if table]))
        block = data.draw(st.sampled_from(table))
        self.pool.name(np.array([block]))
        self.named.add(block)

    @precondition(lambda self: self.named)
    @rule(data=st.data())
    def share(self, data: st.DataObject) -> None:
        blocks = data.draw(st.lists(st.sampled_from(sorted(self.named)), unique=True))
        assert self.pool.num_idle(blocks) == len([block for block in blocks if block in self.cached])
        self.pool.share(blocks)
        self.cached = [block for block in self.cached if block not in blocks]
        self.tables.append(blocks)

    @precondition(lambda self: self.tables)
    @rule(data=st.data())
    def give_back(self, data: st.DataObject) -> None:
        table = self.tables.pop(data.draw(st.integers(0, len(self.tables) - 1)))
        self.pool.give_back(table)
        for block in reversed(table):
            if any(block in other for other in self.tables):
                continue
            if block in self.named:
                self.cached.append(block)
            else:
                self.free.insert(0, block)

    @invariant()
    def same(self) -> None:
        self.pool.check(self.tables)
        assert self.pool.num_free == len(self.free)
        assert self.pool.num_cached == len(self.cached)
        assert self.pool.num_owned == NUM_BLOCKS - len(self.free) - len(self.cached)


TestBlockPool = PoolMachine.TestCase
TestBlockPool.settings = settings(max_examples=100, stateful_step_count=30, deadline=None)
