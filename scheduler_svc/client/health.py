"""Is a frontend SERVING? For container health checks."""

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

from scheduler_svc.client.config import Access
from scheduler_svc.client.connection import OPEN, channel, explain

# As frontends name it.
LIVENESS = "liveness"


def ask(address: str, service: str, timeout_s: float, access: Access = OPEN) -> tuple[str, str]:
    """The health status by name, or the gRPC status when there was no answer; and what a person can do about it."""
    with channel(address, access) as opened:
        request = health_pb2.HealthCheckRequest(service=service)
        try:
            reply = health_pb2_grpc.HealthStub(opened).Check(request, timeout=timeout_s)
        except grpc.RpcError as error:
            answer = str(error.code().name)
            # Nobody there, or somebody who wants TLS, or none.
            words = explain(error, address, access) if answer == "UNAVAILABLE" else advice(answer, address, service)
            return answer, words
        answer = str(health_pb2.HealthCheckResponse.ServingStatus.Name(reply.status))
        return answer, advice(answer, address, service)


def advice(answer: str, address: str, service: str) -> str:
    """What a person can do about an answer that is not SERVING; empty when there is nothing to do."""
    match answer:
        case "DEADLINE_EXCEEDED":
            return f"{address} did not answer in time: is it a frontend's address?"
        case "NOT_SERVING":
            return f"{address} answers, but has no executor: it is starting, restarting or draining"
        case "NOT_FOUND":
            return f"{address} has no service {service!r}: leave --service out, or give a full name"
        case _:
            return ""
