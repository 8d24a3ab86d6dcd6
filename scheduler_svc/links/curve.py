"""CURVE keys: making them, reading them, and the list of who may connect.

The list is a directory with the public keys of frontends and executors. It is read again when it changes: a key put
there may connect, and of a key taken away no handshake succeeds and no message is heard any more, so that its owner is
given up within a lease. Knows nothing of what messages mean.
"""

import os
import tempfile
import threading
from collections.abc import Callable, Sequence
from pathlib import Path

import zmq
import zmq.auth

from scheduler_svc.errors import StartupError
from scheduler_svc.watched import Watched

DOMAIN = "stepwire"
SCHEDULER = "scheduler"
CLIENTS = "clients"
SERVICES = (SCHEDULER, "frontend", "executor")


class AllowList:
    """Who may connect, by public key. `on_refused` is called in the authenticator's thread for each who may not."""

    def __init__(self, directory: Path, on_refused: Callable[[], None]):
        self._on_refused = on_refused
        self._lock = threading.Lock()
        self._keys = Watched("--curve-clients", [directory], lambda: load_public_keys(directory))

    def allows(self, key: bytes) -> bool:
        """`key`: a public key in Z85."""
        with self._lock:
            return key in self._keys.get()

    def callback(self, _domain: str, key: bytes) -> bool:
        """What the authenticator asks at every handshake."""
        allowed = self.allows(key)
        if not allowed:
            self._on_refused()
        return allowed

    def heard(self, frame: zmq.Frame) -> bool:
        """True when the sender of `frame` may still speak. Anybody may claim a routing id; this is its key."""
        return self.allows(str(frame.get("User-Id")).encode())


def load_public_keys(directory: Path) -> frozenset[bytes]:
    """Of every *.key file."""
    if not directory.is_dir():
        raise StartupError(f"--curve-clients {directory} is not a directory")
    return frozenset(_load(path)[0] for path in directory.glob("*.key"))


class Authenticator:
    """Answers libzmq's questions about who connects, in a thread of its own, for one context."""

    def __init__(self, context: zmq.Context, allowed: AllowList):
        # Imports asyncio; a scheduler without CURVE does without both.
        import zmq.auth.thread

        self._thread = zmq.auth.thread.ThreadAuthenticator(context)
        self._thread.start()
        self._thread.configure_curve_callback(DOMAIN, allowed)

    def stop(self) -> None:
        self._thread.stop()


def serve(socket: zmq.Socket, secret: Path) -> None:
    """`socket`, before it is bound, takes only connections that the authenticator lets in."""
    _set_own(socket, secret)
    socket.curve_server = True
    socket.zap_domain = DOMAIN.encode()


def use(socket: zmq.Socket, secret: Path, server: Path) -> None:
    """`socket`, before it connects, talks only to the owner of `server`'s key."""
    _set_own(socket, secret)
    try:
        socket.curve_serverkey = _load(server)[0]
    except zmq.ZMQError:
        raise StartupError(f"{server} is damaged: its key is not one") from None


def _set_own(socket: zmq.Socket, path: Path) -> None:
    public, secret = _load(path)
    if secret is None:
        raise StartupError(f"{path} holds no secret key: give the .key_secret file")
    try:
        socket.curve_publickey, socket.curve_secretkey = public, secret
    except zmq.ZMQError:
        raise StartupError(f"{path} is damaged: its keys are none") from None


def _load(path: Path) -> tuple[bytes, bytes | None]:
    try:
        return zmq.auth.load_certificate(path)
    except (OSError, ValueError) as error:
        raise StartupError(f"cannot read the CURVE key {path}: {error}") from None


def make_certificates(directory: Path, names: Sequence[str]) -> list[Path]:
    """DIRECTORY/NAME.key and .key_secret for each name, and the public keys of all but the scheduler in `clients`.

    Raises StartupError rather than replace a key that exists.
    """
    folder = directory / CLIENTS
    made: list[Path] = []
    umask = os.umask(0o077)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for name in names:
            if (directory / f"{name}.key_secret").exists():
                raise StartupError(f"{directory / name}.key_secret exists: choose another name, or remove it first")
        for name in names:
            public, secret = zmq.auth.create_certificates(directory, name)
            made += [Path(secret), Path(public)]
            if name != SCHEDULER:
                allowed = folder / f"{name}.key"
                allowed.write_bytes(Path(public).read_bytes())
                made.append(allowed)
    except OSError as error:
        raise StartupError(f"cannot make keys in {directory}: {error.strerror}") from None
    finally:
        os.umask(umask)
    return made


def make_for_services(directory: Path) -> list[Path]:
    """The three services' keys, each in DIRECTORY/SERVICE with what that service needs and no more.

    All of them or none: returns [] when all are there, and raises StartupError when only some are.
    """
    secrets = [directory / name / f"{name}.key_secret" for name in SERVICES]
    there = [path for path in secrets if path.exists()]
    if len(there) == len(secrets):
        return []
    if there:
        missing = next(path for path in secrets if path not in there)
        raise StartupError(f"{there[0]} exists but {missing} does not: bring it back, or remove all of {directory}")
    try:
        folder = tempfile.TemporaryDirectory()
    except OSError as error:
        raise StartupError(f"making keys needs a place for temporary files: {error.strerror or error}") from None
    with folder as name_of_folder:
        made = Path(name_of_folder)
        make_certificates(made, SERVICES)
        wanted = {name: [made / f"{name}.key_secret", made / f"{SCHEDULER}.key"] for name in SERVICES}
        wanted[SCHEDULER] += sorted((made / CLIENTS).iterdir())
        return [_install(path, directory / name / path.relative_to(made)) for name in SERVICES for path in wanted[name]]


def _install(source: Path, target: Path) -> Path:
    try:
        target.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        target.touch(mode=0o600)
        target.write_bytes(source.read_bytes())
    except OSError as error:
        raise StartupError(f"cannot write {target}: {error.strerror}") from None
    return target
