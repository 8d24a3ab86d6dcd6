"""The `stepwire` command. Every command imports what it needs when it runs, so that `stepwire --help` is instant.

A StartupError is one line on stderr and exit status 1; anything else that escapes is a bug and shows its traceback.
"""

import inspect
import os
import sys
from typing import Annotated, Any

import typer

from scheduler_svc.errors import StartupError
from scheduler_svc.supervisor.options import OPTIONS, Option

app = typer.Typer(
    help="LLM inference over gRPC: a CPU-only scheduler, an executor with the device, stateless frontends.",
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
)
PASS_ON = {"allow_extra_args": True, "ignore_unknown_options": True, "help_option_names": []}


def main() -> None:
    try:
        app(prog_name="stepwire")
    except StartupError as error:
        print(f"stepwire: {error}", file=sys.stderr)
        raise SystemExit(1) from None


def _parameter(option: Option) -> inspect.Parameter:
    """Values stay text here: the configuration checks them, whether they come from here or from the environment."""
    shown = f" [{option.default}]" if option.default else ""
    help_text = f"{option.help}{shown}"
    if option.kind == "flag":
        declared = typer.Option(f"--{option.name}/--{option.off_name}", help=help_text)
        return _keyword(option.key, Annotated[bool | None, declared])
    metavar = option.kind if "|" in option.kind else option.kind.upper()
    return _keyword(
        option.key, Annotated[str | None, typer.Option(f"--{option.name}", metavar=metavar, help=help_text)]
    )


def _keyword(name: str, annotation: Any) -> inspect.Parameter:
    return inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=None, annotation=annotation)


def serve(**arguments: str | bool | None) -> None:
    """Everything on this host, supervised: scheduler, executor and frontends.

    Every option can also be an environment variable: --max-waiting is STEPWIRE_MAX_WAITING.
    """
    from scheduler_svc.supervisor.config import read_serve_config
    from scheduler_svc.supervisor.model import resolve
    from scheduler_svc.supervisor.serve import run

    raise typer.Exit(run(read_serve_config(arguments), resolve))


# The table of options is the signature.
serve.__signature__ = inspect.Signature([_parameter(option) for option in OPTIONS])  # type: ignore[attr-defined]
serve.__annotations__ = {}
app.command()(serve)


def _become(module: str, arguments: list[str]) -> None:
    """This process becomes the service: signals, pid and exit status are its own."""
    os.execv(sys.executable, [sys.executable, "-m", module, *arguments])


@app.command(context_settings=PASS_ON)
def frontend(context: typer.Context) -> None:
    """One frontend, for containers and other hosts (--help: its options)."""
    _become("scheduler_svc.frontend", context.args)


@app.command(context_settings=PASS_ON)
def scheduler(context: typer.Context) -> None:
    """The scheduler alone (--help: its options)."""
    _become("scheduler_svc", context.args)


@app.command(context_settings=PASS_ON)
def executor(context: typer.Context) -> None:
    """One executor alone (--help: its options)."""
    _become("executor_svc", context.args)


Address = Annotated[str, typer.Option("--address", metavar="HOST:PORT", help="A frontend.")]
MaxTokens = Annotated[int | None, typer.Option("--max-tokens", min=0, help="Tokens of output; unset: all that fit.")]
Temperature = Annotated[
    float | None, typer.Option("--temperature", min=0, max=2, help="0: greedy. Unset: the model's.")
]
Seed = Annotated[int | None, typer.Option("--seed", min=0, max=2**64 - 1, help="Draw the same again.")]
DEFAULT_ADDRESS = "127.0.0.1:50051"


def _write(text: str) -> None:
    print(text, end="", flush=True)


@app.command()
def generate(
    prompt: Annotated[str, typer.Argument(help="The text to go on from; -: read it from stdin.")],
    *,
    address: Address = DEFAULT_ADDRESS,
    max_tokens: MaxTokens = None,
    temperature: Temperature = None,
    seed: Seed = None,
    stop: Annotated[list[str] | None, typer.Option("--stop", help="End before this string; may be repeated.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object per message.")] = False,
) -> None:
    """One streamed completion."""
    from protos.stepwire.inference.v1 import inference_pb2 as pb
    from scheduler_svc.client.generate import generate

    request = pb.GenerateRequest(
        text=sys.stdin.read() if prompt == "-" else prompt,
        sampling=pb.SamplingParams(temperature=temperature, seed=seed),
        stopping=pb.StoppingCriteria(max_tokens=max_tokens, stop=stop or ()),
    )
    generate(address, request, _write, as_json=as_json)


@app.command()
def chat(
    *,
    address: Address = DEFAULT_ADDRESS,
    system: Annotated[str, typer.Option("--system", help="What the model is told first.")] = "",
    max_tokens: MaxTokens = None,
    temperature: Temperature = None,
    seed: Seed = None,
) -> None:
    """A conversation in the terminal, streaming."""
    from protos.stepwire.inference.v1 import inference_pb2 as pb
    from scheduler_svc.client.chat import chat

    template = pb.ChatRequest(
        sampling=pb.SamplingParams(temperature=temperature, seed=seed),
        stopping=pb.StoppingCriteria(max_tokens=max_tokens),
        messages=[pb.ChatMessage(role="system", content=system)] if system else [],
    )
    chat(address, template, input, _write)


@app.command()
def health(
    *,
    address: Address = DEFAULT_ADDRESS,
    service: Annotated[str, typer.Option("--service", help="A service's full name; empty: the whole server.")] = "",
    timeout: Annotated[float, typer.Option("--timeout", min=0.1, max=600, help="Seconds to wait.")] = 5.0,
) -> None:
    """Exit status 0 when the frontend is SERVING."""
    from scheduler_svc.client.health import status

    answer = status(address, service, timeout)
    print(answer)
    raise typer.Exit(0 if answer == "SERVING" else 1)


model = typer.Typer(help="The model cache: $STEPWIRE_CACHE, else the XDG cache directory.", no_args_is_help=True)
app.add_typer(model, name="model")
ModelSpec = Annotated[str, typer.Argument(help="A directory, a .gguf file or a hub id; nothing: the default model.")]


@model.command()
def fetch(spec: ModelSpec = "") -> None:
    """Fetch and convert what serving the model needs, and print its directory."""
    from scheduler_svc.models.progress import RichProgress
    from scheduler_svc.models.store import resolve_model

    print(resolve_model(spec, RichProgress()))


@model.command(name="list")
def list_cached() -> None:
    """The models in the cache: name, size, directory."""
    from scheduler_svc.models.store import list_models

    for cached in list_models():
        damaged = "" if cached.whole else "  (damaged: `stepwire model fetch` repairs it)"
        print(f"{cached.name}  {cached.num_bytes / 1e6:.0f} MB  {cached.path}{damaged}")


@model.command()
def path(spec: ModelSpec = "") -> None:
    """Print the model's directory; exit status 1 when it is not there yet."""
    from scheduler_svc.models.store import model_path

    directory = model_path(spec)
    if directory is None:
        raise StartupError(f"{spec or 'the default model'} is not here yet: stepwire model fetch {spec}".rstrip())
    print(directory)


if __name__ == "__main__":
    main()
