"""TLS and mutual TLS of a frontend, over real sockets: who is let in, and certificates that are renewed under way."""

import asyncio
import ssl

import grpc
import pytest
import trustme
from cryptography import x509
from cryptography.hazmat.primitives import serialization
from grpc_health.v1 import health_pb2, health_pb2_grpc

from protos.stepwire.inference.v1 import inference_pb2 as pb
from scheduler_svc.client.config import Access
from scheduler_svc.client.connection import aio_channel
from scheduler_svc.client.health import ask
from scheduler_svc.errors import StartupError
from scheduler_svc.frontend import api_keys, tls
from scheduler_svc.frontend.config import FrontendConfig
from scheduler_svc.frontend.server import FrontendServer
from tests.unit.frontend.grpc_rig import rig

REQUEST = pb.TokenizeRequest(text="a")


class Pki:
    """One CA, files in a folder."""

    def __init__(self, folder):
        folder.mkdir(exist_ok=True)
        self.folder = folder
        self.ca = trustme.CA()
        self.ca_file = folder / "ca.pem"
        self.ca.cert_pem.write_to_path(self.ca_file)

    def issue(self, name: str, *hosts: str):
        """NAME.pem and NAME.key; replaces what was there, key first."""
        made = self.ca.issue_cert(*hosts)
        cert, key = self.folder / f"{name}.pem", self.folder / f"{name}.key"
        made.private_key_pem.write_to_path(key)
        cert.write_bytes(b"".join(blob.bytes() for blob in made.cert_chain_pems))
        return cert, key

    def server(self, **more) -> dict:
        cert, key = self.issue("server", "127.0.0.1", "localhost")
        return {"tls_cert": cert, "tls_key": key, **more}

    def access(self, cert="", key="") -> Access:
        return Access(tls_ca=str(self.ca_file), tls_cert=str(cert), tls_key=str(key))


@pytest.fixture
def pki(tmp_path):
    return Pki(tmp_path / "pki")


def served_serial(address: str) -> int:
    """The serial number of the certificate that a new connection is shown."""
    host, _, port = address.rpartition(":")
    return x509.load_pem_x509_certificate(ssl.get_server_certificate((host, int(port))).encode()).serial_number


def serial(cert) -> int:
    return x509.load_pem_x509_certificate(cert.read_bytes()).serial_number


async def answers(address: str, access: Access) -> bool:
    async with aio_channel(address, access) as channel:
        try:
            await health_pb2_grpc.HealthStub(channel).Check(health_pb2.HealthCheckRequest(), timeout=60)
        except grpc.aio.AioRpcError:
            return False
        return True


async def test_tls_serves_those_who_trust_its_ca_and_nobody_in_the_clear(tmp_path, pki):
    async with rig(tmp_path, config=pki.server(), access=pki.access()) as r:
        assert (await r.stub.Tokenize(REQUEST)).token_ids
        assert not await answers(r.server.address, Access())
        assert not await answers(r.server.address, Pki(tmp_path / "other").access())


async def test_mutual_tls_wants_a_certificate_of_the_clients_ca(tmp_path, pki):
    config = pki.server(tls_client_ca=pki.ca_file)
    friend, stranger = pki.issue("friend", "friend"), Pki(tmp_path / "other").issue("stranger", "stranger")
    async with rig(tmp_path, config=config, access=pki.access(*friend)) as r:
        assert (await r.stub.Tokenize(REQUEST)).token_ids
        assert not await answers(r.server.address, pki.access())
        assert not await answers(r.server.address, pki.access(*stranger))


async def test_a_renewed_certificate_is_served_without_a_restart(tmp_path, pki):
    config = pki.server()
    async with rig(tmp_path, config=config, access=pki.access()) as r:
        call = r.stub.Generate(
            pb.GenerateRequest(token_ids=pb.TokenIds(ids=[70]), stopping=pb.StoppingCriteria(max_tokens=3))
        )
        before = serial(config["tls_cert"])
        assert await asyncio.to_thread(served_serial, r.server.address) == before
        pki.server()
        after = serial(config["tls_cert"])
        assert before != after
        assert await asyncio.to_thread(served_serial, r.server.address) == after
        assert [message async for message in call]  # what was connected goes on
        assert await answers(r.server.address, pki.access())


async def test_a_renewed_client_ca_lets_its_clients_in_and_the_old_ones_no_more(tmp_path, pki):
    new = Pki(tmp_path / "new")
    client_ca = tmp_path / "client_ca.pem"
    client_ca.write_bytes(pki.ca_file.read_bytes())
    old_client, new_client = pki.issue("c", "c"), new.issue("c", "c")
    async with rig(tmp_path, config=pki.server(tls_client_ca=client_ca), access=pki.access(*old_client)) as r:
        assert await answers(r.server.address, pki.access(*old_client))
        assert not await answers(r.server.address, pki.access(*new_client))
        client_ca.write_bytes(new.ca_file.read_bytes())
        assert await answers(r.server.address, pki.access(*new_client))
        assert not await answers(r.server.address, pki.access(*old_client))


async def test_half_a_renewal_keeps_the_old_pair(tmp_path, pki, caplog):
    config = pki.server()
    async with rig(tmp_path, config=config, access=pki.access()) as r:
        before, key = serial(config["tls_cert"]), config["tls_key"].read_bytes()
        pki.server()
        new_key = config["tls_key"].read_bytes()
        config["tls_key"].write_bytes(key)  # the new certificate beside the old key
        assert await asyncio.to_thread(served_serial, r.server.address) == before
        assert "stays in force" in caplog.text
        assert str(tmp_path) not in caplog.text
        config["tls_key"].write_bytes(new_key)
        assert await asyncio.to_thread(served_serial, r.server.address) != before


async def test_the_health_command_over_tls(tmp_path, pki):
    friend = pki.issue("friend", "friend")
    config = pki.server(tls_client_ca=pki.ca_file)
    async with rig(tmp_path, config=config, access=pki.access(*friend)) as r:
        assert await health_of(r, pki.access(*friend)) == ("SERVING", "")
        answer, words = await health_of(r, pki.access())
        assert answer == "UNAVAILABLE"
        assert words.startswith(f"no TLS with {r.server.address}")
        answer, words = await health_of(r, Access())
        assert answer == "UNAVAILABLE"
        assert words.startswith(f"{r.server.address} closed the connection: it may want TLS (--tls-ca FILE)")


async def test_the_health_command_with_tls_to_a_server_without(tmp_path, pki):
    async with rig(tmp_path) as r:
        answer, words = await health_of(r, pki.access())
    assert answer == "UNAVAILABLE"
    assert words.startswith(f"{r.server.address} answers, but not in TLS: leave --tls-ca out")


async def health_of(r, access: Access) -> tuple[str, str]:
    return await asyncio.to_thread(ask, r.server.address, "", 60.0, access)


# ---- what cannot start ----


def bad_files(pki):
    cert, key = pki.issue("server", "localhost")
    _, other_key = pki.issue("other", "localhost")
    junk = pki.folder / "junk.pem"
    junk.write_text("not a certificate")
    missing = pki.folder / "missing.pem"
    return [
        (tls.TlsFiles(missing, key), "--tls-cert .* cannot be read"),
        (tls.TlsFiles(cert, missing), "--tls-key .* cannot be read"),
        (tls.TlsFiles(cert, other_key), "not a certificate and its private key"),
        (tls.TlsFiles(junk, key), "not a certificate and its private key"),
        (tls.TlsFiles(cert, key, missing), "--tls-client-ca .* cannot be read"),
        (tls.TlsFiles(cert, key, junk), "holds no certificate"),
    ]


def test_files_that_cannot_be_used_are_one_line(pki):
    for files, words in bad_files(pki):
        with pytest.raises(StartupError, match=words):
            tls.server_credentials(files)


def test_an_encrypted_key_is_refused_and_asks_nothing(pki):
    cert, key = pki.issue("server", "localhost")
    private = serialization.load_pem_private_key(key.read_bytes(), None)
    how = serialization.BestAvailableEncryption(b"secret")
    pem, old = serialization.Encoding.PEM, serialization.PrivateFormat.TraditionalOpenSSL
    key.write_bytes(private.private_bytes(pem, old, how))
    with pytest.raises(StartupError, match="without a password"):
        tls.load(tls.TlsFiles(cert, key))


@pytest.mark.parametrize("given", [("cert",), ("key",), ("client_ca",), ("cert", "client_ca"), ("key", "client_ca")])
def test_half_of_the_options_is_refused(pki, given):
    files = {name: pki.ca_file if name in given else None for name in ("cert", "key", "client_ca")}
    with pytest.raises(StartupError, match="both --tls-cert and --tls-key"):
        tls.files_of(**files)


# ---- exposure ----


@pytest.mark.parametrize(
    ("host", "with_tls", "with_keys", "words"),
    [
        ("127.0.0.1", False, False, []),
        ("localhost", False, False, []),
        ("0.0.0.0", False, False, ["plaintext", "may use it and read along"]),
        ("0.0.0.0", False, True, ["plaintext", "API keys cross the network in the clear"]),
        ("0.0.0.0", True, False, ["open", "give --api-keys or --tls-client-ca"]),
        ("0.0.0.0", True, True, []),
    ],
)
async def test_who_listens_beyond_this_host_unprotected_is_warned_in_one_line(
    tmp_path, pki, caplog, host, with_tls, with_keys, words
):
    config = pki.server() if with_tls else {}
    if with_keys:
        config["api_keys"] = tmp_path / "keys"
        api_keys.add(config["api_keys"], api_keys.make_key("acme")[1])
    async with rig(tmp_path) as r:
        caplog.clear()
        server = FrontendServer(FrontendConfig(connect="", host=host, port=0, **config), r.service, r.session)
        await server.start()
        await server._server.stop(None)
        server._watcher.cancel()
    warned = [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]
    assert len(warned) == bool(words)
    assert all(word in warned[0] for word in words)
