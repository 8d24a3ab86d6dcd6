"""`python -m scheduler_svc`: the bare scheduler, one process, no gRPC."""

import typer

from scheduler_svc import config as options
from scheduler_svc import entry, log_output
from scheduler_svc.process import run_scheduler

app = typer.Typer(add_completion=False, rich_markup_mode=None, pretty_exceptions_enable=False)


@app.command()
def scheduler(
    runtime_dir: options.RuntimeDir = None,
    bind_frontend: options.BindFrontend = "",
    bind_executor: options.BindExecutor = "",
    bind_beat: options.BindBeat = "",
    curve_secret: options.CurveSecret = None,
    curve_clients: options.CurveClients = None,
    insecure_wire: options.InsecureWire = False,
    max_waiting: options.MaxWaiting = 1024,
    max_waiting_tokens: options.MaxWaitingTokens = 4_000_000,
    max_waiting_per_tenant: options.MaxWaitingPerTenant = None,
    max_waiting_tokens_per_tenant: options.MaxWaitingTokensPerTenant = None,
    max_wait: options.MaxWait = None,
    inter_token_target: options.InterTokenTarget = None,
    policy: options.PolicyOption = options.PolicyName.FCFS,
    pipeline_depth: options.PipelineDepth = 2,
    prefix_caching: options.PrefixCaching = True,
    drain_timeout: options.DrainTimeout = 30.0,
    step_timeout: options.StepTimeout = 5.0,
    max_executor_deaths: options.MaxExecutorDeaths = 4,
    journal: options.JournalFile = None,
    journal_limit: options.JournalLimit = 256,
    journal_unmasked: options.JournalUnmasked = False,
    metrics_host: options.MetricsHost = "127.0.0.1",
    metrics_port: options.MetricsPort = 0,
    ready_file: options.ReadyFile = None,
    log_level: options.LogLevel = "info",
    log_format: options.LogFormatOption = options.LogFormat.TEXT,
    trace_endpoint: options.TraceEndpoint = None,
) -> None:
    """Plan every step for one executor, and serve any number of frontends."""
    options.check_environment(options.KNOWN_VARIABLES)
    log_output.start_logging(log_output.level_number(log_level), log_format, "scheduler")
    places = options.endpoints(runtime_dir, frontend=bind_frontend, executor=bind_executor, beat=bind_beat)
    run_scheduler(
        options.SchedulerConfig(
            bind_frontend=places.frontend,
            bind_executor=places.executor,
            bind_beat=places.beat,
            curve_secret=curve_secret,
            curve_clients=curve_clients,
            insecure_wire=insecure_wire,
            max_waiting=max_waiting,
            max_waiting_tokens=max_waiting_tokens,
            max_waiting_per_tenant=max_waiting_per_tenant,
            max_waiting_tokens_per_tenant=max_waiting_tokens_per_tenant,
            max_wait_s=max_wait,
            inter_token_target_s=inter_token_target,
            policy=policy,
            pipeline_depth=pipeline_depth,
            prefix_caching=prefix_caching,
            drain_timeout_s=drain_timeout,
            step_timeout_s=step_timeout,
            max_executor_deaths=max_executor_deaths,
            journal=journal,
            journal_limit_mib=journal_limit,
            journal_unmasked=journal_unmasked,
            metrics_host=metrics_host,
            metrics_port=metrics_port,
            ready_file=ready_file,
            trace_endpoint=trace_endpoint,
        )
    )


if __name__ == "__main__":
    raise SystemExit(entry.run(app, "stepwire scheduler"))
