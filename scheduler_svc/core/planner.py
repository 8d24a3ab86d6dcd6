"""The planner: decides a step.

One walk, in this order, and nothing that is decided is ever undone:

    leave     rows whose last step is in flight are released
    grow      rows that cross a block boundary get a block; want of blocks preempts from the tail of the running order
    catch up  running sequences that are behind share the token budget that the decodes leave
    admit     waiting sequences take rows, blocks and the budget that is left
    spread    what is left of the budget goes to those that were given less than they could use
    seal      counters move on, blocks are published, the plan is written down

No phases: a sequence catches up with its known tokens, be they a prompt, the rest of one after a prefix hit, or
everything after a preemption; when it has, it decodes.
"""

from dataclasses import dataclass, field

import numpy as np

from protos.stepwire.wire.v1 import step_pb2
from scheduler_svc.core import scored_chunks
from scheduler_svc.core.admission import LengthHistogram, peak_tokens
from scheduler_svc.core.contract import Limits, Policy
from scheduler_svc.core.epoch import Epoch, Step
from scheduler_svc.core.policy import WaitingQueue
from scheduler_svc.core.quarantine import Quarantine, first_waiting
from scheduler_svc.core.registry import Registry
from scheduler_svc.core.scored_chunks import ScoredChunk
from scheduler_svc.core.sequence import Sequence, State, blocks_for, worst_case_blocks
from scheduler_svc.core.step_time import StepTimeModel

# More blocks than any sequence has: a follower that waits until its leader has settled.
NEVER = 1 << 31
# However tight the step-time target, prompts advance by this much in a step.
MIN_CHUNK = 16
# A head that did not fit is looked at again when blocks were given back, or after so many steps: estimates change.
PATIENCE = 8


@dataclass(slots=True)
class Draft:
    """A plan in the making."""

    admit: list[step_pb2.Admit] = field(default_factory=list)
    copy: list[int] = field(default_factory=list)
    grow: bytes = b""
    # Tokens given to sequences that catch up, by row.
    chunks: dict[int, int] = field(default_factory=dict)
    has_preempted: bool = False
    # Who computes the block of this hash next, of those that catch up.
    leaders: dict[bytes, Sequence] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Placement:
    """Where a waiting sequence would go."""

    shared: list[int]  # blocks of others, full of its own leading tokens
    fork: int | None  # a block of a sibling to be copied, its first tokens are ours
    num_cached: int  # tokens computed already in those
    num_new: int  # blocks to take


class Planner:
    def __init__(
        self,
        limits: Limits,
        queue: WaitingQueue,
        quarantine: Quarantine,
        registry: Registry,
        lengths: LengthHistogram,
    ):
        self._limits = limits
        self._queue = queue
        self._quarantine = quarantine
        self._registry = registry
        self._lengths = lengths
        self.step_time = StepTimeModel()
        # The head that did not fit: its ticket, how often blocks had been given back, when to look again.
        self._refused: tuple[int | None, int, int] = (None, 0, 0)

    def plan(self, epoch: Epoch, now: float) -> step_pb2.StepPlan | None:
        draft = Draft()
        epoch.leave_ended()
        self._grow(epoch, draft)
        if epoch.catching_up or not self._queue.is_empty():
            left = self._budget(epoch)
            left = self._catch_up(epoch, draft, left)
            if not draft.has_preempted:
                left = self._admit(epoch, draft, left, now)
            self._spread(epoch, draft, left)
        if not epoch.rows.num_live and not epoch.releases:
            return None
        return self._seal(epoch, draft)

    # ---- grow --------------------------------------------------------------------------------------------------

    def _grow(self, epoch: Epoch, draft: Draft) -> None:
        step_id, pool = epoch.next_step_id, epoch.memory.pool
        rows = epoch.rows.growing(step_id)
        if not rows:
            return
        while len(rows) > pool.num_available:
            if not epoch.reclaim():
                victim = epoch.rows.last_in_order()
                assert victim is not None, "protected sequences outgrew the pool"
                epoch.preempt(victim)
                draft.has_preempted = True
        if not rows:
            return
        blocks = pool.take(len(rows))
        assert blocks is not None
        draft.grow = epoch.rows.grow(step_id, blocks)
        if self._limits.policy is Policy.FAIR:
            for row in rows:
                self._queue.charge_output(epoch.rows.seated(row), epoch.rows.num_output(row))

    # ---- the token budget --------------------------------------------------------------------------------------

    def _budget(self, epoch: Epoch) -> int:
        """The tokens that decodes leave to those that catch up."""
        most = epoch.geometry.max_num_batched_tokens - epoch.rows.num_decoding
        target = self._limits.inter_token_target_s
        if target is None or not epoch.rows.num_decoding:
            return most
        tokens = self.step_time.budget(target * 1e6, epoch.num_stored)
        return most if tokens is None else min(most, max(tokens - epoch.rows.num_decoding, MIN_CHUNK))

    def _catch_up(self, epoch: Epoch, draft: Draft, left: int) -> int:
        behind = epoch.catching_up
        others_wait = not self._queue.is_empty()
        for i, sequence in enumerate(behind):
            left -= self._give(draft, sequence, self._share(left, others_wait or i + 1 < len(behind)))
        return left

    @staticmethod
    def _share(left: int, others_wait: bool) -> int:
        """While others wait, one prompt takes at most half of what is left: a short one never waits for a long one."""
        return -(-left // 2) if others_wait else left

    @staticmethod
    def _give(draft: Draft, sequence: Sequence, most: int) -> int:
        given = draft.chunks.get(sequence.row, 0)
        behind = sequence.num_logged - sequence.num_computed - given
        chunk = min(behind, most)
        draft.chunks[sequence.row] = given + chunk
        return chunk

    def _spread(self, epoch: Epoch, draft: Draft, left: int) -> None:
        for sequence in epoch.catching_up:
            if left <= 0:
                return
            left -= self._give(draft, sequence, left)

    # ---- admit -------------------------------------------------------------------------------------------------

    def _admit(self, epoch: Epoch, draft: Draft, left: int, now: float) -> int:
        """Admits in order until something is short: nobody slips past a head that does not fit."""
        for leader in epoch.catching_up:
            self._lead(epoch, draft, leader)
        while left > 0 and epoch.rows.num_free:
            sequence = self._head()
            if sequence is None or sequence.fence > epoch.last_committed or self._is_refused(epoch, sequence):
                break
            hits = epoch.memory.find_prefix(sequence, epoch.rows)
            if self._park(epoch, draft, sequence, len(hits)):
                continue
            placement = self._place(epoch, sequence, hits)
            if placement is None:
                num_returns = epoch.memory.pool.num_returns
                self._refused = (sequence.ticket, num_returns, epoch.next_step_id + PATIENCE)
                break
            self._seat(epoch, draft, sequence, placement, now)
            self._lead(epoch, draft, sequence)
            left -= self._give(draft, sequence, self._share(left, not self._queue.is_empty()))
        return left

    def _head(self) -> Sequence | None:
        """Whose turn it is; a suspect's before everybody's."""
        suspect = self._quarantine.suspect() if self._quarantine.is_active else None
        return self._queue.head() if suspect is None else first_waiting(suspect)

    def _is_refused(self, epoch: Epoch, sequence: Sequence) -> bool:
        """Whether it did not fit a moment ago, and nothing has changed since."""
        ticket, num_returns, again = self._refused
        return (
            sequence.ticket == ticket
            and epoch.memory.pool.num_returns == num_returns
            and epoch.next_step_id < again
            and epoch.rows.num_live > 0
        )

    @staticmethod
    def _lead(epoch: Epoch, draft: Draft, sequence: Sequence) -> None:
        key = epoch.memory.key_at(sequence, sequence.num_published)
        if key is not None:
            draft.leaders.setdefault(key, sequence)

    def _park(self, epoch: Epoch, draft: Draft, sequence: Sequence, num_hits: int) -> bool:
        """Whether it should rather wait for a running sequence that is computing the same prefix."""
        if self._donor(sequence) is not None:
            return False
        for mate in sequence.state_of_request.sequences:
            if mate.state is State.RUNNING and mate.settled_step is None:
                self._follow(sequence, mate, NEVER)
                return True
        missing = epoch.memory.key_at(sequence, num_hits)
        leader = draft.leaders.get(missing) if missing is not None else None
        if leader is None or (num_hits + 1) * epoch.geometry.block_size > sequence.num_skippable:
            return False
        self._follow(sequence, leader, epoch.memory.num_common_blocks(sequence, leader))
        return True

    def _follow(self, sequence: Sequence, leader: Sequence, num_blocks: int) -> None:
        self._queue.remove(sequence, admitted=False)
        leader.followers.append((num_blocks, sequence))

    def _place(self, epoch: Epoch, sequence: Sequence, hits: list[int]) -> Placement | None:
        """Where it goes, given the blocks that hold its leading tokens. None: there is no room for it now."""
        size, pool = epoch.geometry.block_size, epoch.memory.pool
        num_known = sequence.num_logged
        shared, fork = hits, None
        num_cached = len(shared) * size
        donor = self._donor(sequence)
        common = min(sequence.num_prompt, num_known - 1)
        if donor is not None and common > num_cached:
            shared, num_cached = donor.blocks[: common // size], common
            fork = donor.blocks[common // size] if common % size else None
        num_new = blocks_for(num_known, size) - len(shared)
        room = pool.num_available - num_new
        if room < 0 or (room < len(shared) and room < pool.num_idle(shared)):
            return None
        placement = Placement(shared, fork, num_cached, num_new)
        return placement if self._fits(epoch, sequence, placement) else None

    @staticmethod
    def _donor(sequence: Sequence) -> Sequence | None:
        """A sibling that computed the common prompt in an earlier step and still holds it."""
        for mate in sequence.state_of_request.sequences:
            if mate is not sequence and mate.blocks and mate.settled_step is not None:
                return mate
        return None

    def _fits(self, epoch: Epoch, sequence: Sequence, placement: Placement) -> bool:
        """Whether the pool holds it at the peak to come; see admission.py."""
        rows, size, num_blocks = epoch.rows, epoch.geometry.block_size, epoch.geometry.num_blocks
        limit = sequence.limit(epoch.geometry)
        worst = worst_case_blocks(sequence.num_prompt, limit, size)
        if sequence.num_preemptions >= self._limits.max_preemptions and epoch.protected_blocks + worst > num_blocks:
            return False
        if not rows.num_live:
            return True
        room = num_blocks - int(num_blocks * self._limits.watermark)
        if epoch.worst_blocks + worst <= room:
            return True
        live = rows.seat.nonzero()[0]
        computed = rows.lead[live] + rows.step
        held = rows.num_slots(live, computed + rows.settled[live]) - rows.num_shared[live]
        drawn = np.maximum(computed - rows.num_prompt[live], 0)
        most = rows.last[live] - computed
        held = np.append(held, placement.num_new * size)
        drawn = np.append(drawn, sequence.num_output)
        most = np.append(most, max(limit - sequence.num_logged, 1))
        others = epoch.memory.pool.num_owned + epoch.memory.pool.num_idle(placement.shared)
        base = max(others * size - int(held[:-1].sum()), 0)
        return base + peak_tokens(held, np.minimum(self._lengths.to_come(drawn), most)) <= room * size

    def _seat(self, epoch: Epoch, draft: Draft, sequence: Sequence, placement: Placement, now: float) -> None:
        pool = epoch.memory.pool
        pool.share(placement.shared)
        new = pool.take(placement.num_new)
        assert new is not None
        sequence.blocks = placement.shared + new
        sequence.num_computed = placement.num_cached
        if placement.fork is not None:
            draft.copy += (placement.fork, new[0])
        limit = sequence.limit(epoch.geometry)
        epoch.seat(
            sequence,
            num_shared=len(placement.shared),
            last=max(limit - 1, sequence.num_prompt),
            worst_blocks=worst_case_blocks(sequence.num_prompt, limit, epoch.geometry.block_size),
        )
        sequence.tell(epoch.planning, "admitted to row", sequence.row, placement.num_cached, sequence.num_logged)
        self._registry.admitted(sequence, placement.num_cached, now)
        if self._limits.policy is Policy.FAIR:
            num_expected = int(self._lengths.to_come(np.array([sequence.num_output]))[0])
            num_expected = min(num_expected, limit - sequence.num_logged)
            self._queue.charge_admission(sequence, sequence.num_logged - placement.num_cached, num_expected)
        admit = step_pb2.Admit(
            row=sequence.row,
            token_ids=bytes(sequence.log),
            num_prompt_tokens=sequence.num_prompt,
            block_ids=np.array(sequence.blocks, "<i4").tobytes(),
            num_computed_tokens=placement.num_cached,
            sampling=sequence.request.sampling,
        )
        admit.sampling.choice = sequence.choice
        scored_chunks.instruct(sequence, admit)
        draft.admit.append(admit)

    # ---- seal --------------------------------------------------------------------------------------------------

    def _seal(self, epoch: Epoch, draft: Draft) -> step_pb2.StepPlan:
        """Moves the counters to where they are once this step has run, and writes the plan down."""
        rows, step_id = epoch.rows, epoch.next_step_id
        num_tokens = rows.num_decoding
        rows.advance(step_id)
        prefill = b""
        scored: tuple[ScoredChunk, ...] = ()
        if epoch.catching_up:
            num_chunked, prefill, scored = self._seal_chunks(epoch, draft)
            num_tokens += num_chunked
        epoch.num_stored += num_tokens
        final = tuple(rows.take_ends())
        epoch.ending += final
        plan = step_pb2.StepPlan(
            boot_id=epoch.boot_id,
            epoch=epoch.number,
            step_id=step_id,
            release=np.array(epoch.releases, "<i4").tobytes() if epoch.releases else b"",
            admit=draft.admit,
            copy=np.array(draft.copy, "<i4").tobytes() if draft.copy else b"",
            grow=draft.grow,
            prefill=prefill,
        )
        epoch.releases.clear()
        epoch.next_step_id += 1
        digest = rows.num_live, epoch.num_stored
        epoch.in_flight.append(Step(step_id, rows.roster(), final, *digest, num_tokens, scored))
        return plan

    def _seal_chunks(self, epoch: Epoch, draft: Draft) -> tuple[int, bytes, tuple[ScoredChunk, ...]]:
        rows = epoch.rows
        pairs: list[tuple[int, int]] = []
        scored: list[ScoredChunk] = []
        num_tokens = 0
        for sequence in list(epoch.catching_up):
            row = sequence.row
            chunk = draft.chunks.get(row, 0)
            sequence.num_computed = computed = sequence.num_computed + chunk
            rows.catch_up(sequence)
            num_tokens += chunk
            scored += scored_chunks.chunk_of(sequence, computed - chunk, computed)
            settles = computed == sequence.num_logged
            if not (settles and chunk == 1):
                pairs.append((row, chunk))
            epoch.memory.publish_known(sequence, computed)
            if settles:
                epoch.settle(sequence, epoch.next_step_id)
            else:
                epoch.wake_reached(sequence)
        return num_tokens, np.array(sorted(pairs), "<i4").tobytes(), tuple(scored)
