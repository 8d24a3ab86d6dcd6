"""Is a frontend SERVING? For container health checks."""

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc


def status(address: str, service: str, timeout_s: float) -> str:
    """The health status by name, or the gRPC status when there was no answer."""
    with grpc.insecure_channel(address) as channel:
        request = health_pb2.HealthCheckRequest(service=service)
        try:
            reply = health_pb2_grpc.HealthStub(channel).Check(request, timeout=timeout_s)
        except grpc.RpcError as error:
            return str(error.code().name)
        return str(health_pb2.HealthCheckResponse.ServingStatus.Name(reply.status))
