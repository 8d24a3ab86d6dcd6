"""What two snapshots say together: rates, the split of a step, quantiles of latencies. Pure."""

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

from protos.stepwire.admin.v1 import admin_pb2 as pb

# Rates are of the last seconds, latencies of more of them: first tokens are rarer than tokens.
RATE_WINDOW_MS = 4_000
LATENCY_WINDOW_MS = 30_000
NUM_POINTS = 240


@dataclass(frozen=True, slots=True)
class Rates:
    """Per second, and per step in milliseconds. None: nothing happened that could be measured."""

    generated: float = 0.0
    computed: float = 0.0
    cached: float = 0.0
    preempted: float = 0.0
    steps: float = 0.0
    step_ms: float | None = None
    plan_ms: float = 0.0
    commit_ms: float = 0.0
    device_ms: float = 0.0
    wire_ms: float = 0.0
    ttft_ms: tuple[float, float] | None = None
    itl_ms: tuple[float, float] | None = None
    # What they are of: the last so many seconds. 0: there is one snapshot yet.
    seconds: float = 0.0
    latency_seconds: float = 0.0


@dataclass(slots=True)
class History:
    """The snapshots of one scheduler's life, as far back as the windows reach, and a line of tokens a second."""

    points: deque[float] = field(default_factory=lambda: deque(maxlen=NUM_POINTS))
    _snapshots: deque[pb.Snapshot] = field(default_factory=deque)

    @property
    def latest(self) -> pb.Snapshot | None:
        return self._snapshots[-1] if self._snapshots else None

    def add(self, snapshot: pb.Snapshot) -> None:
        latest = self.latest
        if latest is not None and latest.boot_id != snapshot.boot_id:
            self._snapshots.clear()  # another scheduler: its totals begin again
            latest = None
        if latest is not None and snapshot.uptime_ms <= latest.uptime_ms:
            return  # the same one again
        self._snapshots.append(snapshot)
        while self._snapshots[0].uptime_ms < snapshot.uptime_ms - LATENCY_WINDOW_MS:
            self._snapshots.popleft()
        if latest is not None:
            seconds = (snapshot.uptime_ms - latest.uptime_ms) / 1000
            tokens = snapshot.totals.generation_tokens - latest.totals.generation_tokens
            self.points.append(tokens / seconds)

    def rates(self) -> Rates:
        latest = self.latest
        if latest is None or len(self._snapshots) < 2:
            return Rates()
        since = latest.uptime_ms - RATE_WINDOW_MS
        before = next((s for s in self._snapshots if s.uptime_ms >= since), self._snapshots[0])
        if before is latest:
            before = self._snapshots[-2]
        return between(before, latest, oldest=self._snapshots[0])


def between(before: pb.Snapshot, after: pb.Snapshot, oldest: pb.Snapshot) -> Rates:
    """Rates from `before` to `after`; latencies from `oldest`, which is the first of the same life or later."""
    seconds = (after.uptime_ms - before.uptime_ms) / 1000
    a, b = before.totals, after.totals
    steps = b.steps - a.steps

    def per_step(name: str) -> float:
        return 1000 * (getattr(b, name) - getattr(a, name)) / steps if steps else 0.0

    step_ms, device_ms = per_step("step_s"), per_step("device_s")
    return Rates(
        generated=(b.generation_tokens - a.generation_tokens) / seconds,
        computed=(b.prompt_tokens_computed - a.prompt_tokens_computed) / seconds,
        cached=(b.prompt_tokens_cached - a.prompt_tokens_cached) / seconds,
        preempted=(b.preemptions - a.preemptions) / seconds,
        steps=steps / seconds,
        step_ms=step_ms if steps else None,
        plan_ms=per_step("plan_s"),
        commit_ms=per_step("commit_s"),
        device_ms=device_ms,
        wire_ms=max(0.0, step_ms - device_ms),
        ttft_ms=_latency(oldest.time_to_first_token, after.time_to_first_token),
        itl_ms=_latency(oldest.inter_token, after.inter_token),
        seconds=seconds,
        latency_seconds=(after.uptime_ms - oldest.uptime_ms) / 1000,
    )


def _latency(before: pb.Histogram, after: pb.Histogram) -> tuple[float, float] | None:
    """The median and the 99th percentile, in milliseconds."""
    if len(before.counts) != len(after.counts):
        return None
    counts = [b - a for a, b in zip(before.counts, after.counts, strict=True)]
    if sum(counts) <= 0:
        return None
    return 1000 * quantile(after.bounds_s, counts, 0.5), 1000 * quantile(after.bounds_s, counts, 0.99)


def quantile(bounds: Sequence[float], counts: Sequence[int], share: float) -> float:
    """Of observations in buckets, taken as evenly spread within each. Beyond the last bound: that bound."""
    wanted = share * sum(counts)
    lower = 0.0
    for upper, count in zip(bounds, counts, strict=False):
        if count and wanted <= count:
            return lower + (upper - lower) * wanted / count
        wanted -= count
        lower = upper
    return lower
