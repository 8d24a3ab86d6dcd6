"""vllm.Control: who this server is, and the end of requests by name."""

from importlib.metadata import version

import grpc

from protos.vllm import control_pb2 as vllm
from protos.vllm import control_pb2_grpc
from scheduler_svc.errors import InvalidArgument
from scheduler_svc.frontend.service import InferenceService
from scheduler_svc.frontend.status import guarded

NAME = vllm.DESCRIPTOR.services_by_name["Control"].full_name
API_VERSION = "1"
MAX_ABORTS = 1024


class VllmControl(control_pb2_grpc.ControlServicer):
    def __init__(self, service: InferenceService):
        self.metrics = service.metrics
        self._service = service

    @guarded
    async def GetServerInfo(
        self, request: vllm.GetServerInfoRequest, context: grpc.aio.ServicerContext
    ) -> vllm.ServerInfo:
        bounds, welcome = self._service.bounds(), self._service.session.welcome
        assert welcome is not None
        return vllm.ServerInfo(
            engine_version=version("stepwire"),
            api_version=API_VERSION,
            instance_id=f"{welcome.boot_id:016x}",
            parallelism=vllm.ParallelismInfo(
                tensor_parallel_size=1,
                pipeline_parallel_size=1,
                data_parallel_size=1,
                decode_context_parallel_size=1,
                world_size=1,
                data_parallel_size_local=1,
            ),
            max_model_len=bounds.max_model_len,
            kv_block_size=bounds.block_size,
            total_kv_blocks=bounds.num_blocks,
            max_running_requests=welcome.geometry.max_num_seqs,
            max_batched_tokens=welcome.geometry.max_num_batched_tokens,
            effective_attention_block_size=bounds.block_size,
        )

    @guarded
    async def GetModelInfo(
        self, request: vllm.GetModelInfoRequest, context: grpc.aio.ServicerContext
    ) -> vllm.ModelInfo:
        return vllm.ModelInfo(
            model_id=self._service.name,
            served_model_name=self._service.name,
            supports_text_input=True,
            supports_token_ids_input=True,
        )

    @guarded
    async def Abort(self, request: vllm.AbortRequest, context: grpc.aio.ServicerContext) -> vllm.AbortResponse:
        if len(request.request_ids) > MAX_ABORTS:
            raise InvalidArgument(
                f"request_ids is {len(request.request_ids)} ids, but must be at most {MAX_ABORTS}", field="request_ids"
            )
        for request_id in request.request_ids:
            self._service.cancel(request_id)
        return vllm.AbortResponse()

    @guarded
    async def GetKvEventSources(
        self, request: vllm.GetKvEventSourcesRequest, context: grpc.aio.ServicerContext
    ) -> vllm.GetKvEventSourcesResponse:
        return vllm.GetKvEventSourcesResponse()
