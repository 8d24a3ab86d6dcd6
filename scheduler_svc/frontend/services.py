"""Which gRPC services a frontend offers: the one list that the server, health, reflection and guards read.

Knows what is offered and under which name; nothing of what the services do.
"""

import importlib.util
import logging
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import grpc

from protos.stepwire.admin.v1 import admin_pb2_grpc
from protos.stepwire.inference.v1 import inference_pb2, inference_pb2_grpc
from protos.vllm import control_pb2_grpc
from protos.vllm import inference_pb2_grpc as vllm_inference_pb2_grpc
from scheduler_svc.frontend import admin
from scheduler_svc.frontend.adapters import control, inference
from scheduler_svc.frontend.service import InferenceService

log = logging.getLogger(__name__)

INFERENCE = inference_pb2.DESCRIPTOR.services_by_name["InferenceService"].full_name


@dataclass(frozen=True)
class OfferedService:
    """`name` is the full name, as in the paths of its methods."""

    name: str
    servicer: Any
    add: Callable[[Any, grpc.aio.Server], None]


def offered_services(service: InferenceService) -> tuple[OfferedService, ...]:
    """Ours and the adapters over it. Health and reflection are the server's own."""
    offered = [
        OfferedService(INFERENCE, service, inference_pb2_grpc.add_InferenceServiceServicer_to_server),
        OfferedService(
            admin.SERVICE,
            admin.AdminService(service.session, service),
            admin_pb2_grpc.add_AdminServiceServicer_to_server,
        ),
        OfferedService(
            inference.NAME,
            inference.VllmInference(service),
            vllm_inference_pb2_grpc.add_InferenceServicer_to_server,
        ),
        OfferedService(control.NAME, control.VllmControl(service), control_pb2_grpc.add_ControlServicer_to_server),
    ]
    if importlib.util.find_spec("smg_grpc_proto") is None:
        log.warning("without the package smg-grpc-proto there is no vllm.grpc.engine.VllmEngine; pip install it")
        return tuple(offered)
    # Only here, because the package may be missing.
    from smg_grpc_proto.generated import vllm_engine_pb2_grpc

    from scheduler_svc.frontend.adapters import engine

    add = vllm_engine_pb2_grpc.add_VllmEngineServicer_to_server
    return (*offered, OfferedService(engine.NAME, engine.VllmEngine(service), add))
