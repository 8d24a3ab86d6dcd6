"""`stepwire bench`: its options. What it does is in client/bench*.py, load*.py, workload.py and measure.py."""

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from scheduler_svc.client.config import DEFAULT_ADDRESS, Access, ApiKey, TlsCa, TlsCert, TlsKey
from scheduler_svc.errors import StartupError

INTERRUPTED = 130
if TYPE_CHECKING:
    from scheduler_svc.client.bench import Bench

APIS = ("auto", "grpc", "openai", "openai-chat")

TargetsOption = Annotated[
    str,
    typer.Option(
        "--targets",
        "--address",
        envvar="STEPWIRE_ADDRESS",
        help="HOST:PORT of frontends or http://HOST:PORT of OpenAI servers, with commas; NAME=... names one.",
    ),
]
ApiOption = Annotated[
    str, typer.Option("--api", help=f"{'|'.join(APIS)}; auto: by the address, completions over HTTP.")
]
StreamsOption = Annotated[int, typer.Option("--streams", min=1, max=65536, help="Closed loop: requests at once.")]
RateOption = Annotated[
    str, typer.Option("--rate", help="Open loop: requests a second, Poisson; several (1,2,4) are a sweep.")
]
BurstinessOption = Annotated[float, typer.Option("--burstiness", help="Below 1: arrivals come in bursts.")]
TraceOption = Annotated[
    str, typer.Option("--trace", help="CSV or JSON lines: arrival, prompt_tokens, output_tokens, prefix_group, ...")
]
RequestsOption = Annotated[int, typer.Option("--requests", help="How many.")]
DurationOption = Annotated[
    float | None,
    typer.Option(
        "--duration",
        min=0.1,
        max=86400,
        help="Open loop: seconds in which requests come; the last answer is waited for.",
    ),
]
TurnsOption = Annotated[int, typer.Option("--turns", help="Requests of one conversation, one after another.")]
PromptTokensOption = Annotated[int, typer.Option("--prompt-tokens", help="Mean length.")]
OutputTokensOption = Annotated[int, typer.Option("--output-tokens", help="Mean length.")]
SpreadOption = Annotated[str, typer.Option("--spread", help="lognormal|uniform|fixed")]
SharedPrefixOption = Annotated[int, typer.Option("--shared-prefix", help="First tokens that prompts share.")]
PrefixGroupsOption = Annotated[int, typer.Option("--prefix-groups", help="How many such prefixes there are.")]
PrefixShareOption = Annotated[float, typer.Option("--prefix-share", help="Share of the prompts that have one.")]
PromptsOption = Annotated[str, typer.Option("--prompts", help="ids|text; text: for servers that take no ids.")]
SeedOption = Annotated[int, typer.Option("--seed", help="Of lengths, prompts and arrivals.")]
TemperatureOption = Annotated[float, typer.Option("--temperature", min=0, max=2, help="0: greedy.")]
SloOption = Annotated[
    str, typer.Option("--slo", help='For goodput: "ttft:200ms itl:50ms"; itl: by the p99 of a request\'s gaps.')
]
ModelOption = Annotated[str, typer.Option("--model", help="OpenAI: the model's name; else the first listed.")]
HttpKeyOption = Annotated[str, typer.Option("--http-key", help="OpenAI: sent as a bearer token.")]
VocabSizeOption = Annotated[int, typer.Option("--vocab-size", min=512, help="OpenAI: ids are below this.")]
ExtraBodyOption = Annotated[str, typer.Option("--extra-body", help="OpenAI: JSON fields for every request.")]
JsonFileOption = Annotated[str, typer.Option("--json", help="Write every figure and request here.")]
PictureOption = Annotated[
    str, typer.Option("--picture", help="Draw to FILE.png or .svg: a sweep, targets side by side, or a timeline.")
]
SelfTestOption = Annotated[bool, typer.Option("--self-test", help="How many tokens/s this client can receive.")]


def bench(
    *,
    targets: TargetsOption = DEFAULT_ADDRESS,
    api: ApiOption = "auto",
    streams: StreamsOption = 16,
    rate: RateOption = "",
    burstiness: BurstinessOption = 1.0,
    trace: TraceOption = "",
    requests: RequestsOption = 64,
    duration: DurationOption = None,
    turns: TurnsOption = 1,
    prompt_tokens: PromptTokensOption = 128,
    output_tokens: OutputTokensOption = 128,
    spread: SpreadOption = "lognormal",
    shared_prefix: SharedPrefixOption = 0,
    prefix_groups: PrefixGroupsOption = 1,
    prefix_share: PrefixShareOption = 1.0,
    prompts: PromptsOption = "ids",
    seed: SeedOption = 0,
    temperature: TemperatureOption = 0.0,
    slo: SloOption = "",
    model: ModelOption = "",
    http_key: HttpKeyOption = "",
    vocab_size: VocabSizeOption = 32_000,
    extra_body: ExtraBodyOption = "",
    json_file: JsonFileOption = "",
    picture: PictureOption = "",
    self_test: SelfTestOption = False,
    api_key: ApiKey = "",
    tls_ca: TlsCa = "",
    tls_cert: TlsCert = "",
    tls_key: TlsKey = "",
) -> None:
    """Put load on frontends or OpenAI servers and measure.

    Throughput, TTFT, ITL, TPOT, E2E and goodput; several targets get the same load in turn, with ratios. A core
    of this client received 9,000 messages a second over gRPC and 20,000 over HTTP; --self-test says how many here.
    """
    from scheduler_svc.client.bench import Bench, parse_rates
    from scheduler_svc.client.load import Sending
    from scheduler_svc.client.load_openai import OpenAI
    from scheduler_svc.client.measure import parse_slo
    from scheduler_svc.client.workload import Shape

    if self_test:
        _self_test()
        return
    _one_of("--api", api, APIS)
    _one_of("--prompts", prompts, ("ids", "text"))
    rates = parse_rates(rate)
    if duration is not None and not rates:
        raise StartupError("--duration is for an open loop: give --rate too, or --requests instead")
    shape = Shape(requests, prompt_tokens, output_tokens, spread, shared_prefix, prefix_groups, prefix_share, turns)
    shape = replace(shape, rate=rates[0] if rates else None, burstiness=burstiness, seed=seed)
    is_chat = api == "openai-chat"
    plan = Bench(
        targets=[target.strip() for target in targets.split(",") if target.strip()],
        shape=shape,
        sending=Sending(streams, temperature, as_text=prompts == "text" or is_chat),
        slo=parse_slo(slo),
        trace=Path(trace) if trace else None,
        rates=rates,
        duration_s=duration,
        openai=OpenAI(is_chat, model, http_key, vocab_size, extra_body),
        api=api,
        json_file=Path(json_file) if json_file else None,
        picture=Path(picture) if picture else None,
        access=Access(api_key, tls_ca, tls_cert, tls_key),
    )
    _run(plan)


def _run(plan: "Bench") -> None:
    from scheduler_svc.client.bench import bench as run

    try:
        results = run(plan)
    except KeyboardInterrupt:
        raise typer.Exit(INTERRUPTED) from None
    if any(result["summary"]["errors"] for result in results):
        raise typer.Exit(1)


def _self_test() -> None:
    from scheduler_svc.client.bench_self import self_test

    for test in self_test():
        print(f"{test.api}: {test.tokens_per_core_s:,.0f} messages of one token a second and core")


def _one_of(name: str, value: str, allowed: tuple[str, ...]) -> None:
    if value not in allowed:
        raise StartupError(f"{name} {value!r} is not one of {', '.join(allowed)}")
