"""Makes ZeroMQ sockets the way this service needs them, and takes bytes off them with care.

Does not know what messages mean. Its laws: whoever binds an ipc path holds its lock file (libzmq would let a second
process take the path over without a word); no socket lingers, queues without bound or reads a message without bound;
plain tcp leaves this host only when asked for by name.
"""

import fcntl
import os
import stat
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeVar

import zmq
from google.protobuf.message import DecodeError, Message

from scheduler_svc.errors import StartupError
from scheduler_svc.hosts import is_loopback
from scheduler_svc.links import curve

MAX_MESSAGE_BYTES = 64 * 2**20
# sun_path holds 108 bytes, the closing zero included.
MAX_IPC_PATH_BYTES = 107
# Messages taken off one socket before the others get their turn.
MAX_MESSAGES_PER_TURN = 1024

# What is counted beside the links: handshakes with keys that may not connect, messages of keys that no longer may.
REFUSED, REVOKED = "refused_key", "revoked_key"

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

    # The first two are there from the start: the authenticator's thread adds to them while others look.
    counts: dict[str, int] = field(default_factory=lambda: {REFUSED: 0, REVOKED: 0})

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


def well_formed(messages: Iterable[list[bytes]], kind: type[M], bad: BadFrames, link: str) -> Iterator[tuple[bytes, M]]:
    """(identity, message) of what a router received, in order; the rest is counted and dropped."""
    for parts in messages:
        message = decode(kind, parts[1]) if len(parts) == 2 else None
        if message is None:
            bad.add(link)
        else:
            yield parts[0], message


class Wire:
    """One process's ZeroMQ context, its sockets and its lock files. close() ends them all."""

    def __init__(self, security: Security | None = None, bad_frames: BadFrames | None = None) -> None:
        self._security = security or Security()
        if self._security.secret is None and (self._security.clients or self._security.server):
            raise StartupError("--curve-clients and --curve-server need --curve-secret, the key of this service")
        self._bad_frames = bad_frames or BadFrames()
        self._context = zmq.Context()
        self._sockets: list[zmq.Socket] = []
        self._locks: list[int] = []
        self._allowed: curve.AllowList | None = None
        self._authenticator: curve.Authenticator | None = None
        # Sockets on which a message counts only while its sender's key may connect.
        self._guarded: set[zmq.Socket] = set()

    def bind_router(self, endpoint: str, high_water_mark: int) -> zmq.Socket:
        check_endpoint(endpoint, self._security)
        if endpoint.startswith("ipc://"):
            self._lock(Path(endpoint.removeprefix("ipc://")))
        socket = self._socket(zmq.ROUTER, high_water_mark)
        # A frame for a peer that is gone is an error to act on; a full peer is EAGAIN. Neither is silence.
        socket.setsockopt(zmq.ROUTER_MANDATORY, 1)
        if self._security.secret is not None and endpoint.startswith("tcp://"):
            self._serve_curve(socket, self._security.secret)
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
        security = self._security
        if security.secret is not None and endpoint.startswith("tcp://"):
            if security.server is None:
                raise StartupError("--curve-secret needs --curve-server, the scheduler's public key")
            curve.use(socket, security.secret, security.server)
        try:
            socket.connect(endpoint)
        except zmq.ZMQError as error:
            raise StartupError(f"cannot connect to {endpoint}: {error.strerror or error}") from error

    def drain(self, socket: zmq.Socket, limit: int = MAX_MESSAGES_PER_TURN) -> Iterator[list[bytes]]:
        """As `drain`, without the messages of peers whose key was taken off the list since they connected."""
        if socket not in self._guarded:
            yield from drain(socket, limit)
            return
        assert self._allowed is not None
        for _ in range(limit):
            try:
                parts = socket.recv_multipart(zmq.NOBLOCK, copy=False)
            except zmq.Again:
                return
            if self._allowed.heard(parts[-1]):
                yield [part.bytes for part in parts]
            else:
                self._bad_frames.add(REVOKED)

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

    def _serve_curve(self, socket: zmq.Socket, secret: Path) -> None:
        clients = self._security.clients
        if clients is None:
            raise StartupError(
                "--curve-secret needs --curve-clients, a directory with the public keys of who may connect"
            )
        if self._allowed is None:
            self._allowed = curve.AllowList(clients, lambda: self._bad_frames.add(REFUSED))
            self._authenticator = curve.Authenticator(self._context, self._allowed)
        curve.serve(socket, secret)
        self._guarded.add(socket)


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
    if not (security.is_curve or security.insecure_wire or is_loopback(host)):
        raise StartupError(
            f"{endpoint} would cross the network in the clear: give CURVE keys, or accept it with --insecure-wire"
        )


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
