"""Block events in simulated worlds: whoever applies them knows exactly what the prefix index knows, at every moment."""

from collections import Counter

import numpy as np
import pytest

from protos.stepwire.wire.v1 import session_pb2
from scheduler_svc.block_watch import BlockWatch
from tests.sim.world import World

NUM_WORLDS = 40
TENANTS = ("", "a", "b")


class Mirror:
    """What one watcher of one tenant has been told."""

    def __init__(self) -> None:
        self.blocks: dict[int, tuple[int, tuple[int, ...]]] = {}  # hash -> (parent, tokens)
        self.num_snapshots = 0

    def hear(self, news: session_pb2.BlockNews) -> None:
        if news.begins_anew:
            self.blocks.clear()
            self.num_snapshots += 1
        for change in news.changes:
            hashes = np.frombuffer(change.hashes, "<u8").tolist()
            if not change.token_ids:
                for block_hash in hashes:
                    del self.blocks[block_hash]
                continue
            tokens = np.frombuffer(change.token_ids, "<i4").reshape(-1, news.block_size).tolist()
            parents = np.frombuffer(change.parents, "<u8").tolist()
            for block_hash, parent, ids in zip(hashes, parents, tokens, strict=True):
                assert block_hash not in self.blocks
                self.blocks[block_hash] = (parent, tuple(ids))


class WatchedWorld(World):
    """Somebody begins to watch at some moment, later stops, and begins again."""

    def __init__(self, seed: int):
        super().__init__(seed)
        self.mirrors: dict[str, Mirror] = {}
        self.watch: BlockWatch | None = None
        self.watched_core: object = None
        self.num_checks = 0
        self.begin_at = self.random.choice([0, 1, 30])

    def hear(self, session: int, news: session_pb2.BlockNews) -> None:
        assert session == 1
        self.mirrors[news.tenant].hear(news)

    def check(self) -> None:
        super().check()
        self.num_checks += 1
        if self.num_checks < self.begin_at:
            return
        if self.watched_core is not self.scheduler:  # also another scheduler, which knows nobody yet
            self.watched_core, self.watch = self.scheduler, BlockWatch(self.scheduler, self.hear)
            self.mirrors = {tenant: Mirror() for tenant in TENANTS}
            for tenant in TENANTS:
                self.watch.asked(1, session_pb2.WatchBlocks(tenant=tenant))
        assert self.watch is not None
        if self.random.random() < 0.02:
            self.seen["asked again"] += 1
            self.watch.asked(1, session_pb2.WatchBlocks(tenant=self.random.choice(TENANTS)))
        if self.random.random() < 0.02:
            self.seen["stopped"] += 1
            self.watch.session_ended(1)
            assert self.scheduler.block_events is None
            self.begin_at, self.watched_core = self.num_checks + self.random.choice([1, 20]), None
            return
        self.watch.fan_out()
        self.compare()

    def compare(self) -> None:
        epoch = self.scheduler._epoch
        index = epoch.memory.index if epoch is not None else None
        if index is None:
            assert all(not mirror.blocks for mirror in self.mirrors.values())
            return
        named = np.array(sorted(index._block_of.values()), np.intp)
        for tenant, mirror in self.mirrors.items():
            root = self.scheduler.prefix_root(tenant)
            mine = named[index.roots(named) == root]
            actual = dict(zip(index.first_lane(mine).tolist(), map(tuple, index.tokens_of(mine).tolist()), strict=True))
            told = {block_hash: tokens for block_hash, (_, tokens) in mirror.blocks.items()}
            # Whoever came late is not told of a block whose prefix was gone already.
            assert told.items() <= actual.items()
            missing = actual.keys() - told.keys()
            assert not missing or self.begin_at > 0
            self.seen["not told"] += len(missing)
            self.seen["told"] += len(told)
            for block_hash in self.random.sample(sorted(told), min(2, len(told))):
                self.check_prefix(index, root, block_hash, mirror)

    def check_prefix(self, index, root: np.uint64, block_hash: int, mirror: Mirror) -> None:
        """Its tokens after those of its parents make the hash it is told by."""
        prefix, at = [], block_hash
        while at:
            if at not in mirror.blocks:
                self.seen["parent gone"] += 1
                return
            at, tokens = mirror.blocks[at]
            prefix[:0] = tokens
        chain = np.array([root, 0], np.uint64)
        assert int(index.hashes(chain, np.array(prefix, np.int32))[0, -1]) == block_hash
        self.seen["prefixes"] += 1


def test_a_watcher_knows_what_the_index_knows() -> None:
    seen: Counter[str] = Counter()
    for seed in range(NUM_WORLDS):
        world = WatchedWorld(seed)
        try:
            seen.update(world.run().seen)
        except (AssertionError, KeyError) as error:
            pytest.fail(f"seed {seed}: {error!r}")
    for name in ("asked again", "stopped", "told", "prefixes"):
        assert seen[name] > 10, (name, seen[name])
    # Nearly everything is told with all of its prefix.
    assert seen["not told"] < seen["told"] / 50
    assert seen["parent gone"] < seen["prefixes"] / 50


def test_nobody_who_watches_costs_nothing() -> None:
    world = World(3).run()
    assert world.scheduler.block_events is None
