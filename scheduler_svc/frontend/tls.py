"""The frontend's certificate, its key, and whose clients' certificates it asks for; renewed without a restart.

gRPC asks at every handshake, in a thread of its own; connections that exist keep what they began with. A pair that does
not belong together (a renewal half done) is not used: the one before stays until both files match.
"""

import ssl
from dataclasses import dataclass
from pathlib import Path

import grpc

from scheduler_svc.errors import StartupError
from scheduler_svc.watched import Watched


@dataclass(frozen=True, slots=True)
class TlsFiles:
    """PEM files. With `client_ca` clients must show a certificate that it signed."""

    cert: Path
    key: Path
    client_ca: Path | None = None


def files_of(cert: Path | None, key: Path | None, client_ca: Path | None) -> TlsFiles | None:
    """None: no TLS. Raises StartupError for half of it."""
    if cert is None or key is None:
        if cert is not None or key is not None or client_ca is not None:
            raise StartupError("TLS needs both --tls-cert and --tls-key (and --tls-client-ca only beside them)")
        return None
    return TlsFiles(cert, key, client_ca)


def server_credentials(files: TlsFiles) -> grpc.ServerCredentials:
    """Raises StartupError when the files cannot be used now."""
    paths = [files.cert, files.key, *([files.client_ca] if files.client_ca else [])]
    watched = Watched("--tls-cert, --tls-key or --tls-client-ca", paths, lambda: load(files))

    def fetch() -> grpc.ServerCertificateConfiguration | None:
        return watched.get() if watched.changed() else None

    return grpc.dynamic_ssl_server_credentials(
        watched.get(), fetch, require_client_authentication=files.client_ca is not None
    )


def load(files: TlsFiles) -> grpc.ServerCertificateConfiguration:
    cert, key = _read(files.cert, "--tls-cert"), _read(files.key, "--tls-key")
    _check_pair(files)
    client_ca = None
    if files.client_ca is not None:
        client_ca = _read(files.client_ca, "--tls-client-ca")
        _check_ca(client_ca, files.client_ca)
    return grpc.ssl_server_certificate_configuration([(key, cert)], root_certificates=client_ca)


def _read(path: Path, option: str) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise StartupError(f"{option} {path} cannot be read: {error.strerror}") from None


def _check_pair(files: TlsFiles) -> None:
    """gRPC would find out at the first handshake, and not tell."""
    try:
        # A password must not be asked for on the terminal; an encrypted key fails with the empty one.
        ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER).load_cert_chain(files.cert, files.key, password="")
    except (ssl.SSLError, OSError, ValueError):
        raise StartupError(
            f"--tls-cert {files.cert} and --tls-key {files.key} are not a certificate and its private key "
            "(PEM, without a password)"
        ) from None


def _check_ca(pem: bytes, path: Path) -> None:
    try:
        ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER).load_verify_locations(cadata=pem.decode("ascii"))
    except (ssl.SSLError, ValueError):
        raise StartupError(f"--tls-client-ca {path} holds no certificate (PEM)") from None
