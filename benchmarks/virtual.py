"""A server in virtual time: the real scheduler core, and an executor that only knows how long a step takes.

    microseconds of a step = base + per_token * tokens computed + per_stored * tokens read from the KV cache

The defaults are those of an 8B model in 16 bits on one H200: weights read once a step, 16 GFLOP a token, 128 KiB of KV
a token. Lengths are log-normal, shaped like ShareGPT's; the scheduler does not know them: streams end by a stop token.
"""

from collections import deque
from dataclasses import dataclass, replace

import numpy as np

from protos.stepwire.wire.v1 import step_pb2
from scheduler_svc.core.contract import Cause, Geometry, Limits, Policy, Request
from scheduler_svc.core.scheduler import Scheduler
from scheduler_svc.errors import QueueFull

VOCAB_SIZE = 32_000
EOS = 2
SLO_TTFT_S = 2.0
SLO_ITL_S = 0.2


@dataclass(frozen=True, slots=True)
class Setting:
    """One server and one traffic."""

    rate: float = 15.0  # requests a second, of the tenant that behaves
    duration_s: float = 60.0
    block_size: int = 16
    budget: int = 2048  # tokens of a step
    pool_tokens: int = 60_000
    max_num_seqs: int = 256
    policy: Policy = Policy.FCFS
    max_wait_s: float | None = None
    max_waiting: int = 1024
    inter_token_target_s: float | None = None
    prefix_caching: bool = True
    shared: float = 0.5  # share of the requests that begin with one of eight system prompts of 300 tokens
    long: float = 0.0  # share of the requests that bring a document of 8,000 tokens
    flood: float = 0.0  # a second tenant sends so many times as much
    base_us: float = 4000.0
    per_token_us: float = 27.0
    per_stored_us: float = 0.032
    seed: int = 1


@dataclass(slots=True)
class Traffic:
    """In columns, by arrival."""

    arrival: np.ndarray
    num_prompt: np.ndarray
    num_output: np.ndarray
    system: np.ndarray  # which system prompt; -1: none
    tenant: np.ndarray  # 1: the one that floods


def traffic(setting: Setting) -> Traffic:
    parts = []
    for tenant, rate in enumerate((setting.rate, setting.rate * setting.flood)):
        rng = np.random.default_rng((setting.seed, tenant))
        count = int(rate * setting.duration_s)
        arrival = np.cumsum(rng.exponential(1 / rate, count)) if count else np.empty(0)
        num_prompt = rng.lognormal(4.6, 1.1, count).clip(4, 2048).astype(int)
        num_output = rng.lognormal(5.0, 0.9, count).clip(4, 1024).astype(int)
        num_prompt[rng.random(count) < setting.long] = 8000
        system = np.where(rng.random(count) < setting.shared, rng.integers(0, 8, count), -1)
        parts.append((arrival, num_prompt, num_output, system, np.full(count, tenant)))
    columns = [np.concatenate(column) for column in zip(*parts, strict=True)]
    order = np.argsort(columns[0], kind="stable")
    return Traffic(*(column[order] for column in columns))


class StepClock:
    """The executor: which rows answer, what ends, and how long each step takes."""

    def __init__(self, setting: Setting, ends_at: np.ndarray):
        self._setting = setting
        self._ends_at = ends_at  # by handle: the known tokens with which the stream ends

        self._known = np.zeros(setting.max_num_seqs, np.int64)
        self._computed = np.zeros(setting.max_num_seqs, np.int64)
        self._handle = np.full(setting.max_num_seqs, -1)

    def run(self, plan: step_pb2.StepPlan, handles: np.ndarray) -> step_pb2.StepResult:
        """`handles` [rows]: who is admitted where; the plan itself does not name anybody."""
        released = np.frombuffer(plan.release, "<i4")
        self._handle[released] = -1
        for admit in plan.admit:
            self._handle[admit.row] = handles[admit.row]
            self._known[admit.row] = len(admit.token_ids) // 4
            self._computed[admit.row] = admit.num_computed_tokens
        live = self._handle >= 0
        chunk = live.astype(np.int64)
        prefill = np.frombuffer(plan.prefill, "<i4").reshape(-1, 2)
        chunk[prefill[:, 0]] = prefill[:, 1]
        self._computed += chunk
        answering = (live & (self._computed == self._known)).nonzero()[0]
        self._known[answering] += 1
        ended = self._known[answering] >= self._ends_at[self._handle[answering]]
        num_stored = int(self._computed[live].sum())
        setting = self._setting
        us = setting.base_us + setting.per_token_us * int(chunk.sum()) + setting.per_stored_us * num_stored
        return step_pb2.StepResult(
            boot_id=plan.boot_id,
            epoch=plan.epoch,
            step_id=plan.step_id,
            token_ids=np.where(ended, EOS, 7).astype("<i4").tobytes(),
            forward_us=int(us),
            num_rows=int(live.sum()),
            num_stored_tokens=num_stored,
        )


class Server:
    def __init__(self, setting: Setting):
        self.setting = setting
        self.traffic = traffic(setting)
        self.scheduler = Scheduler(
            Limits(
                policy=setting.policy,
                max_wait_s=setting.max_wait_s,
                max_waiting=setting.max_waiting,
                inter_token_target_s=setting.inter_token_target_s,
                prefix_caching=setting.prefix_caching,
            )
        )
        num_blocks = setting.pool_tokens // setting.block_size
        self.scheduler.reset(
            Geometry(num_blocks, setting.block_size, setting.max_num_seqs, 16_384, setting.budget, VOCAB_SIZE), 1, 1
        )
        count = len(self.traffic.arrival)
        num_prompt = self.traffic.num_prompt + 300 * (self.traffic.system >= 0)
        self._clock = StepClock(setting, num_prompt + self.traffic.num_output)
        self._rng = np.random.default_rng(setting.seed)
        self._systems = self._rng.integers(3, VOCAB_SIZE, (8, 300)).astype(np.int32)
        self.first = np.full(count, np.nan)
        self.last = np.full(count, np.nan)
        self.worst_gap = np.zeros(count)
        self.num_tokens = np.zeros(count, int)
        self.done = np.zeros(count, bool)
        self.refused = np.zeros(count, bool)
        self.gaps: list[np.ndarray] = []
        self.used: list[tuple[float, int, int]] = []  # seconds of the step, blocks owned, slots in them without a token
        # Output tokens of each tenant, as time goes on.
        self.served: list[tuple[float, int, int]] = []

    def run(self) -> "Server":
        """Until the last arrival; what is unfinished then is judged by what it got."""
        now, freed_at, next_arrival = 0.0, 0.0, 0
        in_flight: deque[tuple[float, step_pb2.StepResult]] = deque()
        while now < self.setting.duration_s:
            while next_arrival < len(self.first) and self.traffic.arrival[next_arrival] <= now:
                self._submit(next_arrival)
                next_arrival += 1
            while self.scheduler.num_in_flight < 2:
                plan = self.scheduler.plan(now)
                if plan is None:
                    break
                rows = self.scheduler._epoch.rows  # type: ignore[union-attr]
                result = self._clock.run(plan, rows.handle)
                freed_at = max(now, freed_at) + result.forward_us / 1e6
                in_flight.append((freed_at, result))
            if in_flight:
                now, result = in_flight.popleft()
                self._commit(result, now)
            elif next_arrival < len(self.first):
                now = float(self.traffic.arrival[next_arrival])
            else:
                break
        return self

    def _submit(self, i: int) -> None:
        traffic = self.traffic
        prompt = self._rng.integers(3, VOCAB_SIZE, traffic.num_prompt[i]).astype(np.int32)
        if traffic.system[i] >= 0:
            prompt = np.concatenate([self._systems[traffic.system[i]], prompt])
        request = Request(
            session=0,
            request_id=str(i),
            handle=i,
            prompt=prompt,
            sampling=step_pb2.Sampling(temperature=1.0),
            max_tokens=1200,
            stop_token_ids=frozenset((EOS,)),
            tenant=f"tenant {traffic.tenant[i]}",
            cache_salt=b"",
        )
        try:
            self.scheduler.submit(request, float(traffic.arrival[i]))
        except QueueFull:
            self.refused[i] = True

    def _commit(self, result: step_pb2.StepResult, now: float) -> None:
        stats = self.scheduler.stats()
        rows = self.scheduler._epoch.rows  # type: ignore[union-attr]
        live = rows.seat.nonzero()[0]
        computed = rows.lead[live] + rows.step
        empty = int((rows.num_slots(live, computed) - computed).sum())
        self.used.append((result.forward_us / 1e6, stats.blocks_owned, empty))
        output = self.scheduler.commit(result, now)
        who = output.handle.astype(np.int64)
        starts = output.position == 0
        self.first[who[starts]] = now
        going = who[~starts]
        gaps = now - self.last[going]
        self.gaps.append(gaps)
        self.worst_gap[going] = np.maximum(self.worst_gap[going], gaps)
        self.last[who] = now
        self.num_tokens[who] += 1
        flood = int(self.traffic.tenant[who].sum())
        self.served.append((now, len(who) - flood, flood))
        for end in output.finished:
            self.done[end.handle] = end.cause in (Cause.STOP, Cause.LENGTH)


def simulate(setting: Setting) -> dict[str, float]:
    """What a setting gives; everything after a sixth of the time, when the server has filled up."""
    server = Server(setting).run()
    arrival, warm = server.traffic.arrival, setting.duration_s / 6
    # Who came too late to be judged is left out; an open stream counts by what it got so far.
    judged = (arrival >= warm) & (arrival < setting.duration_s - SLO_TTFT_S)
    seconds = setting.duration_s - SLO_TTFT_S - warm
    # Who has not started has waited at least that long.
    ttft = np.where(np.isnan(server.first), setting.duration_s, server.first) - arrival
    good = judged & ~np.isnan(server.first) & (ttft <= SLO_TTFT_S) & (server.worst_gap <= SLO_ITL_S)
    small = judged & (server.traffic.tenant == 0)
    gaps = np.concatenate(server.gaps) if server.gaps else np.zeros(1)
    stats = server.scheduler.stats()
    weight, owned, empty = (np.array(column, float) for column in zip(*server.used, strict=True))
    slots = float((weight * owned).sum()) * setting.block_size
    computed = stats.generation_tokens_total + stats.prompt_tokens_computed_total
    times = np.array(server.served)
    late = times[:, 0] >= warm
    gap = np.cumsum(times[late, 1] - times[late, 2])
    return {
        "offered_per_s": round(float(judged.sum()) / seconds, 2),
        "goodput_per_s": round(float(good.sum()) / seconds, 2),
        "good_tokens_per_s": round(float(server.num_tokens[good].sum()) / seconds, 1),
        "tokens_per_s": round(float(times[late, 1:].sum()) / (setting.duration_s - warm), 1),
        "refused": round(float((server.refused & judged).sum() / max(judged.sum(), 1)), 4),
        "ttft_p50_s": _quantile(ttft[judged & ~server.refused], 50),
        "ttft_p99_s": _quantile(ttft[judged & ~server.refused], 99),
        "itl_p50_ms": round(float(np.percentile(gaps, 50)) * 1e3, 2),
        "itl_p99_ms": round(float(np.percentile(gaps, 99)) * 1e3, 2),
        "pool_used": round(float(np.average(owned, weights=weight)) / stats.blocks_total, 4),
        "kv_waste": round(float((weight * empty).sum()) / slots, 4),
        "prefix_hits": round(stats.prompt_tokens_cached_total / max(stats.prompt_tokens_total, 1), 4),
        "preemptions": stats.preemptions_total,
        "recomputed": round(stats.recomputed_tokens_total / computed, 5),
        "small_ttft_p50_s": _quantile(ttft[small & ~server.refused], 50),
        "small_ttft_p99_s": _quantile(ttft[small & ~server.refused], 99),
        "small_refused": round(float((server.refused & small).sum() / max(small.sum(), 1)), 4),
        "served_gap_tokens": int(gap.max() - gap.min()) if len(gap) else 0,
        "small_share_of_tokens": round(float(times[late, 1].sum() / max(times[late, 1:].sum(), 1)), 4),
    }


def _quantile(values: np.ndarray, percent: float) -> float:
    return round(float(np.percentile(values, percent, method="lower")), 3) if len(values) else float("nan")


def vary(base: Setting, **changes: object) -> Setting:
    return replace(base, **changes)  # type: ignore[arg-type]
