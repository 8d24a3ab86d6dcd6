"""How long a step takes: a straight line in what it does, measured or estimated from a device's figures.

    microseconds = base + row * rows that decode + token * prompt tokens + stored * tokens read from the KV cache

`request_us` is what a request takes outside of steps: the network, the tokenizer, the queue's turn.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from scheduler_svc.errors import StartupError
from scheduler_svc.planning.sizes import ModelSize


@dataclass(frozen=True, slots=True)
class StepModel:
    base_us: float
    row_us: float
    token_us: float
    stored_us: float
    request_us: float = 0.0

    def us(self, num_rows: int, num_prompt_tokens: int, num_stored: int) -> float:
        work = self.row_us * num_rows + self.token_us * num_prompt_tokens + self.stored_us * num_stored
        return self.base_us + work


@dataclass(frozen=True, slots=True)
class Device:
    """Figures of the data sheet; `reach` is the share of them that engines get in practice."""

    memory_gib: float
    bytes_per_s: float
    flops: float  # in 16 bits, dense
    overhead_us: float  # launching and sampling, a step
    reach: float = 0.6


DEVICES = {
    "h200": Device(141, 4.8e12, 989e12, 1500),
    "h100": Device(80, 3.35e12, 989e12, 1500),
    "a100": Device(80, 2.0e12, 312e12, 1500),
    "l40s": Device(48, 0.864e12, 362e12, 1500),
    "l4": Device(24, 0.3e12, 121e12, 1500),
    # Two cores with AVX-512 and bfloat16, as continuous integration has them.
    "cpu2": Device(8, 40e9, 0.9e12, 500),
}


def estimate(device: Device, size: ModelSize, dtype: str, kv_dtype: str) -> StepModel:
    """A step reads all weights once and the KV of its rows; every token costs two operations a weight."""
    moved, computed = device.bytes_per_s * device.reach, device.flops * device.reach
    token_us = 2 * size.num_active / computed * 1e6
    return StepModel(
        base_us=device.overhead_us + size.weight_bytes(dtype) / moved * 1e6,
        row_us=token_us,
        token_us=token_us,
        stored_us=size.kv_bytes_per_token(kv_dtype) / moved * 1e6,
    )


@dataclass(frozen=True, slots=True)
class DecodeSample:
    """The gap between tokens that so many rows saw, each with so many tokens stored."""

    num_rows: int
    num_stored: int  # of all rows together
    us: float


@dataclass(frozen=True, slots=True)
class PrefillSample:
    """The time to the first token of a prompt that was alone."""

    num_tokens: int
    us: float


def fit(decodes: Sequence[DecodeSample], prefills: Sequence[PrefillSample]) -> StepModel:
    """Least squares of relative errors; no coefficient is negative, for no work takes time away."""
    wanted = np.array([sample.us for sample in decodes])
    columns = np.array([[1.0, sample.num_rows, sample.num_stored] for sample in decodes])
    base, row, stored = _non_negative(columns / wanted[:, None], np.ones(len(wanted)))
    times = np.array([sample.us for sample in prefills])
    lengths = np.array([[1.0, sample.num_tokens] for sample in prefills])
    first, token = _non_negative(lengths / times[:, None], np.ones(len(times)))
    return StepModel(base, row, token, stored, request_us=max(0.0, first - base))


def _non_negative(columns: np.ndarray, wanted: np.ndarray) -> list[float]:
    """Non-negative least squares of few unknowns: the best of all sets of unknowns that come out positive."""
    num = columns.shape[1]
    best, error = np.zeros(num), float((wanted**2).sum())
    for chosen in range(1, 1 << num):
        used = [i for i in range(num) if chosen >> i & 1]
        found = np.linalg.lstsq(columns[:, used], wanted, rcond=None)[0]
        if (found < 0).any():
            continue
        left = float(((columns[:, used] @ found - wanted) ** 2).sum())
        if left < error:
            best, error = np.zeros(num), left
            best[used] = found
    return best.tolist()


def parse_step_us(text: str) -> StepModel:
    """ "4000,20,27,0.03": base, row, token, stored; a fifth number is what a request takes beside."""
    try:
        numbers = [float(part) for part in text.split(",")]
    except ValueError:
        numbers = []
    if len(numbers) not in (4, 5) or any(not 0 <= number < 1e9 for number in numbers) or numbers[0] <= 0:
        raise StartupError(f"--step-us {text!r}: write BASE,ROW,TOKEN,STORED in microseconds, as in 4000,20,27,0.03")
    return StepModel(*numbers)
