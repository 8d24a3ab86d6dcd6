"""`stepwire plan`: options and what it prints. The arithmetic is in planning/, the measuring in client/calibrate."""

import json
import sys
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from scheduler_svc.client.config import Access, ApiKey, TlsCa, TlsCert, TlsKey
from scheduler_svc.errors import StartupError

if TYPE_CHECKING:
    from scheduler_svc.core.contract import Geometry
    from scheduler_svc.planning.capacity import Plan, Point
    from scheduler_svc.planning.step_model import StepModel

# Of a device's memory, as for serve: what the weights leave of that share is for the KV cache.
MEMORY_SHARE = 0.9
DEFAULT_BUDGET = 2048
DEFAULT_BLOCK_SIZE = 16
FLOOD = "flood"


def plan(
    *,
    model: Annotated[str, typer.Option("--model", help="A directory, a .gguf file or a hub id.")] = "",
    device: Annotated[str, typer.Option("--device", help="h200|h100|a100|l40s|l4|cpu2: by the data sheet.")] = "",
    calibrate: Annotated[
        str, typer.Option("--calibrate", metavar="HOST:PORT", help="Measure an idle frontend: 15 s, slow ones 30.")
    ] = "",
    step_us: Annotated[str, typer.Option("--step-us", help="BASE,ROW,TOKEN,STORED: the step time is known.")] = "",
    kv_memory: Annotated[str, typer.Option("--kv-memory", help="As for serve, as in 4GiB; else what is left.")] = "",
    dtype: Annotated[str, typer.Option("--dtype", help="Of the weights.")] = "bfloat16",
    kv_dtype: Annotated[str, typer.Option("--kv-dtype", help="Of the KV cache; else as the weights.")] = "",
    prompt_tokens: Annotated[int, typer.Option("--prompt-tokens", min=1, help="Mean length.")] = 512,
    output_tokens: Annotated[int, typer.Option("--output-tokens", min=1, help="Mean length.")] = 128,
    slo: Annotated[str, typer.Option("--slo", help="What 90 % of the requests must meet.")] = "ttft:2s itl:100ms",
    max_num_seqs: Annotated[int, typer.Option("--max-num-seqs", min=1, max=16384, help="As for serve.")] = 128,
    budget: Annotated[int, typer.Option("--max-num-batched-tokens", min=0, help="0: the best one.")] = 0,
    block_size: Annotated[int, typer.Option("--block-size", min=0, max=1024, help="0: the best one.")] = 0,
    as_json: Annotated[bool, typer.Option("--json", help="Print the plan as JSON.")] = False,
    api_key: ApiKey = "",
    tls_ca: TlsCa = "",
    tls_cert: TlsCert = "",
    tls_key: TlsKey = "",
) -> None:
    """How many users fit, and are served in time.

    Says at which rate the objectives hold, where it saturates, and which settings to choose.

    The real scheduler runs in virtual time against a step time: measured (--calibrate), given (--step-us), or
    estimated from a data sheet (--device), which is right within a factor of two at best.
    """
    from scheduler_svc.client.measure import parse_slo
    from scheduler_svc.planning.capacity import Demand, make_plan

    if sum(map(bool, (device, calibrate, step_us))) != 1:
        raise StartupError("plan needs to know how long a step takes: give one of --calibrate, --device, --step-us")
    if dtype not in DTYPES or (kv_dtype and kv_dtype not in DTYPES):
        raise StartupError(f"--dtype {dtype} or --kv-dtype {kv_dtype}: choose of {', '.join(DTYPES)}")
    demand = Demand(prompt_tokens, output_tokens, parse_slo(slo))
    wanted = {"max_num_seqs": max_num_seqs, "budget": budget or DEFAULT_BUDGET}
    wanted["block_size"] = block_size or DEFAULT_BLOCK_SIZE
    if calibrate:
        about, geometry, step = _measured(calibrate, Access(api_key, tls_ca, tls_cert, tls_key))
    else:
        about, geometry, step = _described(model, device, step_us, kv_memory, dtype, kv_dtype or dtype, wanted)
    found = make_plan(demand, geometry, step, choose_budget=not budget, choose_block_size=not block_size, say=_say)
    _say("")
    if as_json:
        print(json.dumps({"about": about, "step": asdict(step), "plan": _json(found)}, indent=1))
    else:
        _show(about, demand.slo, step, found, f"{prompt_tokens} in, {output_tokens} out")


DTYPES = ("float32", "bfloat16", "float16", "int8", "fp8")


def _measured(address: str, access: Access) -> "tuple[dict[str, Any], Geometry, StepModel]":
    from scheduler_svc.client.calibrate import run

    measured = run(address, _say, access=access)
    about = {"what": f"{measured.served.model}, {measured.served.dtype} on {measured.served.device}, measured"}
    return about, measured.geometry, measured.step


def _described(
    model: str, device: str, step_us: str, kv_memory: str, dtype: str, kv_dtype: str, wanted: dict[str, int]
) -> "tuple[dict[str, Any], Geometry, StepModel]":
    from scheduler_svc.planning.capacity import geometry_for
    from scheduler_svc.planning.sizes import read_size
    from scheduler_svc.planning.step_model import DEVICES, estimate, parse_step_us

    size = read_size(_config_directory(model))
    if device and device not in DEVICES:
        raise StartupError(f"--device {device!r} is not one of {', '.join(DEVICES)}: --step-us takes any other")
    if not device and not kv_memory:
        raise StartupError("--step-us says nothing of memory: give --kv-memory too")
    kv_bytes = parse_size(kv_memory)
    if kv_bytes is None:
        kv_bytes = MEMORY_SHARE * DEVICES[device].memory_gib * 2**30 - size.weight_bytes(dtype)
    if kv_bytes <= 0:
        raise StartupError(f"{size.name} needs {size.weight_bytes(dtype) / 2**30:.1f} GiB: more than {device} has")
    geometry = geometry_for(
        kv_bytes,
        size.kv_bytes_per_token(kv_dtype),
        wanted["block_size"],
        size.vocab_size,
        max_num_seqs=wanted["max_num_seqs"],
        budget=wanted["budget"],
        max_model_len=size.max_model_len,
    )
    step = estimate(DEVICES[device], size, dtype, kv_dtype) if device else parse_step_us(step_us)
    about = {
        "what": f"{size.name}, {dtype} on {device or 'a device of this step time'}",
        "parameters": size.num_params,
        "weight_bytes": size.weight_bytes(dtype),
        "kv_bytes_per_token": size.kv_bytes_per_token(kv_dtype),
    }
    return about, geometry, step


def _config_directory(model: str) -> Path:
    """A plan needs the configuration alone: no weights are fetched for it."""
    from scheduler_svc.models.hub import fetch_from_hub, is_hub_id
    from scheduler_svc.models.progress import silent
    from scheduler_svc.models.store import is_default, resolve_model

    path = Path(model).expanduser()
    if model and path.is_dir():
        return path
    if not path.exists() and is_hub_id(model) and not is_default(model):
        return fetch_from_hub(model, silent, ["config.json"])
    return resolve_model(model)


def parse_size(text: str) -> float | None:
    """ "4GiB" -> bytes; None for an empty text. Units count by 1024, as for serve."""
    from scheduler_svc.supervisor.options import SIZE

    if not text:
        return None
    plain = text.strip().lower()
    if not SIZE.fullmatch(plain):
        raise StartupError(f"--kv-memory {text!r} is not a size: write bytes or a number with a unit, as in 4GiB")
    digits = plain.rstrip("bkmgti ")
    unit = next((c for c in plain[len(digits) :] if c in "kmgt"), "")
    return float(digits) * 1024 ** ("kmgt".index(unit) + 1 if unit else 0)


def _show(about: "dict[str, Any]", slo: dict[str, float], step: "StepModel", found: "Plan", lengths: str) -> None:
    from rich.box import SIMPLE_HEAD
    from rich.console import Console
    from rich.table import Table

    geometry = found.geometry
    slots = geometry.num_blocks * geometry.block_size
    print(about["what"])
    if "parameters" in about:
        weights, each = about["weight_bytes"] / 2**30, about["kv_bytes_per_token"] / 1024
        print(f"  {about['parameters'] / 1e6:,.0f} M parameters, {weights:.2f} GiB; {each:.1f} KiB of KV a token")
    print(
        f"  a step: {step.base_us / 1000:.2f} ms + {step.row_us:.1f} us a row + {step.token_us:.1f} us a prompt token"
        f" + {step.stored_us:.3f} us a token stored"
    )
    print(f"  the KV cache: {slots:,} tokens; it holds at once")
    by_length = [f"{count:,} of {length:,}" for length, count in found.by_length.items()]
    for start in range(0, len(by_length), 4):
        print("    " + ", ".join(by_length[start : start + 4]))
    table = Table(box=SIMPLE_HEAD, padding=(0, 1, 0, 0), pad_edge=False)
    for heading in ("sent/s", "served", "in time", "users", "tok/s", "TTFT p50", "p99", "ITL p50", "p99", "KV"):
        table.add_column(heading, justify="right")
    points = sorted([*found.around, *([found.holds] if found.holds else [])], key=lambda point: point.rate)
    for point in points:
        table.add_row(*_cells(point, f"{point.rate:.3g}"))
    table.add_row(*_cells(found.saturated, FLOOD))
    print(f"\n{lengths}, log-normal; in time: {' '.join(f'{n}:{limit:g}ms' for n, limit in slo.items()) or 'anything'}")
    Console().print(table)
    if any(not point.is_served for point in points):
        print("grows: more is sent than is served; the queue grows, and with time nobody is in time.")
    print(
        f"flood: {found.num_clients:,} clients, each sends its next request when one is answered; some always wait.\n"
    )
    print(_advice(found))


def _cells(point: "Point", rate: str) -> list[str]:
    times = [f"{value:,.0f}" for value in (point.ttft_p50, point.ttft_p99, point.itl_p50, point.itl_p99)]
    in_time = f"{100 * point.in_time:.0f} %" if point.is_served or rate == FLOOD else "grows"
    shares = f"{point.served_per_s:.3g}", in_time, f"{point.num_running:.1f}", f"{point.tokens_per_s:,.0f}"
    return [rate, *shares, *times, f"{100 * point.blocks_used:.0f} %"]


def _advice(found: "Plan") -> str:
    geometry, holds = found.geometry, found.holds
    lines = [
        f"It saturates at {found.saturated.served_per_s:.3g} requests/s, {found.saturated.tokens_per_s:,.0f} tokens/s."
    ]
    if holds is None:
        lines.insert(
            0, "No rate meets these objectives for nine requests of ten: ask for less, or take a faster device."
        )
    else:
        lines.insert(
            0,
            f"It holds {holds.rate:.3g} requests/s, {holds.num_running:.1f} users at once; "
            f"memory alone would hold {found.users_in_memory:,}.",
        )
        budget, size = geometry.max_num_batched_tokens, geometry.block_size
        lines.append(f"Choose --max-num-batched-tokens {budget} --block-size {size} --num-blocks {geometry.num_blocks}")
        lines[-1] += f" --max-num-seqs {geometry.max_num_seqs}."
    return "\n".join(lines)


def _json(found: "Plan") -> dict[str, Any]:
    plain = asdict(found)
    plain["saturated"]["rate"] = None  # JSON has no infinity
    return plain


def _say(text: str) -> None:
    """What it is doing, on a terminal's own line."""
    if sys.stderr.isatty():
        print(f"\r\x1b[K{text}", end="", file=sys.stderr, flush=True)
