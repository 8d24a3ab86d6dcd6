"""Block news from the scheduler to the KV events of smg.grpc.common, numbered for one subscriber.

A subscriber takes batches whose numbers follow each other without a gap, so each subscription has numbers of its own,
going on from the one that it names; what it knew before is cleared first. Pure: no service, no socket.
"""

import time
from typing import Any

import numpy as np
from smg_grpc_proto.generated import common_pb2 as common

from protos.stepwire.wire.v1 import session_pb2


class KvEventStream:
    def __init__(self, start_sequence_number: int):
        self._sequence = start_sequence_number
        self._event_id = 0

    def batch(self, news: session_pb2.BlockNews) -> Any:
        self._sequence += 1
        events = []
        if news.begins_anew:
            events.append(self._event(cleared=common.KvCacheCleared()))
        for change in news.changes:
            if not change.token_ids:
                hashes = np.frombuffer(change.hashes, "<i8").tolist()
                events.append(self._event(removed=common.KvBlocksRemoved(block_hashes=hashes)))
                continue
            events += [self._event(stored=stored) for stored in _stored(change, news.block_size)]
        return common.KvEventBatch(sequence_number=self._sequence, timestamp=time.time(), events=events)

    def _event(self, **data: Any) -> Any:
        self._event_id += 1
        return common.KvCacheEvent(event_id=self._event_id, **data)


def _stored(change: session_pb2.BlockChange, block_size: int) -> list[Any]:
    """Blocks that follow each other in one prefix are one event; its parent is that of the first."""
    hashes = np.frombuffer(change.hashes, "<i8").tolist()
    parents = np.frombuffer(change.parents, "<i8").tolist()
    tokens_NB = np.frombuffer(change.token_ids, "<i4").reshape(-1, block_size).tolist()
    found: list[Any] = []
    before = None
    for block_hash, parent, tokens in zip(hashes, parents, tokens_NB, strict=True):
        if before is None or parent != before:
            found.append(common.KvBlocksStored(parent_block_hash=parent or None))
        found[-1].blocks.add(block_hash=block_hash, token_ids=tokens, block_size=block_size)
        before = block_hash
    return found
