"""Is a port free? Asked before anything heavy starts, because gRPC would share a taken port silently (SO_REUSEPORT)."""

import socket

from scheduler_svc.errors import StartupError


def check_free(host: str, port: int, option: str) -> None:
    """Raises StartupError when `host:port` cannot be listened on; port 0 checks the host alone."""
    try:
        infos = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    except socket.gaierror as error:
        raise StartupError(f"--host {host} is not an address of this machine: {error.strerror}") from None
    family, kind, protocol, _, address = infos[0]
    with socket.socket(family, kind, protocol) as probe:
        # A listener that ended a moment ago leaves TIME_WAIT behind, which is not "taken".
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(address)
        except OSError as error:
            reason = (error.strerror or str(error)).lower()
            raise StartupError(f"cannot listen on {join(host, port)} ({reason}): choose another {option}") from None


def is_free(host: str, port: int) -> bool:
    try:
        check_free(host, port, "")
    except StartupError:
        return False
    return True


def join(host: str, port: int) -> str:
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def reachable(host: str) -> str:
    """The address under which this machine itself reaches a listener on `host`."""
    return {"0.0.0.0": "127.0.0.1", "::": "::1", "": "127.0.0.1"}.get(host, host)
