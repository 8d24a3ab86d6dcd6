"""The admin service on a real server: bounds, one question for all who watch, an absent scheduler, stories."""

import asyncio

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from protos.stepwire.admin.v1 import admin_pb2 as pb
from protos.stepwire.admin.v1.admin_pb2_grpc import AdminServiceStub
from scheduler_svc.errors import Unavailable
from scheduler_svc.frontend import admin
from tests.unit.frontend.grpc_rig import rig


async def test_a_watcher_gets_a_snapshot_at_once_and_then_more(tmp_path):
    async with rig(tmp_path) as r:
        r.session.seen = pb.Snapshot(epoch=3, num_running=2)
        call = AdminServiceStub(r.channel).Watch(pb.WatchRequest(interval_ms=250))
        first = await call.read()
        assert (first.snapshot.epoch, first.model, first.problem) == (3, "tiny", "")
        r.session.seen = pb.Snapshot(epoch=4)
        await read_until(call, lambda answer: answer.snapshot.epoch == 4)
        call.cancel()


async def read_until(call, condition) -> None:
    """What was made before the test had changed anything may come first."""
    async with asyncio.timeout(60):
        while not condition(await call.read()):
            pass


async def test_nobody_watches_nobody_asks(tmp_path, monkeypatch):
    monkeypatch.setattr(admin, "MIN_INTERVAL_MS", admin.MAX_INTERVAL_MS)  # an answer is fresh for a minute
    async with rig(tmp_path) as r:
        assert r.session.num_snapshots == 0
        stub = AdminServiceStub(r.channel)
        calls = [stub.Watch(pb.WatchRequest(interval_ms=admin.MAX_INTERVAL_MS)) for _ in range(5)]
        await asyncio.gather(*(call.read() for call in calls))
        assert r.session.num_snapshots == 1, "one answer for all, as long as it is fresh"
        for call in calls:
            call.cancel()


async def test_an_absent_scheduler_does_not_end_the_watching(tmp_path):
    async with rig(tmp_path) as r:
        r.session.seen = Unavailable("the scheduler is away")
        call = AdminServiceStub(r.channel).Watch(pb.WatchRequest(interval_ms=250))
        answer = await call.read()
        assert not answer.HasField("snapshot")
        assert answer.problem == "the scheduler is away"
        r.session.seen = pb.Snapshot(epoch=9)
        await read_until(call, lambda answer: answer.snapshot.epoch == 9)
        call.cancel()


@pytest.mark.parametrize("interval", [1, 249, 60_001, 2**32 - 1])
async def test_intervals_out_of_range_are_refused(tmp_path, interval):
    async with rig(tmp_path) as r:
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await AdminServiceStub(r.channel).Watch(pb.WatchRequest(interval_ms=interval)).read()
        assert caught.value.code() == grpc.StatusCode.INVALID_ARGUMENT
        assert str(interval) in caught.value.details()


async def test_those_who_watch_are_bounded(tmp_path, monkeypatch):
    monkeypatch.setattr(admin, "MAX_WATCHERS", 1)
    async with rig(tmp_path) as r:
        stub = AdminServiceStub(r.channel)
        one = stub.Watch(pb.WatchRequest())
        await one.read()
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await stub.Watch(pb.WatchRequest()).read()
        assert caught.value.code() == grpc.StatusCode.RESOURCE_EXHAUSTED
        one.cancel()


async def test_stories(tmp_path):
    async with rig(tmp_path) as r:
        r.session.stories["r1"] = ["step 1: choice 0 submitted 3"]
        stub = AdminServiceStub(r.channel)
        assert list((await stub.GetStory(pb.GetStoryRequest(request_id="r1"))).lines) == r.session.stories["r1"]
        for asked, code in (("r2", "NOT_FOUND"), ("", "INVALID_ARGUMENT"), ("x" * 300, "INVALID_ARGUMENT")):
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await stub.GetStory(pb.GetStoryRequest(request_id=asked))
            assert caught.value.code().name == code


async def test_it_is_in_the_one_list_of_services(tmp_path):
    async with rig(tmp_path) as r:
        reply = await health_pb2_grpc.HealthStub(r.channel).Check(health_pb2.HealthCheckRequest(service=admin.SERVICE))
        assert reply.status == health_pb2.HealthCheckResponse.SERVING


def test_another_tenant_is_seen_as_load_and_not_by_name():
    rows = {"request_ids": ["a/1", "b/secret"], "tenants": ["a", "b"], "num_output_tokens": [3, 4]}
    shared = [pb.SharedPrefix(num_sequences=2, request_id="b/secret", tenant="b")]
    response = pb.WatchResponse(
        snapshot=pb.Snapshot(
            running=pb.Sequences(**rows),
            waiting=pb.Sequences(**rows),
            shared=shared,
            tenants=[pb.Tenant(name="a", num_blocks=1), pb.Tenant(name="b", num_blocks=2)],
        )
    )
    seen = admin.seen_by("a", response)
    assert list(seen.snapshot.running.request_ids) == ["1", ""]
    assert list(seen.snapshot.waiting.tenants) == ["a", admin.OTHER]
    assert list(seen.snapshot.running.num_output_tokens) == [3, 4]
    assert [(t.name, t.num_blocks) for t in seen.snapshot.tenants] == [("a", 1), (admin.OTHER, 2)]
    assert b"secret" not in seen.SerializeToString()
    assert admin.seen_by("", response) is response
    assert response.snapshot.tenants[1].name == "b"
