"""Is a frontend SERVING? For container health checks."""

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

from scheduler_svc.client.config import Access
from scheduler_svc.client.connection import OPEN, channel, explain

# As frontends name it.
LIVENESS = "liveness"
DRAINING = "draining"


def ask(address: str, service: str, timeout_s: float, access: Access = OPEN) -> tuple[str, str]:
    """The health status by name, or the gRPC status when there was no answer; and what a person can do about it."""
    with channel(address, access) as opened:
        stub = health_pb2_grpc.HealthStub(opened)
        try:
            reply = stub.Check(health_pb2.HealthCheckRequest(service=service), timeout=timeout_s)
        except grpc.RpcError as error:
            answer = str(error.code().name)
            # Nobody there, or somebody who wants TLS, or none.
            words = explain(error, address, access) if answer == "UNAVAILABLE" else advice(answer, address, service)
            return answer, words
        answer = str(health_pb2.HealthCheckResponse.ServingStatus.Name(reply.status))
        if answer == "NOT_SERVING" and _drains(stub, timeout_s):
            return answer, f"{address} answers, but drains: it takes no new requests and ends after those that run"
        return answer, advice(answer, address, service)


def _drains(stub: health_pb2_grpc.HealthStub, timeout_s: float) -> bool:
    """Whether it says that it does: a server that never heard of the name says NOT_FOUND."""
    try:
        reply = stub.Check(health_pb2.HealthCheckRequest(service=DRAINING), timeout=timeout_s)
    except grpc.RpcError:
        return False
    return bool(reply.status == health_pb2.HealthCheckResponse.SERVING)


def advice(answer: str, address: str, service: str) -> str:
    """What a person can do about an answer that is not SERVING; empty when there is nothing to do."""
    match answer:
        case "DEADLINE_EXCEEDED":
            return f"{address} did not answer in time: is it a frontend's address?"
        case "NOT_SERVING":
            return f"{address} answers, but has no executor: it is starting or restarting"
        case "NOT_FOUND":
            return f"{address} has no service {service!r}: leave --service out, or give a full name"
        case _:
            return ""
