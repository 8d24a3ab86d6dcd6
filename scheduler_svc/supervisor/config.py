"""The configuration of `stepwire serve`: the option table filled in from the command line, then the environment.

Invariants: every value is checked here, before anything is started; a STEPWIRE_ variable that no one knows is an error;
children inherit only the STEPWIRE_ variables that serve has no option for, the rest is on their command line.
"""

import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from scheduler_svc.environment import PREFIX, refuse_unknown
from scheduler_svc.errors import StartupError
from scheduler_svc.supervisor.options import EXECUTOR, FRONTEND, OPTIONS, SCHEDULER, Option, Value

# Read by this process, through the model store, and by the clients, which may share an environment with a server.
OWN_VARIABLES = ("STEPWIRE_CACHE", "STEPWIRE_ADDRESS", "STEPWIRE_API_KEY", "STEPWIRE_TLS_CA")
# Options that a single service has and serve has not: the variable is handed on to it.
SERVICE_VARIABLES: Mapping[str, tuple[str, ...]] = {
    "STEPWIRE_LOG_LEVEL": (SCHEDULER, FRONTEND),
    "STEPWIRE_MAX_WAITING_TOKENS": (SCHEDULER,),
    "STEPWIRE_STEP_TIMEOUT": (SCHEDULER,),
    "STEPWIRE_RESUME_LIMIT": (FRONTEND,),
    "STEPWIRE_THREADS": (EXECUTOR,),
    "STEPWIRE_SIM_VOCAB_SIZE": (EXECUTOR,),
    "STEPWIRE_SIM_STEP_US": (EXECUTOR,),
    "STEPWIRE_SIM_TOKEN_US": (EXECUTOR,),
    "STEPWIRE_SIM_KV_US": (EXECUTOR,),
    "STEPWIRE_SIM_FAULT": (EXECUTOR,),
}
DEFAULT_PORT = 50051
DEFAULT_METRICS_PORT = 9464


@dataclass(frozen=True, slots=True)
class ServeConfig:
    """What serve itself acts on; `forwarded` are the arguments of each kind of child."""

    model: str = ""
    served_model_name: str = ""
    host: str = "127.0.0.1"
    port: int = DEFAULT_PORT
    frontends: int = 1
    executors: int = 1
    drain_timeout_s: float = 30.0
    metrics_port: int | None = None  # None: the default one, or a free one when that is taken
    ready_file: Path | None = None
    verbose: bool = False
    json_lines: bool = False
    # What clients need to get in, for the line that says how.
    wants_tls: bool = False
    wants_key: bool = False
    # Of one child: restarts within the window before serve gives up; seconds without a sign of life.
    restart_limit: int = 20
    restart_window_s: float = 600.0
    silence_limit_s: float = 10.0
    forwarded: Mapping[str, tuple[str, ...]] = field(default_factory=dict)

    @property
    def ports(self) -> list[int]:
        """One per frontend; zeros are chosen by the system."""
        return [self.port + i if self.port else 0 for i in range(self.frontends)]


def read_serve_config(arguments: Mapping[str, str | bool | None]) -> ServeConfig:
    """`arguments` is what the command line gave, by option key; None where it gave nothing."""
    return build(arguments, os.environ)


def build(arguments: Mapping[str, str | bool | None], environ: Mapping[str, str]) -> ServeConfig:
    refuse_unknown({option.variable for option in OPTIONS} | {*OWN_VARIABLES, *SERVICE_VARIABLES}, environ)
    values: dict[str, Value] = {}
    for option in OPTIONS:
        value = _value(option, arguments.get(option.key), environ)
        if value is not None:
            values[option.key] = value
    _check_together(values)
    plain = ("model", "served_model_name", "host", "port", "frontends", "executors")
    given = {key: values[key] for key in plain if key in values}
    return ServeConfig(
        **given,  # type: ignore[arg-type]
        drain_timeout_s=float(values.get("drain_timeout", 30.0)),
        metrics_port=int(values["metrics_port"]) if "metrics_port" in values else None,
        ready_file=Path(str(values["ready_file"])) if "ready_file" in values else None,
        verbose=bool(values.get("verbose", False)),
        json_lines=values.get("log_format") == "json",
        wants_tls="tls_cert" in values,
        wants_key="api_keys" in values,
        restart_limit=int(values.get("restart_limit", 20)),
        restart_window_s=float(values.get("restart_window", 600.0)),
        silence_limit_s=float(values.get("silence_limit", 10.0)),
        forwarded={part: tuple(_forwarded(part, values)) for part in (SCHEDULER, EXECUTOR, FRONTEND)},
    )


def child_environment(part: str, extra: Mapping[str, str]) -> dict[str, str]:
    kept = {
        name: value
        for name, value in os.environ.items()
        if not name.startswith(PREFIX) or part in SERVICE_VARIABLES.get(name, ())
    }
    # Children write to a pipe: without this their lines would arrive in blocks.
    return {**kept, "PYTHONUNBUFFERED": "1", **extra}


def runtime_root() -> Path | None:
    """Where the user's runtime files belong, when the system says so."""
    root = os.environ.get("XDG_RUNTIME_DIR")
    return Path(root) if root and os.access(root, os.W_OK | os.X_OK) else None


def _value(option: Option, argument: str | bool | None, environ: Mapping[str, str]) -> Value | None:
    if isinstance(argument, bool):
        return argument
    if argument is not None:
        return option.parse(argument, f"--{option.name}")
    if option.variable in environ:
        return option.parse(environ[option.variable], option.variable)
    return None


def _check_together(values: Mapping[str, Value]) -> None:
    for one, other in (("tls_cert", "tls_key"), ("tls_key", "tls_cert"), ("tls_client_ca", "tls_cert")):
        if one in values and other not in values:
            names = [f"--{key.replace('_', '-')}" for key in (one, other)]
            raise StartupError(f"{names[0]} needs {names[1]} as well")
    port, frontends = int(values.get("port", DEFAULT_PORT)), int(values.get("frontends", 1))
    if port and port + frontends - 1 > 65535:
        raise StartupError(f"--port {port} with --frontends {frontends} would pass port 65535: choose a smaller port")
    metrics_port = int(values.get("metrics_port", 0))
    if port and port <= metrics_port < port + frontends:
        raise StartupError(f"--metrics-port {metrics_port} is one of the frontends' ports: choose another")


def _forwarded(part: str, values: Mapping[str, Value]) -> list[str]:
    """Files are made absolute by being looked up here: children may not share this working directory for ever."""
    arguments: list[str] = []
    for option in OPTIONS:
        if part in option.parts and option.key in values:
            value = values[option.key]
            is_path = option.kind == "file" or option.name == "journal"
            arguments += option.arguments(str(Path(str(value)).absolute()) if is_path else value)
    return arguments
