"""What the commands that talk to a frontend have in common: where it is, how to trust it, and who they are.

The certificate and key of a client have no variables: STEPWIRE_TLS_CERT and STEPWIRE_TLS_KEY are a server's.
"""

from dataclasses import dataclass, field
from typing import Annotated

import typer

DEFAULT_ADDRESS = "127.0.0.1:50051"
# Instead of a file: the authorities that come with gRPC.
PUBLIC_CA = "public"

Address = Annotated[str, typer.Option("--address", envvar="STEPWIRE_ADDRESS", metavar="HOST:PORT", help="A frontend.")]
ApiKey = Annotated[
    str,
    typer.Option(
        "--api-key", envvar="STEPWIRE_API_KEY", metavar="KEY", help="The variable keeps it out of process lists."
    ),
]
TlsCa = Annotated[
    str,
    typer.Option(
        "--tls-ca",
        envvar="STEPWIRE_TLS_CA",
        metavar="FILE",
        help=f"Use TLS, and trust what this CA (PEM) signed; `{PUBLIC_CA}`: the public ones.",
    ),
]
TlsCert = Annotated[str, typer.Option("--tls-cert", metavar="FILE", help="Our own certificate (PEM), for mutual TLS.")]
TlsKey = Annotated[str, typer.Option("--tls-key", metavar="FILE", help="Its private key (PEM).")]


@dataclass(frozen=True, slots=True)
class Access:
    """How a client reaches any frontend. Empty: in the clear, without a key."""

    api_key: str = field(default="", repr=False)
    tls_ca: str = ""  # a file's name, or PUBLIC_CA
    tls_cert: str = ""
    tls_key: str = ""

    @property
    def is_tls(self) -> bool:
        return bool(self.tls_ca)

    @property
    def metadata(self) -> tuple[tuple[str, str], ...]:
        """To be sent with every call."""
        return (("authorization", f"Bearer {self.api_key}"),) if self.api_key else ()
