"""Who watches which tenant's blocks, and what they are told. Between the core's block events and the frontends' links.

Knows sessions by number and tenants by name. Its laws: the core records only while somebody watches; a watcher hears a
whole snapshot first, and again whenever the blocks of an epoch are void; what it hears is of its own tenant alone.
"""

from collections.abc import Callable, Iterator

import numpy as np

from protos.stepwire.wire.v1 import session_pb2
from scheduler_svc.core.block_events import BlockChange, BlockEvents
from scheduler_svc.core.scheduler import Scheduler

# Of a snapshot, in one frame.
MAX_BLOCKS_PER_FRAME = 2048
# A frontend watches for few tenants; more are not heard.
MAX_TENANTS_PER_SESSION = 64

Send = Callable[[int, session_pb2.BlockNews], None]


class BlockWatch:
    def __init__(self, core: Scheduler, send: Send):
        self._core = core
        self._send = send
        # (session, tenant) -> root of the tenant's chains
        self._watchers: dict[tuple[int, str], np.uint64] = {}
        # What the watchers know belongs to these.
        self._events: BlockEvents | None = None

    def asked(self, session: int, watch: session_pb2.WatchBlocks) -> None:
        key = (session, watch.tenant)
        if watch.stop:
            self._watchers.pop(key, None)
        elif key in self._watchers or sum(s == session for s, _ in self._watchers) < MAX_TENANTS_PER_SESSION:
            self.fan_out()  # what is older than the snapshot
            self._watchers[key] = self._core.prefix_root(watch.tenant)
            self._core.listen_to_blocks(True)
            if not self._renewed():
                self._tell_all(key)
        self._core.listen_to_blocks(bool(self._watchers))

    def session_ended(self, session: int) -> None:
        gone = [key for key in self._watchers if key[0] == session]
        for key in gone:
            del self._watchers[key]
        if gone:
            self._core.listen_to_blocks(bool(self._watchers))

    def fan_out(self) -> None:
        """What happened since the last time."""
        if not self._watchers:
            return
        self._renewed()
        changes = self._events.take() if self._events is not None else []
        for key, wanted in self._watchers.items() if changes else ():
            mine = [mine for change in changes if (mine := change.of_root(wanted)) is not None]
            if mine:
                self._tell(key, mine)

    def _renewed(self) -> bool:
        """True: the blocks are another epoch's, or recorded anew, and everybody was told all of them."""
        events = self._core.block_events
        if events is self._events:
            return False
        self._events = events
        for key in self._watchers:
            self._tell_all(key)
        return True

    def _tell_all(self, key: tuple[int, str]) -> None:
        if self._events is not None:
            self._events.take()  # the snapshot has them
        everything = self._events.snapshot() if self._events is not None else None
        mine = everything.of_root(self._watchers[key]) if everything is not None else None
        parts = list(_parts(mine)) if mine is not None else []
        self._tell(key, parts[:1], begins_anew=True)
        for part in parts[1:]:
            self._tell(key, [part])

    def _tell(self, key: tuple[int, str], changes: list[BlockChange], *, begins_anew: bool = False) -> None:
        session, tenant = key
        news = session_pb2.BlockNews(tenant=tenant, begins_anew=begins_anew)
        for change in changes:
            tokens = b""
            if change.tokens is not None:
                news.block_size = change.tokens.shape[1]
                tokens = change.tokens.astype("<i4", copy=False).tobytes()
            hashes, parents = (array.astype("<u8", copy=False).tobytes() for array in (change.hashes, change.parents))
            news.changes.add(hashes=hashes, parents=parents, token_ids=tokens)
        self._send(session, news)


def _parts(change: BlockChange) -> Iterator[BlockChange]:
    assert change.tokens is not None
    for i in range(0, len(change.hashes), MAX_BLOCKS_PER_FRAME):
        part = slice(i, i + MAX_BLOCKS_PER_FRAME)
        yield BlockChange(change.hashes[part], change.roots[part], change.parents[part], change.tokens[part])
