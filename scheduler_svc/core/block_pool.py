"""Blocks: who owns which, and which is handed out next.

Knows nothing of tokens or sequences. Every block is in exactly one of three places:

    owned    reference count > 0: in that many block tables
    cached   count 0 and named in the prefix index: a hit takes it back, want of space evicts it
    free     count 0 and nameless: holds nothing of use

The next block handed out is a free one (last freed first: its memory is warm); when there is none, the cached block
that was idle longest. A sequence gives back its tail before its head, so a prefix outlives what hangs on it.
"""

from collections import OrderedDict
from collections.abc import Callable, Iterable

import numpy as np


def forget_nothing(blocks: list[int]) -> None:
    """No block has a name."""


class BlockPool:
    def __init__(self, num_blocks: int, forget: Callable[[list[int]], None] = forget_nothing):
        self.num_blocks = num_blocks
        self._forget = forget
        # Block tables that hold the block.
        self.num_refs = [0] * num_blocks
        # All and only the blocks that the prefix index names.
        self.is_named = np.zeros(num_blocks, np.bool_)
        # Rises when blocks are given back: until then what did not fit will not fit.
        self.num_returns = 0
        # All and only nameless blocks with count 0; the end is taken first.
        self._free = list(range(num_blocks - 1, -1, -1))
        # All and only named blocks with count 0; the front is evicted first.
        self._cached: OrderedDict[int, None] = OrderedDict()

    @property
    def num_free(self) -> int:
        return len(self._free)

    @property
    def num_cached(self) -> int:
        return len(self._cached)

    @property
    def num_available(self) -> int:
        return len(self._free) + len(self._cached)

    @property
    def num_owned(self) -> int:
        return self.num_blocks - self.num_available

    def take(self, count: int) -> list[int] | None:
        """`count` blocks for one owner each, or None and nothing has changed."""
        if count > self.num_available:
            return None
        kept = max(len(self._free) - count, 0)
        blocks = self._free[: kept - 1 if kept else None : -1]
        del self._free[kept:]
        if len(blocks) < count:
            evicted = [self._cached.popitem(last=False)[0] for _ in range(count - len(blocks))]
            self.is_named[evicted] = False
            self._forget(evicted)
            blocks += evicted
        for block in blocks:
            self.num_refs[block] = 1
        return blocks

    def num_idle(self, blocks: Iterable[int]) -> int:
        """How many of these would leave the available ones if they were shared."""
        return sum(not self.num_refs[block] for block in blocks)

    def share(self, blocks: Iterable[int]) -> None:
        """One more owner for blocks that are owned or cached."""
        for block in blocks:
            if not self.num_refs[block]:
                del self._cached[block]
            self.num_refs[block] += 1

    def name(self, blocks: np.ndarray) -> None:
        """The prefix index names these owned blocks from now on."""
        self.is_named[blocks] = True

    def give_back(self, blocks: list[int]) -> None:
        """One owner less for each block of a table, given in the order of the table."""
        refs = self.num_refs
        self.num_returns += 1
        for block, is_named in zip(reversed(blocks), self.is_named[blocks[::-1]].tolist(), strict=True):
            assert refs[block] > 0, f"block {block} was given back twice"
            refs[block] -= 1
            if not refs[block]:
                if is_named:
                    self._cached[block] = None
                else:
                    self._free.append(block)

    def check(self, tables: Iterable[list[int]]) -> None:
        """Asserts the laws above, given every block table."""
        counted = [0] * self.num_blocks
        for table in tables:
            assert len(set(table)) == len(table), f"a block is twice in one table: {table}"
            for block in table:
                counted[block] += 1
        assert counted == self.num_refs, "reference counts differ from table memberships"
        free, cached = set(self._free), set(self._cached)
        assert len(free) == len(self._free), "a block is twice in the free list"
        assert not free & cached, free & cached
        for block in range(self.num_blocks):
            assert (self.num_refs[block] == 0) == (block in free or block in cached), block
            if block in free:
                assert not self.is_named[block], block
            if block in cached:
                assert self.is_named[block], block
