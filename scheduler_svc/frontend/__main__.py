"""`python -m scheduler_svc.frontend`: one frontend process."""

from pathlib import Path

import typer
import uvloop

from scheduler_svc import entry, log_output
from scheduler_svc.config import KNOWN_VARIABLES, LogFormatOption, TraceEndpoint, check_environment, endpoints
from scheduler_svc.frontend import config as options
from scheduler_svc.frontend.metrics import FrontendMetrics
from scheduler_svc.frontend.model_files import ModelFiles
from scheduler_svc.frontend.server import serve
from scheduler_svc.frontend.service import InferenceService
from scheduler_svc.links.session import SchedulerSession
from scheduler_svc.links.transport import Security
from scheduler_svc.log_output import LogFormat
from scheduler_svc.models.store import fingerprint, resolve_model
from scheduler_svc.tracing import Tracing, start_tracing

app = typer.Typer(add_completion=False, rich_markup_mode=None, pretty_exceptions_enable=False)


@app.command()
def frontend(
    model: options.Model = "",
    served_model_name: options.ServedModelName = "",
    host: options.Host = "127.0.0.1",
    port: options.Port = 50051,
    connect: options.Connect = "",
    drain_timeout: options.DrainTimeout = 30.0,
    resume_limit: options.ResumeLimit = 60.0,
    metrics_host: options.MetricsHost = "127.0.0.1",
    metrics_port: options.MetricsPort = 0,
    ready_file: options.ReadyFile = None,
    tls_cert: options.TlsCert = None,
    tls_key: options.TlsKey = None,
    tls_client_ca: options.TlsClientCa = None,
    api_keys: options.ApiKeys = None,
    curve_secret: options.CurveSecret = None,
    curve_server: options.CurveServer = None,
    insecure_wire: options.InsecureWire = False,
    log_level: options.LogLevel = "info",
    log_format: LogFormatOption = LogFormat.TEXT,
    trace_endpoint: TraceEndpoint = None,
) -> None:
    """Speak gRPC to clients, for one scheduler; any number of these may run."""
    check_environment(KNOWN_VARIABLES)
    log_output.start_logging(log_output.level_number(log_level), log_format, "frontend")
    run_frontend(
        options.FrontendConfig(
            connect=connect or endpoints().frontend,
            model=model,
            served_model_name=served_model_name,
            host=host,
            port=port,
            drain_timeout_s=drain_timeout,
            resume_limit_s=resume_limit,
            metrics_host=metrics_host,
            metrics_port=metrics_port,
            ready_file=ready_file,
            tls_cert=tls_cert,
            tls_key=tls_key,
            tls_client_ca=tls_client_ca,
            api_keys=api_keys,
            curve_secret=curve_secret,
            curve_server=curve_server,
            insecure_wire=insecure_wire,
            trace_endpoint=trace_endpoint,
        )
    )


def run_frontend(config: options.FrontendConfig) -> None:
    """Serves until SIGTERM or SIGINT. Raises StartupError when it cannot start."""
    directory = resolve_model(config.model)
    files = ModelFiles.load(directory)
    metrics = FrontendMetrics()
    if config.metrics_port:
        metrics.serve(config.metrics_host, config.metrics_port)
    tracing = start_tracing(config.trace_endpoint, "frontend")
    uvloop.run(_serve(config, directory, files, metrics, tracing))
    if tracing is not None:
        tracing.close()


async def _serve(
    config: options.FrontendConfig,
    directory: Path,
    files: ModelFiles,
    metrics: FrontendMetrics,
    tracing: Tracing | None,
) -> None:
    # All of it inside the loop: gRPC and the session belong to the loop they are made in.
    session = SchedulerSession(
        config.connect,
        fingerprint=fingerprint(directory),
        resume_limit_s=config.resume_limit_s,
        security=Security(secret=config.curve_secret, server=config.curve_server, insecure_wire=config.insecure_wire),
    )
    service = InferenceService(session, files, config.served_model_name or directory.name, metrics, tracing)
    await serve(config, service, session)


if __name__ == "__main__":
    raise SystemExit(entry.run(app, "stepwire frontend"))
