"""The scheduler's Prometheus metrics. Knows nothing of sockets or plans.

A step pays for two appends; what they hold is counted into histograms every other second, totals are told
once a second. What is scraped is that much behind.

Alone, the process serves them over HTTP. Under a supervisor that sets PROMETHEUS_MULTIPROC_DIR they go to files there
(prometheus_client decides that at import) and the supervisor serves the whole.
"""

from bisect import bisect_left
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
from prometheus_client import REGISTRY, CollectorRegistry, Counter, Gauge, Histogram

from protos.stepwire.wire.v1 import step_pb2
from scheduler_svc.core.contract import Cause, Finished, Output, Stats
from scheduler_svc.errors import EndReason, StartupError
from scheduler_svc.metrics_endpoint import serve_metrics

_MS = (0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0, 30.0, 60.0)
_STEP = (0.00002, 0.00005, 0.0001, 0.0002, 0.0005, 0.001, 0.002, 0.005, 0.01, 0.1, 1.0)
_BYTES = (32, 64, 128, 256, 512, 1024, 4096, 16384, 65536, 262144, 1048576)
# Of one value a process: a scheduler that was restarted has the word.
_LATEST: Literal["livemostrecent"] = "livemostrecent"


# How old what a histogram shows may be.
HISTOGRAMS_EVERY_S = 2.0
NEVER = float("nan")


class WeightedHistogram(Histogram):
    """A histogram that takes many observations at the price of one."""

    def observe_many(self, amount: float, count: int) -> None:
        self._sum.inc(amount * count)
        self._buckets[bisect_left(self._upper_bounds, amount)].inc(count)

    def observe_counts(self, counts: Sequence[int], total: float) -> None:
        """Observations that were counted elsewhere: of each bucket alone, the last one of everything beyond the bounds;
        `total` is the sum of what was observed."""
        self._sum.inc(total)
        for bucket, count in zip(self._buckets, counts, strict=True):
            if count:
                bucket.inc(count)

    def observe_all(self, amounts: np.ndarray, counts: np.ndarray | None = None) -> None:
        """Each amount as often as its count says, or once. Both [n]."""
        in_buckets = np.bincount(np.searchsorted(self._upper_bounds, amounts), counts)
        for place in in_buckets.nonzero()[0].tolist():
            self._buckets[place].inc(float(in_buckets[place]))
        self._sum.inc(float(amounts.sum() if counts is None else amounts @ counts))


@dataclass(frozen=True, slots=True)
class Buckets:
    """A histogram as it stands; each count is of its bucket alone, the last one of everything beyond the bounds."""

    bounds_s: tuple[float, ...]
    counts: tuple[int, ...]
    sum_s: float

    @staticmethod
    def of(histogram: Histogram) -> "Buckets":
        counts = tuple(int(bucket.get()) for bucket in histogram._buckets)
        return Buckets(tuple(histogram._upper_bounds[:-1]), counts, histogram._sum.get())


# Of one step: seconds of planning it, seconds of committing it, microseconds on the device, when it was committed
# (NEVER: no step, but the end of an epoch), and how many tokens it brought.
Step = tuple[float, float, float, float, int]


@dataclass(slots=True)
class StepTimes:
    """Seconds of all steps together, as far as they were counted."""

    num_steps: int = 0
    plan_s: float = 0.0
    commit_s: float = 0.0
    device_s: float = 0.0


class SchedulerMetrics:
    def __init__(self, registry: CollectorRegistry = REGISTRY) -> None:
        self._registry = registry

        def gauge(name: str, text: str, labels: Iterable[str] = ()) -> Gauge:
            return Gauge(name, text, labels, registry=registry, multiprocess_mode=_LATEST)

        def counter(name: str, text: str, labels: Iterable[str] = ()) -> Counter:
            return Counter(name, text, labels, registry=registry)

        # The names llm-d scrapes. Info does not work across processes, so the last one is a gauge that is 1.
        self._vllm_running = gauge("vllm:num_requests_running", "Sequences in the running set.")
        self._vllm_waiting = gauge("vllm:num_requests_waiting", "Sequences waiting for admission.")
        self._vllm_usage = gauge("vllm:kv_cache_usage_perc", "Share of KV blocks owned by sequences, 0 to 1.")
        self._vllm_config = gauge("vllm:cache_config_info", "KV cache layout.", ("block_size", "num_gpu_blocks"))

        self._blocks = gauge("stepwire_blocks", "KV blocks.", ("state",))
        self._epoch = gauge("stepwire_epoch", "Lives of executors begun by this scheduler.")
        self._ready = gauge("stepwire_executor_ready", "1 while an executor serves.")
        self._standby = gauge("stepwire_executors_standby", "Executors that stand by.")
        self._sessions = gauge("stepwire_sessions", "Frontends with a lease.")
        self._preemptions = counter("stepwire_preemptions", "Sequences that lost their row.")
        self._recomputed = counter("stepwire_recomputed_tokens", "Tokens computed more than once.")
        self._prompt = counter("stepwire_prompt_tokens", "Prompt tokens of admitted requests.", ("source",))
        self._generated = counter("stepwire_generation_tokens", "Tokens committed.")
        self._requests = counter("stepwire_requests", "Choices that ended.", ("finish_reason",))
        self._epochs_ended = counter("stepwire_epochs_ended", "Times the serving executor was lost.", ("reason",))
        self._bad_frames = counter("stepwire_bad_frames", "Frames dropped because they cannot be read.", ("link",))
        self._stale = counter("stepwire_stale_results", "Executor frames dropped: of another epoch, or repeated.")
        self._plan_bytes = WeightedHistogram(
            "stepwire_plan_bytes", "Size of a plan.", buckets=_BYTES, registry=registry
        )
        self._scheduler_step = WeightedHistogram(
            "stepwire_scheduler_step_seconds", "Planning and committing one step.", buckets=_STEP, registry=registry
        )
        self._executor_step = WeightedHistogram(
            "stepwire_executor_step_seconds", "One step on the device.", buckets=_MS, registry=registry
        )
        self._first_token = Histogram(
            "stepwire_time_to_first_token_seconds", "Submit to first token.", buckets=_MS, registry=registry
        )
        self._inter_token = WeightedHistogram(
            "stepwire_inter_token_seconds", "Between tokens of one choice.", buckets=_MS, registry=registry
        )
        # What histograms have not been told yet.
        self._plan_sizes: list[float] = []
        self._steps: list[float] = []  # one Step after another
        # At which commits choices had their first token, and how many.
        self._firsts: list[tuple[float, int]] = []
        self._committed_at = NEVER
        self._flush_at = 0.0
        self.step_times = StepTimes()
        # What a step says, without a call into Python: the bytes of a plan that leaves; and when it is done, a Step.
        self.plan_sent: Callable[[float], None] = self._plan_sizes.append
        self.step_done: Callable[[Step], None] = self._steps.extend
        self._counted: dict[object, float] = {}
        self._config_labels: tuple[str, str] | None = None
        # Choices that wait for their first token, and since when.
        self.awaited: dict[tuple[int, int], float] = {}
        for reason in ("stop", "length", "cancelled", "expired", "failed"):
            self._requests.labels(reason)
        for link in ("frontend", "executor", "beat"):
            self._bad_frames.labels(link)
        for end in EndReason:
            self._epochs_ended.labels(end)

    def serve(self, host: str, port: int) -> int:
        """Answers GET /metrics from a thread of its own; returns the port."""
        try:
            return serve_metrics(self._registry, host, port)
        except OSError as error:
            raise StartupError(
                f"cannot serve metrics on {host}:{port}: {error.strerror}: choose another --metrics-port"
            ) from error

    # ---- events, a few a step ----------------------------------------------------------------------------------

    def submitted(self, session: int, handle: int, num_choices: int, now: float) -> None:
        for choice in range(num_choices):
            self.awaited[session, handle + choice] = now

    def session_ended(self, session: int) -> None:
        for key in [key for key in self.awaited if key[0] == session]:
            del self.awaited[key]

    def output(self, output: Output, now: float) -> None:
        """First tokens are looked up one by one. Needed only while any are awaited."""
        first = np.flatnonzero(output.position == 0).tolist()
        for i in first:
            began = self.awaited.pop((int(output.session[i]), int(output.handle[i])), None)
            if began is not None:
                self._first_token.observe(now - began)
        if first:
            self._firsts.append((now, len(first)))

    def finished(self, finished: Finished, *, by_stop_string: bool) -> None:
        self.awaited.pop((finished.session, finished.handle), None)
        cause = Cause.STOP if by_stop_string and finished.cause == Cause.CANCELLED else finished.cause
        self._requests.labels(cause.name.lower()).inc()

    def epoch_ended(self, reason: EndReason) -> None:
        self._epochs_ended.labels(reason).inc()
        # Waiting for a new executor is not a gap between two tokens of one step and the next.
        self.step_done((0.0, 0.0, 0.0, NEVER, 0))

    # ---- for those who watch -----------------------------------------------------------------------------------

    def latencies(self) -> tuple[Buckets, Buckets]:
        """Of the time to the first token, and between tokens."""
        self.flush()
        return Buckets.of(self._first_token), Buckets.of(self._inter_token)

    # ---- totals, a few times a second --------------------------------------------------------------------------

    def flush(self) -> None:
        """Histograms hear of the steps since the last time."""
        self._plan_bytes.observe_all(np.array(self._plan_sizes))
        self._plan_sizes.clear()
        if not self._steps:
            return
        plan_s, commit_s, device_us, at_s, num_tokens = np.array(self._steps).reshape(-1, 5).T
        self._steps.clear()
        is_step = np.isfinite(at_s)
        scheduler_s, device_s = (plan_s + commit_s)[is_step], device_us[is_step] / 1e6
        self._scheduler_step.observe_all(scheduler_s)
        self._executor_step.observe_all(device_s)
        times = self.step_times
        times.num_steps += len(scheduler_s)
        times.plan_s += float(plan_s.sum())
        times.commit_s += float(commit_s.sum())
        times.device_s += float(device_s.sum())
        self._flush_gaps(at_s, num_tokens)

    def _flush_gaps(self, at_s: np.ndarray, num_tokens: np.ndarray) -> None:
        """Tokens that are not first ones waited since the commit before. A step without tokens is no commit."""
        is_commit = (num_tokens > 0) | np.isnan(at_s)
        at_s, num_later = at_s[is_commit], num_tokens[is_commit]
        for now, num_first in self._firsts:
            left = num_first
            for i in np.flatnonzero(at_s == now).tolist():  # commits of one turn have one time
                taken = min(left, num_later[i])
                num_later[i] -= taken
                left -= taken
        self._firsts.clear()
        if len(at_s):
            gaps_s = np.diff(at_s, prepend=self._committed_at)
            self._committed_at = float(at_s[-1])
            known = np.isfinite(gaps_s)
            self._inter_token.observe_all(gaps_s[known], num_later[known])

    def update(self, stats: Stats, now: float) -> None:
        if now >= self._flush_at or not stats.num_running + stats.num_waiting:
            self._flush_at = now + HISTOGRAMS_EVERY_S
            self.flush()
        self._vllm_running.set(stats.num_running)
        self._vllm_waiting.set(stats.num_waiting)
        self._vllm_usage.set(stats.blocks_owned / stats.blocks_total if stats.blocks_total else 0)
        self._blocks.labels("free").set(stats.blocks_free)
        self._blocks.labels("owned").set(stats.blocks_owned)
        self._blocks.labels("cached").set(stats.blocks_cached)
        self._raise_to(self._preemptions, stats.preemptions_total)
        self._raise_to(self._recomputed, stats.recomputed_tokens_total)
        self._raise_to(self._generated, stats.generation_tokens_total)
        self._raise_to(self._prompt.labels("computed"), stats.prompt_tokens_computed_total)
        self._raise_to(self._prompt.labels("cached"), stats.prompt_tokens_cached_total)

    def update_links(self, *, sessions: int, standby: int, stale: int, bad_frames: dict[str, int]) -> None:
        self._sessions.set(sessions)
        self._standby.set(standby)
        self._raise_to(self._stale, stale)
        for link, count in bad_frames.items():
            self._raise_to(self._bad_frames.labels(link), count)

    def executor(self, *, ready: bool, epoch: int, geometry: step_pb2.Geometry) -> None:
        self._ready.set(ready)
        self._epoch.set(epoch)
        labels = (str(geometry.block_size), str(geometry.num_blocks))
        if geometry.num_blocks and labels != self._config_labels:
            if self._config_labels is not None:
                self._vllm_config.labels(*self._config_labels).set(0)
            self._config_labels = labels
            self._vllm_config.labels(*labels).set(1)

    def _raise_to(self, counter: Counter, total: float) -> None:
        before = self._counted.get(counter, 0)
        if total > before:
            counter.inc(total - before)
            self._counted[counter] = total
