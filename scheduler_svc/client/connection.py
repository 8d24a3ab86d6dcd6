"""A channel to one frontend, and what its errors mean to a person."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import grpc

from scheduler_svc.client.config import PUBLIC_CA, Access
from scheduler_svc.errors import StartupError

OPEN = Access()
Options = Sequence[tuple[str, Any]]


@contextmanager
def connect(address: str, access: Access = OPEN) -> Iterator[grpc.Channel]:
    """Inside the block an RPC error becomes a StartupError: one line."""
    with channel(address, access) as opened:
        try:
            yield opened
        except grpc.RpcError as error:
            raise StartupError(explain(error, address, access)) from None


def channel(address: str, access: Access = OPEN, options: Options = ()) -> grpc.Channel:
    if access.is_tls:
        return grpc.secure_channel(address, credentials(access), options)
    _check_plain(access)
    return grpc.insecure_channel(address, options)


def aio_channel(address: str, access: Access = OPEN, options: Options = ()) -> grpc.aio.Channel:
    if access.is_tls:
        return grpc.aio.secure_channel(address, credentials(access), options)
    _check_plain(access)
    return grpc.aio.insecure_channel(address, options)


def credentials(access: Access) -> grpc.ChannelCredentials:
    if bool(access.tls_cert) != bool(access.tls_key):
        raise StartupError("--tls-cert and --tls-key belong together: give both or none")
    return grpc.ssl_channel_credentials(
        None if access.tls_ca == PUBLIC_CA else _read("--tls-ca", access.tls_ca),
        _read("--tls-key", access.tls_key) if access.tls_key else None,
        _read("--tls-cert", access.tls_cert) if access.tls_cert else None,
    )


def _check_plain(access: Access) -> None:
    if access.tls_cert or access.tls_key:
        raise StartupError("--tls-cert and --tls-key need --tls-ca, the CA that signed the server's certificate")


def _read(option: str, name: str) -> bytes:
    try:
        return Path(name).read_bytes()
    except OSError as error:
        raise StartupError(f"{option} {name} cannot be read: {error.strerror}") from None


def explain(error: grpc.RpcError, address: str, access: Access = OPEN) -> str:
    code, details = error.code(), error.details() or ""
    if code == grpc.StatusCode.UNAUTHENTICATED:
        return f"{address} answered {code.name}: {details} (--api-key KEY, or STEPWIRE_API_KEY)"
    if code != grpc.StatusCode.UNAVAILABLE:
        return f"{address} answered {code.name}: {details}"
    words = details.lower()
    if "failed to connect" not in words:
        return f"{address} answered {code.name}: {details}"
    if "wrong_version_number" in words:
        return f"{address} answers, but not in TLS: leave --tls-ca out, or start it with --tls-cert and --tls-key"
    if not access.is_tls and "parsing http/2" in words:
        return f"{address} answers, but not in gRPC: is it the port of something else, of metrics say?"
    # A server that wants something else of the handshake closes the connection without a word.
    if access.is_tls and ("handshake" in words or "closed" in words):
        return (
            f"no TLS with {address}: is its certificate for this name and signed by --tls-ca, does it speak TLS, "
            "and does it want a certificate of ours (--tls-cert, --tls-key)?"
        )
    if "closed" in words or "reset" in words:
        return f"{address} closed the connection: it may want TLS (--tls-ca FILE)"
    return nothing_answers(address)


def nothing_answers(address: str) -> str:
    return f"nothing answers on {address}: start `stepwire serve`, or name the place with --address HOST:PORT"
