"""How the terminal clients reach a frontend: variables, TLS files, what goes wrong in words."""

import grpc
import pytest
from typer.testing import CliRunner

from scheduler_svc.cli import app
from scheduler_svc.client.config import Access
from scheduler_svc.client.connection import aio_channel, channel, credentials, explain
from scheduler_svc.errors import StartupError


class Error(grpc.RpcError):
    def __init__(self, code, details):
        self.code, self.details = lambda: code, lambda: details


@pytest.mark.parametrize(
    ("code", "details", "access", "words"),
    [
        ("UNAUTHENTICATED", "this server wants an API key", Access(), "STEPWIRE_API_KEY"),
        ("UNAVAILABLE", "failed to connect to all addresses", Access(), "nothing answers on here:1"),
        ("UNAVAILABLE", "failed to connect to all addresses; last error: Socket closed", Access(), "--tls-ca FILE"),
        ("UNAVAILABLE", "failed to connect: Tls handshake failed", Access(tls_ca="x"), "no TLS with here:1"),
        ("UNAVAILABLE", "failed to connect: Socket closed", Access(tls_ca="x"), "no TLS with here:1"),
        ("UNAVAILABLE", "failed to connect: Failed parsing HTTP/2", Access(), "here:1 answers, but not in gRPC"),
        ("UNAVAILABLE", "Socket closed", Access(), "here:1 answered UNAVAILABLE: Socket closed"),
        ("UNAVAILABLE", "draining", Access(tls_ca="x"), "here:1 answered UNAVAILABLE: draining"),
        ("INVALID_ARGUMENT", "n is 0", Access(), "here:1 answered INVALID_ARGUMENT: n is 0"),
    ],
)
def test_errors_say_what_to_do(code, details, access, words):
    assert words in explain(Error(grpc.StatusCode[code], details), "here:1", access)


def test_a_key_is_metadata_and_never_shown():
    access = Access("sw-secret")
    assert access.metadata == (("authorization", "Bearer sw-secret"),)
    assert "sw-secret" not in repr(access)
    assert Access().metadata == ()


def test_files_that_are_missing_or_do_not_belong_together(tmp_path):
    there = tmp_path / "ca.pem"
    there.write_text("x")
    for access, words in (
        (Access(tls_ca=str(tmp_path / "no.pem")), "--tls-ca .*no.pem cannot be read"),
        (Access(tls_ca=str(there), tls_cert="a"), "--tls-cert and --tls-key belong together"),
        (Access(tls_ca=str(there), tls_key="a"), "--tls-cert and --tls-key belong together"),
        (Access(tls_cert="a", tls_key="b"), "need --tls-ca"),
    ):
        for make in (channel, aio_channel):
            with pytest.raises(StartupError, match=words):
                make("here:1", access)
    assert credentials(Access(tls_ca="public"))


@pytest.mark.parametrize("command", ["health", "generate", "chat", "bench"])
def test_every_client_takes_address_key_and_tls(command):
    shown = CliRunner().invoke(app, [command, "--help"], terminal_width=300).output
    for option in ("--address", "--api-key", "--tls-ca", "--tls-cert", "--tls-key", "STEPWIRE_ADDRESS",
                   "STEPWIRE_API_KEY", "STEPWIRE_TLS_CA"):  # fmt: skip
        assert option in shown


def test_the_environment_says_where_and_who(monkeypatch):
    asked = []
    monkeypatch.setattr(
        "scheduler_svc.client.health.ask", lambda *arguments: asked.append(arguments) or ("SERVING", "")
    )
    environ = {"STEPWIRE_ADDRESS": "there:7", "STEPWIRE_API_KEY": "k", "STEPWIRE_TLS_CA": "ca.pem"}
    assert CliRunner().invoke(app, ["health"], env=environ).exit_code == 0
    assert CliRunner().invoke(app, ["health", "--address", "here:1", "--api-key", "j"], env=environ).exit_code == 0
    assert asked == [
        ("there:7", "", 5.0, Access("k", "ca.pem")),
        ("here:1", "", 5.0, Access("j", "ca.pem")),
    ]
