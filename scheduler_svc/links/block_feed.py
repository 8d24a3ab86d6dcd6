"""The frontend's side of block news: what the scheduler tells of a tenant's cached blocks, handed to those who listen.

Knows nothing of gRPC or of what blocks are for. Its laws: a listener hears a whole snapshot first, and another whenever
news were lost, to a lost session or to its own slowness; a listener that does not read costs a bounded memory.
"""

import asyncio
from collections.abc import Callable

from protos.stepwire.wire.v1 import session_pb2
from scheduler_svc.errors import QueueFull

MAX_LISTENERS = 64
# Blocks that may wait for one listener: some tens of MB.
MAX_WAITING_BLOCKS = 262_144
RETRY_S = 10.0


class BlockListener:
    """Made by BlockFeed.listen(); must be closed."""

    def __init__(self, feed: "BlockFeed", tenant: str, max_waiting: int) -> None:
        self.tenant = tenant
        self._feed = feed
        self._max_waiting = max_waiting
        self._waiting: list[session_pb2.BlockNews] = []
        self._num_blocks = 0
        # News are worthless until a snapshot begins.
        self._is_lost = True
        self._news = asyncio.Event()

    async def read(self) -> list[session_pb2.BlockNews]:
        """Waits for news and returns all of it, in order."""
        while not self._waiting:
            if self._is_lost and self._news.is_set():
                self._feed.ask(self.tenant)
            self._news.clear()
            await self._news.wait()
        waiting, self._waiting, self._num_blocks = self._waiting, [], 0
        return waiting

    def push(self, news: session_pb2.BlockNews) -> None:
        if news.begins_anew:
            self._is_lost = False
            self._waiting, self._num_blocks = [], 0
        if self._is_lost:
            return
        self._waiting.append(news)
        self._num_blocks += sum(len(change.hashes) // 8 for change in news.changes)
        if self._num_blocks > self._max_waiting:
            # Asked for again when the reader comes: until then it would be lost again.
            self._is_lost = True
            self._waiting, self._num_blocks = [], 0
        self._news.set()

    def close(self) -> None:
        self._feed.leave(self)


class BlockFeed:
    """`send` puts a message on its way if there is a session, else does nothing."""

    def __init__(
        self, send: Callable[[session_pb2.WatchBlocks], None], max_waiting_blocks: int = MAX_WAITING_BLOCKS
    ) -> None:
        self._send = send
        self._max_waiting = max_waiting_blocks
        self._listeners: list[BlockListener] = []

    def listen(self, tenant: str) -> BlockListener:
        if len(self._listeners) >= MAX_LISTENERS:
            raise QueueFull(f"{MAX_LISTENERS} listeners hear block events here already", retry_after_s=RETRY_S)
        listener = BlockListener(self, tenant, self._max_waiting)
        self._listeners.append(listener)
        self.ask(tenant)
        return listener

    def ask(self, tenant: str) -> None:
        self._send(session_pb2.WatchBlocks(tenant=tenant))

    def leave(self, listener: BlockListener) -> None:
        self._listeners.remove(listener)
        if all(other.tenant != listener.tenant for other in self._listeners):
            self._send(session_pb2.WatchBlocks(tenant=listener.tenant, stop=True))

    def session_began(self) -> None:
        """Another scheduler, or the same one that forgot us."""
        for tenant in dict.fromkeys(listener.tenant for listener in self._listeners):
            self.ask(tenant)

    def on_news(self, news: session_pb2.BlockNews) -> None:
        for listener in self._listeners:
            if listener.tenant == news.tenant:
                listener.push(news)
