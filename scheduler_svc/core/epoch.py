"""Epoch: everything that dies with an executor. Rows, blocks, the prefix index, plans in flight.

Knows how a sequence gets and loses its seat; not why. There is one way to give a seat up (`_unseat`) and one way to
give blocks back (`Memory.retire`), whatever the reason.
"""

from collections import deque
from typing import NamedTuple

from scheduler_svc.core.contract import Geometry, Limits
from scheduler_svc.core.memory import Memory
from scheduler_svc.core.policy import WaitingQueue
from scheduler_svc.core.rows import Roster, Rows
from scheduler_svc.core.scored_chunks import ScoredChunk
from scheduler_svc.core.sequence import Sequence, State, blocks_for
from scheduler_svc.core.story import Moment


class Step(NamedTuple):
    """A plan in flight: what its result must look like, and whose it is."""

    step_id: int
    roster: Roster
    # Sequences that draw their last token in it.
    final: tuple[Sequence, ...]
    # The digest.
    num_rows: int
    num_stored: int
    num_tokens: int
    # What it scores of prompts.
    scored: tuple[ScoredChunk, ...] = ()


class Epoch:
    def __init__(self, geometry: Geometry, boot_id: int, number: int, limits: Limits, queue: WaitingQueue):
        self.geometry = geometry
        self.boot_id = boot_id
        self.number = number
        self._limits = limits
        self._queue = queue
        hash_key = limits.hash_key if limits.prefix_caching else None
        self.memory = Memory(geometry.num_blocks, geometry.block_size, hash_key)
        # Every live row decodes one token at least: rows never exceed the token budget.
        self.rows = Rows(
            min(geometry.max_num_seqs, geometry.max_num_batched_tokens),
            geometry.block_size,
            min(geometry.num_blocks, blocks_for(geometry.max_model_len, geometry.block_size)),
        )
        self.in_flight: deque[Step] = deque()
        self.next_step_id = 1
        # Running sequences that catch up, in order of admission.
        self.catching_up: list[Sequence] = []
        # Running sequences whose last token is drawn by a step in flight: the next plan releases their rows.
        self.ending: list[Sequence] = []
        # FINISHING sequences by the seat they had.
        self.finishing: dict[int, Sequence] = {}
        # Rows given up since the last plan.
        self.releases: list[int] = []
        # Tokens of live rows whose keys and values are stored once all plans have run.
        self.num_stored = 0
        # Worst case, in blocks, of all running sequences; of the protected ones among them.
        self.worst_blocks = 0
        self.protected_blocks = 0
        self.num_preemptions = 0

    @property
    def last_committed(self) -> int:
        return self.next_step_id - 1 - len(self.in_flight)

    @property
    def planning(self) -> Moment:
        return Moment(self.number, self.next_step_id)

    def seat(self, sequence: Sequence, *, num_shared: int, last: int, worst_blocks: int) -> None:
        """Its blocks and num_computed are set: it runs."""
        self._queue.remove(sequence, admitted=True)
        sequence.state = State.RUNNING
        sequence.settled_step = None
        sequence.protected = sequence.num_preemptions >= self._limits.max_preemptions
        sequence.worst_blocks = worst_blocks
        self.rows.take(sequence, last=last, rank=self._queue.rank(sequence))
        sequence.num_published = num_shared
        self.num_stored += sequence.num_computed
        self.worst_blocks += worst_blocks
        self.protected_blocks += worst_blocks * sequence.protected
        self.catching_up.append(sequence)

    def settle(self, sequence: Sequence, step_id: int) -> None:
        """It has caught up. Those that waited for its blocks may go on from the next plan."""
        sequence.settled_step = step_id
        sequence.tell(Moment(self.number, step_id), "caught up", sequence.num_computed)
        self.catching_up.remove(sequence)
        self.rows.settle(sequence)
        self.memory.settled(sequence)
        self._wake(sequence)

    def wake_reached(self, sequence: Sequence) -> None:
        """Some of its blocks were published: wakes the followers that waited for no more than these."""
        reached = [follower for needed, follower in sequence.followers if needed <= sequence.num_published]
        if reached:
            sequence.followers = [entry for entry in sequence.followers if entry[0] > sequence.num_published]
            self._requeue(reached)

    def preempt(self, sequence: Sequence) -> None:
        sequence.tell(self.planning, "preempted from row", sequence.row)
        self._unseat(sequence)
        sequence.num_lost_tokens = max(sequence.num_lost_tokens, min(sequence.num_computed, sequence.num_logged))
        sequence.num_preemptions += 1
        self.num_preemptions += 1
        self.memory.retire(sequence)
        self._wait_again(sequence, fence=self.next_step_id - 1)

    def leave_ended(self) -> None:
        """Rows whose last step is planned are released; the sequences keep their blocks until the result is here."""
        for sequence in self.ending:
            if sequence.state is State.RUNNING:
                sequence.tell(self.planning, "leaves row", sequence.row)
                self._unseat(sequence)
                sequence.state = State.FINISHING
                self.finishing[sequence.seat] = sequence
        self.ending.clear()

    def reclaim(self) -> bool:
        """Takes blocks from sequences that only wait for their last result: plans run in order, so nothing is lost but
        the chance to publish their last tokens. Whether there were any."""
        holders = [sequence for sequence in self.finishing.values() if sequence.blocks]
        if holders:
            self.memory.retire(holders[0])
        return bool(holders)

    def retire(self, sequence: Sequence) -> None:
        """It is over, wherever it was."""
        if sequence.state is State.RUNNING:
            self._unseat(sequence)
        elif sequence.state is State.FINISHING:
            del self.finishing[sequence.seat]
        self.memory.retire(sequence)

    def lose(self) -> None:
        """The executor is gone: everybody waits again, with the tokens they have and the place they had."""
        running = [sequence for sequence in self.rows.sequence if sequence is not None]
        for sequence in running:
            self._unseat(sequence)
        for sequence in sorted((*running, *self.finishing.values()), key=lambda s: (s.serial, s.choice)):
            sequence.tell(self.planning, "lost its executor in row", sequence.row)
            sequence.num_lost_tokens = max(sequence.num_lost_tokens, min(sequence.num_computed, sequence.num_logged))
            sequence.num_resumes += 1
            sequence.blocks = []
            sequence.num_published = 0
            self._wait_again(sequence, fence=0)

    def _unseat(self, sequence: Sequence) -> None:
        row = sequence.row
        if sequence.settled_step is None:
            self.catching_up.remove(sequence)
        self.num_stored -= self.rows.num_computed(row)
        self.worst_blocks -= sequence.worst_blocks
        self.protected_blocks -= sequence.worst_blocks * sequence.protected
        self.memory.unfile(sequence)
        self.rows.leave(sequence)
        self.releases.append(row)
        self._wake(sequence)

    def _wait_again(self, sequence: Sequence, fence: int) -> None:
        sequence.state = State.WAITING
        sequence.fence = fence
        sequence.num_computed = 0
        self._queue.push(sequence)

    def _wake(self, sequence: Sequence) -> None:
        followers = [follower for _, follower in sequence.followers]
        sequence.followers = []
        self._requeue(followers)

    def _requeue(self, followers: list[Sequence]) -> None:
        for follower in followers:
            if follower.state is State.WAITING:
                self._queue.push(follower)

    def check(self) -> None:
        rows, size = self.rows, self.geometry.block_size
        running = [sequence for sequence in rows.sequence if sequence is not None]
        assert len(running) == rows.num_live == rows.num_rows - rows.num_free
        assert len({sequence.row for sequence in running}) == len(running)
        tables = [rows.blocks(s.row) for s in running]
        self.memory.check([*tables, *(s.blocks for s in self.finishing.values())], running)
        assert rows.step == self.next_step_id - 1
        assert rows.committed_step == self.last_committed
        assert self.num_stored == sum(rows.num_computed(s.row) for s in running)
        assert self.worst_blocks == sum(s.worst_blocks for s in running)
        assert self.protected_blocks == sum(s.worst_blocks for s in running if s.protected)
        assert self.protected_blocks <= self.geometry.num_blocks
        assert {id(s) for s in self.catching_up} == {id(s) for s in running if s.settled_step is None}
        for s in self.finishing.values():
            assert s.state is State.FINISHING, s.state_of_request.story
        due = [set(zip(step.roster.rows.tolist(), step.roster.seats.tolist(), strict=True)) for step in self.in_flight]
        for s, blocks in zip(running, tables, strict=True):
            row, story, computed = s.row, s.state_of_request.story, rows.num_computed(s.row)
            assert s.state is State.RUNNING, story
            assert s.ticket is None, story
            assert rows.sequence[row] is s, story
            assert rows.seat[row] == s.seat, story
            assert blocks[: len(s.blocks)] == s.blocks, story
            assert computed <= len(blocks) * size, story
            assert computed <= rows.last[row], story
            assert len(blocks) <= s.worst_blocks, story
            assert s.num_published <= min(computed, s.num_logged) // size, story
            if rows.settled[row]:
                pending = sum((row, s.seat) in answers for answers in due)
                rows.fold(s)
                num_unheard = 0 if s.request.max_tokens else 1
                assert computed + 1 == s.num_logged + max(pending, num_unheard), story
            else:
                assert computed == s.num_computed < s.num_logged, story
