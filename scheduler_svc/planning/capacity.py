"""The plan: what fits in memory, what rate is served in time, where it saturates, which settings to choose.

A rate holds when at least IN_TIME of its requests meet every objective and as many are served as are sent: no queue
grows. It is searched by halving, with the real core in virtual time; the settings are compared at the rate that the
first of them holds. Every figure is of a steady stretch: after WARM times as many requests as run at once have come,
up to the last one that comes.
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
# Of the requests that are sent, so many must be served: less, and the queue grows.
SERVED = 0.95
# Requests before the steady stretch and in it, in multiples of those that run at once; at least so many are in it.
WARM = 2
STEADY = 4
NUM_REQUESTS = 128
# Requests in a stretch that has exactly the asked mean lengths and rate, lest chance is taken for a growing queue; no
# less than those that run at once, so that bursts as long as a request remain.
STRETCH = 50
# The share of the saturated rate that is tried first: more is a queue of any length.
NEAR = 0.97
SIGMA = 0.6
HALVINGS = 5
BUDGETS = (128, 256, 512, 1024, 2048, 4096, 8192)
BLOCK_SIZES = (16, 32, 64)
LENGTHS = (512, 1024, 2048, 4096, 8192, 16_384, 32_768, 131_072)
# A setting must be that much better than the usual one to be advised.
WORTH = 1.02
Options = Callable[[Geometry], Iterator[Geometry]]
Say = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class Demand:
    """Mean lengths, and the objectives in milliseconds by name: ttft, itl, tpot, e2e."""

    prompt_tokens: int
    output_tokens: int
    slo: dict[str, float]
    seed: int = 0
    num_requests: int = NUM_REQUESTS  # at least so many are measured


@dataclass(frozen=True, slots=True)
class Point:
    """One rate, served by one setting, in its steady stretch. Milliseconds."""

    rate: float
    in_time: float
    # Requests' worth of tokens: whole ones alone would say more of the ends of the stretch than of what is in it.
    served_per_s: float
    tokens_per_s: float
    num_running: float
    ttft_p50: float
    ttft_p99: float
    itl_p50: float
    itl_p99: float
    blocks_used: float
    num_preemptions: int

    @property
    def is_served(self) -> bool:
        return self.served_per_s >= SERVED * self.rate


@dataclass(frozen=True, slots=True)
class Plan:
    # What everything is computed with, the settings chosen among them.
    geometry: Geometry
    # The largest rate that holds, and what half and twice of it would be like; None: not even one request at a time.
    holds: Point | None
    around: list[Point]
    # With always enough that wait: so many clients that each send their next request when one is answered.
    saturated: Point
    num_clients: int
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
    say: Say = lambda text: None,
) -> Plan:
    """What is to be chosen is a starting point in `geometry`; the rest stays. `say` hears what is being simulated."""
    geometry = _check(demand, geometry)
    say("simulating: where it saturates")
    saturated = _saturated(demand, geometry, model)
    say("simulating: which rate holds")
    holds = highest_rate(demand, geometry, model, saturated.served_per_s)
    if holds is not None:
        wanted = ((choose_budget, _with_budgets), (choose_block_size, _with_block_sizes))
        options: list[Options] = [option for is_wanted, option in wanted if is_wanted]
        chosen = _choose(demand, geometry, model, holds, options, say)
        say("simulating: the chosen setting")
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
        num_clients=num_clients(demand, geometry),
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


def num_at_once(demand: Demand, geometry: Geometry) -> int:
    """Requests of the mean length that a full server runs."""
    mean = demand.prompt_tokens + demand.output_tokens
    return max(1, min(geometry.max_num_seqs, users_that_fit(geometry, mean)))


def num_clients(demand: Demand, geometry: Geometry) -> int:
    """Enough that some always wait, also while those that run are shorter than the mean."""
    return min(2 * geometry.max_num_seqs, 4 * num_at_once(demand, geometry))


def measured(demand: Demand, geometry: Geometry) -> tuple[int, int]:
    """How many requests come before the steady stretch, and in it."""
    at_once = num_at_once(demand, geometry)
    return WARM * at_once, max(demand.num_requests, STEADY * at_once)


def _even(drawn: np.ndarray, mean: float, stretch: int) -> np.ndarray:
    """Each stretch of `drawn` scaled to this mean; one that is cut short belongs to the one before it."""
    edges = range(stretch, len(drawn) - stretch + 1, stretch)
    return np.concatenate([part * (mean / part.mean()) for part in np.split(drawn, edges)])


def requests(demand: Demand, geometry: Geometry, count: int) -> tuple[np.ndarray, np.ndarray]:
    """`count` log-normal lengths with these means, cut to what the context and the pool hold."""
    rng = np.random.default_rng(demand.seed)
    most = min(geometry.max_model_len, geometry.num_blocks * geometry.block_size)
    stretch = max(STRETCH, num_at_once(demand, geometry))

    def lengths(mean: int) -> np.ndarray:
        drawn = rng.lognormal(math.log(mean) - SIGMA * SIGMA / 2, SIGMA, count)
        return _even(drawn, mean, stretch).round().clip(1, None).astype(np.int64)

    num_prompt = lengths(demand.prompt_tokens).clip(1, most - 1)
    return num_prompt, lengths(demand.output_tokens).clip(1, most - num_prompt)


def at_rate(demand: Demand, geometry: Geometry, model: StepModel, rate: float, share: float = 1.0) -> Point:
    """Poisson arrivals, even over stretches; `share` of the usual number of requests."""
    warm, steady = (math.ceil(share * count) for count in measured(demand, geometry))
    num_prompt, num_output = requests(demand, geometry, warm + steady)
    gaps = np.random.default_rng((demand.seed, 1)).exponential(1.0, warm + steady)
    arrival = np.cumsum(_even(gaps, 1.0 / rate, max(STRETCH, num_at_once(demand, geometry))))
    out = simulate(Load(num_prompt, num_output, arrival), geometry, model)
    return _point(demand, geometry, rate, out, float(arrival[warm]), float(arrival[-1]))


def _saturated(demand: Demand, geometry: Geometry, model: StepModel) -> Point:
    clients, (warm, steady) = num_clients(demand, geometry), measured(demand, geometry)
    num_prompt, num_output = requests(demand, geometry, warm + steady + clients)
    out = simulate(Load(num_prompt, num_output, num_streams=clients), geometry, model)
    ends = np.sort(out.last_s[out.ended])
    begin_s = float(ends[warm]) if len(ends) > warm else 0.0
    return _point(demand, geometry, math.inf, out, begin_s, float(np.nanmax(out.due_s)))


def _point(demand: Demand, geometry: Geometry, rate: float, out: Outcome, begin_s: float, end_s: float) -> Point:
    """Of the stretch from `begin_s` to `end_s`: the steps in it, and all of the requests that came in it."""
    mine = (out.due_s >= begin_s) & (out.due_s <= end_s)
    means, mean_output = out.during(begin_s, min(end_s, out.end_s)), float(out.num_tokens[out.ended].mean())
    # What a client sees begins and ends with the request's own way there.
    ttft = 1000 * (out.first_s - out.due_s)
    seen = mine & ~np.isnan(ttft)
    reached = {
        "ttft": ttft,
        "itl": 1000 * out.itl_p99_s,
        "tpot": 1000 * (out.last_s - out.first_s) / np.maximum(1, out.num_tokens - 1),
        "e2e": 1000 * (out.last_s - out.due_s),
    }
    good = seen & ~out.refused
    for name, limit in demand.slo.items():
        good &= np.nan_to_num(reached[name], nan=math.inf) <= limit
    gaps = 1000 * out.gaps_s[mine[out.gap_of]]
    return Point(
        rate=rate,
        in_time=float(good.sum()) / max(1, int(mine.sum())),
        served_per_s=means.tokens_per_s / mean_output,
        tokens_per_s=means.tokens_per_s,
        num_running=min(means.num_running, geometry.max_num_seqs),
        ttft_p50=_quantile(ttft[seen], 50),
        ttft_p99=_quantile(ttft[seen], 99),
        itl_p50=_quantile(gaps, 50),
        itl_p99=_quantile(gaps, 99),
        blocks_used=means.blocks_used,
        num_preemptions=out.num_preemptions,
    )


def highest_rate(demand: Demand, geometry: Geometry, model: StepModel, most: float) -> Point | None:
    """The largest rate that holds, below what the server does at all; to within a few percent."""
    best = at_rate(demand, geometry, model, NEAR * most)
    if best.in_time < IN_TIME:
        found: Point | None = None
        low, high = 0.0, best.rate
        for _ in range(HALVINGS):
            rate = (low + high) / 2
            # At a lower rate fewer run at once: as many fewer are a steady stretch.
            point = at_rate(demand, geometry, model, rate, share=max(0.5, rate / most))
            if point.in_time >= IN_TIME:
                found, low = point, point.rate
            else:
                high = point.rate
        if found is None:
            return None
        best = found
    # In time, but a queue may have begun to grow.
    for _ in range(HALVINGS):
        if best.is_served:
            break
        best = at_rate(demand, geometry, model, NEAR * best.rate)
    return best


def _choose(
    demand: Demand, geometry: Geometry, model: StepModel, holds: Point, options: list[Options], say: Say
) -> Geometry:
    """Of each of the options in turn the one that serves most in time at a rate a little beyond the first one's."""

    def served_in_time(candidate: Geometry) -> float:
        say(f"simulating: budget {candidate.max_num_batched_tokens}, blocks of {candidate.block_size}")
        point = at_rate(demand, candidate, model, 1.1 * holds.rate, share=0.5)
        return point.in_time * point.served_per_s

    best, most = geometry, served_in_time(geometry)
    for option in options:
        for candidate in option(best):
            if candidate == best:
                continue
            served = served_in_time(candidate)
            if served > WORTH * most:
                best, most = candidate, served
    return best


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
