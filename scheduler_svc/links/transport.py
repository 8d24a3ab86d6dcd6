"""Makes ZeroMQ sockets the way this service needs them, and takes bytes off them with care.

Does not know what messages mean. Its laws: whoever binds an ipc path holds its lock file (libzmq would let a second
process take the path over without a word); no socket lingers, queues without bound or reads a message without bound;
plain tcp leaves this host only when asked for by name.
"""

import fcntl
import ipaddress
import os
import stat
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeVar

import zmq
import zmq.auth
import zmq.auth.thread
from google.protobuf.message import DecodeError, Message

from scheduler_svc.errors import StartupError

MAX_MESSAGE_BYTES = 64 * 2**20
# sun_path holds 108 bytes, the closing zero included.
MAX_IPC_PATH_BYTES = 107
# Messages taken off one socket before the others get their turn.
MAX_MESSAGES_PER_TURN = 1024

M = TypeVar("M", bound=Message)


@dataclass(frozen=True, slots=True)
class Security:
    """How tcp is protected: CURVE certificate files, or nothing (loopback, or said out loud)."""

    # Our own secret certificate.
    secret: Path | None = None
    # Binding side: a directory with the public certificates of who may connect.
    clients: Path | None = None
    # Connecting side: the public certificate of the scheduler.
    server: Path | None = None
    insecure_wire: bool = False

    @property
    def is_curve(self) -> bool:
        return self.secret is not None


@dataclass(slots=True)
class BadFrames:
    """Counts what could not be understood, by the socket it came from. It is dropped; the process lives."""

    counts: dict[str, int] = field(default_factory=dict)

    def add(self, link: str) -> None:
        self.counts[link] = self.counts.get(link, 0) + 1

    @property
    def total(self) -> int:
        return sum(self.counts.values())


def decode(kind: type[M], frame: bytes) -> M | None:
    """The message in `frame`; None when there is none: not parseable, or a body this version does not know."""
    try:
        message = kind.FromString(frame)
    except DecodeError:
        return None
    return message if message.WhichOneof("body") is not None else None


def drain(socket: zmq.Socket, limit: int = MAX_MESSAGES_PER_TURN) -> Iterator[list[bytes]]:
    """What has arrived, without waiting, at most `limit` messages."""
    for _ in range(limit):
        try:
            yield socket.recv_multipart(zmq.NOBLOCK)
        except zmq.Again:
            return


def drain_router(socket: zmq.Socket, kind: type[M], bad: BadFrames, link: str) -> Iterator[tuple[bytes, M]]:
    """(identity, message) of everything well-formed that has arrived; the rest is counted and dropped."""
    for parts in drain(socket):
        message = decode(kind, parts[1]) if len(parts) == 2 else None
        if message is None:
            bad.add(link)
        else:
            yield parts[0], message


class Wire:
    """One process's ZeroMQ context, its sockets and its lock files. close() ends them all."""

    def __init__(self, security: Security | None = None) -> None:
        self._security = security or Security()
        self._context = zmq.Context()
        self._sockets: list[zmq.Socket] = []
        self._locks: list[int] = []
        self._authenticator: zmq.auth.thread.ThreadAuthenticator | None = None

    def bind_router(self, endpoint: str, high_water_mark: int) -> zmq.Socket:
        check_endpoint(endpoint, self._security)
        if endpoint.startswith("ipc://"):
            self._lock(Path(endpoint.removeprefix("ipc://")))
        socket = self._socket(zmq.ROUTER, high_water_mark)
        # A frame for a peer that is gone is an error to act on; a full peer is EAGAIN. Neither is silence.
        socket.setsockopt(zmq.ROUTER_MANDATORY, 1)
        if self._security.is_curve and endpoint.startswith("tcp://"):
            self._serve_curve(socket)
        umask = os.umask(0o077)
        try:
            socket.bind(endpoint)
        except zmq.ZMQError as error:
            raise StartupError(f"cannot listen on {endpoint}: {error.strerror or error}") from error
        finally:
            os.umask(umask)
        return socket

    def dealer(self, high_water_mark: int) -> zmq.Socket:
        """Not connected yet, so that whoever wants to can monitor it from its first moment."""
        socket = self._socket(zmq.DEALER, high_water_mark)
        # With IMMEDIATE, libzmq drops what has arrived but is not read yet when the connection ends: the last tokens of
        # a scheduler that drains. Without it, whoever uses this socket must send only while it is connected.
        socket.setsockopt(zmq.IMMEDIATE, 0)
        socket.setsockopt(zmq.RECONNECT_IVL, 50)
        socket.setsockopt(zmq.RECONNECT_IVL_MAX, 1000)
        return socket

    def connect(self, socket: zmq.Socket, endpoint: str) -> None:
        check_endpoint(endpoint, self._security)
        if self._security.is_curve and endpoint.startswith("tcp://"):
            self._use_curve(socket)
        try:
            socket.connect(endpoint)
        except zmq.ZMQError as error:
            raise StartupError(f"cannot connect to {endpoint}: {error.strerror or error}") from error

    def monitor(self, socket: zmq.Socket, events: int) -> zmq.Socket:
        """A socket that tells of connections made and lost on `socket`."""
        monitor = socket.get_monitor_socket(events)
        self._sockets.append(monitor)
        return monitor

    def close(self, linger_s: float = 0.0) -> None:
        """`linger_s`: how long frames that are on their way may still take to leave."""
        for socket in self._sockets:
            if socket.type != zmq.PAIR:
                socket.disable_monitor()
            socket.close(linger=round(linger_s * 1000))
        self._sockets.clear()
        if self._authenticator is not None:
            self._authenticator.stop()
            self._authenticator = None
        self._context.term()
        for lock in self._locks:
            os.close(lock)
        self._locks.clear()

    def _socket(self, kind: int, high_water_mark: int) -> zmq.Socket:
        socket = self._context.socket(kind)
        self._sockets.append(socket)
        socket.setsockopt(zmq.LINGER, 0)
        socket.setsockopt(zmq.SNDHWM, high_water_mark)
        socket.setsockopt(zmq.RCVHWM, high_water_mark)
        socket.setsockopt(zmq.MAXMSGSIZE, MAX_MESSAGE_BYTES)
        socket.setsockopt(zmq.IPV6, 1)
        socket.setsockopt(zmq.TCP_KEEPALIVE, 1)
        socket.setsockopt(zmq.TCP_KEEPALIVE_IDLE, 10)
        return socket

    def _lock(self, path: Path) -> None:
        check_runtime_dir(path)
        lock = os.open(f"{path}.lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            owner = os.pread(lock, 32, 0).decode(errors="replace").strip() or "unknown"
            os.close(lock)
            raise StartupError(
                f"another scheduler (pid {owner}) serves {path}: stop it, or choose another --runtime-dir"
            ) from None
        self._locks.append(lock)
        os.truncate(lock, 0)
        os.pwrite(lock, str(os.getpid()).encode(), 0)

    def _serve_curve(self, socket: zmq.Socket) -> None:
        security = self._security
        if security.clients is None or not security.clients.is_dir():
            raise StartupError(
                "--curve-secret needs --curve-clients, a directory with the public keys of who may connect"
            )
        if self._authenticator is None:
            self._authenticator = zmq.auth.thread.ThreadAuthenticator(self._context)
            self._authenticator.start()
            self._authenticator.configure_curve(domain="stepwire", location=security.clients)
        socket.curve_publickey, socket.curve_secretkey = _certificate(security.secret)
        socket.curve_server = True
        socket.zap_domain = b"stepwire"

    def _use_curve(self, socket: zmq.Socket) -> None:
        security = self._security
        if security.server is None:
            raise StartupError("--curve-secret needs --curve-server, the scheduler's public key")
        socket.curve_publickey, socket.curve_secretkey = _certificate(security.secret)
        socket.curve_serverkey = zmq.auth.load_certificate(security.server)[0]


def _certificate(path: Path | None) -> tuple[bytes, bytes]:
    if path is None:
        raise StartupError("CURVE needs a secret key: --curve-secret FILE")
    try:
        public, secret = zmq.auth.load_certificate(path)
    except (OSError, ValueError) as error:
        raise StartupError(f"cannot read the CURVE key {path}: {error}") from error
    if secret is None:
        raise StartupError(f"{path} holds no secret key: give the .key_secret file")
    return public, secret


def check_endpoint(endpoint: str, security: Security) -> None:
    """A transport we know, a path that fits, and no plain tcp beyond this host unless asked for by name."""
    scheme, _, rest = endpoint.partition("://")
    if scheme == "ipc" and rest:
        if len(rest.encode()) > MAX_IPC_PATH_BYTES:
            raise StartupError(
                f"the socket path {rest} is longer than {MAX_IPC_PATH_BYTES} bytes: choose a shorter --runtime-dir"
            )
        return
    host, _, port = rest.rpartition(":")
    if scheme != "tcp" or not host or not (port.isdigit() or port == "*"):
        raise StartupError(f"bad endpoint {endpoint!r}: use ipc:///path or tcp://host:port")
    if not (security.is_curve or security.insecure_wire or _is_loopback(host)):
        raise StartupError(
            f"{endpoint} would cross the network in the clear: give CURVE keys, or accept it with --insecure-wire"
        )


def _is_loopback(host: str) -> bool:
    try:
        address = ipaddress.ip_address(host.strip("[]"))
    except ValueError:
        return host == "localhost"
    # With IPv6 on, libzmq names an IPv4 address in its mapped form.
    mapped = getattr(address, "ipv4_mapped", None)
    return (mapped or address).is_loopback


def check_runtime_dir(path: Path) -> None:
    """The directory of the socket at `path` is ours alone; made if it is not there."""
    folder = path.parent
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        status = folder.stat()
    except OSError as error:
        raise StartupError(f"cannot make the runtime directory {folder}: {error.strerror}") from error
    if status.st_uid != os.geteuid():
        raise StartupError(
            f"the runtime directory {folder} belongs to uid {status.st_uid}: choose another --runtime-dir"
        )
    if stat.S_IMODE(status.st_mode) & 0o077:
        raise StartupError(
            f"the runtime directory {folder} is open to others (mode {stat.S_IMODE(status.st_mode):04o}): "
            f"chmod 700 {folder}, or choose another --runtime-dir"
        )


class Poller:
    """Waits for several sockets at once."""

    def __init__(self, *sockets: zmq.Socket) -> None:
        self._poller = zmq.Poller()
        for socket in sockets:
            self._poller.register(socket, zmq.POLLIN)

    def wait(self, timeout_s: float) -> None:
        self._poller.poll(round(timeout_s * 1000))
