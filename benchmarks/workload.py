"""The request mixes that benchmarks share. Lengths and ids come from a seed alone."""

import math
import random
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Item:
    """One request: its prompt's ids and how many tokens it wants."""

    prompt: list[int]
    num_output: int


def log_normal(draw: random.Random, mean: float, low: int, high: int, sigma: float = 0.6) -> int:
    """An integer in low..high from a log-normal distribution whose mean, before clipping, is `mean`."""
    mu = math.log(mean) - sigma * sigma / 2
    return min(high, max(low, round(draw.lognormvariate(mu, sigma))))


def mixed(count: int, seed: int, vocab_size: int = 40_000) -> list[Item]:
    """Prompts of 16..512 tokens around 128, outputs of 16..384 around 122."""
    draw = random.Random(seed)
    return [
        Item(
            prompt=[draw.randrange(100, vocab_size) for _ in range(log_normal(draw, 128, 16, 512))],
            num_output=log_normal(draw, 122, 16, 384),
        )
        for _ in range(count)
    ]


def shared_prefix(count: int, seed: int, *, prefix: int = 512, own: int = 32, output: int = 64) -> list[Item]:
    """Requests whose first `prefix` tokens are the same."""
    draw = random.Random(seed)
    head = [draw.randrange(100, 40_000) for _ in range(prefix)]
    return [Item(head + [draw.randrange(100, 40_000) for _ in range(own)], output) for _ in range(count)]
