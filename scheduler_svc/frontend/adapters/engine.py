"""vllm.grpc.engine.VllmEngine: what the smg gateway speaks to its workers.

Knows how that gateway behaves: it hangs up a streaming request by Abort and goes on reading the stream, polls
HealthCheck to learn who serves, and takes the tokenizer from us. The messages are those of the package smg-grpc-proto.
"""

import asyncio
import contextlib
import json
import time
from datetime import UTC, datetime
from importlib.metadata import version
from typing import Any

import grpc
from smg_grpc_proto.generated import common_pb2 as common
from smg_grpc_proto.generated import vllm_engine_pb2 as engine
from smg_grpc_proto.generated import vllm_engine_pb2_grpc

from protos.stepwire.inference.v1 import inference_pb2 as pb
from scheduler_svc.errors import InvalidArgument, Unimplemented
from scheduler_svc.frontend import tenant
from scheduler_svc.frontend.adapters.engine_messages import FIELDS, Answer, to_request
from scheduler_svc.frontend.adapters.kv_events import KvEventStream
from scheduler_svc.frontend.adapters.tokenizer_files import TokenizerFiles
from scheduler_svc.frontend.service import InferenceService
from scheduler_svc.frontend.status import guarded

NAME = engine.DESCRIPTOR.services_by_name["VllmEngine"].full_name
MAX_ABORTS = 1024


class VllmEngine(vllm_engine_pb2_grpc.VllmEngineServicer):
    def __init__(self, service: InferenceService):
        self.metrics = service.metrics
        self._service = service
        self._tokenizer_files = TokenizerFiles(service.model.directory)
        self._began_at = time.monotonic()
        self._heard_at = time.time()
        self._throughput = Throughput()

    @guarded
    async def Generate(self, request: Any, context: grpc.aio.ServicerContext) -> None:
        self._heard_at = time.time()
        answer = Answer(request)

        async def write(message: pb.GenerateResponse) -> None:
            for theirs in answer.messages(message):
                await context.write(theirs)

        with FIELDS.translated():
            await self._service.generate(to_request(request), context, write)

    @guarded
    async def Abort(self, request: Any, context: grpc.aio.ServicerContext) -> Any:
        if len(request.request_ids) > MAX_ABORTS:
            raise InvalidArgument(
                f"request_ids is {len(request.request_ids)} ids, but must be at most {MAX_ABORTS}", field="request_ids"
            )
        for request_id in request.request_ids:
            self._service.cancel(request_id)
        return engine.AbortResponse()

    @guarded
    async def HealthCheck(self, request: Any, context: grpc.aio.ServicerContext) -> Any:
        # A gateway registers whoever answers, under the model it names: until one can be named, this is no answer.
        self._service.bounds()
        healthy = self._service.is_serving
        return engine.HealthCheckResponse(healthy=healthy, message="" if healthy else "not serving")

    @guarded
    async def GetModelInfo(self, request: Any, context: grpc.aio.ServicerContext) -> Any:
        """No path of this host: a gateway takes the tokenizer by GetTokenizer."""
        service = self._service
        bounds, model, welcome = service.bounds(), service.model, service.session.welcome
        assert welcome is not None
        return engine.GetModelInfoResponse(
            model_path=service.name,
            served_model_name=service.name,
            is_generation=True,
            max_context_length=bounds.max_model_len,
            max_req_input_len=bounds.max_model_len - 1,
            vocab_size=bounds.vocab_size,
            model_type=str(model.config.get("model_type", "")),
            architectures=[welcome.model.architecture],
            eos_token_ids=model.eos_token_ids,
            pad_token_id=self._special_id("pad_token"),
            bos_token_id=self._special_id("bos_token"),
            default_sampling_params_json=json.dumps(model.sampling_defaults) if model.sampling_defaults else "",
        )

    def _special_id(self, name: str) -> int:
        model = self._service.model
        return model.tokenizer.special_tokens.get(model.special_strings.get(name, ""), 0)

    @guarded
    async def GetServerInfo(self, request: Any, context: grpc.aio.ServicerContext) -> Any:
        bounds, welcome = self._service.bounds(), self._service.session.welcome
        assert welcome is not None
        return engine.GetServerInfoResponse(
            active_requests=self._service.num_active,
            last_receive_timestamp=self._heard_at,
            uptime_seconds=time.monotonic() - self._began_at,
            server_type="vllm-grpc",
            data_parallel_size=1,
            block_size=bounds.block_size,
            model_dtype=welcome.model.dtype,
            max_num_seqs=welcome.geometry.max_num_seqs,
        )

    @guarded
    async def GetLoads(self, request: Any, context: grpc.aio.ServicerContext) -> Any:
        if request.HasField("dp_rank") and request.dp_rank:
            raise InvalidArgument(f"dp_rank is {request.dp_rank}, but must be 0: there is one rank", field="dp_rank")
        bounds, welcome = self._service.bounds(), self._service.session.welcome
        load = await self._service.session.load()
        assert welcome is not None
        usage = load.blocks_owned / load.blocks_total if load.blocks_total else 0.0
        row = engine.SchedulerLoad(
            num_running_reqs=load.num_running,
            num_waiting_reqs=load.num_waiting,
            num_total_reqs=load.num_running + load.num_waiting,
            num_used_tokens=load.blocks_owned * bounds.block_size,
            max_total_num_tokens=load.blocks_total * bounds.block_size,
            token_usage=usage,
            utilization=usage,
            # Over the scheduler's life, in prompt tokens.
            cache_hit_rate=load.prompt_tokens_cached_total / max(1, load.prompt_tokens_total),
            gen_throughput=self._throughput.per_second(load.generation_tokens_total, time.monotonic()),
            max_running_requests=welcome.geometry.max_num_seqs,
        )
        return engine.GetLoadsResponse(
            timestamp=datetime.now(UTC).isoformat(), version=version("stepwire"), dp_rank_count=1, loads=[row]
        )

    @guarded
    async def GetTokenizer(self, request: Any, context: grpc.aio.ServicerContext) -> None:
        archive = await asyncio.to_thread(lambda: self._tokenizer_files.archive)
        chunks = archive.chunks
        for number, chunk in enumerate(chunks, 1):
            sha256 = archive.sha256 if number == len(chunks) else ""
            await context.write(common.GetTokenizerChunk(data=chunk, sha256=sha256))

    @guarded
    async def SubscribeKvEvents(self, request: Any, context: grpc.aio.ServicerContext) -> None:
        """Until the subscriber goes."""
        stream = KvEventStream(request.start_sequence_number)
        with contextlib.closing(self._service.session.blocks.listen(tenant.current())) as listener:
            while True:
                for news in await listener.read():
                    await context.write(stream.batch(news))

    # ---- what this server does not do ----

    @guarded
    async def Embed(self, request: Any, context: grpc.aio.ServicerContext) -> Any:
        raise Unimplemented("this server generates; it does not embed")

    @guarded
    async def FlushCache(self, request: Any, context: grpc.aio.ServicerContext) -> Any:
        raise Unimplemented("cached blocks are evicted when their room is needed; they cannot be flushed")

    @guarded
    async def StartProfile(self, request: Any, context: grpc.aio.ServicerContext) -> Any:
        raise Unimplemented("this server has no profiler to start")

    @guarded
    async def StopProfile(self, request: Any, context: grpc.aio.ServicerContext) -> Any:
        raise Unimplemented("this server has no profiler to stop")


class Throughput:
    """Tokens a second between two looks at a counter; looks within a second of another get the same answer."""

    def __init__(self) -> None:
        self._total, self._at, self._rate = 0, 0.0, 0.0

    def per_second(self, total: int, now: float) -> float:
        passed_s = now - self._at
        if passed_s >= 1.0:
            # A counter that fell is another scheduler's.
            self._rate = max(total - self._total, 0) / passed_s if self._at else 0.0
            self._total, self._at = total, now
        return self._rate
