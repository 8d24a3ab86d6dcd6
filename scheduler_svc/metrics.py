"""The scheduler's Prometheus metrics. Knows nothing of sockets or plans; told a few times a second what counts.

Alone, the process serves them over HTTP. Under a supervisor that sets PROMETHEUS_MULTIPROC_DIR they go to files there
(prometheus_client decides that at import) and the supervisor serves the whole.
"""

from bisect import bisect_left
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
from prometheus_client import REGISTRY, CollectorRegistry, Counter, Gauge, Histogram, start_http_server

from protos.stepwire.wire.v1 import step_pb2
from scheduler_svc.core.contract import Cause, Finished, Output, Stats
from scheduler_svc.errors import EndReason, StartupError

_MS = (0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0, 30.0, 60.0)
_STEP = (0.00002, 0.00005, 0.0001, 0.0002, 0.0005, 0.001, 0.002, 0.005, 0.01, 0.1, 1.0)
_BYTES = (32, 64, 128, 256, 512, 1024, 4096, 16384, 65536, 262144, 1048576)
# Of one value a process: a scheduler that was restarted has the word.
_LATEST: Literal["livemostrecent"] = "livemostrecent"


class WeightedHistogram(Histogram):
    """A histogram that takes many equal observations at the price of one."""

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
        self._plan_bytes = Histogram("stepwire_plan_bytes", "Size of a plan.", buckets=_BYTES, registry=registry)
        self._scheduler_step = Histogram(
            "stepwire_scheduler_step_seconds", "Planning and committing one step.", buckets=_STEP, registry=registry
        )
        self._executor_step = Histogram(
            "stepwire_executor_step_seconds", "One step on the device.", buckets=_MS, registry=registry
        )
        self._first_token = Histogram(
            "stepwire_time_to_first_token_seconds", "Submit to first token.", buckets=_MS, registry=registry
        )
        self._inter_token = WeightedHistogram(
            "stepwire_inter_token_seconds", "Between tokens of one choice.", buckets=_MS, registry=registry
        )
        self._counted: dict[object, float] = {}
        self._config_labels: tuple[str, str] | None = None
        self._committed_at: float | None = None
        self._submitted: dict[tuple[int, int], float] = {}
        for reason in ("stop", "length", "cancelled", "expired", "failed"):
            self._requests.labels(reason)
        for link in ("frontend", "executor", "beat"):
            self._bad_frames.labels(link)
        for end in EndReason:
            self._epochs_ended.labels(end)

    def serve(self, host: str, port: int) -> int:
        """Answers GET /metrics from a thread of its own; returns the port."""
        try:
            server, _ = start_http_server(port, host, self._registry)
        except OSError as error:
            raise StartupError(
                f"cannot serve metrics on {host}:{port}: {error.strerror}: choose another --metrics-port"
            ) from error
        return server.server_port

    # ---- events, a few a step ----------------------------------------------------------------------------------

    def submitted(self, session: int, handle: int, num_choices: int, now: float) -> None:
        for choice in range(num_choices):
            self._submitted[session, handle + choice] = now

    def session_ended(self, session: int) -> None:
        for key in [key for key in self._submitted if key[0] == session]:
            del self._submitted[key]

    def plan_sent(self, num_bytes: int) -> None:
        self._plan_bytes.observe(num_bytes)

    def step_done(self, scheduler_s: float, forward_us: int) -> None:
        self._scheduler_step.observe(scheduler_s)
        self._executor_step.observe(forward_us / 1e6)

    def output(self, output: Output, now: float) -> None:
        """First tokens are looked up one by one; all others waited since the commit before, together."""
        if len(output.position):
            first = np.flatnonzero(output.position == 0)
            for i in first.tolist():
                began = self._submitted.pop((int(output.session[i]), int(output.handle[i])), None)
                if began is not None:
                    self._first_token.observe(now - began)
            num_later = len(output.position) - len(first)
            if num_later and self._committed_at is not None:
                self._inter_token.observe_many(now - self._committed_at, num_later)
            self._committed_at = now

    def finished(self, finished: Finished, *, by_stop_string: bool) -> None:
        self._submitted.pop((finished.session, finished.handle), None)
        cause = Cause.STOP if by_stop_string and finished.cause == Cause.CANCELLED else finished.cause
        self._requests.labels(cause.name.lower()).inc()

    def epoch_ended(self, reason: EndReason) -> None:
        self._epochs_ended.labels(reason).inc()
        # Waiting for a new executor is not a gap between two tokens of one step and the next.
        self._committed_at = None

    # ---- for those who watch -----------------------------------------------------------------------------------

    def latencies(self) -> tuple[Buckets, Buckets]:
        """Of the time to the first token, and between tokens."""
        return Buckets.of(self._first_token), Buckets.of(self._inter_token)

    # ---- totals, a few times a second --------------------------------------------------------------------------

    def update(self, stats: Stats) -> None:
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
