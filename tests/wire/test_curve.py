"""CURVE on tcp: who may connect, who may no longer speak, and services that find each other with keys alone."""

import asyncio
from pathlib import Path

import pytest
import zmq

from executor_svc.link import ExecutorLink, LinkSettings
from executor_svc.link import StartupError as ExecutorStartupError
from scheduler_svc.errors import StartupError
from scheduler_svc.links.curve import make_certificates
from scheduler_svc.links.session import SchedulerSession
from scheduler_svc.links.transport import REFUSED, REVOKED, BadFrames, Security, Wire
from tests.e2e.server import free_port
from tests.wire.cluster import SchedulerThread, collect, request
from tests.wire.peers import LIMIT_S, ExecutorThread, executor_hello, expected_output, wait_for
from tests.wire.test_transport import port_of

NAMES = ("scheduler", "frontend", "executor", "stranger")
QUIET_MS = 300


@pytest.fixture
def keys(tmp_path) -> Path:
    """Keys of all, of whom the stranger is not on the list."""
    folder = tmp_path / "curve"
    make_certificates(folder, NAMES)
    (folder / "clients" / "stranger.key").unlink()
    return folder


def server(keys: Path) -> tuple[Wire, zmq.Socket, str, BadFrames]:
    bad = BadFrames()
    wire = Wire(Security(secret=keys / "scheduler.key_secret", clients=keys / "clients"), bad)
    socket = wire.bind_router("tcp://127.0.0.1:*", 8)
    return wire, socket, f"tcp://127.0.0.1:{port_of(socket)}", bad


def client(endpoint: str, security: Security) -> tuple[Wire, zmq.Socket]:
    wire = Wire(security)
    socket = wire.dealer(8)
    wire.connect(socket, endpoint)
    return wire, socket


def own(keys: Path, name: str, of: str = "scheduler") -> Security:
    return Security(secret=keys / f"{name}.key_secret", server=keys / f"{of}.key")


def heard(wire: Wire, socket: zmq.Socket, wait_ms: int = round(LIMIT_S * 1000)) -> list[bytes]:
    return [parts[1] for parts in wire.drain(socket)] if socket.poll(wait_ms) else []


@pytest.mark.parametrize(
    "security",
    [
        lambda keys: own(keys, "stranger"),
        lambda keys: own(keys, "frontend", of="stranger"),
        lambda keys: Security(),
    ],
    ids=["a key that is not on the list", "another server's key", "no key"],
)
def test_nobody_else_is_heard(keys, security):
    wire, socket, endpoint, bad = server(keys)
    other, dealer = client(endpoint, security(keys))
    dealer.send(b"let me in")
    assert heard(wire, socket, QUIET_MS) == []
    friend, known = client(endpoint, own(keys, "frontend"))
    known.send(b"it is me")
    assert heard(wire, socket) == [b"it is me"]
    if security(keys) == own(keys, "stranger"):
        wait_for(lambda: bad.counts[REFUSED], "the refusal to be counted")
    for each in (other, friend, wire):
        each.close()


def test_a_revoked_key_is_heard_no_more_and_cannot_come_back(keys):
    wire, socket, endpoint, bad = server(keys)
    peer, dealer = client(endpoint, own(keys, "frontend"))
    other, executor = client(endpoint, own(keys, "executor"))
    dealer.send(b"one")
    assert heard(wire, socket) == [b"one"]
    (keys / "clients" / "frontend.key").unlink()
    dealer.send(b"two")
    executor.send(b"still here")
    got: list[bytes] = []
    wait_for(lambda: got.extend(heard(wire, socket, 10)) or (got and bad.counts[REVOKED]), "both messages")
    assert got == [b"still here"]
    peer.close()
    peer, dealer = client(endpoint, own(keys, "frontend"))
    dealer.send(b"three")
    assert heard(wire, socket, QUIET_MS) == []
    for each in (peer, other, wire):
        each.close()


def test_a_key_put_on_the_list_may_connect_at_once(keys):
    wire, socket, endpoint, _ = server(keys)
    (keys / "clients" / "stranger.key").write_bytes((keys / "stranger.key").read_bytes())
    peer, dealer = client(endpoint, own(keys, "stranger"))
    dealer.send(b"new here")
    assert heard(wire, socket) == [b"new here"]
    peer.close()
    wire.close()


def test_a_list_that_breaks_stays_as_it_was(keys, caplog):
    wire, socket, endpoint, _ = server(keys)
    (keys / "clients" / "junk.key").write_text("no key")
    peer, dealer = client(endpoint, own(keys, "frontend"))
    dealer.send(b"me")
    assert heard(wire, socket) == [b"me"]
    assert "--curve-clients changed and cannot be used" in caplog.text
    peer.close()
    wire.close()


def curve_faults(keys: Path):
    secret, clients, public = keys / "scheduler.key_secret", keys / "clients", keys / "scheduler.key"
    damaged = keys / "damaged.key_secret"
    damaged.write_text('curve\n    public-key = "short"\n    secret-key = "short"\n')
    return {
        "need --curve-secret": Security(clients=clients),
        "needs --curve-clients": Security(secret=secret),
        "holds no secret key": Security(secret=public, clients=clients),
        "cannot read the CURVE key": Security(secret=keys / "none", clients=clients),
        "is not a directory": Security(secret=secret, clients=keys / "none"),
        "is damaged": Security(secret=damaged, clients=clients),
    }


def bind(security: Security) -> None:
    wire = Wire(security)
    try:
        wire.bind_router("tcp://127.0.0.1:*", 8)
    finally:
        wire.close()


def test_what_cannot_work_is_one_line_at_the_start(keys):
    for words, security in curve_faults(keys).items():
        with pytest.raises(StartupError, match=words):
            bind(security)
    wire = Wire(Security(secret=keys / "frontend.key_secret"))
    with pytest.raises(StartupError, match="needs --curve-server"):
        wire.connect(wire.dealer(8), "tcp://127.0.0.1:1")
    wire.close()


@pytest.mark.parametrize(
    ("secret", "public", "words"),
    [
        ("executor.key_secret", None, "go together"),
        (None, "scheduler.key", "go together"),
        ("executor.key", "scheduler.key", "holds no secret key"),
        ("none", "scheduler.key", "cannot connect"),
    ],
)
def test_half_a_key_pair_never_falls_back_to_plain_tcp(keys, secret, public, words):
    settings = LinkSettings(
        "tcp://127.0.0.1:1", "tcp://127.0.0.1:2",
        curve_secret=keys / secret if secret else None, curve_server=keys / public if public else None,
    )  # fmt: skip
    with pytest.raises(ExecutorStartupError, match=words):
        ExecutorLink(executor_hello(), settings)


async def test_a_whole_cluster_over_curve(keys):
    """Scheduler, executor and frontend with nothing in common but keys; a revoked frontend loses what it had."""
    port = free_port(3)
    frontend, executor, beat = (f"tcp://127.0.0.1:{port + i}" for i in range(3))
    binds = {"bind_frontend": frontend, "bind_executor": executor, "bind_beat": beat}
    served = {"curve_secret": keys / "scheduler.key_secret", "curve_clients": keys / "clients"}
    serves = {"curve_secret": keys / "executor.key_secret", "curve_server": keys / "scheduler.key"}
    with (
        SchedulerThread(keys, **binds, **served) as scheduler,
        ExecutorThread(keys, endpoints=(executor, beat), **serves),
    ):
        session = SchedulerSession(frontend, fingerprint="f1", security=own(keys, "frontend"))
        await session.start()
        async with asyncio.timeout(LIMIT_S):
            while not session.ready:  # noqa: ASYNC110
                await asyncio.sleep(0.01)
            tokens, _ = await collect(session.submit(request("a", [1, 2, 3], 5)))
            assert tokens[0] == expected_output([1, 2, 3], 5)
            assert scheduler.service._frontends.num_sessions == 1
            (keys / "clients" / "frontend.key").unlink()
            while scheduler.service._frontends.num_sessions:  # noqa: ASYNC110
                await asyncio.sleep(0.05)
        await session.close()
