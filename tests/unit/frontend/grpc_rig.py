"""A real grpc.aio server on a loopback port, with a fake session behind it."""

import contextlib
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc
from google.rpc import error_details_pb2
from grpc_status import rpc_status

from protos.stepwire.inference.v1 import inference_pb2 as pb
from protos.stepwire.inference.v1 import inference_pb2_grpc
from scheduler_svc.client.config import Access
from scheduler_svc.client.connection import OPEN, aio_channel
from scheduler_svc.frontend.config import FrontendConfig
from scheduler_svc.frontend.metrics import FrontendMetrics
from scheduler_svc.frontend.model_files import ModelFiles
from scheduler_svc.frontend.server import FrontendServer
from scheduler_svc.frontend.service import InferenceService
from scheduler_svc.frontend.tokenizer import ModelTokenizer
from scheduler_svc.tracing import Tracing
from tests.unit.frontend import tiny_models
from tests.unit.frontend.fake_session import FakeSession, Script


@dataclass
class Rig:
    session: FakeSession
    service: InferenceService
    server: FrontendServer
    channel: grpc.aio.Channel
    stub: inference_pb2_grpc.InferenceServiceStub
    tokenizer: ModelTokenizer

    async def collect(self, request: Any, **options: Any) -> list[pb.GenerateResponse]:
        method = self.stub.Chat if isinstance(request, pb.ChatRequest) else self.stub.Generate
        return [message async for message in method(request, **options)]

    async def refusal(self, request: Any, **options: Any) -> "Refusal":
        try:
            await self.collect(request, **options)
        except grpc.aio.AioRpcError as error:
            return Refusal.of(error)
        raise AssertionError("the call succeeded")


@dataclass
class Refusal:
    code: grpc.StatusCode
    message: str
    fields: list[str]
    retry_after_s: float | None
    pushback_ms: str | None

    @staticmethod
    def of(error: grpc.aio.AioRpcError) -> "Refusal":
        status = rpc_status.from_call(error)
        fields, retry = [], None
        for detail in status.details if status is not None else ():
            bad, again = error_details_pb2.BadRequest(), error_details_pb2.RetryInfo()
            if detail.Unpack(bad):
                fields += [violation.field for violation in bad.field_violations]
            elif detail.Unpack(again):
                retry = again.retry_delay.ToTimedelta().total_seconds()
        trailers = dict(error.trailing_metadata() or ())
        return Refusal(error.code(), error.details() or "", fields, retry, trailers.get("grpc-retry-pushback-ms"))


def spelled(tokenizer: ModelTokenizer, *texts: str) -> list[int]:
    """One token for each text, if the vocabulary has it: else the tokens it is made of."""
    return [i for text in texts for i in tokenizer.encode(text, add_special_tokens=False, parse_special_tokens=True)]


@contextlib.asynccontextmanager
async def rig(
    directory: Path,
    script: Script | None = None,
    *,
    drain_s: float = 5.0,
    config: dict[str, Any] | None = None,
    access: Access = OPEN,
    tracing: Tracing | None = None,
    **session: Any,
) -> AsyncIterator[Rig]:
    """`config`: fields of the frontend's; `access`: how the channel reaches it."""
    model = ModelFiles.load(tiny_models.chat_model(directory))
    fake = FakeSession(script or (lambda submit, index: iter(lambda: 100 + index, None)), **session)
    service = InferenceService(fake, model, "tiny", FrontendMetrics(), tracing)
    service.chat_template.start()
    server = FrontendServer(
        FrontendConfig(connect="", port=0, drain_timeout_s=drain_s, **(config or {})), service, fake
    )
    await server.start()
    channel = aio_channel(server.address, access)
    try:
        yield Rig(fake, service, server, channel, inference_pb2_grpc.InferenceServiceStub(channel), model.tokenizer)
    finally:
        await channel.close()
        await server.stop()
        service.close()
        await fake.close()
