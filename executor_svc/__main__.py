"""`python -m executor_svc`: one executor, until it is told to stop."""

import logging
import sys
from pathlib import Path
from typing import Annotated, Any

import typer

from executor_svc.config import (
    PREFIX,
    BackendChoice,
    Dtype,
    ExecutorConfig,
    KVDtype,
    SimulationSettings,
    SizeSettings,
    check_environment,
    parse_bytes,
    prepare_environment,
)
from executor_svc.errors import ExecutorError, Refused, StartupError
from executor_svc.log_output import LogFormat, start_logging

logger = logging.getLogger("executor_svc")

EXIT_STARTUP = 1
EXIT_BROKEN = 70  # a bug or a dead device: worth a restart
EXIT_LINK_LOST = 75  # the scheduler or the parent is gone, and the operator wants an end then

# The root of every complaint about the command line, whether typer brings its own click or uses the installed one.
UsageError: Any = typer.BadParameter.__base__

app = typer.Typer(add_completion=False, rich_markup_mode=None, pretty_exceptions_enable=False)


def option(name: str, text: str, **bounds: object) -> typer.models.OptionInfo:
    return typer.Option(f"--{name}", envvar=PREFIX + name.upper().replace("-", "_"), help=text, **bounds)  # type: ignore[arg-type]


@app.command()
def main(
    connect: Annotated[str, option("connect", "The scheduler's executor endpoint, ipc:// or tcp://.")],
    connect_beat: Annotated[str, option("connect-beat", "The scheduler's heartbeat endpoint.")],
    model: Annotated[Path | None, option("model", "Model directory: config.json and safetensors.")] = None,
    backend: Annotated[BackendChoice, option("backend", "auto: cuda where there is one.")] = BackendChoice.AUTO,
    dtype: Annotated[Dtype, option("dtype", "What to compute in.")] = Dtype.AUTO,
    kv_dtype: Annotated[KVDtype, option("kv-dtype", "What to store K and V in; auto: as computed.")] = KVDtype.AUTO,
    block_size: Annotated[int | None, option("block-size", "Tokens per KV block.", min=1, max=1024)] = None,
    num_blocks: Annotated[int | None, option("num-blocks", "KV blocks.", min=1, max=2**24)] = None,
    kv_memory: Annotated[str | None, option("kv-memory", "Memory for KV blocks, as 512MiB or 4GiB.")] = None,
    gpu_memory_utilization: Annotated[
        float, option("gpu-memory-utilization", "Share of the GPU to fill.", min=0.05, max=1.0)
    ] = 0.9,
    max_model_len: Annotated[
        int | None, option("max-model-len", "Longest sequence, prompt and output: 2 tokens at least.", min=2, max=2**24)
    ] = None,
    max_num_seqs: Annotated[int | None, option("max-num-seqs", "Sequences at once.", min=1, max=2**14)] = None,
    max_num_batched_tokens: Annotated[
        int | None, option("max-num-batched-tokens", "Tokens of one step.", min=1, max=2**20)
    ] = None,
    threads: Annotated[int | None, option("threads", "CPU threads; default: all cores.", min=1, max=1024)] = None,
    metrics_host: Annotated[str, option("metrics-host", "Address of the metrics endpoint.")] = "127.0.0.1",
    metrics_port: Annotated[int, option("metrics-port", "Prometheus; 0: none.", min=0, max=65_535)] = 0,
    ready_file: Annotated[Path | None, option("ready-file", "Written once the model is loaded.")] = None,
    parent_pid: Annotated[int | None, option("parent-pid", "End when this is no longer the parent.", min=1)] = None,
    insecure_wire: Annotated[bool, option("insecure-wire", "Allow plain tcp beyond this host.")] = False,
    curve_secret: Annotated[Path | None, option("curve-secret", "Our CURVE certificate, secret.")] = None,
    curve_server: Annotated[Path | None, option("curve-server", "The scheduler's CURVE certificate.")] = None,
    log_format: Annotated[LogFormat, option("log-format", "text, or json: one object a line.")] = LogFormat.TEXT,
    trace_endpoint: Annotated[
        str | None, option("trace-endpoint", "OpenTelemetry collector that takes OTLP over HTTP: http://host:4318.")
    ] = None,
    sim_vocab_size: Annotated[int | None, option("sim-vocab-size", "Simulated vocabulary.", min=1, max=2**24)] = None,
    sim_step_us: Annotated[float, option("sim-step-us", "Simulated time per step.", min=0)] = 0.0,
    sim_token_us: Annotated[float, option("sim-token-us", "... per token computed.", min=0)] = 0.0,
    sim_kv_us: Annotated[float, option("sim-kv-us", "... per stored token read.", min=0)] = 0.0,
    sim_fault: Annotated[
        str, option("sim-fault", "For tests of recovery: KIND:TOKEN; fails when TOKEN is computed: kill:7.")
    ] = "",
) -> None:
    """Computes what a scheduler plans: one step plan in, one step result out."""
    start_logging(logging.INFO, log_format, "executor")
    sizes = SizeSettings(
        block_size=block_size,
        num_blocks=num_blocks,
        kv_memory=None if kv_memory is None else parse_bytes(kv_memory),
        gpu_memory_utilization=gpu_memory_utilization,
        max_model_len=max_model_len,
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=max_num_batched_tokens,
    )
    simulation = SimulationSettings(sim_vocab_size, sim_step_us, sim_token_us, sim_kv_us, sim_fault)
    config = ExecutorConfig(model, backend, dtype, kv_dtype, sizes, simulation, threads, metrics_host, metrics_port)
    from executor_svc.link import LinkSettings
    from executor_svc.serve import serve

    settings = LinkSettings(
        connect,
        connect_beat,
        parent_pid=parent_pid,
        pulse_file=ready_file,
        insecure_wire=insecure_wire,
        curve_secret=curve_secret,
        curve_server=curve_server,
    )
    serve(config, settings, ready_file, trace_endpoint)


def run(arguments: list[str] | None = None) -> int:
    """The exit status. One line says why it is not 0."""
    start_logging(logging.INFO, LogFormat.TEXT, "executor")
    prepare_environment()
    command = typer.main.get_command(app)
    try:
        check_environment(frozenset(str(parameter.envvar) for parameter in command.params if parameter.envvar))
        return command.main(arguments, prog_name="stepwire executor", standalone_mode=False) or 0
    except (StartupError, Refused) as error:
        print(f"stepwire executor: {error}", file=sys.stderr)
        return EXIT_STARTUP
    except UsageError as error:
        print(f"stepwire executor: {error.format_message()}", file=sys.stderr)
        return EXIT_STARTUP
    except ExecutorError as error:
        logger.error("executor_ended reason=%r", str(error))
        return EXIT_LINK_LOST
    except Exception as error:
        logger.critical("executor_failed error=%s message=%r", type(error).__name__, str(error))
        logger.debug("where", exc_info=True)
        return EXIT_BROKEN


if __name__ == "__main__":
    raise SystemExit(run())
