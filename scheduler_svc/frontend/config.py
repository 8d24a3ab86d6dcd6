"""What the operator may set on a frontend: one option type each, one frozen object for the service."""

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import typer

Model = Annotated[
    str,
    typer.Option("--model", envvar="STEPWIRE_MODEL", help="A directory, a .gguf file or a hub id; empty: the default."),
]
ServedModelName = Annotated[
    str,
    typer.Option(
        "--served-model-name",
        envvar="STEPWIRE_SERVED_MODEL_NAME",
        help="What clients call the model. Default: its folder.",
    ),
]
Host = Annotated[str, typer.Option("--host", envvar="STEPWIRE_HOST", help="Address to listen on.")]
Port = Annotated[
    int, typer.Option("--port", envvar="STEPWIRE_PORT", min=0, max=65_535, help="Port to listen on; 0: any free one.")
]
Connect = Annotated[
    str,
    typer.Option(
        "--connect", envvar="STEPWIRE_CONNECT", help="The scheduler's endpoint for frontends: ipc:// or tcp://."
    ),
]
DrainTimeout = Annotated[
    float,
    typer.Option(
        "--drain-timeout",
        envvar="STEPWIRE_DRAIN_TIMEOUT",
        min=0,
        max=86_400,
        help="Seconds that streams get at SIGTERM.",
    ),
]
ResumeLimit = Annotated[
    float,
    typer.Option(
        "--resume-limit",
        envvar="STEPWIRE_RESUME_LIMIT",
        min=0,
        max=3600,
        help="Seconds that streams wait for a lost scheduler or executor before they end UNAVAILABLE.",
    ),
]
MetricsHost = Annotated[
    str, typer.Option("--metrics-host", envvar="STEPWIRE_METRICS_HOST", help="Address of the metrics endpoint.")
]
MetricsPort = Annotated[
    int, typer.Option("--metrics-port", envvar="STEPWIRE_METRICS_PORT", min=0, max=65_535, help="Prometheus; 0: none.")
]
ReadyFile = Annotated[
    Path | None,
    typer.Option("--ready-file", envvar="STEPWIRE_READY_FILE", help="Written, as JSON, once the service answers."),
]
TlsCert = Annotated[
    Path | None,
    typer.Option("--tls-cert", envvar="STEPWIRE_TLS_CERT", help="Certificate chain (PEM); serves TLS."),
]
TlsKey = Annotated[
    Path | None, typer.Option("--tls-key", envvar="STEPWIRE_TLS_KEY", help="Its private key (PEM, without a password).")
]
TlsClientCa = Annotated[
    Path | None,
    typer.Option(
        "--tls-client-ca",
        envvar="STEPWIRE_TLS_CLIENT_CA",
        help="Clients must show a certificate that this CA (PEM) signed.",
    ),
]
ApiKeys = Annotated[
    Path | None,
    typer.Option(
        "--api-keys", envvar="STEPWIRE_API_KEYS", help="File of the keys that clients may use, see `stepwire keys`."
    ),
]
CurveSecret = Annotated[
    Path | None,
    typer.Option("--curve-secret", envvar="STEPWIRE_CURVE_SECRET", help="Own secret key file: encrypts tcp endpoints."),
]
CurveServer = Annotated[
    Path | None,
    typer.Option("--curve-server", envvar="STEPWIRE_CURVE_SERVER", help="The scheduler's public key file."),
]
InsecureWire = Annotated[
    bool,
    typer.Option("--insecure-wire", envvar="STEPWIRE_INSECURE_WIRE", help="Allow plain tcp beyond this host."),
]
LogLevel = Annotated[
    str, typer.Option("--log-level", envvar="STEPWIRE_LOG_LEVEL", help="debug, info, warning or error.")
]


@dataclass(frozen=True, slots=True, kw_only=True)
class FrontendConfig:
    connect: str
    model: str = ""
    served_model_name: str = ""
    host: str = "127.0.0.1"
    port: int = 50051
    drain_timeout_s: float = 30.0
    resume_limit_s: float = 60.0
    metrics_host: str = "127.0.0.1"
    metrics_port: int = 0
    ready_file: Path | None = None
    tls_cert: Path | None = None
    tls_key: Path | None = None
    tls_client_ca: Path | None = None
    api_keys: Path | None = None
    curve_secret: Path | None = None
    curve_server: Path | None = None
    insecure_wire: bool = False
    trace_endpoint: str | None = None

    @property
    def address(self) -> str:
        """As gRPC wants it: IPv6 in brackets."""
        return join(self.host, self.port)


def join(host: str, port: int) -> str:
    return f"[{host}]:{port}" if ":" in host and not host.startswith("[") else f"{host}:{port}"
