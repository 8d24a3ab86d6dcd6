"""What one frontend counts. Works with one registry of its own, and in prometheus_client's multi-process mode.

Names begin with stepwire_frontend_: the scheduler counts the same requests from its side, and one endpoint shows both.
"""

from bisect import bisect_left

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

from scheduler_svc.errors import StartupError
from scheduler_svc.metrics import WeightedHistogram
from scheduler_svc.metrics_endpoint import serve_metrics

FIRST_TOKEN_BUCKETS = (0.005, 0.01, 0.02, 0.04, 0.08, 0.16, 0.32, 0.64, 1.28, 2.56, 5.12, 10.24, 20.48, 40.96)
INTER_TOKEN_BUCKETS = (0.001, 0.002, 0.004, 0.006, 0.008, 0.012, 0.016, 0.024, 0.032, 0.064, 0.128, 0.256, 0.512, 1.024)
# Times between tokens are tallied here and handed over this often: telling prometheus costs more than a token does.
HAND_OVER_EVERY_S = 0.25
# How a request that the scheduler took can end.
FINISH_REASONS = ("stop", "length", "cancelled", "disconnected", "deadline", "failed")


class FrontendMetrics:
    def __init__(self, registry: CollectorRegistry | None = None):
        self.registry = CollectorRegistry() if registry is None else registry
        self._requests = Counter(
            "stepwire_frontend_requests", "Requests that ended, once each", ["finish_reason"], registry=self.registry
        )
        for reason in FINISH_REASONS:
            self._requests.labels(reason)
        self._refused = Counter(
            "stepwire_frontend_errors",
            "Calls that ended with an error status",
            ["method", "status"],
            registry=self.registry,
        )
        self._first_token = Histogram(
            "stepwire_frontend_time_to_first_token_seconds",
            "From the call's arrival to its first token",
            buckets=FIRST_TOKEN_BUCKETS,
            registry=self.registry,
        )
        self._inter_token = WeightedHistogram(
            "stepwire_frontend_inter_token_seconds",
            "Between tokens of one choice, as they are handed to gRPC",
            buckets=INTER_TOKEN_BUCKETS,
            registry=self.registry,
        )
        self._gaps = [0] * (len(INTER_TOKEN_BUCKETS) + 1)
        self._gaps_s = 0.0
        self._hand_over_at = 0.0
        self._active = Gauge(
            "stepwire_frontend_active_streams",
            "Streams open now",
            registry=self.registry,
            multiprocess_mode="livesum",
        )

    def opened(self) -> None:
        self._active.inc()

    def closed(self, finish_reason: str) -> None:
        self._hand_over()
        self._active.dec()
        self._requests.labels(finish_reason).inc()

    def refused(self, method: str, status: str) -> None:
        self._refused.labels(method, status).inc()

    def first_token(self, waited_s: float) -> None:
        self._first_token.observe(waited_s)

    def tokens(self, waited_s: float, num_tokens: int, now: float) -> None:
        """Tokens that came together share the time since the ones before. Shown once a stream ends, or soon after."""
        self._gaps[bisect_left(INTER_TOKEN_BUCKETS, waited_s / num_tokens)] += num_tokens
        self._gaps_s += waited_s
        if now >= self._hand_over_at:
            self._hand_over_at = now + HAND_OVER_EVERY_S
            self._hand_over()

    def _hand_over(self) -> None:
        if any(self._gaps):
            self._inter_token.observe_counts(self._gaps, self._gaps_s)
            self._gaps, self._gaps_s = [0] * len(self._gaps), 0.0

    def serve(self, host: str, port: int) -> int:
        """Answers GET /metrics from a daemon thread; returns the port."""
        try:
            return serve_metrics(self.registry, host, port)
        except OSError as error:
            reason = f"cannot serve metrics on {host}:{port} ({error.strerror})"
            raise StartupError(f"{reason}: choose another --metrics-port") from None
