"""AdminService: what an operator may see. Knows the scheduler's session and nothing of requests in detail.

The scheduler is asked for a snapshot only while somebody watches, and all who watch on this frontend share it.
"""

import asyncio
import time
from typing import Any, Protocol

import grpc

from protos.stepwire.admin.v1 import admin_pb2 as pb
from protos.stepwire.admin.v1 import admin_pb2_grpc
from scheduler_svc.errors import InvalidArgument, NotFound, QueueFull, Unavailable
from scheduler_svc.frontend import tenant
from scheduler_svc.frontend.metrics import FrontendMetrics
from scheduler_svc.frontend.status import guarded
from scheduler_svc.frontend.validation import check_request_id

SERVICE = pb.DESCRIPTOR.services_by_name["AdminService"].full_name
MIN_INTERVAL_MS, DEFAULT_INTERVAL_MS, MAX_INTERVAL_MS = 250, 1000, 60_000
MAX_WATCHERS = 64
RETRY_S = 1.0
# In place of another tenant's name.
OTHER = "(another)"


class Session(Protocol):
    """What is needed of scheduler_svc.links.session.SchedulerSession."""

    async def snapshot(self, timeout_s: float = 2.0) -> pb.Snapshot: ...

    async def story(self, request_id: str, timeout_s: float = 2.0) -> list[str]: ...


class Streams(Protocol):
    """What is needed of the service beside this one."""

    num_active: int
    name: str
    metrics: FrontendMetrics


class AdminService(admin_pb2_grpc.AdminServiceServicer):
    def __init__(self, session: Session, streams: Streams):
        self.metrics = streams.metrics
        self._session = session
        self._streams = streams
        self._num_watchers = 0
        self._made_at = -float("inf")
        self._latest: asyncio.Task[pb.WatchResponse] | None = None

    @guarded
    async def Watch(self, request: pb.WatchRequest, context: grpc.aio.ServicerContext) -> None:
        interval_ms = request.interval_ms or DEFAULT_INTERVAL_MS
        if not MIN_INTERVAL_MS <= interval_ms <= MAX_INTERVAL_MS:
            allowed = f"{MIN_INTERVAL_MS} to {MAX_INTERVAL_MS}, or 0 for {DEFAULT_INTERVAL_MS}"
            raise InvalidArgument(f"interval_ms is {interval_ms}, allowed is {allowed}", field="interval_ms")
        if self._num_watchers >= MAX_WATCHERS:
            raise QueueFull(f"{MAX_WATCHERS} watch on this frontend already", retry_after_s=RETRY_S)
        self._num_watchers += 1
        try:
            while True:
                await context.write(seen_by(tenant.current(), await asyncio.shield(self._now())))
                await asyncio.sleep(interval_ms / 1000)
        finally:
            self._num_watchers -= 1

    @guarded
    async def GetStory(self, request: pb.GetStoryRequest, context: grpc.aio.ServicerContext) -> pb.GetStoryResponse:
        if not request.request_id:
            raise InvalidArgument("request_id is empty; name the request", field="request_id")
        check_request_id(request.request_id)
        lines = await self._session.story(tenant.scoped(request.request_id))
        if not lines:
            raise NotFound("nobody remembers a request of this id", field="request_id")
        return pb.GetStoryResponse(lines=lines)

    def _now(self) -> "asyncio.Task[pb.WatchResponse]":
        """One question at a time for all who watch; its answer is good until the next may be asked."""
        latest, now = self._latest, time.monotonic()
        if latest is None or (latest.done() and now - self._made_at >= MIN_INTERVAL_MS / 1000):
            self._made_at = now
            latest = self._latest = asyncio.create_task(self._ask())
        return latest

    async def _ask(self) -> pb.WatchResponse:
        found: dict[str, Any] = {}
        try:
            found["snapshot"] = await self._session.snapshot()
        except Unavailable as error:
            found["problem"] = error.message
        return pb.WatchResponse(model=self._streams.name, num_streams=self._streams.num_active, **found)


def seen_by(name: str, response: pb.WatchResponse) -> pb.WatchResponse:
    """What a tenant may see: of others how much they take, but neither who they are nor what they call their requests.

    Without keys nobody has a name, and everybody sees everything.
    """
    if not name:
        return response
    seen = pb.WatchResponse()
    seen.CopyFrom(response)
    snapshot = seen.snapshot
    for sequences in (snapshot.running, snapshot.waiting):
        for i, owner in enumerate(sequences.tenants):
            if owner == name:
                sequences.request_ids[i] = sequences.request_ids[i].removeprefix(f"{name}/")
            else:
                sequences.tenants[i], sequences.request_ids[i] = OTHER, ""
    for prefix in snapshot.shared:
        if prefix.tenant != name:
            prefix.tenant, prefix.request_id = OTHER, ""
        prefix.request_id = prefix.request_id.removeprefix(f"{name}/")
    for entry in snapshot.tenants:
        if entry.name != name:
            entry.name = OTHER
    return seen
