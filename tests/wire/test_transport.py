"""Sockets: who may bind, who may connect, what leaves this host."""

import os
import stat

import pytest
import zmq

from scheduler_svc.errors import StartupError
from scheduler_svc.links.transport import MAX_IPC_PATH_BYTES, Security, Wire, check_endpoint


def test_a_second_bind_is_refused_at_once_and_allowed_after_the_first_ended(tmp_path):
    endpoint = f"ipc://{tmp_path}/run/a.sock"
    first, second = Wire(), Wire()
    first.bind_router(endpoint, 8)
    with pytest.raises(StartupError, match=f"pid {os.getpid()}"):
        second.bind_router(endpoint, 8)
    second.close()
    first.close()
    third = Wire()
    third.bind_router(endpoint, 8)
    assert stat.S_IMODE((tmp_path / "run").stat().st_mode) == 0o700
    assert stat.S_IMODE((tmp_path / "run" / "a.sock").stat().st_mode) == 0o700
    third.close()


@pytest.mark.parametrize("mode", [0o755, 0o770, 0o701])
def test_a_runtime_directory_open_to_others_is_refused(tmp_path, mode):
    folder = tmp_path / "open"
    folder.mkdir()
    folder.chmod(mode)
    wire = Wire()
    with pytest.raises(StartupError, match="chmod 700"):
        wire.bind_router(f"ipc://{folder}/a.sock", 8)
    wire.close()


@pytest.mark.parametrize("length", [MAX_IPC_PATH_BYTES - 1, MAX_IPC_PATH_BYTES, MAX_IPC_PATH_BYTES + 1])
def test_socket_paths_have_a_longest(length):
    path = "/tmp/" + "x" * (length - 5)
    if length > MAX_IPC_PATH_BYTES:
        with pytest.raises(StartupError, match="shorter --runtime-dir"):
            check_endpoint(f"ipc://{path}", Security())
    else:
        check_endpoint(f"ipc://{path}", Security())


@pytest.mark.parametrize("host", ["*", "0.0.0.0", "scheduler", "10.0.0.1", "[::]"])
def test_plain_tcp_leaves_the_host_only_when_asked(host):
    with pytest.raises(StartupError, match="--insecure-wire"):
        check_endpoint(f"tcp://{host}:7000", Security())
    check_endpoint(f"tcp://{host}:7000", Security(insecure_wire=True))


@pytest.mark.parametrize("host", ["127.0.0.1", "127.8.8.8", "localhost", "[::1]"])
def test_plain_tcp_on_loopback_is_allowed(host):
    check_endpoint(f"tcp://{host}:7000", Security())


@pytest.mark.parametrize("endpoint", ["", "ipc://", "tcp://", "tcp://host", "udp://127.0.0.1:1", "/tmp/x"])
def test_a_bad_endpoint_is_named(endpoint):
    with pytest.raises(StartupError, match="bad endpoint"):
        check_endpoint(endpoint, Security())


def port_of(socket: zmq.Socket) -> str:
    return socket.getsockopt(zmq.LAST_ENDPOINT).rstrip(b"\0").decode().rpartition(":")[2]


def test_a_port_in_use_is_named():
    first, second = Wire(), Wire()
    port = port_of(first.bind_router("tcp://127.0.0.1:*", 8))
    with pytest.raises(StartupError, match=f"cannot listen on tcp://127.0.0.1:{port}"):
        second.bind_router(f"tcp://127.0.0.1:{port}", 8)
    second.close()
    first.close()
