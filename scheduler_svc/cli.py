"""The `stepwire` command. Every command imports what it needs when it runs, so that `stepwire --help` is instant.

A StartupError is one line on stderr and exit status 1; anything else that escapes is a bug and shows its traceback.
"""

import inspect
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.metadata import PackageNotFoundError, version
from typing import Annotated, Any

import typer

from scheduler_svc.bench_command import bench
from scheduler_svc.client.config import DEFAULT_ADDRESS, Access, Address, ApiKey, TlsCa, TlsCert, TlsKey
from scheduler_svc.errors import StartupError
from scheduler_svc.keys_command import keys
from scheduler_svc.plan_command import plan
from scheduler_svc.supervisor.options import OPTIONS, Option
from scheduler_svc.watch_command import top

app = typer.Typer(
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


def _print_version(wanted: bool) -> None:
    if wanted:
        try:
            print(f"stepwire {version('stepwire')}")
        except PackageNotFoundError:
            print("stepwire, run from its sources without being installed")
        raise typer.Exit


@app.callback()
def stepwire(
    _version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Show the version and exit.")
    ] = False,
) -> None:
    """LLM inference over gRPC: a CPU-only scheduler, an executor with the device, stateless frontends."""


def _parameter(option: Option) -> inspect.Parameter:
    """Values stay text here: the configuration checks them, whether they come from here or from the environment."""
    shown = f" [{option.default}]" if option.default else ""
    help_text = f"{option.help}{shown}"
    if option.kind == "flag":
        names = [f"--{option.name}/--{option.off_name}", *([f"-{option.short}"] if option.short else [])]
        declared = typer.Option(*names, help=help_text)
        return _keyword(option.key, Annotated[bool | None, declared])
    metavar = option.kind if "|" in option.kind else option.kind.upper()
    return _keyword(
        option.key, Annotated[str | None, typer.Option(f"--{option.name}", metavar=metavar, help=help_text)]
    )


def _keyword(name: str, annotation: Any) -> inspect.Parameter:
    return inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=None, annotation=annotation)


def serve(**arguments: str | bool | None) -> None:
    """Serve a model: every service, on this host.

    Scheduler, executor and frontends are started, watched and, when one dies, started again. Ctrl-C drains.
    Every option can also be an environment variable: --max-waiting is STEPWIRE_MAX_WAITING.
    """
    from scheduler_svc.supervisor.config import read_serve_config
    from scheduler_svc.supervisor.model import resolve
    from scheduler_svc.supervisor.serve import run

    named = arguments.pop(SERVED_MODEL)
    if named is not None and arguments["model"] not in (None, named):
        raise StartupError(f"serve was told two models, {named!r} and --model {arguments['model']!r}: give one")
    arguments["model"] = named or arguments["model"]
    raise typer.Exit(run(read_serve_config(arguments), resolve))


# The table of options is the signature, after the model, which needs no name.
SERVED_MODEL = "served"
_positional = inspect.Parameter(
    SERVED_MODEL,
    inspect.Parameter.POSITIONAL_OR_KEYWORD,
    default=None,
    annotation=Annotated[str | None, typer.Argument(metavar="MODEL", help="The same as --model.")],
)
serve.__signature__ = inspect.Signature(  # type: ignore[attr-defined]
    [_positional, *(_parameter(option) for option in OPTIONS)]
)
serve.__annotations__ = {}
app.command()(serve)


def _become(module: str, arguments: list[str]) -> None:
    """This process becomes the service: signals, pid and exit status are its own."""
    os.execv(sys.executable, [sys.executable, "-m", module, *arguments])


@app.command(context_settings=PASS_ON)
def frontend(context: typer.Context) -> None:
    """One frontend alone (containers, other hosts)."""
    _become("scheduler_svc.frontend", context.args)


@app.command(context_settings=PASS_ON)
def scheduler(context: typer.Context) -> None:
    """The scheduler alone."""
    _become("scheduler_svc", context.args)


@app.command(context_settings=PASS_ON)
def executor(context: typer.Context) -> None:
    """One executor alone."""
    _become("executor_svc", context.args)


def _whole(name: str, high: int, help: str) -> Any:
    """An option for a field of the API that holds 0..high; what of it the model allows is for the server to say."""

    def check(value: int | None) -> int | None:
        if value is not None and not 0 <= value <= high:
            raise typer.BadParameter(f"{value} is not within 0..{high}")
        return value

    return typer.Option(name, callback=check, help=help)


MaxTokens = Annotated[int | None, _whole("--max-tokens", 2**32 - 1, "Tokens of output; unset: all that fit.")]
Temperature = Annotated[
    float | None, typer.Option("--temperature", min=0, max=2, help="0: greedy. Unset: the model's.")
]
Seed = Annotated[int | None, _whole("--seed", 2**64 - 1, "Draw the same again.")]
TopP = Annotated[float | None, typer.Option("--top-p", min=0, max=1, help="Draw from the likeliest of this share.")]
TopK = Annotated[int | None, _whole("--top-k", 2**32 - 1, "Draw from this many; 0: from all.")]
INTERRUPTED = 130


@contextmanager
def _in_utf8(what: str) -> Iterator[None]:
    try:
        yield
    except UnicodeError:
        raise StartupError(f"{what} is not text in UTF-8") from None


def _write(text: str) -> None:
    print(text, end="", flush=True)


@app.command()
def generate(
    prompt: Annotated[
        str | None, typer.Argument(help="The text to go on from; - or nothing: read it from stdin.")
    ] = None,
    *,
    address: Address = DEFAULT_ADDRESS,
    max_tokens: MaxTokens = None,
    temperature: Temperature = None,
    top_p: TopP = None,
    top_k: TopK = None,
    seed: Seed = None,
    stop: Annotated[list[str] | None, typer.Option("--stop", help="End before this string; may be repeated.")] = None,
    ignore_eos: Annotated[bool, typer.Option("--ignore-eos", help="Go on after the end of sequence.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object per message.")] = False,
    api_key: ApiKey = "",
    tls_ca: TlsCa = "",
    tls_cert: TlsCert = "",
    tls_key: TlsKey = "",
) -> None:
    """One streamed completion. Exit status: 0, 1 for an error, 130 after Ctrl-C."""
    from protos.stepwire.inference.v1 import inference_pb2 as pb
    from scheduler_svc.client.generate import generate

    if prompt is None and sys.stdin.isatty():
        raise StartupError("generate needs a prompt: give it as an argument or on stdin")
    with _in_utf8("the prompt, or --stop,"):
        request = pb.GenerateRequest(
            text=sys.stdin.read() if prompt in (None, "-") else prompt,
            sampling=pb.SamplingParams(temperature=temperature, top_p=top_p, top_k=top_k, seed=seed),
            stopping=pb.StoppingCriteria(max_tokens=max_tokens, stop=stop or (), ignore_eos=ignore_eos),
        )
    try:
        generate(address, request, _write, as_json=as_json, access=Access(api_key, tls_ca, tls_cert, tls_key))
    except KeyboardInterrupt:
        raise typer.Exit(INTERRUPTED) from None
    except BrokenPipeError:
        # The reader (`| head`) has had enough. Python would complain about it again when it flushes at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


@app.command()
def chat(
    *,
    address: Address = DEFAULT_ADDRESS,
    system: Annotated[str, typer.Option("--system", help="What the model is told first.")] = "",
    max_tokens: MaxTokens = None,
    temperature: Temperature = None,
    top_p: TopP = None,
    top_k: TopK = None,
    seed: Seed = None,
    stats: Annotated[bool, typer.Option("--stats", help="Show time to first token and tokens/s.")] = False,
    api_key: ApiKey = "",
    tls_ca: TlsCa = "",
    tls_cert: TlsCert = "",
    tls_key: TlsKey = "",
) -> None:
    """A conversation in the terminal, streaming."""
    # Importing it gives input() line editing and a history.
    import readline  # noqa: F401

    from protos.stepwire.inference.v1 import inference_pb2 as pb
    from scheduler_svc.client.chat import chat

    with _in_utf8("--system"):
        template = pb.ChatRequest(
            sampling=pb.SamplingParams(temperature=temperature, top_p=top_p, top_k=top_k, seed=seed),
            stopping=pb.StoppingCriteria(max_tokens=max_tokens),
            messages=[pb.ChatMessage(role="system", content=system)] if system else [],
        )
    chat(address, template, input, _write, stats=stats, access=Access(api_key, tls_ca, tls_cert, tls_key))


@app.command()
def health(
    *,
    address: Address = DEFAULT_ADDRESS,
    service: Annotated[str, typer.Option("--service", help="A service's full name; empty: the whole server.")] = "",
    metrics: Annotated[
        str, typer.Option("--metrics", metavar="HOST:PORT", help="Instead: does a process answer on its metrics port?")
    ] = "",
    live: Annotated[bool, typer.Option("--live", help="Only whether the frontend lives, for liveness probes.")] = False,
    timeout: Annotated[float, typer.Option("--timeout", min=0.1, max=600, help="Seconds to wait.")] = 5.0,
    api_key: ApiKey = "",
    tls_ca: TlsCa = "",
    tls_cert: TlsCert = "",
    tls_key: TlsKey = "",
) -> None:
    """Exit status 0 when the frontend is SERVING.

    SERVING: a request would be computed. With --live: it answers at all. With --metrics: that process, whichever
    service it is, answers on its metrics port.
    """
    if metrics:
        from scheduler_svc.client.alive import answers_metrics

        print(answers_metrics(metrics, timeout))
        return
    from scheduler_svc.client.health import LIVENESS, ask

    service = LIVENESS if live else service
    answer, hint = ask(address, service, timeout, Access(api_key, tls_ca, tls_cert, tls_key))
    print(answer)
    if hint:
        print(f"stepwire: {hint}", file=sys.stderr)
    raise typer.Exit(0 if answer == "SERVING" else 1)


app.add_typer(keys, name="keys")
app.command()(bench)
app.command()(plan)
app.command()(top)


@app.command()
def replay(
    file: Annotated[str, typer.Argument(help="A journal: serve --journal FILE wrote it, and FILE.1 before it.")],
    *,
    until: Annotated[str, typer.Option("--until", metavar="[EPOCH:]STEP", help="Stop after this step.")] = "",
    story: Annotated[
        str, typer.Option("--story", metavar="REQUEST", help="Show what happened to this request, by EPOCH:STEP.")
    ] = "",
) -> None:
    """Run the core over a journal again; compare every plan.

    Exit status 1 when a plan differs from the one that was made: the first that does is named. Also for a damaged
    journal, and when the step or the request that was asked for is not in it.
    """
    from pathlib import Path

    from scheduler_svc.journal.replay import Difference, Replay, count, parse_position, report

    run = Replay(Path(file))
    try:
        run.run(parse_position(until) if until else None)
    except Difference as difference:
        raise StartupError(f"after {count(run.num_plans, 'plan')} made again the same: {difference}") from None
    finally:
        for line in run.story(story) if story else ():
            print(line)
    print("\n".join(report(run)))
    if run.troubles:
        raise StartupError("; ".join(run.troubles))


model = typer.Typer(help="The model cache: $STEPWIRE_CACHE, else the XDG cache directory.", no_args_is_help=True)
app.add_typer(model, name="model")
ModelSpec = Annotated[str, typer.Argument(help="A directory, a .gguf file or a hub id; nothing: the default model.")]


@model.command()
def fetch(
    spec: ModelSpec = "",
    link: Annotated[str, typer.Option("--link", metavar="PATH", help="Make this symbolic link point to it.")] = "",
) -> None:
    """Get what serving a model needs; print its directory."""
    from pathlib import Path

    from scheduler_svc.models.atomic import point_link
    from scheduler_svc.models.progress import RichProgress
    from scheduler_svc.models.store import resolve_model

    directory = resolve_model(spec, RichProgress())
    if link:
        point_link(Path(link), directory)
    print(directory)


@model.command(name="list")
def list_cached() -> None:
    """The models in the cache: name, size, directory."""
    from scheduler_svc.models.store import list_models, models_directory

    found = list_models()
    if not found:
        print(f"no models in {models_directory()} yet: `stepwire model fetch` gets the default one", file=sys.stderr)
    for cached in found:
        damaged = "" if cached.whole else "  (damaged: `stepwire model fetch` repairs it)"
        print(f"{cached.name}  {cached.num_bytes / 1e6:.0f} MB  {cached.path}{damaged}")


@model.command()
def path(spec: ModelSpec = "") -> None:
    """Print a model's directory; status 1: not there yet."""
    from scheduler_svc.models.store import model_path

    directory = model_path(spec)
    if directory is None:
        raise StartupError(f"{spec or 'the default model'} is not here yet: stepwire model fetch {spec}".rstrip())
    print(directory)


if __name__ == "__main__":
    main()
