"""What the operator may set on the scheduler: one option type each, one frozen object for the service.

The only module of the bare scheduler that reads the environment. The option types are typer annotations, to be used as
they are by every command that has the option.
"""

import os
import tempfile
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

from scheduler_svc.core.contract import Limits, Policy
from scheduler_svc.environment import PREFIX, refuse_unknown
from scheduler_svc.log_output import LogFormat


class PolicyName(StrEnum):
    FCFS = "fcfs"
    PRIORITY = "priority"
    FAIR = "fair"


RuntimeDir = Annotated[
    Path | None,
    typer.Option(
        "--runtime-dir",
        envvar="STEPWIRE_RUNTIME_DIR",
        help="Directory of the sockets between the services, mode 0700. Default: stepwire in $XDG_RUNTIME_DIR.",
    ),
]
BindFrontend = Annotated[
    str,
    typer.Option(
        "--bind-frontend", envvar="STEPWIRE_BIND_FRONTEND", help="Endpoint for frontends instead: tcp://host:port."
    ),
]
BindExecutor = Annotated[
    str,
    typer.Option(
        "--bind-executor", envvar="STEPWIRE_BIND_EXECUTOR", help="Endpoint for executors instead: tcp://host:port."
    ),
]
BindBeat = Annotated[
    str,
    typer.Option("--bind-beat", envvar="STEPWIRE_BIND_BEAT", help="Endpoint for executors' heartbeats instead."),
]
CurveSecret = Annotated[
    Path | None,
    typer.Option("--curve-secret", envvar="STEPWIRE_CURVE_SECRET", help="Own secret key file: encrypts tcp endpoints."),
]
CurveClients = Annotated[
    Path | None,
    typer.Option(
        "--curve-clients", envvar="STEPWIRE_CURVE_CLIENTS", help="Directory with the public keys of who may connect."
    ),
]
InsecureWire = Annotated[
    bool,
    typer.Option(
        "--insecure-wire", envvar="STEPWIRE_INSECURE_WIRE", help="Allow plain tcp beyond this host. Anyone there rules."
    ),
]
MaxWaiting = Annotated[
    int,
    typer.Option(
        "--max-waiting",
        envvar="STEPWIRE_MAX_WAITING",
        min=1,
        max=1_000_000,
        help="Requests that may wait.",
    ),
]
MaxWaitingTokens = Annotated[
    int,
    typer.Option(
        "--max-waiting-tokens",
        envvar="STEPWIRE_MAX_WAITING_TOKENS",
        min=1,
        max=2**40,
        help="Prompt tokens that may wait.",
    ),
]
MaxWaitingPerTenant = Annotated[
    int | None,
    typer.Option(
        "--max-waiting-per-tenant",
        envvar="STEPWIRE_MAX_WAITING_PER_TENANT",
        min=1,
        max=1_000_000,
        help="Requests of one tenant that may wait. Default: no bound of its own.",
    ),
]
MaxWaitingTokensPerTenant = Annotated[
    int | None,
    typer.Option(
        "--max-waiting-tokens-per-tenant",
        envvar="STEPWIRE_MAX_WAITING_TOKENS_PER_TENANT",
        min=1,
        max=2**40,
        help="Prompt tokens of one tenant that may wait. Default: no bound of its own.",
    ),
]
MaxWait = Annotated[
    float | None,
    typer.Option(
        "--max-wait",
        envvar="STEPWIRE_MAX_WAIT",
        min=0.001,
        max=86_400,
        help="Seconds: a request that would wait longer for its turn, as predicted, is refused. Default: no limit.",
    ),
]
InterTokenTarget = Annotated[
    float | None,
    typer.Option(
        "--inter-token-target",
        envvar="STEPWIRE_INTER_TOKEN_TARGET",
        min=0.001,
        max=60,
        help="Seconds, as 0.05: prompts are computed in pieces small enough for running streams to see a token this "
        "often. Default: as much as fits in a step.",
    ),
]
PolicyOption = Annotated[
    PolicyName,
    typer.Option("--policy", envvar="STEPWIRE_POLICY", help="Who is admitted first among those who wait."),
]
PipelineDepth = Annotated[
    int,
    typer.Option(
        "--pipeline-depth",
        envvar="STEPWIRE_PIPELINE_DEPTH",
        min=1,
        max=2,
        help="Plans in flight. 1 is for debugging: same tokens, slower.",
    ),
]
PrefixCaching = Annotated[
    bool,
    typer.Option(
        "--enable-prefix-caching/--no-prefix-caching",
        envvar="STEPWIRE_ENABLE_PREFIX_CACHING",
        help="Share the KV blocks of equal prefixes.",
    ),
]
DrainTimeout = Annotated[
    float,
    typer.Option(
        "--drain-timeout", envvar="STEPWIRE_DRAIN_TIMEOUT", min=0, max=86_400, help="Seconds to finish work at SIGTERM."
    ),
]
StepTimeout = Annotated[
    float,
    typer.Option(
        "--step-timeout",
        envvar="STEPWIRE_STEP_TIMEOUT",
        min=0.1,
        max=3600,
        help="Seconds a step may take at least before its executor counts as hung.",
    ),
]
MaxExecutorDeaths = Annotated[
    int,
    typer.Option(
        "--max-executor-deaths",
        envvar="STEPWIRE_MAX_EXECUTOR_DEATHS",
        min=3,
        max=100,
        help="A request that was at work in so many deaths of executors, the last one alone, ends with INTERNAL.",
    ),
]
JournalFile = Annotated[
    Path | None,
    typer.Option(
        "--journal", envvar="STEPWIRE_JOURNAL", help="Write what the core is told, and digests of its plans, to FILE."
    ),
]
JournalLimit = Annotated[
    int,
    typer.Option(
        "--journal-limit",
        envvar="STEPWIRE_JOURNAL_LIMIT",
        min=1,
        max=1_048_576,
        help="MiB of the journal and of the part before it, FILE.1, together.",
    ),
]
JournalUnmasked = Annotated[
    bool,
    typer.Option(
        "--journal-unmasked/--no-journal-unmasked",
        envvar="STEPWIRE_JOURNAL_UNMASKED",
        help="Token ids, tenants and salts as they are: who has the file can read prompts.",
    ),
]
MetricsHost = Annotated[
    str, typer.Option("--metrics-host", envvar="STEPWIRE_METRICS_HOST", help="Address of the metrics endpoint.")
]
MetricsPort = Annotated[
    int,
    typer.Option("--metrics-port", envvar="STEPWIRE_METRICS_PORT", min=0, max=65_535, help="Prometheus; 0: none."),
]
ReadyFile = Annotated[
    Path | None,
    typer.Option("--ready-file", envvar="STEPWIRE_READY_FILE", help="Written, as JSON, once the service answers."),
]
TraceEndpoint = Annotated[
    str | None,
    typer.Option(
        "--trace-endpoint",
        envvar="STEPWIRE_TRACE_ENDPOINT",
        help="OpenTelemetry collector that takes OTLP over HTTP: http://host:4318. Default: no traces.",
    ),
]
LogLevel = Annotated[
    str,
    typer.Option("--log-level", envvar="STEPWIRE_LOG_LEVEL", help="debug, info, warning or error."),
]
LogFormatOption = Annotated[
    LogFormat,
    typer.Option("--log-format", envvar="STEPWIRE_LOG_FORMAT", help="text, or json: one object a line."),
]


@dataclass(frozen=True, slots=True, kw_only=True)
class SchedulerConfig:
    bind_frontend: str
    bind_executor: str
    bind_beat: str
    curve_secret: Path | None = None
    curve_clients: Path | None = None
    insecure_wire: bool = False
    max_waiting: int = 1024
    max_waiting_tokens: int = 4_000_000
    max_waiting_per_tenant: int | None = None
    max_waiting_tokens_per_tenant: int | None = None
    max_wait_s: float | None = None
    inter_token_target_s: float | None = None
    policy: PolicyName = PolicyName.FCFS
    pipeline_depth: int = 2
    prefix_caching: bool = True
    drain_timeout_s: float = 30.0
    step_timeout_s: float = 5.0
    max_executor_deaths: int = 4
    journal: Path | None = None
    journal_limit_mib: int = 256
    journal_unmasked: bool = False
    metrics_host: str = "127.0.0.1"
    metrics_port: int = 0
    ready_file: Path | None = None
    trace_endpoint: str | None = None

    def limits(self, hash_key: bytes) -> Limits:
        return Limits(
            max_waiting=self.max_waiting,
            max_waiting_tokens=self.max_waiting_tokens,
            max_waiting_per_tenant=self.max_waiting_per_tenant,
            max_waiting_tokens_per_tenant=self.max_waiting_tokens_per_tenant,
            max_wait_s=self.max_wait_s,
            inter_token_target_s=self.inter_token_target_s,
            policy=Policy[self.policy.name],
            pipeline_depth=self.pipeline_depth,
            prefix_caching=self.prefix_caching,
            hash_key=hash_key,
            max_executor_deaths=self.max_executor_deaths,
        )


@dataclass(frozen=True, slots=True)
class Endpoints:
    """Where the scheduler listens, and the others connect."""

    frontend: str
    executor: str
    beat: str


def endpoints(runtime_dir: Path | None = None, *, frontend: str = "", executor: str = "", beat: str = "") -> Endpoints:
    """Sockets in the runtime directory, each replaceable by an endpoint of its own."""
    folder = runtime_dir or default_runtime_dir()
    folder = folder.absolute()
    return Endpoints(
        frontend=frontend or f"ipc://{folder}/frontend.sock",
        executor=executor or f"ipc://{folder}/executor.sock",
        beat=beat or f"ipc://{folder}/beat.sock",
    )


def default_runtime_dir(environ: Mapping[str, str] = os.environ) -> Path:
    base = environ.get("XDG_RUNTIME_DIR")
    if base and Path(base).is_dir():
        return Path(base) / "stepwire"
    return Path(tempfile.gettempdir()) / f"stepwire-{os.getuid()}"


def check_environment(known: Iterable[str], environ: Mapping[str, str] = os.environ) -> None:
    refuse_unknown(known, environ)


# fmt: off
_NAMES = (
    "ADDRESS", "API_KEY", "API_KEYS", "BACKEND", "BIND_BEAT", "BIND_EXECUTOR", "BIND_FRONTEND", "BLOCK_SIZE", "CACHE",
    "CONNECT", "CONNECT_BEAT", "CURVE_CLIENTS", "CURVE_SECRET", "CURVE_SERVER", "DRAIN_TIMEOUT", "DTYPE",
    "ENABLE_PREFIX_CACHING", "FRONTENDS", "GPU_MEMORY_UTILIZATION", "HOST", "INSECURE_WIRE", "INTER_TOKEN_TARGET",
    "JOURNAL", "JOURNAL_LIMIT", "JOURNAL_UNMASKED", "KV_DTYPE", "KV_MEMORY", "LOG_FORMAT", "LOG_LEVEL",
    "MAX_EXECUTOR_DEATHS", "MAX_MODEL_LEN", "MAX_NUM_BATCHED_TOKENS", "MAX_NUM_SEQS", "MAX_WAIT", "MAX_WAITING",
    "MAX_WAITING_PER_TENANT", "MAX_WAITING_TOKENS", "MAX_WAITING_TOKENS_PER_TENANT", "METRICS_HOST", "METRICS_PORT",
    "MODEL", "NUM_BLOCKS", "PARENT_PID", "PIPELINE_DEPTH", "POLICY", "PORT", "READY_FILE", "RESTART_LIMIT",
    "RESTART_WINDOW", "RESUME_LIMIT", "RUNTIME_DIR", "SERVED_MODEL_NAME", "SILENCE_LIMIT", "SIM_FAULT", "SIM_KV_US",
    "SIM_STEP_US", "SIM_TOKEN_US", "SIM_VOCAB_SIZE", "STEP_TIMEOUT", "THREADS", "TLS_CA", "TLS_CERT", "TLS_CLIENT_CA",
    "TLS_KEY", "TRACE_ENDPOINT", "VERBOSE",
)
# fmt: on
# Read by one service or another: one environment may serve them all. A test compares this with the options there are.
KNOWN_VARIABLES = frozenset(PREFIX + name for name in _NAMES)
