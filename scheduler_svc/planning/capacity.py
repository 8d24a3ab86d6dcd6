"""The plan: what fits in memory, what rate is served in time, where it saturates, which settings to choose.

A rate holds when at least IN_TIME of its requests meet every objective. It is searched by halving, with the real core
in virtual time; the settings are compared at the rate that the first of them holds.
"""

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

import numpy as np

from scheduler_svc.core.contract import Geometry
from scheduler_svc.core.sequence import blocks_for
from scheduler_svc.errors import StartupError
from scheduler_svc.planning.step_model import StepModel
from scheduler_svc.planning.virtual import Load, Outcome, simulate

IN_TIME = 0.9
NUM_REQUESTS = 100
SIGMA = 0.6
HALVINGS = 5
BUDGETS = (128, 256, 512, 1024, 2048, 4096, 8192)
BLOCK_SIZES = (16, 32, 64)
LENGTHS = (512, 1024, 2048, 4096, 8192, 16_384, 32_768, 131_072)
# A setting must be that much better than the usual one to be advised.
WORTH = 1.02
Options = Callable[[Geometry], Iterator[Geometry]]


@dataclass(frozen=True, slots=True)
class Demand:
    """Mean lengths, and the objectives in milliseconds by name: ttft, itl, tpot, e2e."""

    prompt_tokens: int
    output_tokens: int
    slo: dict[str, float]
    seed: int = 0
    num_requests: int = NUM_REQUESTS


@dataclass(frozen=True, slots=True)
class Point:
    """One rate, served by one setting. Milliseconds."""

    rate: float
    in_time: float
    served_per_s: float
    tokens_per_s: float
    num_running: float
    ttft_p50: float
    ttft_p99: float
    itl_p50: float
    itl_p99: float
    blocks_used: float
    num_preemptions: int


@dataclass(frozen=True, slots=True)
class Plan:
    # What everything is computed with, the settings chosen among them.
    geometry: Geometry
    # The largest rate that holds, and what half and twice of it would be like; None: not even one request at a time.
    holds: Point | None
    around: list[Point]
    # With always enough that wait.
    saturated: Point
    # Sequences of the mean length, and of other lengths, that the pool holds at once.
    users_in_memory: int
    by_length: dict[int, int]


def geometry_for(
    kv_bytes: float,
    kv_bytes_per_token: int,
    block_size: int,
    vocab_size: int,
    *,
    max_num_seqs: int,
    budget: int,
    max_model_len: int,
) -> Geometry:
    num_blocks = int(kv_bytes // (kv_bytes_per_token * block_size))
    if num_blocks < 1:
        raise StartupError(f"{kv_bytes / 2**20:.0f} MiB for the KV cache hold not one block of {block_size} tokens")
    return Geometry(num_blocks, block_size, max_num_seqs, max_model_len, budget, vocab_size)


def make_plan(
    demand: Demand,
    geometry: Geometry,
    model: StepModel,
    *,
    choose_budget: bool = True,
    choose_block_size: bool = True,
) -> Plan:
    """What is to be chosen is a starting point in `geometry`; the rest stays."""
    geometry = _check(demand, geometry)
    saturated = _saturated(demand, geometry, model)
    holds = highest_rate(demand, geometry, model, saturated.served_per_s)
    if holds is not None:
        wanted = ((choose_budget, _with_budgets), (choose_block_size, _with_block_sizes))
        options: list[Options] = [option for is_wanted, option in wanted if is_wanted]
        chosen = _choose(demand, geometry, model, holds, options)
        if chosen != geometry:
            geometry, saturated = chosen, _saturated(demand, chosen, model)
            holds = highest_rate(demand, geometry, model, saturated.served_per_s)
    around = [at_rate(demand, geometry, model, holds.rate * factor) for factor in (0.5, 1.5)] if holds else []
    mean = demand.prompt_tokens + demand.output_tokens
    return Plan(
        geometry=geometry,
        holds=holds,
        around=around,
        saturated=saturated,
        users_in_memory=users_that_fit(geometry, mean),
        by_length={n: users_that_fit(geometry, n) for n in LENGTHS if n <= geometry.max_model_len},
    )


def users_that_fit(geometry: Geometry, num_tokens: int) -> int:
    return geometry.num_blocks // blocks_for(num_tokens, geometry.block_size)


def _check(demand: Demand, geometry: Geometry) -> Geometry:
    mean = demand.prompt_tokens + demand.output_tokens
    if mean > geometry.max_model_len:
        raise StartupError(f"prompts and outputs of {mean} tokens exceed the context of {geometry.max_model_len}")
    if not users_that_fit(geometry, mean):
        slots = geometry.num_blocks * geometry.block_size
        raise StartupError(f"the KV cache holds {slots:,} tokens: not one request of {mean:,}")
    return geometry


def requests(demand: Demand, geometry: Geometry) -> tuple[np.ndarray, np.ndarray]:
    """Log-normal lengths with these means, cut to what the context and the pool hold."""
    rng = np.random.default_rng(demand.seed)
    most = min(geometry.max_model_len, geometry.num_blocks * geometry.block_size)

    def lengths(mean: int) -> np.ndarray:
        drawn = rng.lognormal(math.log(mean) - SIGMA * SIGMA / 2, SIGMA, demand.num_requests)
        return drawn.round().clip(1, None).astype(np.int64)

    num_prompt = lengths(demand.prompt_tokens).clip(1, most - 1)
    return num_prompt, lengths(demand.output_tokens).clip(1, most - num_prompt)


def at_rate(demand: Demand, geometry: Geometry, model: StepModel, rate: float) -> Point:
    num_prompt, num_output = requests(demand, geometry)
    gaps = np.random.default_rng((demand.seed, 1)).exponential(1.0, len(num_prompt))
    arrival = np.concatenate([[0.0], np.cumsum(gaps)[:-1]]) / rate
    return _point(demand, rate, simulate(Load(num_prompt, num_output, arrival), geometry, model))


def _saturated(demand: Demand, geometry: Geometry, model: StepModel) -> Point:
    num_prompt, num_output = requests(demand, geometry)
    load = Load(num_prompt, num_output, num_streams=2 * geometry.max_num_seqs)
    return _point(demand, math.inf, simulate(load, geometry, model))


def _point(demand: Demand, rate: float, out: Outcome) -> Point:
    # What a client sees begins and ends with the request's own way there.
    ttft = 1000 * (out.first_s - out.due_s)
    seen = ~np.isnan(ttft)
    reached = {
        "ttft": ttft,
        "itl": 1000 * out.itl_p99_s,
        "tpot": 1000 * (out.last_s - out.first_s) / np.maximum(1, out.num_tokens - 1),
        "e2e": 1000 * (out.last_s - out.due_s),
    }
    good = seen & ~out.refused
    for name, limit in demand.slo.items():
        good &= np.nan_to_num(reached[name], nan=math.inf) <= limit
    gaps = 1000 * out.gaps_s
    return Point(
        rate=rate,
        in_time=float(good.mean()),
        served_per_s=float(seen.sum()) / out.end_s,
        tokens_per_s=out.tokens_per_s,
        num_running=out.num_running,
        ttft_p50=_quantile(ttft[seen], 50),
        ttft_p99=_quantile(ttft[seen], 99),
        itl_p50=_quantile(gaps, 50),
        itl_p99=_quantile(gaps, 99),
        blocks_used=out.blocks_used,
        num_preemptions=out.num_preemptions,
    )


def highest_rate(demand: Demand, geometry: Geometry, model: StepModel, most: float) -> Point | None:
    """The largest rate that holds, up to what the server does at all; to within a few percent."""
    best: Point | None = None
    low, high = 0.0, most
    for _ in range(HALVINGS):
        point = at_rate(demand, geometry, model, (low + high) / 2)
        if point.in_time >= IN_TIME:
            best, low = point, point.rate
        else:
            high = point.rate
    return best


def _choose(demand: Demand, geometry: Geometry, model: StepModel, holds: Point, options: list[Options]) -> Geometry:
    """Of each of the options in turn the one that serves most in time at a rate a little beyond the first one's."""
    rate = 1.1 * holds.rate
    for option in options:
        best, most = geometry, at_rate(demand, geometry, model, rate).in_time
        for candidate in option(geometry):
            in_time = at_rate(demand, candidate, model, rate).in_time
            if in_time > WORTH * most:
                best, most = candidate, in_time
        geometry = best
    return geometry


def _with_budgets(geometry: Geometry) -> Iterator[Geometry]:
    for budget in BUDGETS:
        if budget >= geometry.max_num_seqs:
            yield replace(geometry, max_num_batched_tokens=budget)


def _with_block_sizes(geometry: Geometry) -> Iterator[Geometry]:
    slots = geometry.num_blocks * geometry.block_size
    for size in BLOCK_SIZES:
        if slots >= size:
            yield replace(geometry, block_size=size, num_blocks=slots // size)


def _quantile(values: np.ndarray, percent: float) -> float:
    return float(np.percentile(values, percent)) if len(values) else math.nan
