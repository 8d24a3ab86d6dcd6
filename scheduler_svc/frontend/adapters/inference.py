"""vllm.Inference: what vllm-router speaks to its workers. A client that goes away cancels the call."""

import grpc

from protos.stepwire.inference.v1 import inference_pb2 as pb
from protos.vllm import inference_pb2 as vllm
from protos.vllm import inference_pb2_grpc
from scheduler_svc.errors import InvalidArgument
from scheduler_svc.frontend.adapters.inference_messages import FIELDS, Answer, to_request
from scheduler_svc.frontend.service import InferenceService
from scheduler_svc.frontend.status import guarded

NAME = vllm.DESCRIPTOR.services_by_name["Inference"].full_name


class VllmInference(inference_pb2_grpc.InferenceServicer):
    def __init__(self, service: InferenceService):
        self.metrics = service.metrics
        self._service = service

    @guarded
    async def GenerateStream(self, request: vllm.GenerateRequest, context: grpc.aio.ServicerContext) -> None:
        answer = Answer(request, self._service.model.eos_token_ids)

        async def write(message: pb.GenerateResponse) -> None:
            await context.write(answer.message(message))

        with FIELDS.translated():
            await self._service.generate(to_request(request), context, write)

    @guarded
    async def Generate(self, request: vllm.GenerateRequest, context: grpc.aio.ServicerContext) -> vllm.GenerateResponse:
        if request.sampling.num_sequences > 1:
            raise InvalidArgument(
                f"sampling.num_sequences is {request.sampling.num_sequences}, but must be 1 here; "
                "GenerateStream answers with several",
                field="sampling.num_sequences",
            )
        answer = Answer(request, self._service.model.eos_token_ids)
        whole = pb.GenerateResponse()

        async def write(message: pb.GenerateResponse) -> None:
            text = whole.text + message.text
            whole.MergeFrom(message)
            whole.text = text

        with FIELDS.translated():
            await self._service.generate(to_request(request), context, write)
        return answer.message(whole)
