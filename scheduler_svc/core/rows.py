"""Rows: the running sequences, in columns.

A row is a sequence's seat in the executor. What changes with every step is a number in a numpy column here, so a steady
decode step is a handful of array operations, whatever the number of rows; Python touches the rows that cross a block
boundary, stop, join or leave.

Laws of a row that is taken (seat != 0), with `bs` the block size and `known` its tokens, pending ones included:

    stride 0    it catches up:  num_computed < known, all of them committed
    stride 1    it decodes:     num_computed == known - 1, the newest token is computed next
    num_computed <= capacity == the blocks in `table` * bs
    committed - known == the results in flight that hold a token of it

In a row that is free every comparison below is false, so that no column operation needs a mask.
"""

import heapq
from dataclasses import dataclass

import numpy as np

from scheduler_svc.core.sequence import Sequence

NEVER = np.iinfo(np.int32).max


@dataclass(frozen=True, slots=True, eq=False)
class Roster:
    """Who answers in a step: rows in ascending order. Shared by all steps between two changes of it."""

    rows: np.ndarray
    # The same as an index: a slice where the rows are the first ones without a gap, which is far cheaper.
    where: "np.ndarray | slice"
    # The stays in those rows; a row whose seat has changed since belongs to someone else. Negative: answers unheard.
    seats: np.ndarray
    session: np.ndarray
    handle: np.ndarray
    num_prompt: np.ndarray
    # Rows' `num_unseated` when it was made: as long as that stands every entry is valid.
    num_unseated: int
    unheard: bool


class Rows:
    def __init__(self, num_rows: int, block_size: int, max_blocks: int):
        """`max_blocks`: the most of one sequence."""
        self.num_rows = num_rows
        self.block_size = block_size
        self.sequence: list[Sequence | None] = [None] * num_rows
        self.num_live = 0
        self.num_decoding = 0
        # Rises when a row is left.
        self.num_unseated = 0
        self._next_seat = 1
        # Lowest row first: rows stay dense.
        self._free = list(range(num_rows))
        # None: who answers has changed since.
        self._roster: Roster | None = None

        self.seat = np.zeros(num_rows, np.int64)
        # Running order, smaller first; the largest is preempted first. -1: free, or never to be preempted again.
        self.rank = np.full(num_rows, -1, np.int64)
        self.stride = np.zeros(num_rows, np.int32)
        self.num_computed = np.zeros(num_rows, np.int32)
        self.capacity = np.full(num_rows, NEVER, np.int32)
        # Its blocks, capacity / block_size of them. Memory is touched only as far as sequences grow.
        self.table = np.zeros((num_rows, max_blocks), np.int32)
        self._flat_table = self.table.ravel()
        # The num_computed with which its last token is drawn.
        self.last = np.full(num_rows, NEVER, np.int32)
        self.committed = np.zeros(num_rows, np.int32)
        # The `committed` at which a block of generated tokens has become full and computed.
        self.publish_at = np.full(num_rows, NEVER, np.int32)
        self.num_prompt = np.zeros(num_rows, np.int32)
        # Tokens of its blocks that came from others.
        self.num_shared = np.zeros(num_rows, np.int32)
        self.session = np.zeros(num_rows, np.int32)
        self.handle = np.zeros(num_rows, np.uint64)
        self.root = np.zeros(num_rows, np.uint64)
        self.chain = np.zeros((num_rows, 2), np.uint64)
        # A ring of the newest tokens of each row: position p is at p % width.
        self.width = 2 * block_size
        self._ring = np.zeros(num_rows * self.width, np.int32)
        self._ring_start = np.arange(num_rows) * self.width
        self._ring_blocks = self._ring.reshape(num_rows * 2, block_size)

    @property
    def num_free(self) -> int:
        return len(self._free)

    def take(self, sequence: Sequence, *, num_known: int, last: int, rank: int) -> None:
        """Seats a sequence whose blocks and num_computed are set."""
        row = heapq.heappop(self._free)
        request = sequence.request
        sequence.row, sequence.seat = row, self._next_seat if request.max_tokens else -self._next_seat
        self._next_seat += 1
        self.sequence[row] = sequence
        self.num_live += 1
        block_size = self.block_size
        self.seat[row] = sequence.seat
        self.rank[row] = -1 if sequence.protected else rank
        self.num_computed[row] = sequence.num_computed
        self.capacity[row] = len(sequence.blocks) * block_size
        self.table[row, : len(sequence.blocks)] = sequence.blocks
        self.last[row] = last
        self.committed[row] = num_known
        self.publish_at[row] = (num_known // block_size + 1) * block_size + 1
        self.num_prompt[row] = sequence.num_prompt
        self.num_shared[row] = sequence.num_computed // block_size * block_size
        self.session[row] = request.session
        self.handle[row] = sequence.handle
        self.root[row] = sequence.state_of_request.root[0]
        partial = num_known % block_size
        if partial:
            tokens = np.frombuffer(bytes(sequence.log[-4 * partial :]), "<i4")
            self._ring[self._at(row, np.arange(num_known - partial, num_known))] = tokens

    def leave(self, sequence: Sequence, block_tokens: np.ndarray) -> None:
        """Frees the row; the sequence takes along what the columns knew. `block_tokens`: what full blocks hold."""
        row = sequence.row
        sequence.blocks = self.blocks(row)
        if self.stride[row]:
            self._fold(sequence, block_tokens)
            sequence.num_published = (int(self.publish_at[row]) - 1) // self.block_size - 1
        sequence.num_computed = int(self.num_computed[row])
        sequence.chain = self.chain[row].copy()
        self.sequence[row] = None
        self.num_live -= 1
        self.num_decoding -= int(self.stride[row])
        self.num_unseated += 1
        self._roster = None
        self.seat[row] = 0
        self.rank[row] = -1
        self.stride[row] = 0
        self.num_computed[row] = 0
        self.capacity[row] = NEVER
        self.last[row] = NEVER
        self.publish_at[row] = NEVER
        heapq.heappush(self._free, row)

    def settle(self, row: int) -> None:
        """It has caught up and decodes from the next step on."""
        self.stride[row] = 1
        self.num_decoding += 1
        self._roster = None

    def roster(self) -> Roster:
        """Those that answer in the step being planned: all that decode after it."""
        if self._roster is None:
            rows = np.flatnonzero(self.stride)
            seats = self.seat[rows]
            is_dense = len(rows) > 0 and rows[-1] == len(rows) - 1
            self._roster = Roster(
                rows=rows,
                where=slice(0, len(rows)) if is_dense else rows,
                seats=seats,
                session=self.session[rows],
                handle=self.handle[rows],
                num_prompt=self.num_prompt[rows],
                num_unseated=self.num_unseated,
                unheard=bool((seats < 0).any()),
            )
        return self._roster

    def grow(self, rows: np.ndarray, blocks: np.ndarray) -> None:
        """One more block for each of these rows."""
        capacity = self.capacity[rows]
        self.table[rows, capacity // self.block_size] = blocks
        self.capacity[rows] = capacity + self.block_size

    def blocks(self, row: int) -> list[int]:
        return self.table[row, : int(self.capacity[row]) // self.block_size].tolist()

    def append(self, rows: "np.ndarray | slice", tokens: np.ndarray) -> np.ndarray:
        """Commits one token in each of these rows; returns the positions they took."""
        committed = self.committed[rows]
        positions = committed.copy() if isinstance(rows, slice) else committed
        # position % width; numpy divides by a scalar several times faster than it takes the remainder.
        self._ring[self._ring_start[rows] + (positions - positions // self.width * self.width)] = tokens
        self.committed[rows] = positions + 1
        return positions

    def full_blocks(self) -> np.ndarray:
        """Rows in which a block of generated tokens has become full and computed since."""
        return (self.committed == self.publish_at).nonzero()[0]

    def take_full(self, rows: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Of each of these rows the block that became full: its place in the table, the block, its tokens."""
        until = self.publish_at.take(rows)
        self.publish_at[rows] = until + self.block_size
        places = (until - 1) // self.block_size - 1
        blocks = self._flat_table.take(rows * self.table.shape[1] + places)
        return places, blocks, self._ring_blocks.take(rows * 2 + (places & 1), axis=0)

    def _fold(self, sequence: Sequence, block_tokens: np.ndarray) -> None:
        """Brings its log up to date: from the blocks that became full meanwhile, then from the ring."""
        row, size = sequence.row, self.block_size
        start, end = sequence.num_logged, int(self.committed[row])
        in_blocks = int(self.publish_at[row]) - 1 - size
        if in_blocks > start:
            blocks = sequence.blocks[start // size : in_blocks // size]
            sequence.log += block_tokens[blocks].ravel()[start % size :].tobytes()
            start = in_blocks
        sequence.log += self._ring[self._at(row, np.arange(start, end))].tobytes()

    def last_in_order(self) -> Sequence | None:
        """The one to preempt."""
        row = int(self.rank.argmax())
        return self.sequence[row] if self.rank[row] >= 0 else None

    def num_output(self, row: int) -> int:
        return int(self.committed[row]) - int(self.num_prompt[row])

    def _at(self, row: "np.ndarray | int", positions: np.ndarray) -> np.ndarray:
        return self._ring_start[row] + positions % self.width
