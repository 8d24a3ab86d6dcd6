"""Rows: the running sequences, in columns.

A row is a sequence's seat in the executor. A decode step adds one token to every row that decodes, so nothing about
them is counted row by row: a row remembers by how much it is ahead of the step number, `lead`, and what it will need is
filed under the step that needs it. A steady step then asks which rows are due, and touches no other.

Laws of a row that is taken (seat != 0), with `step` the last step planned and `bs` the block size:

    computed                = lead + step, the tokens whose keys and values are stored once all plans have run
    blocks in `table`       = max(known at admission, computed) / bs, rounded up
    settled (it decodes)    each step computes its newest token and draws another; step s draws token number lead + s
    not settled             it catches up with tokens that are all in its sequence's log

A settled row takes a block in step s when lead + s - 1 is a multiple of bs, so all of those steps are alike modulo bs:
its phase. It draws its last token in step `last` - lead.

Drawn tokens are kept by step and row, HISTORY steps of them, and brought to a sequence's log when it leaves, when
somebody asks, and every HISTORY steps: a few rows in each.
"""

import heapq
from bisect import insort
from dataclasses import dataclass, field

import numpy as np

from scheduler_svc.core.sequence import Sequence, blocks_for

HISTORY = 256


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
    # The token of step s is number first + s of the output.
    first: np.ndarray
    # Rows' `num_unseated` when it was made: as long as that stands every entry is valid.
    num_unseated: int
    unheard: bool


@dataclass(slots=True, eq=False)
class Phase:
    """The rows that take a block in the same steps."""

    rows: list[int] = field(default_factory=list)  # ascending
    # int32 [n, 2]: row, block; as the plan says it. Made when needed; None: the rows have changed since.
    pairs: np.ndarray | None = None
    # Where in the table each row's next block goes.
    places: np.ndarray | None = None


class Rows:
    def __init__(self, num_rows: int, block_size: int, max_blocks: int):
        """`max_blocks`: the most of one sequence."""
        self.num_rows = num_rows
        self.block_size = block_size
        self.sequence: list[Sequence | None] = [None] * num_rows
        self.num_live = 0
        self.num_decoding = 0
        # The last step that was planned, and the last whose result is here.
        self.step = 0
        self.committed_step = 0
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
        self.settled = np.zeros(num_rows, np.bool_)
        self.lead = np.zeros(num_rows, np.int64)
        self.num_known = np.zeros(num_rows, np.int64)  # at admission
        # Computed tokens with which its last one is drawn.
        self.last = np.zeros(num_rows, np.int64)
        self.num_prompt = np.zeros(num_rows, np.int64)
        # Tokens of its blocks that came from others.
        self.num_shared = np.zeros(num_rows, np.int64)
        self.session = np.zeros(num_rows, np.int32)
        self.handle = np.zeros(num_rows, np.uint64)
        # Its blocks. Memory is touched only as far as sequences grow.
        self.table = np.zeros((num_rows, max_blocks), np.int32)
        self._flat_table = self.table.ravel()
        self._phases = [Phase() for _ in range(block_size)]
        # Those that draw their last token in a step to come, by that step.
        self._ends: dict[int, list[Sequence]] = {}
        # The tokens of step s are at s modulo its length.
        self._history = np.zeros((HISTORY, num_rows), "<i4")

    @property
    def num_free(self) -> int:
        return len(self._free)

    # ---- a stay ------------------------------------------------------------------------------------------------

    def take(self, sequence: Sequence, *, last: int, rank: int) -> None:
        """Seats a sequence whose blocks and num_computed are set."""
        row = heapq.heappop(self._free)
        request = sequence.request
        sequence.row, sequence.seat = row, self._next_seat if request.max_tokens else -self._next_seat
        self._next_seat += 1
        self.sequence[row] = sequence
        self.num_live += 1
        self.seat[row] = sequence.seat
        self.rank[row] = -1 if sequence.protected else rank
        self.lead[row] = sequence.num_computed - self.step
        self.num_known[row] = sequence.num_logged
        self.last[row] = last
        self.num_prompt[row] = sequence.num_prompt
        self.num_shared[row] = sequence.num_computed // self.block_size * self.block_size
        self.session[row] = request.session
        self.handle[row] = sequence.handle
        self.table[row, : len(sequence.blocks)] = sequence.blocks

    def catch_up(self, sequence: Sequence) -> None:
        """`num_computed` of a sequence that is not settled says what it has after the last step planned."""
        self.lead[sequence.row] = sequence.num_computed - self.step

    def settle(self, sequence: Sequence) -> None:
        """It has caught up in the last step planned, which draws its next token; it decodes from the next on."""
        row = sequence.row
        self.settled[row] = True
        self.num_decoding += 1
        self._roster = None
        self._change(self._phase_of(row), row, joins=True)
        self._ends.setdefault(self._end_of(row), []).append(sequence)

    def leave(self, sequence: Sequence) -> None:
        """Frees the row; the sequence takes along what the columns knew."""
        row = sequence.row
        sequence.blocks = self.blocks(row)
        sequence.num_computed = self.num_computed(row)
        self.fold(sequence)
        if self.settled[row]:
            self.settled[row] = False
            self.num_decoding -= 1
            self._roster = None
            self._change(self._phase_of(row), row, joins=False)
            if self._end_of(row) > self.step:
                self._ends[self._end_of(row)].remove(sequence)
        self.sequence[row] = None
        self.num_live -= 1
        self.num_unseated += 1
        self.seat[row] = 0
        self.rank[row] = -1
        heapq.heappush(self._free, row)

    def _phase_of(self, row: int) -> Phase:
        return self._phases[(1 - int(self.lead[row])) % self.block_size]

    def _end_of(self, row: int) -> int:
        return int(self.last[row] - self.lead[row])

    @staticmethod
    def _change(phase: Phase, row: int, *, joins: bool) -> None:
        if joins:
            insort(phase.rows, row)
        else:
            phase.rows.remove(row)
        phase.pairs = None

    # ---- a step is planned -------------------------------------------------------------------------------------

    def growing(self, step_id: int) -> list[int]:
        """The rows that take a block in this step, the next one."""
        return self._phases[step_id % self.block_size].rows

    def grow(self, step_id: int, blocks: list[int]) -> bytes:
        """A block for each of those rows; returns the pairs (row, block) as the plan says them."""
        phase = self._phases[step_id % self.block_size]
        if phase.pairs is None or phase.places is None:
            rows = np.array(phase.rows)
            phase.pairs = np.empty((len(rows), 2), "<i4")
            phase.pairs[:, 0] = rows
            phase.places = rows * self.table.shape[1] + (self.lead[rows] + self.step) // self.block_size
        phase.pairs[:, 1] = blocks
        self._flat_table[phase.places] = phase.pairs[:, 1]
        phase.places += 1
        return phase.pairs.tobytes()

    def advance(self, step_id: int) -> None:
        """The step is planned: every settled row computes one token more."""
        self.step = step_id

    def take_ends(self) -> list[Sequence]:
        """Those that draw their last token in the step just planned."""
        return self._ends.pop(self.step, [])

    def roster(self) -> Roster:
        """Those that answer in the step just planned: all that are settled after it."""
        if self._roster is None:
            rows = self.settled.nonzero()[0]
            seats = self.seat[rows]
            is_dense = len(rows) > 0 and rows[-1] == len(rows) - 1
            self._roster = Roster(
                rows=rows,
                where=slice(0, len(rows)) if is_dense else rows,
                seats=seats,
                session=self.session[rows],
                handle=self.handle[rows],
                first=(self.lead[rows] - self.num_prompt[rows]).astype(np.int32),
                num_unseated=self.num_unseated,
                unheard=bool((seats < 0).any()),
            )
        return self._roster

    # ---- its result is here ------------------------------------------------------------------------------------

    def commit(self, step_id: int, roster: Roster, tokens: np.ndarray) -> None:
        """Keeps the tokens of a step. Those of rows that changed hands since are never read."""
        length = len(self._history)
        place = step_id % length
        self._history[place, roster.where] = tokens
        self.committed_step = step_id
        for sequence in self.sequence[place::length]:
            if sequence is not None:
                self.fold(sequence)

    def fold(self, sequence: Sequence) -> None:
        """Brings the log of a sequence in a row up to date."""
        if sequence.settled_step is None or not sequence.request.max_tokens:
            return
        first, end = sequence.num_logged - int(self.lead[sequence.row]), self.committed_step + 1
        if first >= end:
            return
        column = self._history[:, sequence.row]
        start, stop = first % len(column), end % len(column)
        if start < stop:
            sequence.log += column[start:stop].tobytes()
        else:
            sequence.log += column[start:].tobytes()
            sequence.log += column[:stop].tobytes()

    # ---- what there is to see ----------------------------------------------------------------------------------

    def num_computed(self, row: int) -> int:
        return int(self.lead[row]) + self.step

    def num_committed(self, sequence: Sequence) -> int:
        """Its known tokens, those that its log lacks included."""
        if sequence.settled_step is None or not sequence.request.max_tokens:
            return sequence.num_logged
        return max(sequence.num_logged, int(self.lead[sequence.row]) + self.committed_step + 1)

    def num_slots(self, rows: np.ndarray, computed: np.ndarray) -> np.ndarray:
        """Of the blocks of these rows when so many tokens of each are computed."""
        size = self.block_size
        return -(-np.maximum(self.num_known[rows], computed) // size) * size

    def seated(self, row: int) -> Sequence:
        sequence = self.sequence[row]
        assert sequence is not None
        return sequence

    def blocks(self, row: int) -> list[int]:
        num_tokens = max(int(self.num_known[row]), self.num_computed(row))
        return self.table[row, : blocks_for(num_tokens, self.block_size)].tolist()

    def last_in_order(self) -> Sequence | None:
        """The one to preempt."""
        row = int(self.rank.argmax())
        return self.sequence[row] if self.rank[row] >= 0 else None

    def num_output(self, row: int) -> int:
        """Drawn by all steps planned."""
        return self.num_computed(row) + 1 - int(self.num_prompt[row])
