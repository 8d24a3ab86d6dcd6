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


# What ids are written as where a server takes text only. Most tokenizers have each of them, with the space before it,
# as one token.
_COMMON = (
    "time year people way day man thing woman life child world school state family student group country problem hand "
    "part place case week company system program question work government number night point home water room mother "
    "area money story fact month lot right study book eye job word business issue side kind head house service friend "
    "father power hour game line end member law car city community name president team minute idea body"
)
WORDS = tuple(_COMMON.split())


@dataclass(frozen=True, slots=True)
class Turn:
    """A further turn of a conversation: what is said, and how long the answer is to be."""

    said: list[int]
    num_output: int


@dataclass(frozen=True, slots=True)
class Job:
    """One request, or with `later` turns one conversation: each turn is sent once the answer before it has ended.

    `at_s` counts from the start of the run; None: as soon as a stream is free (closed loop).
    """

    at_s: float | None
    prompt: list[int]
    num_output: int
    later: tuple[Turn, ...] = ()

    @property
    def num_requests(self) -> int:
        return 1 + len(self.later)


@dataclass(frozen=True, slots=True)
class Shape:
    """Means, not limits: `spread` says how lengths vary around them."""

    num_requests: int = 64
    prompt_tokens: int = 128
    output_tokens: int = 128
    spread: str = "lognormal"
    # The first tokens of a prompt, the same for all of one group; some prompts may begin with none of them.
    shared_prefix: int = 0
    prefix_groups: int = 1
    prefix_share: float = 1.0
    # Requests that follow one another in a conversation. `num_requests` counts all of them.
    turns: int = 1
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
        _in_range("--prefix-groups", self.prefix_groups, 1, 1_000_000)
        _in_range("--prefix-share", self.prefix_share, 0, 1)
        _in_range("--turns", self.turns, 1, 1000)
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
    prefixes = [_ids(draw, shape.shared_prefix, room) for _ in range(shape.prefix_groups)]
    jobs: list[Job] = []
    at_s, num_left = 0.0, shape.num_requests
    while num_left > 0:
        num_turns = min(shape.turns, num_left)
        # Settings that need no draw make none: the same seed gives the same load as ever.
        prefix = prefixes[draw.randrange(len(prefixes))] if len(prefixes) > 1 else prefixes[0]
        if shape.prefix_share < 1 and draw.random() >= shape.prefix_share:
            prefix = []
        jobs.append(_conversation(draw, shape, room, prefix, num_turns, at_s if shape.rate else None))
        num_left -= jobs[-1].num_requests
        if shape.rate:
            # A rate of requests: a conversation brings as many as it has turns.
            mean_s = num_turns / shape.rate
            at_s += draw.gammavariate(shape.burstiness, mean_s / shape.burstiness)
    return jobs


def _conversation(
    draw: random.Random, shape: Shape, room: Room, prefix: list[int], num_turns: int, at_s: float | None
) -> Job:
    """Its turns end early when the context has no room for another."""
    num_prompt = _length(draw, shape.prompt_tokens, shape.spread)
    num_output = _length(draw, shape.output_tokens, shape.spread)
    prompt = (prefix + _ids(draw, num_prompt, room))[: room.max_model_len - 1]
    num_output = min(num_output, room.max_model_len - len(prompt))
    length, later = len(prompt) + num_output, []
    for _ in range(num_turns - 1):
        said = _ids(draw, _length(draw, shape.prompt_tokens, shape.spread), room)
        answer = _length(draw, shape.output_tokens, shape.spread)
        length += len(said) + answer
        if length > room.max_model_len:
            break
        later.append(Turn(said, answer))
    return Job(at_s, prompt, num_output, tuple(later))


def as_text(ids: list[int]) -> str:
    """Words in the place of ids, for servers that take text only: equal ids, equal words."""
    return " ".join(WORDS[i % len(WORDS)] for i in ids)


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
    # One draw an id, however many there are to choose from: lengths and arrivals are the same for every vocabulary.
    return [low + int(draw.random() * (room.vocab_size - low)) for _ in range(count)]


def _length(draw: random.Random, mean: int, spread: str) -> int:
    if spread == "fixed":
        return mean
    if spread == "uniform":
        return draw.randint(1, 2 * mean - 1)
    return max(1, round(draw.lognormvariate(math.log(mean) - SIGMA * SIGMA / 2, SIGMA)))


def _in_range(name: str, value: float, low: float, high: float) -> None:
    if not low <= value <= high:
        raise StartupError(f"{name} {value:,g} is out of range: {low:,.10g} to {high:,.10g}")
