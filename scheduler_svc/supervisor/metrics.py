"""One Prometheus endpoint for all of serve: the children write counters into files, each scrape merges them.

A dead child's counters stay in the sums, so that totals only grow; its live gauges go. Needs only the directory.
"""

from pathlib import Path

from prometheus_client import CollectorRegistry, Counter
from prometheus_client.multiprocess import MultiProcessCollector, mark_process_dead

from scheduler_svc.errors import StartupError
from scheduler_svc.metrics_endpoint import serve_metrics
from scheduler_svc.supervisor import ports


class MergedMetrics:
    VARIABLE = "PROMETHEUS_MULTIPROC_DIR"

    def __init__(self, directory: Path):
        self._directory = str(directory)
        self._registry = CollectorRegistry()
        MultiProcessCollector(self._registry, path=self._directory)
        self._restarts = Counter(
            "stepwire_deaths", "Ends of child processes, asked for or not", ["process"], registry=self._registry
        )

    def serve(self, host: str, port: int) -> int:
        """Starts to answer, in a daemon thread that lives as long as the process; the port that it got."""
        try:
            return serve_metrics(self._registry, host, port)
        except OSError as error:
            reason = f"cannot serve metrics on {ports.join(host, port)} ({error.strerror})"
            raise StartupError(f"{reason}: choose another --metrics-port") from None

    def died(self, name: str, pid: int) -> None:
        self._restarts.labels(process=name).inc()
        mark_process_dead(pid, path=self._directory)
