"""The gRPC server around the service: options, health, reflection, readiness, drain. Knows no requests.

Health follows the whole path: SERVING means that a request handed over now would be computed. Within 5 s of a scheduler
or an executor that stands still it is NOT_SERVING. The name "liveness" is SERVING as long as this process answers, also
while it drains: what restarts a frontend for the state of an executor restarts everything for one fault. The name
"draining" is there, and SERVING, once a drain has begun.
"""

import asyncio
import contextlib
import json
import logging
import os
import signal
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import grpc
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection

from scheduler_svc.errors import StartupError
from scheduler_svc.frontend import api_keys, tls
from scheduler_svc.frontend.auth import RequireKey
from scheduler_svc.frontend.config import FrontendConfig, join
from scheduler_svc.frontend.malformed import RefuseMalformed
from scheduler_svc.frontend.service import InferenceService
from scheduler_svc.frontend.services import offered_services
from scheduler_svc.hosts import is_loopback

log = logging.getLogger(__name__)

MAX_MESSAGE_BYTES = 16 << 20
MAX_METADATA_BYTES = 8 << 10
OPTIONS: tuple[tuple[str, int], ...] = (
    # A second server on the same port would silently take half of the connections.
    ("grpc.so_reuseport", 0),
    # Gateways ping idle connections every 30 s; the default policy kills them for it. The option that sounds right,
    # min_recv_ping_interval_without_data_ms, does nothing.
    ("grpc.http2.min_ping_interval_without_data_ms", 10_000),
    ("grpc.http2.max_ping_strikes", 0),
    ("grpc.keepalive_permit_without_calls", 1),
    # A client that vanished without a word is found out, so that its blocks are freed.
    ("grpc.keepalive_time_ms", 30_000),
    ("grpc.keepalive_timeout_ms", 10_000),
    # How long the answer to any ping may take. Its default of a minute wins over the line above while we write.
    ("grpc.http2.ping_timeout_ms", 10_000),
    ("grpc.max_concurrent_streams", 16_384),
    # Calls that arrived faster than we take them. Beyond the first limit grpc cancels some at random, and clients do
    # not try again after CANCELLED; the scheduler's queue is what refuses, with a time to come back.
    ("grpc.server.max_pending_requests", 65_536),
    ("grpc.server.max_pending_requests_hard_limit", 131_072),
    ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),
    ("grpc.max_send_message_length", MAX_MESSAGE_BYTES),
    # Between the two limits grpc refuses at random; equal, they are one that can be relied on.
    ("grpc.max_metadata_size", MAX_METADATA_BYTES),
    ("grpc.absolute_max_metadata_size", MAX_METADATA_BYTES),
)

# After the drain: time for the last messages to leave.
LAST_MESSAGES_S = 0.5
PULSE_EVERY_S = 1.0
# The health service's name for whether this process lives, whatever is the matter with what stands behind it.
LIVENESS = "liveness"
# Its name for a drain that has begun; before that it has no such name.
DRAINING = "draining"


class FrontendServer:
    """`session` is a SchedulerSession that someone else starts and closes."""

    def __init__(self, config: FrontendConfig, service: InferenceService, session: Any):
        self._config = config
        self._service = service
        self._offered = offered_services(service)
        self.names = (*(offered.name for offered in self._offered), health.SERVICE_NAME, reflection.SERVICE_NAME)
        self._session = session
        self._health = health.aio.HealthServicer()
        self._is_serving = False
        self._is_draining = False
        self._health_changed = asyncio.Event()
        self._on_first_serving: list[Callable[[], None]] = []
        self.address = ""

    async def start(self) -> None:
        """Listens. Must run in the loop that serves."""
        self._server = grpc.aio.server(options=OPTIONS, interceptors=self._interceptors())
        for offered in self._offered:
            offered.add(offered.servicer, self._server)
        health_pb2_grpc.add_HealthServicer_to_server(self._health, self._server)
        reflection.enable_server_reflection(self.names, self._server)
        for name in ("", *self.names):
            await self._health.set(name, health_pb2.HealthCheckResponse.NOT_SERVING)
        await self._health.set(LIVENESS, health_pb2.HealthCheckResponse.SERVING)
        port = self._listen()
        self.address = join(self._config.host, port)
        await self._server.start()
        self._session.on_change(self._health_changed.set)
        self._health_changed.set()
        self._watcher = asyncio.create_task(self._watch_health())

    def _interceptors(self) -> list[grpc.aio.ServerInterceptor]:
        """Keys are asked for before anything of a request is looked at."""
        if self._config.api_keys is None:
            return [RefuseMalformed()]
        keys = api_keys.watch(self._config.api_keys)
        if not len(keys.get()):
            log.warning("no_keys: --api-keys holds no key yet, every call is refused; `stepwire keys make` adds one")
        return [RequireKey(keys, self._service.metrics), RefuseMalformed()]

    def _listen(self) -> int:
        """The port."""
        config = self._config
        files = tls.files_of(config.tls_cert, config.tls_key, config.tls_client_ca)
        try:
            if files is not None:
                port = self._server.add_secure_port(config.address, tls.server_credentials(files))
            else:
                port = self._server.add_insecure_port(config.address)
        except RuntimeError:
            port = 0
        if port == 0:
            raise StartupError(
                f"cannot listen on {config.address}: the port is in use or the address is not of this host; "
                "choose another --port or --host"
            )
        if files is None and not is_loopback(config.host):
            log.warning("plaintext: %s", _exposure(has_keys=config.api_keys is not None))
        elif config.api_keys is None and config.tls_client_ca is None and not is_loopback(config.host):
            log.warning("open: anybody who reaches this port may use it; give --api-keys or --tls-client-ca")
        return port

    def when_serving(self, callback: Callable[[], None]) -> None:
        """Runs once, the first time that requests can be computed."""
        self._on_first_serving.append(callback)

    async def _watch_health(self) -> None:
        while True:
            await self._health_changed.wait()
            self._health_changed.clear()
            await self._set_serving(self._session.ready)

    async def _set_serving(self, serving: bool) -> None:
        if serving == self._is_serving or self._is_draining:
            return
        self._is_serving = serving
        log.info("health serving=%s", serving)
        status = health_pb2.HealthCheckResponse.SERVING if serving else health_pb2.HealthCheckResponse.NOT_SERVING
        for name in ("", *self.names):
            await self._health.set(name, status)
        if serving:
            callbacks, self._on_first_serving = self._on_first_serving, []
            for callback in callbacks:
                callback()

    async def drain(self) -> None:
        """NOT_SERVING at once, no new streams, time for those that run, then the end."""
        await self._set_serving(False)
        self._is_draining = True
        await self._health.set(DRAINING, health_pb2.HealthCheckResponse.SERVING)
        log.info("draining active=%d timeout_s=%g", self._service.num_active, self._config.drain_timeout_s)
        if not await self._service.drain(self._config.drain_timeout_s):
            log.warning("drain timeout: %d streams are cut", self._service.num_active)

    async def stop(self) -> None:
        """Whoever is still connected is told UNAVAILABLE, and when to try again."""
        self._watcher.cancel()
        self._session.end_streams()
        await self._server.stop(LAST_MESSAGES_S)


def _exposure(*, has_keys: bool) -> str:
    if has_keys:
        return "prompts, answers and API keys cross the network in the clear; give --tls-cert and --tls-key"
    return "anybody who reaches this port may use it and read along; give --tls-cert, --tls-key and --api-keys"


def check_ready_file(path: Path) -> None:
    """Better now than at the end of a start that it cannot be written. An old file would tell of another life."""
    try:
        path.unlink(missing_ok=True)
        with tempfile.NamedTemporaryFile(prefix=f".{path.name}-", dir=path.parent):
            pass
    except OSError as error:
        raise StartupError(f"--ready-file {path} cannot be written ({error.strerror}); choose another") from None


def write_ready_file(path: Path, address: str) -> None:
    """A reader sees the whole object or none."""
    descriptor, name = tempfile.mkstemp(prefix=f".{path.name}-", dir=path.parent)
    with os.fdopen(descriptor, "w") as file:
        json.dump({"grpc": address, "pid": os.getpid(), "pulse": True}, file)
    os.replace(name, path)


async def renew_for_ever(path: Path) -> None:
    """Its modification time is the sign of life of this process: that of the loop that serves."""
    while True:
        with contextlib.suppress(OSError):  # not written yet, or the supervisor has cleaned up: nobody looks at it
            os.utime(path)
        await asyncio.sleep(PULSE_EVERY_S)


async def serve(config: FrontendConfig, service: InferenceService, session: Any) -> None:
    """Serves until SIGTERM or SIGINT, then drains; a second signal ends the drain."""
    loop = asyncio.get_running_loop()
    stopping, hurry = asyncio.Event(), asyncio.Event()

    def on_signal() -> None:
        (hurry if stopping.is_set() else stopping).set()

    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, on_signal)
    server = FrontendServer(config, service, session)
    ready_file = config.ready_file
    if ready_file is not None:
        check_ready_file(ready_file)
        server.when_serving(lambda: write_ready_file(ready_file, server.address))
    await asyncio.gather(session.start(), loop.run_in_executor(None, service.chat_template.start))
    try:
        await server.start()
        pulse = asyncio.create_task(renew_for_ever(ready_file)) if ready_file is not None else None
        log.info("listening on %s", server.address)
        await stopping.wait()
        drain = asyncio.create_task(server.drain())
        rush = asyncio.create_task(hurry.wait())
        await asyncio.wait({drain, rush}, return_when=asyncio.FIRST_COMPLETED)
        for task in (drain, rush):
            task.cancel()
        await server.stop()
        if pulse is not None:
            pulse.cancel()
    finally:
        service.close()
        await session.close()
