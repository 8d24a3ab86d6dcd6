"""Block events against the prefixes they are about, hashed one by one; and when the core records them."""

import numpy as np
import pytest

from protos.stepwire.wire.v1 import step_pb2
from scheduler_svc.core import block_events as module
from scheduler_svc.core.block_events import BlockChange, BlockEvents
from scheduler_svc.core.contract import Geometry, Limits, Request
from scheduler_svc.core.prefix_index import PrefixIndex, root
from scheduler_svc.core.scheduler import Scheduler
from tests.wire.peers import Arithmetic

SIZE = 4
ROOT, OTHER = root(b"key", "tenant", b""), root(b"key", "other", b"")


class Rig:
    """An index whose blocks are named by hand."""

    def __init__(self) -> None:
        self.tokens = np.zeros((16, SIZE), np.int32)
        self.is_named = np.zeros(16, np.bool_)
        self.index = PrefixIndex(b"key", self.tokens)

    def publish(self, blocks: list[int], tokens: np.ndarray, chain: np.ndarray = ROOT) -> None:
        """`blocks` get the names of the last so many blocks of `tokens`."""
        keys = self.index.hashes(chain, tokens)[:, SIZE - 1 :: SIZE].T[-len(blocks) :].tobytes()
        self.tokens[blocks] = tokens.reshape(-1, SIZE)[-len(blocks) :]
        assert self.index.publish(np.array(blocks), keys, chain).tolist() == blocks
        self.is_named[blocks] = True

    def events(self) -> BlockEvents:
        return BlockEvents(self.index, self.is_named)

    def hash_of(self, prefix: np.ndarray, chain: np.ndarray = ROOT) -> int:
        return int(self.index.hashes(chain, prefix)[0, -1])


def told(change: BlockChange | None) -> list[tuple[int, int, list[int]]]:
    assert change is not None
    assert change.tokens is not None
    return list(zip(change.hashes.tolist(), change.parents.tolist(), change.tokens.tolist(), strict=True))


def expected(
    rig: Rig, tokens: np.ndarray, first: int = 0, chain: np.ndarray = ROOT
) -> list[tuple[int, int, list[int]]]:
    return [
        (
            rig.hash_of(tokens[: end + SIZE], chain),
            rig.hash_of(tokens[:end], chain) if end else 0,
            tokens[end : end + SIZE].tolist(),
        )
        for end in range(first * SIZE, len(tokens), SIZE)
    ]


def some_tokens(seed: int, num_blocks: int) -> np.ndarray:
    print(f"seed {seed}")
    return np.random.default_rng(seed).integers(0, 1000, num_blocks * SIZE).astype(np.int32)


def test_a_block_is_told_with_its_parent_when_it_is_named() -> None:
    rig, tokens = Rig(), some_tokens(1, 3)
    events = rig.events()
    rig.publish([9, 2], tokens[: 2 * SIZE])
    events.named(np.array([9, 2]), np.array([0, 1]))
    rig.publish([5], tokens)
    events.named(np.array([5]), np.array([2]))
    events.named(np.array([], np.intp), np.array([], np.intp))
    first, second = events.take()
    assert first.is_stored
    assert told(first) == expected(rig, tokens[: 2 * SIZE])
    assert told(second) == expected(rig, tokens, first=2)
    assert first.roots.tolist() == [int(ROOT[0])] * 2
    assert events.take() == []
    assert told(events.snapshot()) == expected(rig, tokens)


def test_a_forgotten_block_is_told_by_its_hash_and_no_longer_there() -> None:
    rig, tokens = Rig(), some_tokens(2, 2)
    events = rig.events()
    rig.publish([1, 0], tokens)
    events.named(np.array([1, 0]), np.array([0, 1]))
    events.take()
    rig.is_named[0] = False
    events.forgotten([0])
    (change,) = events.take()
    assert not change.is_stored
    assert change.hashes.tolist() == [rig.hash_of(tokens)]
    assert told(events.snapshot()) == expected(rig, tokens[:SIZE])
    rig.is_named[1] = False
    events.forgotten([1])
    assert events.snapshot() is None


def test_who_comes_late_is_told_parents_first_of_all_that_hangs_on_a_root() -> None:
    rig, tokens, others = Rig(), some_tokens(3, 3), some_tokens(4, 1)
    branch = np.concatenate([tokens[:SIZE], others])
    rig.publish([8, 4, 6], tokens)
    rig.publish([3], branch)
    rig.publish([7], others, OTHER)
    events = rig.events()
    snapshot = told(events.snapshot())
    everything = expected(rig, tokens) + expected(rig, branch, first=1) + expected(rig, others, chain=OTHER)
    assert sorted(snapshot) == sorted(everything)
    hashes = [0, *(entry[0] for entry in snapshot)]
    assert all(parent in hashes[: i + 1] for i, (_, parent, _) in enumerate(snapshot))
    assert events.take() == [], "what was there before is no news"


def test_a_block_whose_prefix_is_gone_is_told_to_nobody_who_comes_late() -> None:
    rig, tokens = Rig(), some_tokens(5, 4)
    rig.publish([0, 1, 2, 3], tokens)
    rig.index.forget([1])
    rig.is_named[1] = False
    events = rig.events()
    assert told(events.snapshot()) == expected(rig, tokens[:SIZE])
    rig.is_named[3] = False
    events.forgotten([3])
    assert events.take() == []


def test_looking_for_places_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    rig, tokens = Rig(), some_tokens(6, 3)
    rig.publish([0, 1, 2], tokens)
    # Three blocks are looked at for place 0, two for place 1, one for place 2.
    for most, num_found in ((3, 1), (3 * SIZE, 1), (3 * SIZE + 1, 2), (5 * SIZE, 2), (5 * SIZE + 1, 3)):
        monkeypatch.setattr(module, "MAX_LOOKS", most)
        assert told(rig.events().snapshot()) == expected(rig, tokens)[:num_found]


def test_a_change_of_several_roots_falls_apart() -> None:
    rig, tokens, others = Rig(), some_tokens(7, 2), some_tokens(8, 1)
    rig.publish([0, 1], tokens)
    rig.publish([2], others, OTHER)
    events = rig.events()
    change = events.snapshot()
    assert change is not None
    assert told(change.of_root(ROOT[0])) == expected(rig, tokens)
    assert told(change.of_root(OTHER[0])) == expected(rig, others, chain=OTHER)
    assert change.of_root(np.uint64(1)) is None
    events.forgotten([1, 2])
    (gone,) = events.take()
    mine = gone.of_root(ROOT[0])
    assert mine is not None
    assert mine.hashes.tolist() == [rig.hash_of(tokens)]
    assert mine.of_root(ROOT[0]) is mine


# ---- in the core ---------------------------------------------------------------------------------------------------


def live(core: Scheduler, executor: Arithmetic, number: int, prompt: np.ndarray) -> None:
    """A request from its arrival to its end."""
    core.submit(Request(1, f"r{number}", number, prompt, step_pb2.Sampling(), 2, tenant="tenant"), now=0.0)
    while (plan := core.plan(0.0)) is not None:
        core.commit(executor.execute(plan), 0.0)


def started(num_blocks: int, limits: Limits) -> tuple[Scheduler, Arithmetic]:
    core = Scheduler(limits)
    core.reset(Geometry(num_blocks, SIZE, 2, 64, 64, 1000), 1, 1)
    return core, Arithmetic()


def test_the_core_tells_what_it_names_and_evicts_while_somebody_listens() -> None:
    core, executor = started(4, Limits(hash_key=b"key"))
    live(core, executor, 1, some_tokens(9, 2))
    assert core.block_events is None
    core.listen_to_blocks(True)
    events = core.block_events
    assert events is not None
    core.listen_to_blocks(True)
    assert core.block_events is events, "to ask again begins nothing anew"
    before = told(events.snapshot())
    assert [tokens for _, _, tokens in before] == some_tokens(9, 2).reshape(-1, SIZE).tolist()
    live(core, executor, 2, some_tokens(10, 3))
    changes = events.take()
    gone = {block_hash for change in changes if not change.is_stored for block_hash in change.hashes.tolist()}
    assert gone == {block_hash for block_hash, _, _ in before}, "four blocks hold one of the two at a time"
    news = [entry for change in changes if change.is_stored for entry in told(change)]
    assert [tokens for _, _, tokens in news] == some_tokens(10, 3).reshape(-1, SIZE).tolist()
    assert {int(r) for change in changes for r in change.roots} == {int(core.prefix_root("tenant"))} == {int(ROOT[0])}
    core.listen_to_blocks(False)
    assert core.block_events is None


def test_listening_outlives_an_executor_and_events_do_not() -> None:
    core, executor = started(8, Limits(hash_key=b"key"))
    core.listen_to_blocks(True)
    first = core.block_events
    core.executor_lost()
    assert core.block_events is None
    core.listen_to_blocks(False)
    core.listen_to_blocks(True)
    core.reset(Geometry(8, SIZE, 2, 64, 64, 1000), 1, 2)
    assert core.block_events is not None
    assert core.block_events is not first
    executor = Arithmetic()
    live(core, executor, 1, some_tokens(11, 2))
    assert len(told(core.block_events.snapshot())) == 2


def test_without_prefix_caching_there_is_nothing_to_tell() -> None:
    core, _ = started(8, Limits(prefix_caching=False))
    core.listen_to_blocks(True)
    assert core.block_events is None
