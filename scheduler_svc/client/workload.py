"""Which requests a benchmark sends, and when. Everything follows from a seed; nothing here sends anything.

Prompts are random token ids, so that any model can be asked and no two prompts share more than they are told to.
"""

import csv
import json
import math
import random
from dataclasses import dataclass
from pathlib import Path

from scheduler_svc.errors import StartupError

SPREADS = ("lognormal", "uniform", "fixed")
# Spread of the log-normal lengths: the 95th percentile is about 2.2 times the mean.
SIGMA = 0.6


@dataclass(frozen=True, slots=True)
class Job:
    """One request. `at_s` counts from the start of the run; None: as soon as a stream is free (closed loop)."""

    at_s: float | None
    prompt: list[int]
    num_output: int


@dataclass(frozen=True, slots=True)
class Shape:
    """Means, not limits: `spread` says how lengths vary around them."""

    num_requests: int = 64
    prompt_tokens: int = 128
    output_tokens: int = 128
    spread: str = "lognormal"
    # The first tokens of every prompt, the same for all.
    shared_prefix: int = 0
    # Requests a second; None: closed loop.
    rate: float | None = None
    # Gamma shape of the gaps between arrivals: 1 is Poisson, smaller comes in bursts.
    burstiness: float = 1.0
    seed: int = 0

    def __post_init__(self) -> None:
        _in_range("--requests", self.num_requests, 1, 10_000_000)
        _in_range("--prompt-tokens", self.prompt_tokens, 1, 10_000_000)
        _in_range("--output-tokens", self.output_tokens, 1, 10_000_000)
        _in_range("--shared-prefix", self.shared_prefix, 0, 10_000_000)
        _in_range("--burstiness", self.burstiness, 0.01, 1000)
        if self.rate is not None:
            _in_range("--rate", self.rate, 1e-6, 1e6)
        if self.spread not in SPREADS:
            raise StartupError(f"--spread {self.spread}: choose one of {', '.join(SPREADS)}")


@dataclass(frozen=True, slots=True)
class Room:
    """What the served model allows."""

    vocab_size: int
    max_model_len: int


def make_jobs(shape: Shape, room: Room) -> list[Job]:
    draw = random.Random(shape.seed)
    prefix = _ids(draw, shape.shared_prefix, room)
    jobs, at_s = [], 0.0
    for _ in range(shape.num_requests):
        num_prompt = _length(draw, shape.prompt_tokens, shape.spread)
        num_output = _length(draw, shape.output_tokens, shape.spread)
        prompt = (prefix + _ids(draw, num_prompt, room))[: room.max_model_len - 1]
        jobs.append(Job(at_s if shape.rate else None, prompt, min(num_output, room.max_model_len - len(prompt))))
        if shape.rate:
            at_s += draw.gammavariate(shape.burstiness, 1 / (shape.rate * shape.burstiness))
    return jobs


def read_trace(path: Path, room: Room, seed: int = 0) -> list[Job]:
    """CSV with a header or JSON lines: arrival (seconds), prompt_tokens, output_tokens, optional prefix_group and
    prefix_tokens: requests of one group begin with the same tokens."""
    try:
        text = path.read_text(encoding="utf-8")
        rows = (
            list(csv.DictReader(text.splitlines()))
            if path.suffix == ".csv"
            else [json.loads(line) for line in text.splitlines() if line.strip()]
        )
        jobs = [_traced(row, room, seed, number) for number, row in enumerate(rows)]
    except OSError as error:
        raise StartupError(f"cannot read the trace {path}: {error.strerror}") from None
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise StartupError(
            f"the trace {path} is damaged ({error}): each row needs arrival, prompt_tokens and output_tokens"
        ) from None
    if not jobs:
        raise StartupError(f"the trace {path} is empty")
    return sorted(jobs, key=lambda job: job.at_s or 0.0)


def _traced(row: dict, room: Room, seed: int, number: int) -> Job:
    at_s, num_prompt, num_output = float(row["arrival"]), int(row["prompt_tokens"]), int(row["output_tokens"])
    if at_s < 0 or num_prompt < 1 or num_output < 1 or not math.isfinite(at_s):
        raise ValueError(f"row {number + 1} is out of range")
    shared = min(int(row.get("prefix_tokens") or 0), num_prompt)
    prefix = _ids(random.Random(f"{seed} {row.get('prefix_group')}"), shared, room)
    prompt = prefix + _ids(random.Random(f"{seed} row {number}"), num_prompt - shared, room)
    prompt = prompt[: room.max_model_len - 1]
    return Job(at_s, prompt, min(num_output, room.max_model_len - len(prompt)))


def _ids(draw: random.Random, count: int, room: Room) -> list[int]:
    # Low ids are often control tokens or single bytes; they are no typical text.
    low = min(256, room.vocab_size // 2)
    return [draw.randrange(low, room.vocab_size) for _ in range(count)]


def _length(draw: random.Random, mean: int, spread: str) -> int:
    if spread == "fixed":
        return mean
    if spread == "uniform":
        return draw.randint(1, 2 * mean - 1)
    return max(1, round(draw.lognormvariate(math.log(mean) - SIGMA * SIGMA / 2, SIGMA)))


def _in_range(name: str, value: float, low: float, high: float) -> None:
    if not low <= value <= high:
        raise StartupError(f"{name} {value:,g} is out of range: {low:,.10g} to {high:,.10g}")
