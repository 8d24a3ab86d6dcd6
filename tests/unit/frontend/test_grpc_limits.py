"""What one connection may cost: metadata, messages, streams, pings. Both sides of each limit."""

import asyncio
import struct

import grpc
import pytest

from protos.stepwire.inference.v1 import inference_pb2 as pb
from scheduler_svc.frontend import server
from scheduler_svc.frontend.server import MAX_MESSAGE_BYTES, MAX_METADATA_BYTES, OPTIONS
from tests.unit.frontend.grpc_rig import rig
from tests.unit.frontend.test_grpc_generate import until

SHORT = pb.GenerateRequest(token_ids=pb.TokenIds(ids=[70]), stopping=pb.StoppingCriteria(max_tokens=2))
# Of the headers that every call has: method, host, content type, user agent, each with HPACK's 32 bytes.
OWN_HEADERS = 1024


async def test_metadata(tmp_path):
    async with rig(tmp_path) as r:
        for _ in range(5):  # grpc's own default refuses at random in between
            await r.collect(SHORT, metadata=[("x-big", "a" * (MAX_METADATA_BYTES - OWN_HEADERS))])
            found = await r.refusal(SHORT, metadata=[("x-big", "a" * MAX_METADATA_BYTES)])
            assert found.code == grpc.StatusCode.RESOURCE_EXHAUSTED
        found = await r.refusal(SHORT, metadata=[(f"x-{i}", "") for i in range(MAX_METADATA_BYTES // 32)])
        assert found.code == grpc.StatusCode.RESOURCE_EXHAUSTED
        await r.collect(SHORT)
        assert len(r.session.submitted) == 6


async def test_message_size(tmp_path):
    """The longest allowed is read and refused for what it says; one byte more is refused unread."""
    async with rig(tmp_path) as r:
        around = pb.TokenizeRequest(text="x" * (MAX_MESSAGE_BYTES - 64)).ByteSize() - (MAX_MESSAGE_BYTES - 64)
        for extra, code in ((0, grpc.StatusCode.INVALID_ARGUMENT), (1, grpc.StatusCode.RESOURCE_EXHAUSTED)):
            request = pb.TokenizeRequest(text="x" * (MAX_MESSAGE_BYTES - around + extra))
            assert request.ByteSize() == MAX_MESSAGE_BYTES + extra
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await r.stub.Tokenize(request)
            assert caught.value.code() == code
        assert (await r.stub.Tokenize(pb.TokenizeRequest(text="a"))).token_ids


async def test_streams_beyond_the_limit_of_a_connection_wait(tmp_path, monkeypatch):
    fewer = [(name, 2 if name == "grpc.max_concurrent_streams" else value) for name, value in OPTIONS]
    assert dict(OPTIONS)["grpc.max_concurrent_streams"] >= 1024
    monkeypatch.setattr(server, "OPTIONS", tuple(fewer))
    async with rig(tmp_path) as r:
        r.session.gate.clear()
        running = [asyncio.ensure_future(r.collect(SHORT)) for _ in range(3)]
        await until(lambda: len(r.session.submitted) == 2)
        await asyncio.sleep(0.1)
        assert len(r.session.submitted) == 2
        r.session.gate.set()
        assert len(await asyncio.gather(*running)) == 3


async def test_a_gateway_may_ping_as_often_as_it_likes(tmp_path):
    """grpc's default ends the connection of a client that pings without sending; gateways do that all day."""
    async with rig(tmp_path) as r:
        host, _, port = r.server.address.rpartition(":")
        reader, writer = await asyncio.open_connection(host, int(port))
        writer.write(b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + frame(SETTINGS, 0))
        num_pings, num_answers = 60, 0
        for i in range(num_pings):
            writer.write(frame(PING, 0, struct.pack(">Q", i)))
            await writer.drain()
        async with asyncio.timeout(60):
            while num_answers < num_pings:
                length, kind, flags = struct.unpack(">3sBB4x", await reader.readexactly(9))
                await reader.readexactly(int.from_bytes(length))
                assert kind != GOAWAY
                num_answers += kind == PING and flags == ACK
        writer.close()
        await writer.wait_closed()


PING, SETTINGS, GOAWAY, ACK = 6, 4, 7, 1


def frame(kind: int, flags: int, payload: bytes = b"") -> bytes:
    return len(payload).to_bytes(3) + bytes([kind, flags]) + bytes(4) + payload
