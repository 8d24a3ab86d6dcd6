"""A channel to one frontend, and what its errors mean to a person."""

from collections.abc import Iterator
from contextlib import contextmanager

import grpc

from scheduler_svc.errors import StartupError


@contextmanager
def connect(address: str) -> Iterator[grpc.Channel]:
    """Inside the block an RPC error becomes a StartupError: one line."""
    with grpc.insecure_channel(address) as channel:
        try:
            yield channel
        except grpc.RpcError as error:
            raise StartupError(explain(error, address)) from None


def explain(error: grpc.RpcError, address: str) -> str:
    code, details = error.code(), error.details() or ""
    if code == grpc.StatusCode.UNAVAILABLE and "connect" in details.lower():
        return nothing_answers(address)
    return f"{address} answered {code.name}: {details}"


def nothing_answers(address: str) -> str:
    return f"nothing answers on {address}: start `stepwire serve`, or name the place with --address HOST:PORT"
