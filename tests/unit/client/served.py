"""One servicer behind a real gRPC server in this process, for as long as a test talks to it."""

import contextlib
from collections.abc import Callable, Iterator
from concurrent import futures

import grpc


@contextlib.contextmanager
def served(servicer: object, add: Callable[[object, grpc.Server], None]) -> Iterator[str]:
    """Its address. `add`: the function that protoc made to add such a servicer."""
    server = grpc.server(futures.ThreadPoolExecutor(4))
    add(servicer, server)
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    try:
        yield f"127.0.0.1:{port}"
    finally:
        server.stop(None).wait()
