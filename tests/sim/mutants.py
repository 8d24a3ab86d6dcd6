"""Bugs one could write, each as a patch of the core. The simulation must catch every one of them.

`python -m tests.sim.mutants` prints at which seed each fell.
"""

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np

from scheduler_svc.core import committer, planner
from scheduler_svc.core import scheduler as scheduler_module
from scheduler_svc.core.block_pool import BlockPool
from scheduler_svc.core.epoch import Epoch
from scheduler_svc.core.memory import Memory
from scheduler_svc.core.planner import Planner
from scheduler_svc.core.prefix_index import PrefixIndex
from scheduler_svc.core.rows import Rows
from scheduler_svc.core.sequence import Sequence, State
from tests.sim.world import World

MAX_SEEDS = 400


@contextmanager
def patched(owner: Any, name: str, value: Any) -> Iterator[None]:
    saved = owner.__dict__[name]
    setattr(owner, name, value)
    try:
        yield
    finally:
        setattr(owner, name, saved)


def wrap(owner: Any, name: str, make: Callable[[Any], Any]) -> Any:
    """Replaces a function by one made from it."""
    original = owner.__dict__[name]
    if isinstance(original, staticmethod):
        return patched(owner, name, staticmethod(make(original.__func__)))
    return patched(owner, name, make(original))


def suspects_in_company() -> Any:
    """Poison runs beside others, so nobody can tell who it is."""
    return patched(Planner, "_head", lambda planner: planner._queue.head())


def one_block_too_few() -> Any:
    return patched(planner, "blocks_for", lambda num_tokens, block_size: max(1, num_tokens // block_size))


def freed_twice() -> Any:
    def make(give_back: Any) -> Any:
        def twice(pool: BlockPool, blocks: list[int]) -> None:
            give_back(pool, blocks)
            pool._free += [block for block in blocks[:1] if not pool.num_refs[block] and not pool.is_named[block]]

        return twice

    return wrap(BlockPool, "give_back", make)


def never_freed() -> Any:
    def make(give_back: Any) -> Any:
        return lambda pool, blocks: give_back(pool, blocks[1:])

    return wrap(BlockPool, "give_back", make)


def late_result_applied() -> Any:
    """A token goes to whoever sits in the row now."""

    def make(leave: Any) -> Any:
        def leave_quietly(rows: Rows, sequence: Sequence) -> None:
            leave(rows, sequence)
            rows.num_unseated -= 1

        return leave_quietly

    return wrap(Rows, "leave", make)


def salt_forgotten() -> Any:
    return patched(scheduler_module, "root", lambda key, tenant, salt: np.array([1, 2], np.uint64))


def tokens_not_compared() -> Any:
    """And hashes that see only where a block ends."""

    def find(index: PrefixIndex, keys: bytes, tokens: np.ndarray, root: np.ndarray, max_blocks: int) -> list[int]:
        hits = [index._block_of.get(keys[16 * i : 16 * i + 16]) for i in range(max_blocks)]
        return hits[: hits.index(None)] if None in hits else hits  # type: ignore[return-value]

    def make(hashes: Any) -> Any:
        return lambda index, chain, tokens, first=0: hashes(index, chain, tokens * 0, first)

    @contextmanager
    def both() -> Iterator[None]:
        with patched(PrefixIndex, "find", find), wrap(PrefixIndex, "hashes", make):
            yield

    return both()


def unfenced_readmission() -> Any:
    def make(wait_again: Any) -> Any:
        return lambda epoch, sequence, fence: wait_again(epoch, sequence, 0)

    return wrap(Epoch, "_wait_again", make)


def hit_covers_the_last_token() -> Any:
    def find_prefix(memory: Memory, sequence: Sequence, rows: Rows) -> list[int]:
        if memory.index is None:
            return []
        keys, tokens = memory._hash(sequence)
        return memory.index.find(keys, tokens, sequence.state_of_request.root, len(keys) // 16)

    return patched(Memory, "find_prefix", find_prefix)


def published_before_computed() -> Any:
    """The whole prompt is published with its first chunk."""

    def make(publish_known: Any) -> Any:
        return lambda memory, sequence, num_computed: publish_known(memory, sequence, sequence.num_logged)

    return wrap(Memory, "publish_known", make)


def published_before_known() -> Any:
    """A drawn block is published although its newest token is not computed yet."""

    def make(publish: Any) -> Any:
        return lambda memory, sequence, blocks, num_computed: publish(memory, sequence, blocks, num_computed + 1)

    return wrap(Memory, "_publish", make)


def grows_a_step_late() -> Any:
    return patched(Rows, "growing", lambda rows, step_id: rows._phases[(step_id - 1) % rows.block_size].rows)


def tokens_of_another_step() -> Any:
    """The history is read one step off."""

    def make(commit: Any) -> Any:
        def shifted(rows: Rows, step_id: int, roster: Any, tokens: np.ndarray) -> None:
            commit(rows, step_id + 1, roster, tokens)
            rows.committed_step = step_id

        return shifted

    return wrap(Rows, "commit", make)


def phase_not_left() -> Any:
    """Whoever leaves a row goes on growing there."""

    def make(change: Any) -> Any:
        def stay(phase: Any, row: int, *, joins: bool) -> None:
            if joins and row not in phase.rows:
                change(phase, row, joins=True)

        return stay

    return wrap(Rows, "_change", make)


def fork_without_copy() -> Any:
    def make(seat: Any) -> Any:
        def without(self: Planner, epoch: Any, draft: Any, sequence: Any, placement: Any, now: float) -> None:
            seat(self, epoch, draft, sequence, placement, now)
            draft.copy.clear()

        return without

    return wrap(Planner, "_seat", make)


def partial_block_shared() -> Any:
    """A sibling writes into the block that another still fills."""

    def make(place: Any) -> Any:
        def share_all(self: Planner, epoch: Any, sequence: Any, hits: Any) -> Any:
            placement = place(self, epoch, sequence, hits)
            if placement is None or placement.fork is None:
                return placement
            return planner.Placement(
                [*placement.shared, placement.fork], None, placement.num_cached, placement.num_new - 1
            )

        return share_all

    return wrap(Planner, "_place", make)


def blocks_not_kept_from_eviction() -> Any:
    """Hit blocks are counted as available too."""
    return patched(BlockPool, "num_idle", lambda pool, blocks: 0)


def evicted_but_still_named() -> Any:
    def make(take: Any) -> Any:
        def forgetful(pool: BlockPool, count: int) -> Any:
            saved, pool._forget = pool._forget, lambda blocks: None
            try:
                return take(pool, count)
            finally:
                pool._forget = saved

        return forgetful

    return wrap(BlockPool, "take", make)


def length_off_by_one() -> Any:
    def make(take: Any) -> Any:
        def late(rows: Rows, sequence: Sequence, *, last: int, rank: int) -> None:
            take(rows, sequence, last=last + 1, rank=rank)

        return late

    return wrap(Rows, "take", make)


def min_tokens_off_by_one() -> Any:
    def is_stop(sequence: Sequence, token: int, num_output: int) -> bool:
        return token in sequence.request.stop_token_ids and num_output > sequence.request.min_tokens

    return patched(Sequence, "is_stop", is_stop)


def stop_of_another() -> Any:
    """Any token that is somebody's stop ends everybody."""
    return patched(Sequence, "is_stop", lambda sequence, token, num_output: True)


def release_forgotten() -> Any:
    def make(unseat: Any) -> Any:
        def forget(epoch: Epoch, sequence: Sequence) -> None:
            unseat(epoch, sequence)
            if len(epoch.releases) > 1:
                epoch.releases.pop()

        return forget

    return wrap(Epoch, "_unseat", make)


def followers_forgotten() -> Any:
    return patched(Epoch, "_wake", lambda epoch, sequence: None)


def victim_already_grown() -> Any:
    """Victims are taken after blocks were handed out in the same plan: here, the head instead of the tail."""

    def last_in_order(rows: Rows) -> Sequence | None:
        live = [sequence for sequence in rows.sequence if sequence is not None]
        return min(live, key=lambda s: (s.serial, s.choice)) if live else None

    return patched(Rows, "last_in_order", last_in_order)


def choice_not_told() -> Any:
    """Every sibling draws as the first does."""

    def make(seat: Any) -> Any:
        def same(self: Planner, epoch: Any, draft: Any, sequence: Any, placement: Any, now: float) -> None:
            seat(self, epoch, draft, sequence, placement, now)
            draft.admit[-1].sampling.choice = 0

        return same

    return wrap(Planner, "_seat", make)


def results_unchecked() -> Any:
    def accept(epoch: Epoch, result: Any) -> Any:
        result.token_ids = result.token_ids[: 4 * len(epoch.in_flight[0].roster.rows)]
        return epoch.in_flight[0]

    return patched(committer, "_checked", accept)


def output_lost_with_the_executor() -> Any:
    def make(wait_again: Any) -> Any:
        def shorter(epoch: Epoch, sequence: Sequence, fence: int) -> None:
            if fence == 0 and sequence.num_output:
                del sequence.log[-4:]
            wait_again(epoch, sequence, fence)

        return shorter

    return wrap(Epoch, "_wait_again", make)


def cancel_leaves_the_row() -> Any:
    def make(retire: Any) -> Any:
        def keep(epoch: Epoch, sequence: Sequence) -> None:
            if sequence.state is State.RUNNING and sequence.settled_step is None:
                return
            retire(epoch, sequence)

        return keep

    return wrap(Epoch, "retire", make)


def unlimited_preemption() -> Any:
    """No sequence is ever protected: a victim is a victim for ever."""

    def make(take: Any) -> Any:
        def unprotected(rows: Rows, sequence: Sequence, **numbers: int) -> None:
            take(rows, sequence, **numbers)
            rows.rank[sequence.row] = numbers["rank"]

        return unprotected

    return wrap(Rows, "take", make)


MUTANTS: tuple[Callable[[], Any], ...] = (
    one_block_too_few,
    suspects_in_company,
    freed_twice,
    never_freed,
    late_result_applied,
    salt_forgotten,
    tokens_not_compared,
    unfenced_readmission,
    hit_covers_the_last_token,
    published_before_computed,
    published_before_known,
    grows_a_step_late,
    tokens_of_another_step,
    phase_not_left,
    fork_without_copy,
    partial_block_shared,
    blocks_not_kept_from_eviction,
    evicted_but_still_named,
    length_off_by_one,
    min_tokens_off_by_one,
    stop_of_another,
    release_forgotten,
    followers_forgotten,
    victim_already_grown,
    choice_not_told,
    results_unchecked,
    output_lost_with_the_executor,
    cancel_leaves_the_row,
    unlimited_preemption,
)


def seed_that_catches(mutant: Callable[[], Any]) -> int | None:
    """The first world that fails with this bug in the core; None: none of MAX_SEEDS does."""
    with mutant():
        for seed in range(MAX_SEEDS):
            try:
                World(seed).run()
            except Exception:  # a bug may show as any error at all; that is the point
                return seed
    return None


def main() -> int:
    survivors = 0
    for mutant in MUTANTS:
        seed = seed_that_catches(mutant)
        survivors += seed is None
        print(f"{mutant.__name__:32s} {'SURVIVED' if seed is None else f'caught by seed {seed}'}", flush=True)
    return 1 if survivors else 0


if __name__ == "__main__":
    sys.exit(main())
