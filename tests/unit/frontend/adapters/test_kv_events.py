"""Block news as KV events, to a subscriber over a real server."""

import asyncio

import numpy as np
from smg_grpc_proto.generated import common_pb2 as common
from smg_grpc_proto.generated import vllm_engine_pb2_grpc

from protos.stepwire.wire.v1 import session_pb2
from scheduler_svc.frontend.adapters.kv_events import KvEventStream
from tests.unit.frontend.grpc_rig import rig

BIG = 2**63 + 5  # as int64 it is negative


def stored(*blocks: tuple[int, int, list[int]]) -> session_pb2.BlockChange:
    hashes, parents, tokens = zip(*blocks, strict=True)
    return session_pb2.BlockChange(
        hashes=np.array(hashes, "<u8").tobytes(),
        parents=np.array(parents, "<u8").tobytes(),
        token_ids=np.array(tokens, "<i4").tobytes(),
    )


def removed(*hashes: int) -> session_pb2.BlockChange:
    return session_pb2.BlockChange(hashes=np.array(hashes, "<u8").tobytes())


def news(*changes: session_pb2.BlockChange, begins_anew: bool = False) -> session_pb2.BlockNews:
    return session_pb2.BlockNews(changes=changes, block_size=2, begins_anew=begins_anew)


def test_blocks_of_one_prefix_are_one_event_with_the_parent_of_the_first():
    stream = KvEventStream(7)
    batch = stream.batch(
        news(stored((1, 0, [3, 4]), (BIG, 1, [5, 6]), (9, BIG, [7, 8]), (11, 1, [5, 9])), removed(2, BIG))
    )
    assert batch.sequence_number == 8
    first, second, third = batch.events
    assert not first.stored.HasField("parent_block_hash")
    assert [(b.block_hash, list(b.token_ids), b.block_size) for b in first.stored.blocks] == [
        (1, [3, 4], 2),
        (BIG - 2**64, [5, 6], 2),
        (9, [7, 8], 2),
    ]
    assert (second.stored.parent_block_hash, [b.block_hash for b in second.stored.blocks]) == (1, [11])
    assert list(third.removed.block_hashes) == [2, BIG - 2**64]
    assert len({event.event_id for event in batch.events}) == 3
    assert stream.batch(news()).sequence_number == 9


def test_a_snapshot_voids_what_was_known():
    batch = KvEventStream(0).batch(news(stored((1, 0, [3, 4])), begins_anew=True))
    assert batch.sequence_number == 1
    assert [event.WhichOneof("data") for event in batch.events] == ["cleared", "stored"]


async def test_a_subscription_lasts_until_the_subscriber_goes(tmp_path):
    async with rig(tmp_path) as r:
        stub = vllm_engine_pb2_grpc.VllmEngineStub(r.channel)
        call = stub.SubscribeKvEvents(common.SubscribeKvEventsRequest(start_sequence_number=4))
        async with asyncio.timeout(60):
            while not r.session.watched:  # noqa: ASYNC110
                await asyncio.sleep(0.01)
            r.session.blocks.on_news(news(begins_anew=True))
            r.session.blocks.on_news(news(stored((1, 0, [3, 4]))))
            batches = [await call.read(), await call.read()]
            assert [batch.sequence_number for batch in batches] == [5, 6]
            call.cancel()
            while not r.session.watched[-1].stop:  # noqa: ASYNC110
                await asyncio.sleep(0.01)
