"""Block events: which prefixes the index gained and lost, for somebody who routes requests by what is cached where.

Recorded only while somebody listens; then each block that is named costs a few array operations, and nothing is kept of
those that were handed out. Knows hashes and tokens, not who owns a block or who listens.

A block is told by the first lane of its hash, a 64-bit number that means nothing outside this process. Its parent, the
hash of the prefix without it, is not stored anywhere: hashes being sums, it is its own hash minus what its tokens add
at its place. So all that must be known of a block is its place, how many blocks of the prefix come before it; for
blocks that were named before anybody listened, the places are found level by level, from the roots on.
"""

from dataclasses import dataclass, field

import numpy as np

from scheduler_svc.core.prefix_index import PrefixIndex

# Tokens looked at to find the places of older blocks: tens of milliseconds. Those not reached are not told.
MAX_LOOKS = 8_000_000
UNKNOWN = -1
NO_PARENT = np.uint64(0)
_NO_HASHES = np.empty(0, np.uint64)


@dataclass(frozen=True, slots=True)
class BlockChange:
    """Blocks that can be found from now on, or no longer. All of one change are one or the other."""

    # uint64 [n]: the blocks' hashes, and the roots of their chains, which name tenant and salt.
    hashes: np.ndarray
    roots: np.ndarray
    # For stored blocks: uint64 [n], 0 where a block is the first of its prefix; int32 [n, block_size].
    parents: np.ndarray = field(default_factory=lambda: _NO_HASHES)
    tokens: np.ndarray | None = None

    @property
    def is_stored(self) -> bool:
        return self.tokens is not None

    def of_root(self, root: np.uint64) -> "BlockChange | None":
        mine = self.roots == root
        if mine.all():
            return self
        if not mine.any():
            return None
        if self.tokens is None:
            return BlockChange(self.hashes[mine], self.roots[mine])
        return BlockChange(self.hashes[mine], self.roots[mine], self.parents[mine], self.tokens[mine])


class BlockEvents:
    """Of one prefix index."""

    def __init__(self, index: PrefixIndex, is_named: np.ndarray):
        self._index = index
        self._is_named = is_named
        # How many blocks of its prefix come before each named block.
        self._places = np.full(len(is_named), UNKNOWN, np.int32)
        self._changes: list[BlockChange] = []
        self._find_places()

    def named(self, blocks: np.ndarray, places: np.ndarray) -> None:
        """The index names `blocks`, each the `places[i]`-th of its prefix."""
        if len(blocks):
            self._places[blocks] = places
            self._changes.append(self._stored(blocks))

    def forgotten(self, blocks: list[int]) -> None:
        """The index is about to forget `blocks`."""
        told = np.array([block for block in blocks if self._places[block] != UNKNOWN], np.intp)
        self._places[blocks] = UNKNOWN
        if len(told):
            self._changes.append(BlockChange(self._index.first_lane(told), self._index.roots(told)))

    def take(self) -> list[BlockChange]:
        changes, self._changes = self._changes, []
        return changes

    def snapshot(self) -> BlockChange | None:
        """Every block that can be found, parents before children. The changes not taken yet are part of it."""
        blocks = (self._is_named & (self._places != UNKNOWN)).nonzero()[0]
        if not len(blocks):
            return None
        return self._stored(blocks[np.argsort(self._places[blocks], kind="stable")])

    def _stored(self, blocks: np.ndarray) -> BlockChange:
        places = self._places[blocks]
        parents = self._index.parents(blocks, places)
        parents[places == 0] = NO_PARENT
        index = self._index
        return BlockChange(index.first_lane(blocks), index.roots(blocks), parents, index.tokens_of(blocks))

    def _find_places(self) -> None:
        index, place, looks = self._index, 0, 0
        left = self._is_named.nonzero()[0]
        above = _NO_HASHES
        while len(left) and looks < MAX_LOOKS:
            looks += len(left) * index.block_size
            parents = index.parents(left, np.full(len(left), place))
            found = parents == index.roots(left) if place == 0 else np.isin(parents, above)
            if not found.any():
                return
            self._places[left[found]] = place
            above = index.first_lane(left[found])
            left = left[~found]
            place += 1
