"""Listeners of block news: a snapshot first, all of it in order, and a new snapshot after whatever was lost."""

import asyncio

import pytest

from protos.stepwire.wire.v1 import session_pb2
from scheduler_svc.errors import QueueFull
from scheduler_svc.links.block_feed import MAX_LISTENERS, BlockFeed


def news(tenant: str = "", num_blocks: int = 1, **fields: object) -> session_pb2.BlockNews:
    message = session_pb2.BlockNews(tenant=tenant, **fields)
    message.changes.add(hashes=bytes(8 * num_blocks))
    return message


def asked(watches: list[session_pb2.WatchBlocks]) -> list[tuple[str, bool]]:
    return [(watch.tenant, watch.stop) for watch in watches]


async def test_a_listener_hears_from_its_snapshot_on():
    sent: list[session_pb2.WatchBlocks] = []
    feed = BlockFeed(sent.append)
    listener = feed.listen("a")
    assert asked(sent) == [("a", False)]
    feed.on_news(news("a"))  # older than the snapshot
    feed.on_news(news("b", begins_anew=True))  # somebody else's
    first, second = news("a", begins_anew=True), news("a", 2)
    feed.on_news(first)
    feed.on_news(second)
    assert await listener.read() == [first, second]
    listener.close()
    assert asked(sent)[1:] == [("a", True)]


async def test_reading_waits_for_news():
    feed = BlockFeed(lambda watch: None)
    listener = feed.listen("")
    reader = asyncio.create_task(listener.read())
    await asyncio.sleep(0)
    assert not reader.done()
    feed.on_news(news(begins_anew=True))
    assert len(await reader) == 1


async def test_the_scheduler_is_told_to_stop_by_the_last_of_a_tenant():
    sent: list[session_pb2.WatchBlocks] = []
    feed = BlockFeed(sent.append)
    one, other = feed.listen(""), feed.listen("")
    one.close()
    assert not any(watch.stop for watch in sent)
    other.close()
    assert asked(sent)[-1] == ("", True)


async def test_a_new_session_is_asked_again_once_a_tenant():
    sent: list[session_pb2.WatchBlocks] = []
    feed = BlockFeed(sent.append)
    for tenant in ("a", "b", "a"):
        feed.listen(tenant)
    sent.clear()
    feed.session_began()
    assert asked(sent) == [("a", False), ("b", False)]


@pytest.mark.parametrize(("num_blocks", "is_lost"), [(9, False), (10, True)])
async def test_who_does_not_read_costs_no_more_than_the_bound_and_hears_everything_anew(num_blocks, is_lost):
    sent: list[session_pb2.WatchBlocks] = []
    feed = BlockFeed(sent.append, max_waiting_blocks=10)
    listener = feed.listen("")
    feed.on_news(news(begins_anew=True))
    feed.on_news(news(num_blocks=num_blocks))
    if not is_lost:
        assert len(await listener.read()) == 2
        return
    assert len(sent) == 1  # nobody reads: another snapshot would be lost as well
    reader = asyncio.create_task(listener.read())
    await asyncio.sleep(0)
    assert asked(sent)[1:] == [("", False)]
    feed.on_news(news())
    again = news(begins_anew=True)
    feed.on_news(again)
    assert await reader == [again]


async def test_there_are_only_so_many_listeners():
    feed = BlockFeed(lambda watch: None)
    listeners = [feed.listen("") for _ in range(MAX_LISTENERS)]
    with pytest.raises(QueueFull):
        feed.listen("")
    listeners[0].close()
    feed.listen("")
