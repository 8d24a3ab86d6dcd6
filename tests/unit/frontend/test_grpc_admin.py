"""The admin service on a real server: bounds, one question for all who watch, an absent scheduler, stories."""

import asyncio

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from protos.stepwire.admin.v1 import admin_pb2 as pb
from protos.stepwire.admin.v1.admin_pb2_grpc import AdminServiceStub
from scheduler_svc.errors import Unavailable
from scheduler_svc.frontend import admin
from scheduler_svc.frontend.server import NAMES
from tests.unit.frontend.grpc_rig import rig


async def test_a_watcher_gets_a_snapshot_at_once_and_then_more(tmp_path):
    async with rig(tmp_path) as r:
        r.session.seen = pb.Snapshot(epoch=3, num_running=2)
        call = AdminServiceStub(r.channel).Watch(pb.WatchRequest(interval_ms=250))
        first = await call.read()
        assert (first.snapshot.epoch, first.model, first.problem) == (3, "tiny", "")
        r.session.seen = pb.Snapshot(epoch=4)
        assert (await call.read()).snapshot.epoch == 4
        call.cancel()


async def test_nobody_watches_nobody_asks(tmp_path):
    async with rig(tmp_path) as r:
        assert r.session.num_snapshots == 0
        stub = AdminServiceStub(r.channel)
        calls = [stub.Watch(pb.WatchRequest()) for _ in range(5)]
        await asyncio.gather(*(call.read() for call in calls))
        # One answer for all, as long as it is fresh; a slow machine may have asked once more.
        assert 1 <= r.session.num_snapshots < 5
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
        assert (await call.read()).snapshot.epoch == 9
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
    assert admin.SERVICE in NAMES
    async with rig(tmp_path) as r:
        reply = await health_pb2_grpc.HealthStub(r.channel).Check(health_pb2.HealthCheckRequest(service=admin.SERVICE))
        assert reply.status == health_pb2.HealthCheckResponse.SERVING
