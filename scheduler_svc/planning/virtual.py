"""The real scheduler core in virtual time, before an executor that only knows how long a step takes.

Knows no clock: a run of minutes takes as long as its planning. Prompts share nothing, and every stream gets as many
tokens as it asks for.
"""

from collections import deque
from dataclasses import dataclass

import numpy as np

from protos.stepwire.wire.v1 import step_pb2
from scheduler_svc.core.contract import Geometry, Limits, Request
from scheduler_svc.core.scheduler import Scheduler
from scheduler_svc.errors import RequestError
from scheduler_svc.planning.step_model import StepModel

TOKEN = 7
FIRST_ID = 100
# A load that never ends in time is not followed for ever.
MAX_STEPS = 400_000


@dataclass(frozen=True, slots=True)
class Load:
    """Requests in columns. `arrival_s` None: `num_streams` at a time, each sent when one before it has ended."""

    num_prompt: np.ndarray
    num_output: np.ndarray
    arrival_s: np.ndarray | None = None
    num_streams: int = 1


@dataclass(slots=True)
class Outcome:
    """Seconds, by request; NaN: it has not happened."""

    due_s: np.ndarray
    first_s: np.ndarray
    last_s: np.ndarray
    # The 99th percentile of its own gaps between tokens; 0 with fewer than two tokens.
    itl_p99_s: np.ndarray
    num_tokens: np.ndarray
    refused: np.ndarray
    # Whether `last_s` is its last token.
    ended: np.ndarray
    # Of all requests together: seconds between tokens, and whose they are.
    gaps_s: np.ndarray
    gap_of: np.ndarray
    # By step, in columns: when it ended, the seconds it took, tokens drawn, blocks used and sequences running.
    steps: np.ndarray
    end_s: float = 0.0
    blocks_total: int = 1
    num_preemptions: int = 0

    @property
    def tokens_per_s(self) -> float:
        return self.during(0.0, self.end_s).tokens_per_s

    @property
    def num_running(self) -> float:
        return self.during(0.0, self.end_s).num_running

    def during(self, begin_s: float, end_s: float) -> "Means":
        """Of the steps that ended after `begin_s`, up to `end_s`."""
        seconds = end_s - begin_s
        if seconds <= 0:
            return Means(0.0, 0.0, 0.0)
        _, took_s, drawn, blocks, running = self.steps[(self.steps[:, 0] > begin_s) & (self.steps[:, 0] <= end_s)].T
        return Means(
            tokens_per_s=float(drawn.sum()) / seconds,
            blocks_used=float(took_s @ blocks) / seconds / self.blocks_total,
            num_running=float(took_s @ running) / seconds,
        )


@dataclass(frozen=True, slots=True)
class Means:
    """Over a stretch of time. `blocks_used` is a share of the pool."""

    tokens_per_s: float
    blocks_used: float
    num_running: float


class _Executor:
    """Counts tokens of rows, as the executor's digest does, and tells how long each step took."""

    def __init__(self, max_num_seqs: int, model: StepModel):
        self._model = model
        self._known = np.zeros(max_num_seqs, np.int64)
        self._computed = np.zeros(max_num_seqs, np.int64)
        self._live = np.zeros(max_num_seqs, np.bool_)

    def run(self, plan: step_pb2.StepPlan) -> step_pb2.StepResult:
        self._live[np.frombuffer(plan.release, "<i4")] = False
        for admit in plan.admit:
            self._live[admit.row] = True
            self._known[admit.row] = len(admit.token_ids) // 4
            self._computed[admit.row] = admit.num_computed_tokens
        chunk = self._live.astype(np.int64)
        prefill = np.frombuffer(plan.prefill, "<i4").reshape(-1, 2)
        chunk[prefill[:, 0]] = prefill[:, 1]
        self._computed += chunk
        answering = self._live & (self._computed == self._known) & (chunk > 0)
        self._known[answering] += 1
        num_prompt = int(prefill[:, 1].sum())
        num_stored = int(self._computed[self._live].sum())
        us = self._model.us(int(chunk.sum()) - num_prompt, num_prompt, num_stored)
        return step_pb2.StepResult(
            boot_id=plan.boot_id,
            epoch=plan.epoch,
            step_id=plan.step_id,
            token_ids=np.full(int(answering.sum()), TOKEN, "<i4").tobytes(),
            forward_us=max(1, round(us)),
            num_rows=int(self._live.sum()),
            num_stored_tokens=num_stored,
        )


class Simulation:
    def __init__(self, load: Load, geometry: Geometry, limits: Limits, model: StepModel):
        self._load = load
        self._geometry = geometry
        self._request_s = model.request_us / 1e6
        self._scheduler = Scheduler(limits)
        self._scheduler.reset(geometry, 1, 1)
        self._depth = limits.pipeline_depth
        self._executor = _Executor(geometry.max_num_seqs, model)
        self._ids = np.random.default_rng(1)
        count = len(load.num_prompt)
        self._out = Outcome(
            due_s=np.full(count, np.nan) if load.arrival_s is None else load.arrival_s.astype(float),
            first_s=np.full(count, np.nan),
            last_s=np.full(count, np.nan),
            itl_p99_s=np.zeros(count),
            num_tokens=np.zeros(count, np.int64),
            refused=np.zeros(count, np.bool_),
            ended=np.zeros(count, np.bool_),
            gaps_s=np.empty(0),
            gap_of=np.empty(0, np.int64),
            steps=np.empty((0, 5)),
        )
        self._gaps: list[tuple[np.ndarray, np.ndarray]] = []  # of each step: whose, and seconds
        self._ready: deque[tuple[float, int]] = deque()  # when each request reaches the scheduler, in that order
        self._next = 0
        self._steps: list[tuple[float, float, int, int, int]] = []

    def run(self) -> Outcome:
        now, freed_at = 0.0, 0.0
        in_flight: deque[tuple[float, step_pb2.StepResult]] = deque()
        self._arrive(now)
        for _ in range(MAX_STEPS):
            while self._ready and self._ready[0][0] <= now:
                self._submit(*self._ready.popleft())
            while self._scheduler.num_in_flight < self._depth:
                plan = self._scheduler.plan(now)
                if plan is None:
                    break
                result = self._executor.run(plan)
                freed_at = max(now, freed_at) + result.forward_us / 1e6
                in_flight.append((freed_at, result))
            if in_flight:
                now, result = in_flight.popleft()
                self._commit(result, now)
            elif self._ready:
                now = self._ready[0][0]
            else:
                break
        self._finish(now)
        return self._out

    def _arrive(self, now: float) -> None:
        load = self._load
        if load.arrival_s is not None:
            self._ready.extend((float(at) + self._request_s, i) for i, at in enumerate(load.arrival_s))
            return
        for _ in range(min(load.num_streams, len(load.num_prompt))):
            self._send_next(now)

    def _send_next(self, now: float) -> None:
        if self._load.arrival_s is None and self._next < len(self._load.num_prompt):
            self._out.due_s[self._next] = now
            self._ready.append((now + self._request_s, self._next))
            self._next += 1

    def _submit(self, at_s: float, i: int) -> None:
        prompt = self._ids.integers(FIRST_ID, self._geometry.vocab_size, int(self._load.num_prompt[i]))
        request = Request(
            session=0,
            request_id=str(i),
            handle=i,
            prompt=prompt.astype(np.int32),
            sampling=step_pb2.Sampling(),
            max_tokens=int(self._load.num_output[i]),
        )
        try:
            self._scheduler.submit(request, at_s)
        except RequestError:
            self._out.refused[i] = True
            self._send_next(at_s)

    def _commit(self, result: step_pb2.StepResult, now: float) -> None:
        stats = self._scheduler.stats()
        output, out = self._scheduler.commit(result, now), self._out
        who = output.handle.astype(np.int64)
        self._steps.append((now, result.forward_us / 1e6, len(who), stats.blocks_owned, stats.num_running))
        starts = output.position == 0
        out.first_s[who[starts]] = now
        going = who[~starts]
        self._gaps.append((going, now - out.last_s[going]))
        out.last_s[who] = now
        out.num_tokens[who] += 1
        for finished in output.finished:
            out.ended[finished.handle] = True
            self._send_next(now)

    def _finish(self, now: float) -> None:
        out, stats = self._out, self._scheduler.stats()
        out.end_s = now
        if self._gaps:
            out.gap_of, out.gaps_s = (np.concatenate(column) for column in zip(*self._gaps, strict=True))
            out.itl_p99_s = percentile_by(out.gap_of, out.gaps_s, len(out.due_s), 0.99)
            out.steps = np.array(self._steps)
        out.num_preemptions, out.blocks_total = stats.preemptions_total, stats.blocks_total


def percentile_by(whose: np.ndarray, values: np.ndarray, count: int, share: float) -> np.ndarray:
    """float64 [count]: of the values of each owner, interpolated as numpy does; 0 where there are none."""
    order = np.lexsort((values, whose))
    values, nums = values[order], np.bincount(whose, minlength=count)
    places = share * (nums - 1)
    starts = np.cumsum(nums) - nums
    low = starts + np.floor(places).astype(np.int64)
    high = starts + np.ceil(places).astype(np.int64)
    has = nums > 0
    found = np.zeros(count)
    part = places[has] - np.floor(places[has])
    found[has] = values[low[has]] * (1 - part) + values[high[has]] * part
    return found


def simulate(load: Load, geometry: Geometry, model: StepModel, limits: Limits | None = None) -> Outcome:
    return Simulation(load, geometry, limits or Limits(), model).run()
