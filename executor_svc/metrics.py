"""The executor's Prometheus metrics. Told each result as it leaves; knows nothing of plans, rows or devices.

Alone, the process answers GET /metrics from a thread of its own, from before the model is loaded. Under a supervisor
that sets PROMETHEUS_MULTIPROC_DIR the numbers go to files there (prometheus_client decides that at import).
"""

from typing import Literal

from prometheus_client import REGISTRY, CollectorRegistry, Counter, Gauge, Histogram

from executor_svc.errors import StartupError
from executor_svc.metrics_endpoint import serve_metrics
from protos.stepwire.wire.v1 import step_pb2

_SECONDS = (0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0)
# A standby says 0 of everything; across processes of one host the sum is what runs.
_SUM: Literal["livesum"] = "livesum"


class ExecutorMetrics:
    def __init__(self, registry: CollectorRegistry = REGISTRY) -> None:
        self._registry = registry
        self._loaded = Gauge(
            "stepwire_executor_loaded",
            "1 once the model is loaded and this executor serves or stands by.",
            registry=registry,
            multiprocess_mode=_SUM,
        )
        self._rows = Gauge("stepwire_executor_rows", "Sequences seated.", registry=registry, multiprocess_mode=_SUM)
        self._stored = Gauge(
            "stepwire_executor_stored_tokens", "Tokens of all rows.", registry=registry, multiprocess_mode=_SUM
        )
        self._forward = Histogram(
            "stepwire_executor_forward_seconds",
            "One step here, from the plan's arrival to the result.",
            buckets=_SECONDS,
            registry=registry,
        )
        self._sampled = Counter("stepwire_executor_sampled_tokens", "Tokens drawn.", registry=registry)

    def loaded(self) -> None:
        self._loaded.set(1)

    def step(self, result: step_pb2.StepResult) -> None:
        self._forward.observe(result.forward_us / 1e6)
        self._sampled.inc(len(result.token_ids) // 4)
        self._rows.set(result.num_rows)
        self._stored.set(result.num_stored_tokens)

    def serve(self, host: str, port: int) -> int:
        """The port that answers; raises StartupError when it cannot be had."""
        try:
            return serve_metrics(self._registry, host, port)
        except OSError as error:
            raise StartupError(
                f"cannot serve metrics on {host}:{port}: {error.strerror}: choose another --metrics-port"
            ) from error
